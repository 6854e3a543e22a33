"""Every block type against another engine: dequantisation bit for bit, products with rounded activations to 1e-5 sigma."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ggufc.formats.activations import activation_mode, round_activations, round_q8_2, round_q8_k
from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import TYPES, row_bytes
from ggufc.formats.quants import codes, dequantize
from ggufc.formats.quants.codes import DECODERS
from quant_golden import quant_cases

N = 512
CASES = quant_cases()


def test_every_block_type_has_a_golden():
    assert set(DECODERS) <= set(CASES)
    assert set(DECODERS) == {t.name for t in TYPES.values() if t.is_quantized}


@pytest.mark.parametrize("name", CASES)
def test_dequantises_bit_for_bit(name: str):
    case = CASES[name]
    assert case.raw.shape[1] == row_bytes(name, N)
    got = dequantize(name, case.raw, N)
    assert np.array_equal(got.view(np.uint32), case.deq.view(np.uint32))


@pytest.mark.parametrize("name", DECODERS)
def test_codes_rebuild_the_values(name: str):
    case = CASES[name]
    q, scale, low, g = codes(name, case.raw, N)
    assert q.dtype == np.int8 and q.shape == case.deq.shape
    assert g in (16, 32) and scale.dtype == np.float32 and scale.shape == (len(q), N // g)
    value = q * np.repeat(scale, g, axis=1)
    if low is not None:
        assert low.dtype == np.float32 and low.shape == scale.shape
        value = value - np.repeat(low, g, axis=1)
    if name == "iq6_k":  # products use the cubic rounded to integers
        assert np.abs(value - case.deq).max() < 0.6 * np.abs(scale).max()
    else:
        assert np.array_equal(value, case.deq)


def product(name: str, case) -> np.ndarray:
    """Float64 product of rounded activations and weights, computed from integers where the engine does."""
    mode = activation_mode(name)
    if mode in ("f32", "bf16"):
        return round_activations(case.x, mode).astype(np.float64) @ dequantize(name, case.raw, N).astype(np.float64).T
    qs, d = round_q8_2(case.x) if mode == "q8_2" else round_q8_k(case.x)
    q, scale, low, g = codes(name, case.raw, N)
    parts = np.einsum("tkg,nkg->tnk", qs.reshape(len(qs), -1, g).astype(np.int64), q.reshape(len(q), -1, g).astype(np.int64))
    d = np.repeat(d, 32 // g, axis=1).astype(np.float64)
    y = np.einsum("tnk,tk,nk->tn", parts.astype(np.float64), d, scale.astype(np.float64))
    if low is not None:
        sums = qs.reshape(len(qs), -1, g).astype(np.int64).sum(axis=2)
        y -= (sums * d) @ low.astype(np.float64).T
    return y


@pytest.mark.parametrize("name", CASES)
def test_products_equal_the_reference(name: str):
    case = CASES[name]
    error = np.abs(product(name, case) - case.ref_rounded).max() / case.sigma
    # The reference multiplied IQ6_K's exact cubic; products round it.
    assert error < (0.03 if name == "iq6_k" else 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_rounded_activations_are_what_the_reference_multiplied(name: str):
    case = CASES[name]
    y = round_activations(case.x, activation_mode(name)).astype(np.float64) @ dequantize(name, case.raw, N).astype(np.float64).T
    assert np.abs(y - case.ref_rounded).max() / case.sigma < 1e-5
    exact = case.x.astype(np.float64) @ case.deq.astype(np.float64).T
    assert np.abs(exact - case.ref).max() / case.sigma < 1e-5


def test_partial_rows_are_refused():
    with pytest.raises(GGUFError, match="not whole rows of 256 q4_k values"):
        dequantize("q4_k", np.zeros(145, np.uint8), 256)
    with pytest.raises(GGUFError, match="cannot be q4_k"):
        codes("q4_k", np.zeros(144, np.uint8), 128)
    with pytest.raises(GGUFError, match="not a block type"):
        codes("f16", np.zeros(64, np.uint8), 32)
    with pytest.raises(GGUFError, match="'q9_k' is unknown"):
        dequantize("q9_k", np.zeros(64, np.uint8), 32)


@pytest.mark.parametrize("name", ["q4_1", "iq2_k", "iq4_ks", "iq6_k"])
def test_slabs_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch):
    """Decoding a tensor in pieces gives the same as decoding it at once."""
    case = CASES[name]
    whole = dequantize(name, case.raw, N), codes(name, case.raw, N)
    monkeypatch.setattr(sys.modules["ggufc.formats.quants.codes"], "SLAB", 600)
    monkeypatch.setattr(sys.modules["ggufc.formats.quants.dequantize"], "SLAB", 600)
    assert np.array_equal(dequantize(name, case.raw, N), whole[0])
    for a, b in zip(codes(name, case.raw, N), whole[1]):
        assert np.array_equal(a, b) if a is not None else b is None
