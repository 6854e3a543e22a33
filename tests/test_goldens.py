"""Compiled models against logits of another engine (golden cases), and real models against exact logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support import artifact_of, check_golden, golden_cases

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
)
"""Sparse families are in ``test_sparse_goldens``, fused and unfused."""

CASES = golden_cases(*PREFIXES)


@pytest.fixture(scope="module")
def run():
    """``run(case folder) -> {step name: logits}`` through a compiled artifact, as ``ggufc logits`` does."""
    from ggufc.codegen.compile import CompileOptions
    from ggufc.runtime.logits import graph_options, run_case, session_options
    from ggufc.runtime.session import Session

    def go(case: Path, target: str = "native", pipeline: str | None = None) -> dict[str, np.ndarray]:
        spec = json.loads((case / "case.json").read_text())
        options = spec["options"]
        cache = {key: options[key] for key in ("type_k", "type_v") if key in options}
        compilation = CompileOptions(target=target, pipeline=pipeline, jobs=1, builder=graph_options(options), **cache)
        artifact = artifact_of(case / "model.gguf", compilation)
        return run_case(lambda o: Session(artifact, **session_options(o)), spec, case)

    return go


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
def test_golden(case, run):
    check_golden(case, json.loads((case / "case.json").read_text()), run(case))
