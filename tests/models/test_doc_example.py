"""The worked example of docs/add-an-architecture.md is complete and right: it loads, builds, and meets goldens of its architecture."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from golden_runner import ROOT, assert_close, golden_cases, run_case
from model_files import D, E, G, H, llama_file

from ggufc.models import ARCHITECTURES, ModelError, load_model


@pytest.fixture
def qwen2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the page's code as architecture qwen2."""
    page = (ROOT / "docs" / "add-an-architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "qwen2_of_the_page.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(ARCHITECTURES, "qwen2", module.QWEN2)


def test_example_builds_and_requires_its_biases(qwen2: None) -> None:
    file = llama_file()
    file.metadata = {key.replace("llama.", "qwen2."): value for key, value in file.metadata.items()} | {"general.architecture": "qwen2"}
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        load_model(file)
    for i in range(2):
        for name, n in (("attn_q", H * D), ("attn_k", G * D), ("attn_v", G * D)):
            file.add(f"blk.{i}.{name}.bias", n)
    model = load_model(file)
    graph = model.build()
    assert len(graph.nodes) <= model.node_estimate() and model.n_embd == E
    assert {node.attrs["mode"] for node in graph.find("rope")} == {"neox"}


@pytest.mark.parametrize("case", golden_cases("qwen2-"), ids=lambda case: case.name)
def test_example_meets_the_goldens(qwen2: None, case: Path) -> None:
    assert_close(case, run_case(case))
