"""Products on the GPU form against float64, for every weight type, and equal bits for any number of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from ggufc.codegen.kernels import matmul as cpu
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.nvptx import describe
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


@pytest.mark.parametrize("tokens", [pytest.param(3, marks=pytest.mark.full), 20])
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


def findings_without_each_wait(spec, entry: str, multiply: Callable[[str], object]) -> tuple[int, list[str]]:
    """Run ``multiply`` with the kernel's text less one barrier or wait of the entry, for each of them: how often that was found to be
    wrong, and what was taken out where it was not.
    """
    text = ptx_of(spec)
    begin = text.index(f"{entry}(")
    body = text[begin : text.find(".entry", begin) if ".entry" in text[begin:] else None]
    places = [m.span() for m in re.finditer(r"(bar\.sync|bar\.warp\.sync|cp\.async\.(wait|commit)_group)[^;]*;", body)]
    missed = []
    for start, end in places:
        try:
            multiply(text[: begin + start] + text[begin + end :])
            missed.append(body[start:end])
        except SimtError as error:
            assert re.search(r"race on shared memory|still on its way|never written", str(error)), error
    return len(places) - len(missed), missed


@pytest.mark.parametrize(
    "name, entry, tokens, k, n, spare",
    [("q4_k", "_tile", 20, 512, 96, 1), ("f16", "_tile", 20, 512, 96, 1), ("bf16", "_8", 3, 1056, 64, 0), ("f32", "_tile", 20, 96, 96, 0)],
)
def test_pipelines_need_every_barrier_and_every_wait(name, entry, tokens, k, n, spare):
    """S75, a test of the tester as well: whichever is taken out of a kernel, a race or an early read is found.

    ``spare``: whether the barrier every kernel has after a tile is not needed, since tiles end in one buffer and begin in the other.
    """
    raw, x = weight_rows(name, k, n), activations(tokens, k)
    spec, weights = MatMul(name, k, n, "silu_glu", False, "T"), packed(name, raw, k)
    found, missed = findings_without_each_wait(spec, entry, lambda text: multiply(spec, weights, x, text=text, only=entry, max_blocks=1))
    assert found >= 4 and missed == ["bar.sync \t0;"] * spare


def test_float_types_are_known():
    assert {t for t in TYPES if isinstance(weight_format(t), FloatFormat)} == {"f32", "f16", "bf16"}


# Tensor cores for 16-bit floats


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("k", [20, 64, 544])
def test_sixteen_bit_weights_keep_the_precision_of_activations(name, k):
    """Columns that fill no block, and activations of sizes no f16 could hold: each part of a value has an exponent from its block."""
    n, tokens = 40, 18
    raw, x = weight_rows(name, k, n), activations(tokens, k)
    x *= np.float32(10.0) ** np.random.default_rng(2).integers(-12, 12, (tokens, 1)).astype(np.float32)
    x[3], x[4, 1:] = 0, 0
    got = multiply(MatMul(name, k, n, "none", False, "T"), packed(name, raw, k), x)
    want = product(name, raw, k, x)
    error = np.abs(got - want).max(1) / (np.abs(want).max(1) + 1e-37)
    assert error.max() <= (4e-7 if name == "f16" else 6e-6)
    assert not got[3].any()


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_sixteen_bit_weights_any_number_of_tokens(name, epilogue):
    """S65: few tokens and many, alone and together; bias, residual and gates."""
    k, n, tokens = 96, 96, 19
    raw, x = weight_rows(name, k, n), activations(tokens, k)
    n_out = n // 2 if epilogue.endswith("_glu") else n
    residual = activations(tokens, n_out, 7) if epilogue == "add" else None
    bias = None if epilogue.endswith("_glu") else activations(1, n_out, 8)[0]
    spec, weights = MatMul(name, k, n, epilogue, bias is not None, "T"), packed(name, raw, k)
    whole = multiply(spec, weights, x, residual=residual, bias=bias)
    assert np.isfinite(whole).all()
    for start, stop in ((0, 1), (5, 14)):
        rest = None if residual is None else residual[start:stop]
        assert multiply(spec, weights, x[start:stop], residual=rest, bias=bias).tobytes() == whole[start:stop].tobytes()


def test_infinite_activations_stay_so():
    x = activations(2, 64)
    x[1, 5] = np.inf
    got = multiply(MatMul("f16", 64, 16, "none", False, "T"), packed("f16", weight_rows("f16", 64, 16), 64), x)
    assert np.isfinite(got[0]).all() and not np.isfinite(got[1]).any()


# F32


@pytest.mark.parametrize("k, n, epilogue", [(96, 48, "add"), (250, 96, "silu_glu"), (1100, 40, "none"), (20, 20, "none")])
def test_f32_weights_any_number_of_tokens(k, n, epilogue):
    """S65: one token, several (one lane's or two), and tiles add in one order; K that fills no piece and more pieces than segments."""
    tokens, glu = 35, epilogue == "silu_glu"
    raw, x = weight_rows("f32", k, n), activations(tokens, k)
    residual = activations(tokens, n, 7) if epilogue == "add" else None
    spec, weights = MatMul("f32", k, n, epilogue, False, "T"), packed("f32", raw, k)
    single, several, tiles = (multiply(spec, weights, x, residual=residual, only=o) for o in ("_1", "_8" if glu else "_16", "_tile"))
    assert single.tobytes() == several.tobytes() == tiles.tobytes()
    assert multiply(spec, weights, x, residual=residual).tobytes() == single.tobytes()
    if epilogue == "none":
        assert close(single, product("f32", raw, k, x))


def test_f32_tiles_where_they_fill_a_device():
    """A router of 128 rows is two rows of tiles: only very long batches make enough of them."""
    names = {
        (n, tokens): next(
            e.symbol for e in describe(MatMul("f32", 2048, n, "none", False, "T")).entries if e.low <= tokens <= (e.high or 1 << 30)
        )
        for n in (128, 8192)
        for tokens in (1, 2, 512)
    }
    ends = {key: name.rpartition("_")[2] for key, name in names.items()}
    assert ends == {(128, 1): "1", (128, 2): "16", (128, 512): "16", (8192, 1): "1", (8192, 2): "16", (8192, 512): "tile"}
