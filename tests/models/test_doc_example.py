"""The worked example of docs/add-an-architecture.md is the file it claims to show; goldens and refusals of that file are tested here."""

from __future__ import annotations

import re

import pytest

from ggufc.models import ModelError, load_model
from model_files import D, E, G, H, llama_file
from support import ROOT


def test_the_page_shows_the_file() -> None:
    page = (ROOT / "docs" / "add-an-architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code == (ROOT / "models" / "qwen2.py").read_text()


def test_example_builds_and_requires_its_biases() -> None:
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
