"""Chains of pointwise operators become one launch; what has another reader, another shape or too many inputs does not join."""

from __future__ import annotations

import numpy as np

from ggufc.codegen.cpu.target import resolve
from ggufc.codegen.kernels.elementwise import Elementwise
from ggufc.codegen.kernels.strided import contiguous
from ggufc.codegen.lower import lower
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym
from harness import build, run
from strided_reference import tiles

T = Sym("T")
C = contiguous


def graph() -> Graph:
    return Graph("g", symbols=("T", "O", "C", "KV", "R"))


def inputs(g: Graph, n: int = 2, width: int = 40):
    x = g.input("embd", "embd", TensorType("f32", (width * n, T)))
    return [g.add("cont", g.add("view", x, ne=(width, T), nb=(1, width * n), offset=width * i), name=f"part{i}") for i in range(n)]


def expressions(g: Graph):
    return [step.spec.expr for step in lower(g)[0].steps if isinstance(step.spec, Elementwise)]


def clamped(g: Graph, gate, up):
    gate = g.add("clamp", g.add("silu", gate, name="act"), min=-np.inf, max=2.0, name="gate")
    return g.add("mul", gate, g.add("clamp", up, min=-2.0, max=2.0, name="up"), name="hidden")


def test_a_bounded_gate_is_one_launch():
    g = graph()
    g.outputs["y"] = clamped(g, *inputs(g))
    assert expressions(g) == [("mul", ("clamp", ("silu", 0), -np.inf, 2.0), ("clamp", 1, -2.0, 2.0))]


def test_an_operand_that_appears_twice_is_one_input():
    g = graph()
    (x,) = inputs(g, 1)
    g.outputs["y"] = g.add("mul", g.add("sigmoid", x), g.add("tanh", x))
    assert expressions(g) == [("mul", ("sigmoid", 0), ("tanh", 0))]


def test_results_with_other_readers_stay_apart():
    g = graph()
    x, y = inputs(g)
    act = g.add("silu", x, name="act")
    g.outputs["y"] = g.add("mul", act, y)
    g.outputs["act"] = act
    assert expressions(g) == [("silu", 0), ("mul", 0, 1)]


def test_results_of_another_shape_stay_apart():
    g = graph()
    (x,) = inputs(g, 1)
    row = g.add("exp", g.weight("w", TensorType("f32", (40,))), name="row")
    g.outputs["y"] = g.add("mul", x, row)
    assert expressions(g) == [("exp", 0), ("mul", 0, 1)]


def test_a_kernel_takes_three_inputs_at_most():
    g = graph()
    a, b, c, d = inputs(g, 4)
    g.outputs["y"] = g.add("add", g.add("mul", a, b), g.add("mul", c, d))
    found = expressions(g)
    assert len(found) == 2 and sorted(map(len, found)) == [3, 3]


def test_a_chain_has_the_bits_of_its_launches():
    rng = np.random.default_rng(1)
    x, y, out = (rng.normal(size=(3, 40)).astype(np.float32) * 3 for _ in range(3))
    shape = C("f32", (40, T))
    chain = Elementwise(("mul", ("clamp", ("silu", 0), -np.inf, 2.0), ("sigmoid", ("scale", 1, 0.3, 0.1))), shape, (shape, shape))
    parts = [Elementwise(e, shape, (shape,)) for e in (("silu", 0), ("clamp", 0, -np.inf, 2.0), ("scale", 0, 0.3, 0.1), ("sigmoid", 0))]
    product = Elementwise(("mul", 0, 1), shape, (shape, shape))
    target = resolve("native")
    image = build([chain, *parts, product], target)

    def go(spec, *operands):
        return run(spec, target, [out, *operands], tiles(spec.grid(), {"T": 3}), loaded=image, T=3)[0]

    silu, clamp, scale, sigmoid = parts
    want = go(product, go(clamp, go(silu, x)), go(sigmoid, go(scale, y)))
    assert (go(chain, x, y).view(np.uint32) == want.view(np.uint32)).all()
