"""Golden cases compiled with GPU code, for executors on any device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ggufc.codegen.child import compile_here
from ggufc.codegen.options import CompileOptions
from ggufc.runtime.logits import graph_options, run_case, session_options
from ggufc.runtime.session import Session
from support import golden_cases

DEVICE_FACTOR = 3
"""S75: how much wider than the CPU's the tolerance is."""

COVERED = ("gemma3-7", "qwen3moe-a", "glm-dsa-topk8")
"""A case for what llama has not: windows and head norms, experts, latent and sparse attention."""

CASES = [
    *COVERED,
    "deepseek2-v3-fa-mla1",
    "llama-moe",
    "quant-q4_k",
    "llama-fa-q8",
    "llama-cacheops",
    "gpt-oss-mxfp4",
    "glm-dsa-dense",
    "glm-dsa-topk8-mla1",
    "glm-dsa-topk8-ubatch",
    "glm-dsa-fa-fidx0",
    "glm-dsa-fa-fidx1",
    "glm-dsa-idxq8",
    "glm-dsa-twoseq",
    "glm-dsa-noop",
    "glm-dsa-sink-after-rm",
]
"""Integer products, block caches, sequence operations, sinks, and every sparse case beside these."""


@dataclass
class FatModel:
    """A golden case and its artifact."""

    case: Path
    spec: dict
    path: Path

    def run(self, **session) -> dict[str, np.ndarray]:
        """Logits of the case's steps; ``session`` adds to its options."""
        return run_case(lambda o: Session(self.path, **{**session_options(o), **session}), self.spec, self.case)

    def check(self, results: dict[str, np.ndarray]) -> None:
        """S75: every step within the device's tolerance."""
        for step in self.spec["steps"]:
            if "name" in step:
                want = np.load(self.case / f"{step['name']}.npy")
                excess = np.abs(results[step["name"]] - want) - DEVICE_FACTOR * self.spec["rtol"] * np.abs(want)
                assert excess.max() <= DEVICE_FACTOR * self.spec["atol"], step["name"]


def find_case(name: str) -> Path | None:
    """The golden case of exactly this name."""
    return next((case for case in golden_cases(name) if case.name == name), None)


def compiled(name: str, folder: Path, *targets: str, pipeline: str | None = None) -> FatModel:
    """The case ``name`` for the CPU and ``targets`` (``cuda:sm_90``), by other passes if given; skips where the case is not here."""
    case = find_case(name)
    if case is None:
        pytest.skip(f"the golden case {name} is not here")
    spec = json.loads((case / "case.json").read_text())
    cache = {key: spec["options"][key] for key in ("type_k", "type_v") if key in spec["options"]}
    path = folder / f"{name}.ggufc"
    target, builder = ",".join(("native", *targets)), graph_options(spec["options"])
    options = CompileOptions(target=target, jobs=1, builder=builder, pipeline=pipeline, **cache)
    compile_here(case / "model.gguf", path, options)
    return FatModel(case, spec, path)
