"""Quantised tensors of another engine: the bundled four rows per type, or the full set when it lies beside the repository."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from support import golden_dirs


class QuantCase(NamedTuple):
    """``raw`` rows of 512 values, the engine's ``deq`` of them, and products with ``x``: exact and with rounded activations."""

    raw: np.ndarray
    deq: np.ndarray
    x: np.ndarray
    ref: np.ndarray
    ref_rounded: np.ndarray
    sigma: float


@cache
def quant_cases() -> dict[str, QuantCase]:
    folders = [root / "quant-tensors" for root in golden_dirs()]
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
