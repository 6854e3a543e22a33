"""Attention in the schedule: which launches it becomes, what they are told, and what is refused."""

from __future__ import annotations

import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.attention_cpu import LANE, FlashAttn, FlashAttnSplits
from ggufc.codegen.kernels.softmax import SoftMax
from ggufc.codegen.lower import lower
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym

T, C, R = Sym("T"), Sym("C"), Sym("R")
D, HEADS = 96, 4


def attention(dtype="f16", values=64, offset=0, sinks=False, window=0, apart=False):
    """One ``flash_attn`` whose values are part of the rows of the keys, or a cache of their own."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    q = g.add("reshape", g.input("embd", "embd", TensorType("f32", (D * HEADS, T))), ne=(D, HEADS, T))
    cells = g.input("kv_cells", "kv_cells", TensorType("i32", (R,)))
    vis = g.input("visible", "visible", TensorType("i32", (3, T)), window=window)
    k = g.cache("blk.0.k", TensorType(dtype, (D, C)))
    if apart:
        v = g.cache("blk.0.v", TensorType(dtype, (D, C)))
        v = v if values == D else g.add("view", v, ne=(values, C), nb=(1, D), offset=offset)
    else:
        v = g.add("view", k, ne=(values, C), nb=(1, D), offset=offset)
    more = [g.weight("sinks", TensorType("f32", (HEADS,)))] if sinks else []
    g.outputs["o"] = g.add("flash_attn", q, k, v, cells, vis, *more, scale=0.1, n_head_kv=1, name="attn")
    return g


def steps(g):
    apart, whole = lower(g)[0].steps
    assert isinstance(apart.spec, FlashAttnSplits) and apart.spec.attention == whole.spec
    named = [dict(zip(s.spec.arg_names, s.args)) for s in (apart, whole)]
    assert named[0]["partials"] == named[1]["partials"] and named[0]["partials"].kind == "value"
    return apart, whole, named[1]


def test_ordinary_caches():
    apart, whole, args = steps(attention(values=D, apart=True))
    assert whole.spec == FlashAttn(D, D, HEADS, 1, "f16", "f16", 0.1)
    assert (whole.sym, whole.div, whole.mult) == ("T", 16, 1)
    assert (apart.sym, apart.div, apart.mult) == ("R", LANE, 1)
    assert (args["k"].name, args["v"].name, args["sinks"].kind) == ("blk.0.k", "blk.0.v", "null")


@pytest.mark.parametrize(("dtype", "offset", "bytes_"), [("f16", 0, 0), ("f16", 20, 40), ("q8_0", 32, 34)])
def test_values_within_the_rows_of_the_keys(dtype, offset, bytes_):
    _, whole, args = steps(attention(dtype, offset=offset))
    assert whole.spec.shared and (whole.spec.d, whole.spec.dv) == (D, 64)
    assert args["v"] == args["k"].at(bytes_)
    assert whole.bytes == {"R": 96 * (2 if dtype == "f16" else 34 / 32)}


def test_keys_that_are_the_values_are_read_as_they_are():
    """One cache for both is storage alone, whatever its type: nothing is rounded to meet it, and its rows are read once."""
    _, whole, args = steps(attention("q8_0", values=D))
    assert whole.spec == FlashAttn(D, D, HEADS, 1, "q8_0", "q8_0", 0.1, shared=True)
    assert args["v"] == args["k"] and whole.bytes == {"R": 96 * 34 / 32}


def test_sinks():
    _, whole, args = steps(attention(sinks=True))
    assert whole.spec.sinks and (args["sinks"].kind, args["sinks"].name) == ("weight", "sinks")


def test_a_window_bounds_the_launch_of_splits():
    apart, whole, _ = steps(attention(window=5000))
    assert whole.bytes == {"T": 5000 * 96 * 2}
    assert (apart.sym, apart.mult) == ("", 21) and apart.args[10].value == 21


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"dtype": "q8_0", "offset": 16, "values": 64}, "node 'attn': values that begin inside a q8_0 block"),
        ({"apart": True}, "node 'attn': values that are a view of another cache"),
    ],
)
def test_refusals(case, message):
    with pytest.raises(CodegenError, match=message):
        lower(attention(**case))


def test_unfused_sinks_reach_the_kernel():
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    x = g.input("embd", "embd", TensorType("f32", (32 * HEADS, T)))
    a = g.add("view", x, ne=(32, T, HEADS), nb=(1, 32 * HEADS, 32))
    mask = g.add("view", x, ne=(32, T), nb=(1, 32 * HEADS))
    g.outputs["p"] = g.add("soft_max", a, mask, g.weight("sinks", TensorType("f32", (HEADS,))), scale=0.5)
    (step,) = (s for s in lower(g)[0].steps if isinstance(s.spec, SoftMax))
    assert step.spec.sinks and dict(zip(step.spec.arg_names, step.args))["sinks"].name == "sinks"


def test_operands_without_a_kernel_are_refused():
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    a = g.input("embd", "embd", TensorType("f32", (32, T)))
    g.outputs["y"] = y = g.add("relu", a, name="act")
    y.operands = (a, a)
    with pytest.raises(CodegenError, match="node 'act': relu with 2 operands"):
        lower(g)
