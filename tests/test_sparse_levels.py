"""Sparse families on the lower feature levels: the logits stay those of the other engine. ``test_sparse_goldens`` runs all cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ggufc.codegen.compile import CompileOptions
from ggufc.codegen.cpu.target import host_features, resolve
from ggufc.runtime.logits import graph_options, run_case, session_options
from ggufc.runtime.session import Session
from support import artifact_of, golden_cases

NAMES = ("glm-dsa-topk8", "openpangu-pos0", "deepseek4-split-decode")
CASES = [case for case in golden_cases(*NAMES) if case.name in NAMES]
LEVELS = ("x86-64", "x86-64-v3")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_golden(case: Path, level: str) -> None:  # S137, S149, S153
    if not host_features().issuperset(resolve(level).features):
        pytest.skip(f"this machine cannot run {level}")
    spec = json.loads((case / "case.json").read_text())
    options = spec["options"]
    cache = {key: options[key] for key in ("type_k", "type_v") if key in options}
    artifact = artifact_of(case / "model.gguf", CompileOptions(jobs=1, builder=graph_options(options), target=level, **cache))
    results = run_case(lambda o: Session(artifact, **session_options(o)), spec, case)
    for name, got in results.items():
        want = np.load(case / f"{name}.npy")
        assert np.isfinite(got).all()
        assert (np.abs(got - want) - spec["rtol"] * np.abs(want)).max() <= spec["atol"], name
