"""Quantisers: bounded round-trip error, agreement with ggml's reference rounding, and awkward blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ggufc.formats.activations import round_activations, round_bf16, round_q8_2, round_q8_k
from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import TYPES, row_bytes
from ggufc.formats.quants import dequantize, quantize
from ggufc.formats.quants.quantize import QUANTIZERS

# Root mean square error on normal data in units of its deviation: what ggml's own quantisers reach, rounded up by about 1 %.
RMS = {
    "f16": 0.00021,
    "bf16": 0.0017,
    "q4_0": 0.087,
    "q4_1": 0.079,
    "q5_0": 0.0433,
    "q5_1": 0.0382,
    "q8_0": 0.0054,
    "iq4_nl": 0.0756,
    "mxfp4": 0.116,
    "q2_k": 0.293,
    "q3_k": 0.15,
    "q4_k": 0.0718,
    "q5_k": 0.0363,
    "q6_k": 0.0176,
    "iq4_xs": 0.0763,
}
BLOCKS = sorted(QUANTIZERS)


@pytest.mark.parametrize("name", RMS)
def test_error_on_normal_data(name: str):
    x = np.random.default_rng(7).standard_normal((64, 512), np.float32)
    packed = quantize(name, x)
    assert packed.dtype == np.uint8 and packed.shape == (64, row_bytes(name, 512))
    assert np.sqrt(np.square(dequantize(name, packed, 512) - x).mean()) < RMS[name]


@pytest.mark.parametrize("name", ["f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_bytes_equal_the_gguf_package(name: str):
    gguf = pytest.importorskip("gguf")
    x = np.random.default_rng(8).standard_normal((16, 256), np.float32)
    x[3] = 0
    x[4, 32:64] = -0.25
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(quantize(name, x).reshape(-1), np.ascontiguousarray(theirs).reshape(-1).view(np.uint8))


def test_mxfp4_errs_less_than_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    x = np.random.default_rng(9).standard_normal((64, 256), np.float32)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x, gguf.GGMLQuantizationType.MXFP4), gguf.GGMLQuantizationType.MXFP4)
    ours = dequantize("mxfp4", quantize("mxfp4", x), 256)
    assert np.square(ours - x).sum() < np.square(theirs - x).sum()


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_error_is_bounded_by_the_step_of_each_block(name: str, data):
    """No value is further off than the coarsest step of its type allows; constant, one-sided and sparse blocks included."""
    block = TYPES[name].block
    # Eighths: the scales of much smaller values would be subnormal halves, whose steps are coarse.
    elements = st.integers(-64, 64).map(lambda i: i / 8)
    x = data.draw(hnp.arrays(np.float32, (2, 256), elements=elements, fill=st.sampled_from([0.0, 1.0, -0.5])))
    error = np.abs(dequantize(name, quantize(name, x), 256) - x).reshape(2, -1, block).max(axis=2)
    top = np.abs(x).reshape(2, -1, block).max(axis=2)
    span = np.ptp(x.reshape(2, -1, block), axis=2)
    bound = {"q8_0": 0.01, "q6_k": 0.04, "q5_0": 0.13, "q5_1": 0.05, "q5_k": 0.13, "q4_1": 0.1}.get(name, 0.4 if name != "q2_k" else 0.7)
    assert (error <= bound * np.maximum(top, span) + 1e-6).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_zeros_stay_zero_and_tiny_values_do_not_explode(name: str):
    assert not dequantize(name, quantize(name, np.zeros((2, 256), np.float32)), 256).any()
    tiny = np.full((1, 256), 1e-38, np.float32)
    assert np.abs(dequantize(name, quantize(name, tiny), 256)).max() < 1e-6


@pytest.mark.parametrize("name", BLOCKS)
def test_unusable_values_are_refused(name: str):
    x = np.ones((1, 256), np.float32)
    for bad in (np.nan, np.inf):
        x[0, 17] = bad
        with pytest.raises(GGUFError, match="not all finite"):
            quantize(name, x)
    if name != "mxfp4":
        x[0, 17] = 1e30
        with pytest.raises(GGUFError, match="do not fit"):
            quantize(name, x)


def test_types_without_a_quantiser_are_refused():
    with pytest.raises(GGUFError, match="no quantiser for iq3_k"):
        quantize("iq3_k", np.zeros((1, 256), np.float32))
    with pytest.raises(GGUFError, match="cannot be q8_0"):
        quantize("q8_0", np.zeros((1, 33), np.float32))


def test_bf16_rounds_to_even_and_keeps_nan():
    # Halfway between 1 and the next bfloat16 goes to 1 (even), halfway above that goes up.
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.nan, -0.0, 3.3895314e38, np.inf], np.float32)
    got = round_bf16(x)
    assert got[0] == 1 and got[1] == 1 + 2**-6 and np.isnan(got[2]) and np.signbit(got[3]) and got[4] == np.float32(3.3895314e38)
    assert np.isinf(got[5])


@settings(max_examples=50, deadline=None)
@given(x=hnp.arrays(np.float32, (3, 256), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)))
def test_activation_rounding_stays_within_half_a_step(x: np.ndarray):
    for qs, d, slack in ((*round_q8_2(x), 1 / 128), (*round_q8_k(x), 1e-5)):
        assert qs.dtype == np.int8 and d.dtype == np.float32 and d.shape == (3, 8)
        step = np.repeat(d, 32, axis=1).astype(np.float64)
        # A bfloat16 scale may be rounded down: the largest value is then up to half a step plus the clipping off.
        assert (np.abs(qs * step - x) <= step * (0.5 + 128 * slack) + 1e-30).all()
    d = round_q8_2(x)[1]
    assert np.array_equal(round_bf16(d), d)


def test_zero_activations_give_zero_scales():
    for qs, d in (round_q8_2(np.zeros((1, 256), np.float32)), round_q8_k(np.zeros((1, 256), np.float32))):
        assert not qs.any() and not d.any()
    with pytest.raises(GGUFError, match="blocks of 256"):
        round_q8_k(np.zeros((1, 32), np.float32))


@pytest.mark.parametrize("mode", ["q8_2", "q8_k", "bf16", "f32"])
def test_no_rows_round_to_no_rows(mode: str):
    """A micro-batch whose logits nobody wants multiplies the output weights with nothing."""
    assert round_activations(np.zeros((2, 0, 256), np.float32), mode).shape == (2, 0, 256)
