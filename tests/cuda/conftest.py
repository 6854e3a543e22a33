"""The model most tests of the GPU runtime run."""

from __future__ import annotations

import pytest

from fat_models import FatModel, compiled


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> FatModel:
    """A small llama with GPU code for two architectures."""
    return compiled("llama-gqa-tied", tmp_path_factory.mktemp("fat"), "cuda:sm_90", "cuda:sm_80")
