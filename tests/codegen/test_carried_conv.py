"""Convolutions with carried history: the numbers, the state left behind, and the bits of any way to cut a sequence into batches."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.convolution import CarriedConv, SsmConv
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.lower import lower
from ggufc.ir import Graph, Sym, TensorType
from harness import build, run, runnable_targets
from strided_reference import tiles

T, S, C = Sym("T"), Sym("S"), contiguous
SPECS = [CarriedConv(48, 3), CarriedConv(37, 3), CarriedConv(5, 4), CarriedConv(64, 2)]


def plain(spec):
    """The convolution alone, over inputs of which the first are carried."""
    n = T + (spec.taps - 1)
    return SsmConv(
        Strided("f32", (n, spec.channels), (spec.channels, 1)), C("f32", (spec.taps, spec.channels)), C("f32", (spec.channels, T))
    )


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*SPECS, *map(plain, SPECS)], request.param)


def step(loaded, spec, x, w, state, read, slot):
    """(y, state after) of one batch; rows of x lie further apart than they are long."""
    target, image = loaded
    n = len(x)
    padded = np.zeros((n, spec.channels + 3), np.float32)
    padded[:, : spec.channels] = x
    args = [padded, spec.channels + 3, w, state, np.array([read], np.int32), np.array([slot], np.int32), np.zeros_like(x)]
    out = run(spec, target, args, spec.tiles, loaded=image, T=n)
    return out[6], out[3]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.channels}x{s.taps}")
def test_any_way_to_cut_a_sequence_has_the_same_bits(loaded, spec):  # S89, S90
    target, image = loaded
    rng = np.random.default_rng(1)
    n, kept = 9, spec.taps - 1
    x, w = rng.normal(size=(n, spec.channels)).astype(np.float32), rng.normal(size=(spec.channels, spec.taps)).astype(np.float32)
    inputs = np.concatenate([np.zeros((kept, spec.channels), np.float32), x])
    conv = plain(spec)
    want = x + run(conv, target, [inputs, w, np.zeros_like(x)], tiles(conv.grid(), {"T": n}), loaded=image, T=n)[2]
    for sizes in ([9], [1] * 9, [2, 1, 6], [4, 5]):
        state = rng.normal(size=(3, kept * spec.channels)).astype(np.float32)
        state[2] = 0  # the row that a sequence starts from
        other = state[0].copy()
        rows, at = [], 0
        for size in sizes:
            y, state = step(loaded, spec, x[at : at + size], w, state, 1 if at else 2, 1)
            rows.append(y)
            at += size
        assert (np.concatenate(rows).view(np.uint32) == want.view(np.uint32)).all()
        assert (x[n - kept :] == state[1].reshape(spec.channels, kept).T).all()
        assert (state[0] == other).all() and not state[2].any()


def graph(keep=True, residual=True):
    g = Graph("g", symbols=("T", "O", "C", "KV", "R", "S"))
    x = g.add("relu", g.input("embd", "embd", TensorType("f32", (48, T))), name="x")
    cache = g.cache("blk.0.conv", TensorType("f32", (96, S + 1)))
    read = g.add("get_rows", cache, g.input("state_reads", "state_reads", TensorType("i32", (1,))), name="read")
    new = g.add("cont", g.add("permute", x, axes=(1, 0)))
    both = g.add("concat", g.add("reshape", read, ne=(2, 48)), new, dim=0, name="inputs")
    y = g.add("ssm_conv", both, g.weight("taps", TensorType("f32", (3, 48))), name="conv")
    g.outputs["y"] = g.add("add", x if residual else g.add("neg", x), y, name="out")
    tail = g.add("reshape", g.add("cont", g.add("view", both, ne=(2, 48), nb=(1, T + 2), offset=T)), ne=(96, 1))
    g.add("set_rows", cache, tail, g.input("state_slots", "state_slots", TensorType("i32", (1,))), name="store")
    if not keep:
        g.outputs["inputs"] = both
    return g


def kinds(g):
    return [type(s.spec).__name__ for s in lower(g)[0].steps]


def test_it_is_one_launch():
    assert kinds(graph()) == ["Elementwise", "CarriedConv"]
    (step_,) = (s for s in lower(graph())[0].steps if isinstance(s.spec, CarriedConv))
    assert step_.writes == (3, 6)


def test_what_only_looks_like_it_is_left_alone():
    assert "SsmConv" in kinds(graph(keep=False)) and "SsmConv" in kinds(graph(residual=False))


def test_one_tap_carries_nothing():
    with pytest.raises(CodegenError, match="1 taps carry no inputs"):
        CarriedConv(8, 1)
