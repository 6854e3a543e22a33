"""Golden cases with every cache type, on every feature level of the machine, within an error bound per type.

A type that does not divide a family's rows, or that the family does not have, must be refused by name before code is generated. The grid of
all families and types and that of types and levels are marked ``full``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ggufc.models.cache_types import CACHE_TYPES
from harness import runnable_targets
from support import golden_cases

BOUNDS = {
    "f32": (2e-3, 2e-3), "f16": (2e-3, 2e-3), "bf16": (3e-3, 0.02), "q8_0": (5e-3, 0.05), "q5_1": (0.05, 0.2), "q5_0": (0.08, 0.25),
    "q4_1": (0.2, 0.35), "q4_0": (0.3, 0.45), "iq4_nl": (0.2, 0.35),
}  # fmt: skip
"""Largest normalised mean squared error |got - want|^2 / |want|^2 over all logits of a case, whose own run had another cache type: of
models without and with experts, where a rounding may tip the choice of one. These models have random weights, so their attention is flat
and every rounding counts; logits of another model would have an error of 1 or 2."""

QUICK = ("llama-fa-q8", "gemma3-7")
FAMILIES = (
    "gpt-oss-mxfp4", "qwen3-tied", "qwen3moe-a", "glm4moe-a", "llama-yarn", "deepseek2-v3-mqa576-fa", "deepseek2-v3-fa-mla3",
    "glm-dsa-fa-fidx1", "gemma2-26", "phi3-swa", "smollm3-tied", "qwen2-tied", "openpangu-q8", "deepseek4-kq8",
)  # fmt: skip
ROUTED = ("gpt-oss", "qwen3moe", "glm4moe", "deepseek", "glm-dsa", "openpangu")


def named(*names: str) -> list[Path]:
    return [case for case in golden_cases(*names) if case.name in names]


def bound(case: Path, dtype: str) -> float:
    return BOUNDS[dtype][case.name.startswith(ROUTED)]


def error(case: Path, artifact: Path, dtype: str, target: str = "native") -> float | None:
    """NMSE of a case's logits on caches of one type; None for a type that was refused by name."""
    from ggufc.codegen.compile import CompileOptions, compile_file
    from ggufc.codegen.errors import CodegenError
    from ggufc.runtime.logits import graph_options, run_case, session_options
    from ggufc.runtime.session import Session

    spec = json.loads((case / "case.json").read_text())
    for type_v in (dtype, "f16"):  # families without a V cache may refuse types of it that K has
        options = CompileOptions(target=target, jobs=1, type_k=dtype, type_v=type_v, builder=graph_options(spec["options"]))
        try:
            compile_file(case / "model.gguf", artifact, options)
            break
        except CodegenError as refusal:
            assert "builder option 'type_" in str(refusal)
            if "'type_v'" not in str(refusal):
                return None
    else:
        return None
    results = run_case(lambda o: Session(artifact, **session_options(o)), spec, case)
    pairs = [(results[step["name"]], np.load(case / f"{step['name']}.npy")) for step in spec["steps"] if "name" in step]
    got, want = (np.concatenate([pair[i].reshape(-1) for pair in pairs]).astype(np.float64) for i in (0, 1))
    return float(((got - want) ** 2).sum() / (want**2).sum())


GRID = [(case, dtype) for case in named(*QUICK) for dtype in CACHE_TYPES]
GRID += [pytest.param(case, dtype, marks=pytest.mark.full) for case in named(*FAMILIES) for dtype in CACHE_TYPES]


@pytest.mark.parametrize(("case", "dtype"), GRID, ids=lambda x: x if isinstance(x, str) else x.name)
def test_every_cache_type(case: Path, dtype: str, tmp_path: Path) -> None:
    found = error(case, tmp_path / "a.ggufc", dtype)
    if found is None:
        assert dtype != "f16"  # which every family has
    else:
        assert found <= bound(case, dtype)


*WEAKER, _ = (target.level for target in runnable_targets())
"""Levels besides the strongest, which all other tests run at."""
AT_LEVELS = [("q5_0", level) for level in WEAKER]
AT_LEVELS += [pytest.param(dtype, level, marks=pytest.mark.full) for dtype in CACHE_TYPES for level in WEAKER if dtype != "q5_0"]


@pytest.mark.parametrize(("dtype", "level"), AT_LEVELS)
def test_every_level(dtype: str, level: str, tmp_path: Path) -> None:
    (case,) = named("llama-fa-q8")
    found = error(case, tmp_path / "a.ggufc", dtype, level)
    assert found is not None and found <= bound(case, dtype)


@pytest.mark.full
@pytest.mark.parametrize("level", WEAKER)
@pytest.mark.parametrize("case", named(*QUICK, *FAMILIES), ids=lambda case: case.name)
def test_every_family_at_every_level(case: Path, level: str, tmp_path: Path) -> None:
    found = error(case, tmp_path / "a.ggufc", "f16", level)
    assert found is not None and found <= bound(case, "f16")


def test_the_bounds_are_ordered_and_below_what_chance_gives() -> None:
    assert set(BOUNDS) == set(CACHE_TYPES)
    order = ["f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
    for routed in (0, 1):
        found = [BOUNDS[dtype][routed] for dtype in order]
        assert found == sorted(found) and found[-1] < 0.5
