"""Fixtures of the runtime's tests: the toy artifact and sessions on it, the real models and their goldens.

Test modules import what they use.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fake_model
from ggufc.runtime.paths import models_dir
from ggufc.runtime.session import Session
from support import BUNDLED_GOLDEN, artifact_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    return fake_model.write(tmp_path_factory.mktemp("toy") / "toy.ggufc")


@pytest.fixture
def session(toy):
    """``session(**options)`` opens a session on the toy artifact; all are closed at the end."""
    opened: list[Session] = []

    def open_session(**options) -> Session:
        options.setdefault("n_threads", 1)
        opened.append(Session(toy, **options))
        return opened[-1]

    yield open_session
    for s in opened:
        s.close()


@pytest.fixture(scope="session")
def compiled():
    """``compiled(case, **options)``: the artifact of a bundled golden case's model, compiled once per test run."""
    from ggufc.codegen.compile import CompileOptions

    def artifact(case: str, **options) -> Path:
        return artifact_of(BUNDLED_GOLDEN / case / "model.gguf", CompileOptions(jobs=1, **options))

    return artifact


@pytest.fixture(scope="session")
def real_model():
    """``real_model(file name)``: a downloaded model, or the test is skipped."""

    def find(name: str) -> Path:
        for folder in (os.environ.get("GGUFC_MODELS"), models_dir()):
            if folder and (Path(folder) / name).is_file():
                return Path(folder) / name
        pytest.skip(f"{name} is not in {models_dir()} or $GGUFC_MODELS; get it with ggufc pull")

    return find


@pytest.fixture(scope="session")
def real_golden():
    """``real_golden(model, file name)``: a file of the real models' goldens, or the test is skipped."""

    def find(model: str, name: str) -> Path:
        for folder in (os.environ.get("GGUFC_GOLDEN"), ROOT / "tests" / "golden", ROOT.parent / "shared" / "golden"):
            if folder and (Path(folder) / "real" / model / name).is_file():
                return Path(folder) / "real" / model / name
        pytest.skip(f"there is no golden real/{model}/{name}; set GGUFC_GOLDEN")

    return find
