"""openpangu and deepseek4: how often each fusion fires, counted from the model's hyperparameters and compared with the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ggufc.codegen.kernels.attention_sparse import SparseAttn
from ggufc.codegen.lower import lower
from ggufc.formats.artifact import evaluate
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph
from ggufc.models import Model, Step, load_model
from ggufc.passes import DEFAULT_PIPELINE, PassManager, compare_counts, fusion_counts
from ggufc.passes.cache_fixups import check_fixups
from support import golden_cases

BASELINE = Path(__file__).with_name("fusion_counts.json")
NAMES = ("openpangu-swa-dsa-f16", "openpangu-dense", "openpangu-q8", "deepseek4-split-decode", "deepseek4-dense", "deepseek4-hc8")
CASES = [case for case in golden_cases("openpangu-", "deepseek4-") if case.name in NAMES]


def build(folder: Path, **options: Any) -> tuple[Model, Graph]:
    with GGUFFile.open(folder / "model.gguf") as file:
        model = load_model(file)
        return model, model.build(Step(options))


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_fusion_counts_equal_the_baseline(case: Path, request: pytest.FixtureRequest) -> None:
    _, g = build(case)
    counts = fusion_counts(PassManager.parse(DEFAULT_PIPELINE).run(g))
    check_fixups(g)  # S146
    baseline = json.loads(BASELINE.read_text())
    if request.config.getoption("--update-golden"):
        baseline[case.name] = counts
        BASELINE.write_text(json.dumps(dict(sorted(baseline.items())), indent=1) + "\n")
    assert case.name in baseline, f"{BASELINE.name} has no entry for {case.name}; run pytest with --update-golden"
    assert compare_counts(baseline[case.name], counts) == []


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_every_sublayer_has_three_operators_of_hyper_connections(case: Path) -> None:  # S47, S61
    model, g = build(case)
    hp: Any = model.hparams
    counts = fusion_counts(PassManager.parse(DEFAULT_PIPELINE).run(g))
    sites = 2 * hp.n_layer
    assert {rule: counts[f"fuse-hyper-connections/{rule}"] for rule in ("sinkhorn-start", "sinkhorn-step", "hc-mix", "hc-post")} == {
        "sinkhorn-start": sites,
        "sinkhorn-step": sites * (hp.iterations - 1),
        "hc-mix": sites + 1,  # and the merge after the last layer
        "hc-post": sites,
    }
    assert [len(g.find(name)) for name in ("hc_pre", "hc_mix", "hc_post", "sinkhorn")] == [sites, sites + 1, sites, 0]


@pytest.mark.parametrize("name", ["openpangu-swa-dsa-f16", "deepseek4-split-decode"])
def test_the_option_leaves_attention_unfused_and_all_else_fused(name: str) -> None:  # S45
    (case,) = (c for c in CASES if c.name == name)
    model, g = build(case, flash_attn=False)
    PassManager.parse(DEFAULT_PIPELINE).run(g)
    assert g.analysis["observations"]["flash_attn"] is False
    assert not g.find("sparse_attn") and not g.find("flash_attn")
    assert len([n for n in g.find("soft_max") if n.name.endswith("kq_soft_max")]) == model.n_layer
    assert g.find("indexer_topk") and g.find("hc_post") and g.find("expert_weights")


@pytest.mark.parametrize("name", ["openpangu-swa-dsa-f16", "deepseek4-split-decode"])
def test_attention_over_windows_and_choices_reads_the_same_at_any_length(name: str) -> None:  # S99, S154
    (case,) = (c for c in CASES if c.name == name)
    _, g = build(case, dsa_top_k=2048)
    PassManager.parse(DEFAULT_PIPELINE).run(g)
    steps = [step for step in lower(g)[0].steps if isinstance(step.spec, SparseAttn)]

    def read(cells: int) -> list[int]:
        env = {"T": 1, "R": cells, "E4": cells // 4, "E128": cells // 128}
        return [evaluate(step.bytes, env) for step in steps]

    # Heavily compressed entries are all read: one for 128 tokens.
    all_read = [step.spec.entries == "E128" for step in steps]
    assert [long == short for short, long in zip(read(8192), read(32768))] == [not every for every in all_read]
    assert any(step.spec.most == 2048 for step in steps) or max(read(8192)) >= 2048 * 64 * 2
    assert not [n for n in g.nodes if n.type.symbols & {"KV", "V4", "V128"}]


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("openpangu-")], ids=lambda p: p.name)
def test_sinks_are_computed_at_compile_time(case: Path) -> None:  # S92
    _, g = build(case)
    PassManager.parse(DEFAULT_PIPELINE).run(g)
    constant = {n for n in g.nodes if n.op.name in ("weight", "const")}
    for node in g.nodes:
        if not node.is_leaf and constant.issuperset(node.operands):
            assert node.is_view, f"{node.name} is computed from weights alone in every step"
            constant.add(node)
    rows = [n.operands[4] for n in g.find("sparse_attn")]
    assert rows and all(n.op.name == "weight" and "param_sink" in n.attrs["derived"] for n in rows)
