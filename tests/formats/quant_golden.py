"""Quantised tensors of another engine: the bundled four rows per type, or the full set when it lies beside the repository."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np


class QuantCase(NamedTuple):
    """``raw`` rows of 512 values, the engine's ``deq`` of them, and products with ``x``: exact and with rounded activations."""

    raw: np.ndarray
    deq: np.ndarray
    x: np.ndarray
    ref: np.ndarray
    ref_rounded: np.ndarray
    sigma: float


@cache
def golden_folders() -> list[Path]:
    """``golden_dirs`` of the suite's conftest; loaded by path because every room has a conftest of the same name."""
    spec = importlib.util.spec_from_file_location("suite_conftest", Path(__file__).resolve().parent.parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.golden_dirs())


@cache
def quant_cases() -> dict[str, QuantCase]:
    folders = [root / "quant-tensors" for root in golden_folders()]
    full = [f for f in folders if (f / "x.npy").is_file()]
    cases = {}
    if full:
        x = np.load(full[-1] / "x.npy")
        for path in sorted(full[-1].glob("*.npz")):
            with np.load(path) as z:
                cases[path.stem.lower()] = QuantCase(z["raw"], z["deq"], x, z["ref"], z["ref_rounded"], float(z["ref"].std()))
        return cases
    with np.load(folders[0] / "light.npz") as z:
        for name in sorted(key[:-4] for key in z.files if key.endswith(".raw")):
            parts = (z[f"{name}.{part}"] for part in ("raw", "deq", "ref", "ref_rounded", "sigma"))
            raw, deq, ref, ref_rounded, sigma = parts
            cases[name] = QuantCase(raw, deq, z["x"], ref, ref_rounded, float(sigma))
    return cases
