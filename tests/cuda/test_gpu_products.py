"""Products on the GPU form against float64, for every weight type, and equal bits for any number of tokens."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ggufc.codegen.kernels import matmul as cpu
from ggufc.codegen.kernels.matmul import MatMul, MatMulId
from ggufc.codegen.weights import activation_mode, known_formats, weight_format
from ggufc.codegen.weights.floats import FloatFormat
from gpu_harness import ptx_of, run
from products import kernel_name, packed, product, records, weight_rows
from simt import SimtError

TYPES = [t for t in known_formats() if kernel_name(t) == t]
EPILOGUES = ["none", "add", "silu_glu", "gelu_glu"]


def activations(tokens: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, k)).astype(np.float32)


def multiply(spec: MatMul, weights: np.ndarray, x: np.ndarray, *, residual=None, bias=None, ldy=None, **options) -> np.ndarray:
    n_out = spec.n // spec.unit
    ldy = ldy or n_out
    y = np.full((len(x), ldy), np.nan, np.float32)
    args = [weights, records(x, activation_mode(spec.format)), y, spec.k, ldy, residual, n_out, bias]
    sizes = {} if spec.rows.isdigit() else {spec.rows: len(x)}
    result = run(spec, args, [2], cpu.grid(spec), **sizes, **options)[2]
    assert result is not None
    return result


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """Within what sums in f32 may lose."""
    return bool(np.abs(got - want).max() <= 3e-6 * np.abs(want).max() + 1e-30)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("name", TYPES)
def test_every_type(name, tokens):
    """S75: a few tokens and a tile; K over several segments, rows that do not fill a group."""
    k, n = (512, 40) if weight_format(name).columns > 32 else (224, 40)
    raw = weight_rows(name, k, n)
    x = activations(tokens, k)
    got = multiply(MatMul(name, k, n, "none", False, "T"), packed(name, raw, k), x, ldy=n + 3)
    assert close(got[:, :n], product(name, raw, k, x))
    assert np.isnan(got[:, n:]).all()


@pytest.mark.parametrize("name", ["q8_0", "q2_k", "q4_k", "f16"])
def test_any_number_of_tokens_gives_equal_bits(name):
    """Vector, four-token and tile kernels add in one order."""
    k, n, tokens = 512, 40, 33
    raw = weight_rows(name, k, n)
    x = activations(tokens, k)
    spec, weights = MatMul(name, k, n, "none", False, "T"), packed(name, raw, k)
    whole = multiply(spec, weights, x)
    assert close(whole, product(name, raw, k, x))
    for start, stop in ((0, 1), (9, 10), (3, 8), (16, 33)):
        part = multiply(spec, weights, x[start:stop])
        assert part.tobytes() == whole[start:stop].tobytes()


@pytest.mark.parametrize("tokens", [1, 6, 33])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue, tokens):
    name, k, n = "q4_0", 128, 96
    glu = epilogue.endswith("_glu")
    raw, x = weight_rows(name, k, n), activations(tokens, k)
    n_out = n // 2 if glu else n
    residual = activations(tokens, n_out, 7) if epilogue == "add" else None
    bias = None if glu else activations(1, n_out, 8)[0]
    got = multiply(MatMul(name, k, n, epilogue, bias is not None, "T"), packed(name, raw, k), x, residual=residual, bias=bias)
    want = product(name, raw, k, x)
    if glu:
        groups = want.reshape(tokens, -1, 2, 16)
        gate, up = groups[:, :, 0].reshape(tokens, -1), groups[:, :, 1].reshape(tokens, -1)
        act = (
            gate / (1 + np.exp(-gate))
            if epilogue == "silu_glu"
            else 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        )
        want = act * up
    else:
        want = want + bias + (0 if residual is None else residual)
    assert close(got, want)


def test_numbered_rows():
    name, k, n = "q8_0", 64, 16
    raw, x = weight_rows(name, k, n), activations(20, k)
    assert close(multiply(MatMul(name, k, n, "none", False, "20"), packed(name, raw, k), x), product(name, raw, k, x))


def test_one_block_computes_all_tiles():
    """S73: a grid smaller than the number of tiles computes them all, so no launch can exceed a limit."""
    name, k, n = "q4_k", 256, 160
    raw, x = weight_rows(name, k, n), activations(25, k)
    spec, weights = MatMul(name, k, n, "none", False, "T"), packed(name, raw, k)
    assert multiply(spec, weights, x, max_blocks=1).tobytes() == multiply(spec, weights, x).tobytes()


def test_tiles_need_every_barrier_and_every_wait():
    """S75, a test of the tester as well: whichever is taken out of the tile kernel, a race or an early read is found."""
    name, k, n, tokens = "q4_k", 512, 80, 20
    raw, x = weight_rows(name, k, n), activations(tokens, k)
    spec, weights = MatMul(name, k, n, "none", False, "T"), packed(name, raw, k)
    text = ptx_of(spec)
    places = [m.span() for m in re.finditer(r"(bar\.sync|cp\.async\.(wait|commit)_group)[^;]*;", text) if m.start() > text.index("_tile(")]
    missed = 0
    for start, end in places:
        try:
            multiply(spec, weights, x, text=text[:start] + text[end:], max_blocks=1)
            missed += 1
        except SimtError as error:
            assert re.search(r"race on shared memory|still on its way", str(error)), error
    # The barrier every kernel has between tiles is not needed here: the last stage of a tile and the first of the next use different buffers.
    assert len(places) >= 6 and missed == 1


@pytest.mark.parametrize("name", ["q4_k", "f16", "q5_0", "mxfp4"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_chosen_experts(name, broadcast):
    k, n, experts, used, tokens = 256, 24, 5, 2, 3
    raw = [weight_rows(name, k, n, seed) for seed in range(experts)]
    weights = np.concatenate([packed(name, r, k) for r in raw])
    ids = np.array([[4, 0], [2, 2], [1, 3]], np.int32)
    x = activations(tokens if broadcast else tokens * used, k)
    y = np.full((tokens * used, n), np.nan, np.float32)
    spec = MatMulId(name, k, n, experts, used, broadcast)
    got = run(spec, [weights, records(x, activation_mode(name)), y, ids], [2], 1, T=tokens)[2]
    for i, expert in enumerate(ids.reshape(-1)):
        row = x[i // used if broadcast else i][None]
        assert close(got[i : i + 1], product(name, raw[expert], k, row))


def test_float_types_are_known():
    assert {t for t in TYPES if isinstance(weight_format(t), FloatFormat)} == {"f32", "f16", "bf16"}
