"""Real builders' graphs: how often each rule fires, and that the results stay what they were.

``fusion_counts.json`` is compared in both directions: a fusion that stops matching makes models slower without failing anything else,
and one that starts matching deserves a look. After an intended change: ``pytest tests/passes --update-golden``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph
from ggufc.ir.layout import is_contiguous
from ggufc.models import Model, Step, load_model
from ggufc.passes import DEFAULT_PIPELINE, PassManager, compare_counts, fusion_counts
from ggufc.passes.cache_fixups import check_fixups
from ggufc.passes.reuse_key import check_reuse_key, explain
from passes_graphs import evaluate
from support import golden_cases

BASELINE = Path(__file__).with_name("fusion_counts.json")
CASES = golden_cases(
    "llama-", "gemma2-", "gemma3-", "deepseek2-", "glm4moe-a", "gpt-oss-", "phi3-", "qwen2-", "qwen3-", "qwen3moe-", "smollm3-"
)


def build(folder: Path, **options: str) -> tuple[Model, GGUFFile, Graph]:
    file = GGUFFile.open(folder / "model.gguf")
    model = load_model(file)
    return model, file, model.build(Step(options))


@pytest.mark.parametrize("folder", CASES, ids=lambda p: p.name)
def test_fusion_counts_equal_the_baseline(folder: Path, request: pytest.FixtureRequest) -> None:
    _, _, g = build(folder)
    counts = fusion_counts(PassManager.parse(DEFAULT_PIPELINE).run(g))
    baseline = json.loads(BASELINE.read_text()) if BASELINE.is_file() else {}
    if request.config.getoption("--update-golden"):
        baseline[folder.name] = counts
        BASELINE.write_text(json.dumps(dict(sorted(baseline.items())), indent=1) + "\n")
    assert folder.name in baseline, f"{BASELINE.name} has no entry for {folder.name}; run pytest with --update-golden"
    assert compare_counts(baseline[folder.name], counts) == []


def test_the_comparison_works_in_both_directions() -> None:
    baseline = {"fuse-norm/rms-norm-mul": 5, "hoist/hoisted": 4}
    assert compare_counts(baseline, baseline) == []
    assert compare_counts(baseline, {"fuse-norm/rms-norm-mul": 4, "fuse-glu/glu-silu": 2, "hoist/hoisted": 4}) == [
        "fuse-glu/glu-silu fired 2 times, the baseline says 0",
        "fuse-norm/rms-norm-mul fired 4 times, the baseline says 5",
    ]


@pytest.mark.parametrize("folder", golden_cases("llama-gqa-tied", "llama-moe-split", "gemma3-7"), ids=lambda p: p.name)
def test_fused_models_compute_what_the_builders_built(folder: Path) -> None:
    # Tolerance: removed roundings may tip f16 cache entries (2^-10 of them); the deepest model has seven layers.
    model, file, built = build(folder)
    final = built.clone()
    PassManager.parse(DEFAULT_PIPELINE).run(final)
    weights = {name: file.data(name) for name in model.weights}
    want, want_caches = evaluate(built, [5, 1, 2], weights=weights)
    got, got_caches = evaluate(final, [5, 1, 2], weights=weights)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-3 * max(1.0, np.abs(a).max()))
    assert want_caches.keys() == got_caches.keys()


@pytest.mark.parametrize("folder", CASES, ids=lambda p: p.name)
def test_final_graphs_keep_their_promises(folder: Path) -> None:
    # S74
    _, _, g = build(folder)
    PassManager.parse(DEFAULT_PIPELINE.replace("node-budget", "node-budget{required=1}")).run(g)
    check_fixups(g)
    check_reuse_key(g)
    assert g.analysis["node-budget"]["actual"] <= g.analysis["node-budget"]["estimate"]
    leaves = [n for n in g.nodes if n.is_leaf]
    assert len(leaves) == len(g.find("weight")) + len(g.find("cache")) + len(g.inputs()) + len(g.find("const"))
    users = g.users()
    assert [n for n in leaves if not users[n]] == []
    assert [n for n in g.find("cont") if is_contiguous(n.operands[0])] == []
    # all attention is fused, so no number of visible cells is left in the graph
    assert [n for n in g.nodes if "KV" in n.type.symbols] == []
    assert g.analysis["memory-plan"]["peak"] < 1.5 * g.analysis["memory-plan"]["live"]


def test_the_cache_type_is_a_reason_not_to_reuse() -> None:
    folder = CASES[0]
    keys = []
    for type_k in ("f16", "f32"):
        _, _, g = build(folder, type_k=type_k)
        PassManager.parse("reuse-key").run(g)
        keys.append(g.analysis["reuse-key"])
    assert "type_k f16 -> f32" in explain(*keys)
