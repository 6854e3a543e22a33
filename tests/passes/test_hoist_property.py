"""``hoist`` on random computations from weights: the same bits as in every step, and nothing left that depends on weights alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.ir import Graph, Node, Sym, TensorType, interpret, parse_graph, print_graph, verify
from ggufc.passes import PassManager

T, N = Sym("T"), 4


@st.composite
def weighted(draw: st.DrawFn) -> Graph:
    """Sinks, transposed and merged matrices and scaled vectors in the manner of builders: [N, N] computed from weights, some of it read by
    products with activations and some by other computations as well."""
    g = Graph("g", symbols=("T",))
    x = g.add("tanh", g.input("embd", "embd", TensorType("f32", (N, T))), name="x")
    dtypes = [draw(st.sampled_from(["f32", "f16"])) for _ in range(3)]
    leaves = [g.weight(f"w{i}", TensorType(dtype, (N, N))) for i, dtype in enumerate(dtypes)]
    pool: list[Node] = [w if w.dtype == "f32" else g.add("cast", w, dtype="f32") for w in leaves]
    for _ in range(draw(st.integers(1, 8))):
        a, b = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        kind = draw(st.sampled_from(["norm", "product", "sum", "scale", "turn", "join", "row", "matmul", "live"]))
        if kind == "norm":
            a = g.add("rms_norm", a, eps=1e-5)
        elif kind == "product":
            a = g.add("mul", a, b)
        elif kind == "sum":
            a = g.add("add", a, g.const(draw(st.sampled_from([0.5, 1.0]))))
        elif kind == "scale":
            a = g.add("scale", a, s=draw(st.sampled_from([1.0, -2.0])), b=0.25)
        elif kind == "turn":
            a = g.add("cont", g.add("transpose", a))
        elif kind == "join":
            both = g.add("concat", a, b, dim=1)
            a = g.add("cont", g.add("view", both, ne=(N, N), nb=(1, N), offset=2 * N))
        elif kind == "row":
            a = g.add("mul", a, g.add("view", b, ne=(N,), nb=(1,), offset=N))
        elif kind == "matmul":
            a = g.add("mul_mat", a, b)
        elif kind == "live":
            x = g.add("tanh", g.add("mul_mat", a, x))
        pool.append(a)
    y = g.add("mul_mat", pool[-1], x)
    g.outputs["y"] = g.add("add", y, g.add("view", draw(st.sampled_from(pool)), ne=(N,), nb=(1,), offset=0))
    if draw(st.booleans()):
        g.outputs["constant"] = g.add("neg", pool[-1])
    g.remove_dead()
    verify(g)
    return g


@settings(max_examples=80, deadline=None)
@given(weighted(), st.integers(0, 1000), st.sampled_from(["hoist", "hoist,cse,hoist,dce", "canonicalize,cse,hoist,cse,dce"]))
def test_hoisted_equals_computed_in_every_step(built: Graph, seed: int, pipeline: str) -> None:
    final = built.clone()
    PassManager.parse(pipeline).run(final)
    verify(final)
    constant = {n for n in final.nodes if n.op.name in ("weight", "const")}
    for node in final.nodes:
        if not node.is_leaf and constant.issuperset(node.operands):
            assert node.is_view, f"{node.op.name} is computed from weights alone"
            constant.add(node)
    rng = np.random.default_rng(seed)
    numpy_types = {"f32": np.float32, "f16": np.float16}
    weights = {n.attrs["tensor"]: rng.normal(size=(N, N)).astype(numpy_types[n.dtype]) for n in built.find("weight")}
    inputs = {"embd": rng.normal(size=(3, N)).astype(np.float32)}
    want = interpret(built, weights, inputs, {}, {"T": 3})
    for graph in (final, parse_graph(print_graph(final))):
        got = interpret(graph, weights, inputs, {}, {"T": 3})
        assert want.keys() == got.keys()
        for name, value in want.items():
            assert np.array_equal(np.asarray(got[name]), np.asarray(value), equal_nan=True), name
