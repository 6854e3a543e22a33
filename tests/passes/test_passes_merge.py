"""Merging of products that read the same activation."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.ir import Graph, Node, TensorType, interpret
from ggufc.ir.layout import is_contiguous
from ggufc.passes import PassManager
from passes_graphs import C, T, Tiny, Weights, evaluate, f32, graph, rules_fired, tiny_model


def products(g: Graph, *shapes: tuple[str, int], shared: bool = False) -> list[Node]:
    x = g.add("silu", g.input("embd", "embd", f32(32, T)))
    found = []
    for i, (dtype, n) in enumerate(shapes):
        other = g.add("silu", x) if shared and i else x
        found.append(
            g.add("mul_mat", g.weight(f"blk.0.attn_{'qkvx'[i]}.weight", TensorType(dtype, (32, n))), other, name=f"blk.0.attn_{'qkvx'[i]}")
        )
    return found


def store(g: Graph, rows: Node, name: str = "blk.0.v") -> Node:
    slots = next((n for n in g.inputs() if n.name == "kv_slots"), None) or g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
    return g.add("set_rows", g.cache(name, TensorType("f16", (rows.type.ne[0], C))), rows, slots)


def test_merge_qkv_of_one_type() -> None:
    g = graph()
    q, k, v = products(g, ("q8_0", 64), ("q8_0", 32), ("q8_0", 32))
    store(g, k, "blk.0.k")
    store(g, v)
    g.outputs["q"] = g.add("silu", q)
    assert rules_fired(g, "merge-qkv,hoist") == {"three": 1, "hoisted": 1}
    (product,) = g.find("mul_mat")
    assert product.type == f32(128, T)
    assert product.name == "blk.0.attn_q+attn_k+attn_v"
    assert [(v.type.ne, v.attrs["nb"], v.attrs["offset"]) for v in g.find("view")] == [
        ((64, T), (1, 128), 0),
        ((32, T), (1, 128), 64),
        ((32, T), (1, 128), 96),
    ]
    assert list(g.derived) == ["blk.0.attn_q+attn_k+attn_v.weight"]


@pytest.mark.parametrize(
    ("types", "left"),
    [
        (("q4_0", "q4_0", "q8_0"), 2),
        (("q4_0", "q8_0", "q4_0"), 2),
        (("q8_0", "q4_0", "f16"), 3),
    ],
)
def test_merge_qkv_of_mixed_types_merges_those_that_agree(types: tuple[str, str, str], left: int) -> None:
    g = graph()
    q, k, v = products(g, *((t, 32) for t in types))
    store(g, k, "blk.0.k")
    store(g, v)
    g.outputs["q"] = g.add("silu", q)
    rules_fired(g, "merge-qkv,hoist,dce")
    assert len(g.find("mul_mat")) == left


def test_merge_qkv_keeps_the_meaning_of_views_with_their_own_strides() -> None:
    """A ``view`` of one projection states strides of that projection's storage; over the merged rows they would mean other elements."""
    g = graph()
    x = g.input("x", "embd", TensorType("f32", (8, T)))
    k = g.add("mul_mat", g.weight("k", TensorType("f32", (8, 6))), x, name="k")
    v = g.add("mul_mat", g.weight("v", TensorType("f32", (8, 4))), x, name="v")
    slots = g.input("slots", "kv_slots", TensorType("i32", (T,)))
    half = g.add("view", k, ne=(3, T), nb=(1, 6), offset=3, name="half")
    g.add("set_rows", g.cache("c", TensorType("f32", (3, C))), g.add("cont", half), slots, name="store")
    g.outputs["half"] = g.add("scale", half, s=1.0, b=0.0)
    g.outputs["v"] = g.add("scale", v, s=2.0, b=0.0)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((n, 8)).astype(np.float32) for name, n in (("k", 6), ("v", 4))}
    inputs = {"x": rng.standard_normal((5, 8)).astype(np.float32), "slots": np.arange(5, dtype=np.int32)}

    def run(graph: Graph) -> list[np.ndarray]:
        caches = {"c": np.zeros((5, 3), np.float32)}
        out = interpret(graph, weights, inputs, caches, {"T": 5, "C": 5})
        return [out["half"], out["v"]]

    merged = g.clone()
    assert PassManager.parse("merge-qkv").run(merged)[0].changed
    for want, got in zip(run(g), run(merged)):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_merge_qkv_near_misses() -> None:
    g = graph()  # no cache is written: these are other projections
    a, b = products(g, ("f32", 32), ("f32", 32))
    g.outputs["y"] = g.add("add", a, b)
    assert rules_fired(g, "merge-qkv") == {}

    g = graph()  # different activations
    a, b = products(g, ("f32", 32), ("f32", 32), shared=True)
    store(g, b)
    g.outputs["y"] = g.add("silu", a)
    assert rules_fired(g, "merge-qkv") == {}

    g = graph()  # a weight that is read elsewhere would be stored twice
    a, b = products(g, ("f32", 32), ("f32", 32))
    store(g, b)
    g.outputs["y"] = g.add("add", g.add("silu", a), g.add("mul_mat", a.operands[0], g.add("neg", a.operands[1])))
    assert rules_fired(g, "merge-qkv") == {}

    g = graph()  # an output is handed out as it is
    a, b = products(g, ("f32", 32), ("f32", 32))
    store(g, b)
    g.outputs["y"] = a
    assert rules_fired(g, "merge-qkv") == {}

    g = graph()  # experts are three-dimensional
    x = g.add("reshape", g.add("silu", g.input("embd", "embd", f32(32, T))), ne=(32, T, 1))
    a, b = (g.add("mul_mat", g.weight(f"w{i}", f32(32, 32, 1)), x) for i in range(2))
    store(g, g.add("reshape", b, ne=(32, T)))
    g.outputs["y"] = g.add("silu", a)
    assert rules_fired(g, "merge-qkv") == {}


