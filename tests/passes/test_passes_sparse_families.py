"""openpangu and deepseek4: how often each fusion fires, counted from the model's hyperparameters and compared with the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
