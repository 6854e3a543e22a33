"""Where golden cases lie, sessions over them, and Python without CUDA packages.

Tests import it as ``support``: this folder is in pytest's ``pythonpath``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from ggufc.codegen.compile import CompileOptions
    from ggufc.runtime import Artifact, Session

ROOT = Path(__file__).resolve().parent.parent
SHARED_ARTIFACTS = "GGUFC_TEST_ARTIFACTS"
"""The variable that tells all workers of a run where ``artifact_of`` keeps artifacts; ``conftest`` sets it."""
BUNDLED_GOLDEN = Path(__file__).resolve().parent / "golden"

WITHOUT_CUDA_PACKAGES = """\
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pycuda", "cuda", "cupy", "numba"): raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""
"""First lines of a program for which every package that speaks CUDA is missing."""


def golden_dirs() -> list[Path]:
    """The bundled subset, then the full set when it lies beside the repository or where GGUFC_GOLDEN points."""
    found = [BUNDLED_GOLDEN]
    for candidate in (os.environ.get("GGUFC_GOLDEN"), ROOT.parent / "shared" / "golden"):
        if candidate and Path(candidate).is_dir():
            found.append(Path(candidate))
            break
    return found


def golden_cases(*prefixes: str) -> list[Path]:
    """Folders of golden cases whose name starts with one of the prefixes; a case of the full set hides its bundled copy."""
    cases: dict[str, Path] = {}
    for root in golden_dirs():
        for path in sorted(root.iterdir()) if root.is_dir() else []:
            if (path / "case.json").is_file() and path.name.startswith(prefixes):
                cases[path.name] = path
    return [cases[name] for name in sorted(cases)]


def artifact_of(model: Path, options: CompileOptions) -> Path:
    """The artifact of a small model, compiled once per run of the tests: all modules and workers share it, for reading only."""
    from ggufc.codegen.compile import compile_file

    key = hashlib.sha256(model.read_bytes() + msgspec.json.encode(options, order="deterministic")).hexdigest()
    artifact = Path(os.environ[SHARED_ARTIFACTS]) / f"{key}.ggufc"
    with open(artifact.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not artifact.exists():
            compile_file(model, artifact, options)
    return artifact


@contextmanager
def compiled(case: Path, **options: Any) -> Iterator[Artifact]:
    """The artifact of a case's model; ``options`` of ``CompileOptions``."""
    from ggufc.codegen.compile import CompileOptions
    from ggufc.runtime import Artifact

    with Artifact.open(artifact_of(case / "model.gguf", CompileOptions(jobs=1, **options))) as artifact:
        yield artifact


def check_golden(case: Path, spec: Mapping[str, Any], results: Mapping[str, np.ndarray]) -> None:
    """The logits of the named steps of ``spec``, a golden case or a part of it, are those of the other engine within the tolerance."""
    worst = []
    for name in [step["name"] for step in spec["steps"] if "name" in step]:
        want, got = np.load(case / f"{name}.npy"), results[name]
        assert got.shape == want.shape, name
        assert np.isfinite(got).all()
        worst.append((np.abs(got - want) - spec["rtol"] * np.abs(want)).max(axis=-1))
    rows = np.concatenate(worst)
    rounded = spec.get("atol_if_activations_are_rounded_as_the_engine_does")
    if rounded is None:
        assert rows.max() <= spec["atol"]
        return
    # Quantised weights: every row within the tolerance, and either the typical or the best row close, depending on how activations are
    # rounded.
    assert rows.max() <= max(spec["atol"], rounded)
    assert np.median(rows) <= spec["median_row_atol_unrounded"] or np.quantile(rows, 0.25) <= spec["low_quartile_row_atol_rounded"]


def random_tokens(artifact: Artifact, length: int) -> list[int]:
    """The same ``length`` tokens each time."""
    return np.random.default_rng(7).integers(3, artifact.manifest.n_vocab - 1, length).tolist()


def one_by_one(session: Session, tokens: list[int]) -> np.ndarray:
    """Logits f32 [tokens, n_vocab], evaluated one token at a time."""
    return np.concatenate([session.decode([token], logits="all") for token in tokens])


def fill_results(session: Session, byte: int) -> None:
    """Give what lies between launches, the outputs and the threads' scratch the same bytes: what a step reads there, it wrote."""
    executor: Any = session.executor
    for index in range(len(executor.program.slots)):
        executor.slot(index)[:] = byte
    for data in executor._outputs.values():
        data.view(np.uint8)[:] = byte
    executor.team._scratch.bytes[:] = byte