def test_a_user_that_needs_contiguous_rows_gets_a_copy() -> None:
    g = graph()
    q, v = products(g, ("f32", 32), ("f32", 32))
    store(g, v)
    g.outputs["q"] = g.add("silu", g.add("reshape", q, ne=(T, 32)))  # mixes tokens: only contiguous storage has that order
    assert rules_fired(g, "merge-qkv")["two"] == 1
    (copy,) = g.find("cont")
    assert copy.operands[0].op.name == "view" and not is_contiguous(copy.operands[0])
    assert g.find("reshape")[0].operands[0] is copy


def test_merge_gate_up_keeps_biases_on_the_views() -> None:
    built = tiny_model(Tiny(bias=True, layers=1))
    g = built.clone()
    assert rules_fired(g, "fuse-glu,merge-gate-up,hoist")["gate-up"] == 1
    gate, up = g.find("glu")[0].operands
    assert [n.op.name for n in (gate, up)] == ["add", "add"]
    assert gate.operands[0].operands[0] is up.operands[0].operands[0]
    weights = Weights(built, 5)
    rules_fired(built, "fuse-glu")
    assert np.array_equal(evaluate(built, [2], weights=weights)[0][0], evaluate(g, [2], weights=weights)[0][0])


def test_merge_gate_up_near_misses() -> None:
    g = tiny_model(Tiny(layers=1))
    assert rules_fired(g, "merge-gate-up") == {}  # activations are not fused yet

    g = graph()
    a, b = products(g, ("f32", 32), ("f16", 32))
    g.outputs["y"] = g.add("glu", a, b, fn="silu")
    assert rules_fired(g, "merge-gate-up") == {}

    g = graph()
    (a,) = products(g, ("f32", 32))
    g.outputs["y"] = g.add("glu", a, a, fn="silu")
    assert rules_fired(g, "merge-gate-up") == {}


def test_merging_changes_no_bits() -> None:
    built = tiny_model(Tiny(dtype="q8_0", head_norms=True))
    merged = built.clone()
    PassManager.parse("fuse-glu").run(built)
    rules_fired(merged, "fuse-glu,merge-qkv,merge-gate-up,hoist")
    weights = Weights(tiny_model(Tiny(dtype="q8_0", head_norms=True)), 2)
    a, caches_a = evaluate(built, [3, 2], weights=weights)
    b, caches_b = evaluate(merged, [3, 2], weights=weights)
    assert all(np.array_equal(x, y) for x, y in zip(a, b))
    assert all(np.array_equal(caches_a[name], caches_b[name]) for name in caches_a)


# hoist
