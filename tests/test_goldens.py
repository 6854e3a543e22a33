"""Compiled models against logits of another engine (golden cases), and real models against exact logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support import artifact_of, golden_cases

PREFIXES = (
    "llama-",
    "gemma2-",
    "gemma3-",
    "quant-",
    "qwen2-",
    "qwen3-",
    "qwen3moe-",
    "phi3-",
    "gpt-oss-",
    "glm4moe-",
    "smollm3-",
    "deepseek2-",
    "glm-dsa-",
    "openpangu-",
    "deepseek4-",
)
WITHOUT_LOGITS = ("openpangu-chat",)
"""Cases about text alone."""

PREDICTED = ("mtp_warmup", "mtp_update", "mtp_draft", "mtp_rm")
"""Steps of layers that predict further ahead: not supported; the other steps of a case do not depend on them."""

CASES = [case for case in golden_cases(*PREFIXES) if case.name not in WITHOUT_LOGITS]


@pytest.fixture(scope="module")
def run():
    """``run(case folder) -> {step name: logits}`` through a compiled artifact, as ``ggufc logits`` does."""
    from ggufc.codegen.compile import CompileOptions
    from ggufc.runtime.logits import graph_options, run_case, session_options, without_prediction
    from ggufc.runtime.session import Session

    def go(case: Path, target: str = "native", pipeline: str | None = None) -> dict[str, np.ndarray]:
        spec, _ = without_prediction(json.loads((case / "case.json").read_text()))
        options = spec["options"]
        cache = {key: options[key] for key in ("type_k", "type_v") if key in options}
        compilation = CompileOptions(target=target, pipeline=pipeline, jobs=1, builder=graph_options(options), **cache)
        artifact = artifact_of(case / "model.gguf", compilation)
        return run_case(lambda o: Session(artifact, **session_options(o)), spec, case)

    return go


def excess(got: np.ndarray, want: np.ndarray, rtol: float) -> np.ndarray:
    """Per row the largest |a-b| beyond rtol*|b|."""
    return (np.abs(got - want) - rtol * np.abs(want)).max(axis=-1)


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_golden(case, run):  # S39, S42, S83, S137, S149: compiled, on a CPU
    spec = json.loads((case / "case.json").read_text())
    results = run(case)
    rows = []
    for step in spec["steps"]:
        if "name" not in step or step["op"] in PREDICTED:
            continue
        want = np.load(case / f"{step['name']}.npy")
        got = results[step["name"]]
        assert got.shape == want.shape, step["name"]
        assert np.isfinite(got).all()
        rows.append(excess(got, want, spec["rtol"]))
    worst = np.concatenate(rows)
    rounded = spec.get("atol_if_activations_are_rounded_as_the_engine_does")
    if rounded is None:
        assert worst.max() <= spec["atol"]
        return
    # Quantised weights: every row within the tolerance, and either the typical or the best row close, depending on how activations are
    # rounded.
    assert worst.max() <= max(spec["atol"], rounded)
    assert np.median(worst) <= spec["median_row_atol_unrounded"] or np.quantile(worst, 0.25) <= spec["low_quartile_row_atol_rounded"]
