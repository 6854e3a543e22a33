"""Node budgets over the whole grid of sizes, by building alone (openpangu's own, with windows and gathers, is beside its other tests)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.models import Step, load_model
from ggufc.passes import PassManager
from support import golden_cases

TOKENS = (1, 14, 15, 256, 257, 2048)
CELLS = (256, 1024, 4096, 32768, 65536)
NAMES = ("glm-dsa-topk8", "deepseek4-split-decode", "deepseek4-dense")
CASES = [case for case in golden_cases(*NAMES) if case.name in NAMES]


@pytest.mark.parametrize(
    "options", [{}, {"dsa": True}, {"dsa": True, "dsa_top_k": 2048, "fidx": False}], ids=["dense", "sparse", "separate"]
)
@pytest.mark.parametrize("folder", CASES, ids=lambda case: case.name)
def test_estimates_bound_graphs_of_all_sizes(folder: Path, options: dict[str, Any]) -> None:  # S58, S102
    with GGUFFile.open(folder / "model.gguf") as file:
        model = load_model(file)
    for kv in CELLS:
        for tokens in TOKENS:
            sizes = {"T": tokens, "KV": kv, "V4": max(256, kv // 4), "V128": max(256, kv // 128)}
            graph = model.build(Step(options, sizes))
            estimate = model.node_estimate(Step(options, sizes))
            assert len(graph.nodes) <= estimate <= 4 * len(graph.nodes) + 64, sizes
    PassManager.parse("node-budget{required=1}").run(graph)
    assert graph.analysis["node-budget"] == {"estimate": estimate, "actual": len(graph.nodes)}
