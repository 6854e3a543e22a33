"""Models with sparse attention as a user sees them: what options ask for, a graph by one layer of each kind, what attention reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GLM, PANGU, DEEPSEEK = (GOLDEN / name / "model.gguf" for name in ("glm-dsa-topk8", "openpangu-swa-dsa-ubatch", "deepseek4-split-decode"))


@pytest.mark.parametrize(("options", "k"), [((), None), (("--no-dsa",), None), (("--dsa",), 16), (("--dsa", "--dsa-top-k", "-1"), 16),
                                            (("--dsa", "--dsa-top-k", "9"), 9)])  # fmt: skip
def test_the_indexer_is_there_when_asked_for(invoke, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], k: int | None) -> None:
    """S147: whatever the environment says; -1 stands for the number in the file."""
    for name in ("GGUFC_DSA", "GGUFC_DSA_TOP_K", "DSA", "LLAMA_ARG_DSA"):
        monkeypatch.setenv(name, "1")
    text = invoke("dump", GLM, "--stage", "built", *options).stdout
    found = re.findall(r'top_k\(%\d+\) \{name = "blk\.(\d)\.indexer\.top_k", k = (\d+)', text)
    assert found == ([] if k is None else [(layer, str(k)) for layer in "012"])
    assert ("indexer" in text) == (k is not None)


LOOKED_FOR = {
    GLM: ["blk.0.indexer.top_k", "blk.0.ffn_hidden", "blk.1.ffn_moe_ids", "blk.3.kqv.fused"],
    PANGU: ["blk.0.attn_mhc.gates", "blk.0.conv_qa.conv", "blk.2.indexer.top_k", "blk.2.kqv.latents.fused", "blk.0.mlp_mhc.out"],
    DEEPSEEK: ["blk.0.indexer.top_k", "blk.0.attn_compressor", "blk.1.entries.store", "blk.2.kqv.raw.fused", "blk.1.hc_ffn.out"],
}
"""Nodes a reader looks for in a model's graph."""
SHOWN = {GLM: "0134", PANGU: "0123", DEEPSEEK: "012"}
"""Layers that differ: glm-dsa's third is like its second; the last layer computes the wanted rows only."""


@pytest.mark.parametrize("model", LOOKED_FOR, ids=lambda path: path.parent.name)
def test_a_graph_shows_one_layer_of_each_kind(invoke, model: Path) -> None:
    options = ("--dsa",) if model == GLM else ()
    text = invoke("dump", model, "--format", "folded", *options).stdout
    assert "".join(sorted(set(re.findall(r'name = "blk\.(\d+)\.', text)))) == SHOWN[model]
    assert re.findall(r"# (.*), \d+ nodes each", text) == (["blk.2: as blk.1"] if model == GLM else [])
    for name in LOOKED_FOR[model]:
        assert f'name = "{name}' in text, name
    unnamed = [
        line for line in text.splitlines() if re.search(r"%\d+ = (?!weight|input|cache|const)\w+\(", line) and 'name = "' not in line
    ]
    assert not unnamed


def test_attention_reads_the_same_at_8k_and_32k(invoke, tmp_path: Path) -> None:
    """S154: with 2048 chosen rows, counted from the schedule, in text and JSON; what choosing reads stands beside it and grows."""
    path = tmp_path / "model.ggufc"
    invoke("compile", GLM, "--dsa", "--dsa-top-k", "2048", "-o", path)
    text = invoke("inspect", path).stdout
    (line, _) = (x for x in text.splitlines() if "attention reads per decoded token" in x)
    few, many = re.findall(r"([\d.]+ \w+) at \d+ \(and ([\d.]+ \w+) to choose\)", line)
    assert few[0] == many[0] == "960.0 KiB" and (few[1], many[1]) == ("1.5 MiB", "6.0 MiB")
    (program, _) = json.loads(invoke("inspect", path, "--json").stdout)["programs"]
    assert program["reads"] == [{"n_ctx": n, "attention": 5 * 2048 * 48 * 2, "scoring": 3 * n * 32 * 2} for n in (8192, 32768)], (
        "layers x rows x bytes of a row; indexers x cells x bytes of a key"
    )
