"""Row look-ups in repacked weights give the reference dequantiser's values. S30."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.kernels.get_rows import GetRows
from ggufc.formats.quants import codes
from harness import run
from products import CASE_IDS, CASES, kernel_name, loaded, packed, weight_rows, weight_values


def values(name: str, raw: np.ndarray, k: int) -> np.ndarray:
    """f32 as the dequantiser rounds: the product, then the sum with the minimum."""
    if name in ("f32", "f16", "bf16"):
        return weight_values(name, raw, k).astype(np.float32)
    code, scale, low, g = codes(name, raw, k)
    w = np.repeat(scale, g, axis=1) * code.astype(np.float32)
    return w if low is None else w - np.repeat(low, g, axis=1)


@pytest.mark.parametrize(("name", "target"), CASES, ids=CASE_IDS)
def test_rows_equal_the_dequantiser(name, target):
    k, n = 512, 37
    raw = weight_rows(name, k, n)
    ids = np.array([36, 0, 15, 16, 5, 31, 32, 5], np.int32)
    out = np.full((len(ids), k), np.nan, np.float32)
    spec = GetRows(kernel_name(name), k)
    out = run(spec, target, [packed(name, raw, k), ids, out], len(ids), loaded=loaded(spec, target), T=len(ids))[2]
    assert (out == values(name, raw, k)[ids]).all()
