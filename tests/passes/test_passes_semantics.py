"""No pass changes what a graph computes: logits and cache contents against the unfused graph, through the numpy reference.

Tolerance: the reference computes each operator in float64 and rounds its result to f32 once, so a fusion may only remove roundings:
1e-5 of the largest logit with f32 caches. A removed rounding may tip a value to its neighbour in a coarser cache, which later logits
then see: one step is 2^-10 of an f16 value, 1/127 of the largest of a q8_0 block.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.ir import Graph, interpret, parse_graph, print_graph
from ggufc.ir.layout import is_contiguous, layout
from ggufc.ir.storage import decode
from ggufc.passes import DEFAULT_PIPELINE, FUSIONS, PassManager
from passes_graphs import CELLS, T, Tiny, Weights, evaluate, f32, graph, tiny_model, tiny_models

REWRITES = list(dict.fromkeys(FUSIONS.split(",")))
STEPS = [3, 1, 2]
TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "q8_0": 2e-2}


def assert_same_results(built: Graph, final: Graph, weights: Weights, steps: list[int] = STEPS) -> None:
    want, want_caches = evaluate(built, steps, weights=weights)
    got, got_caches = evaluate(final, steps, weights=weights)
    types = {node.name: node.dtype for node in built.find("cache")}
    tolerance = max(TOLERANCE[kind] for kind in types.values())
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * max(1.0, np.abs(a).max()))
    assert want_caches.keys() == got_caches.keys()
    for name, before in want_caches.items():
        after = got_caches[name]
        assert before.dtype == after.dtype
        kind = types[name]
        wide, wide_after = (np.asarray(decode(data, kind), np.float64) for data in (before, after))
        one_step = {"f32": 1e-5, "f16": 2e-3, "q8_0": 1e-2}[kind]
        np.testing.assert_allclose(wide_after, wide, rtol=0, atol=one_step * max(1.0, np.abs(wide).max()))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tiny_models(), st.integers(0, 1000))
def test_the_default_pipeline_keeps_logits_and_caches(m: Tiny, seed: int) -> None:
    built = tiny_model(m)
    final = built.clone()
    PassManager.parse(DEFAULT_PIPELINE).run(final)
    assert_same_results(built, final, Weights(built, seed))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tiny_models(), st.lists(st.sampled_from(REWRITES), min_size=1, max_size=6), st.integers(0, 1000))
def test_any_order_of_passes_keeps_logits_and_caches(m: Tiny, order: list[str], seed: int) -> None:
    built = tiny_model(m)
    final = built.clone()
    PassManager.parse(",".join(order)).run(final)
    assert_same_results(built, final, Weights(built, seed), [2, 1])


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Chains and joins of views, copies and arithmetic, many of them without effect."""
    g = graph()
    x = g.add("reshape", g.input("embd", "embd", f32(24, T)), ne=(4, 3, 2, T))
    pool = [g.add("silu", x)]
    for _ in range(draw(st.integers(1, 9))):
        a = draw(st.sampled_from(pool))
        ne = a.type.ne
        kind = draw(st.sampled_from(["permute", "transpose", "cont", "reshape", "window", "scale", "add", "join", "neg"]))
        if kind == "permute":
            a = g.add("permute", a, axes=tuple(draw(st.permutations(range(4)))))
        elif kind == "reshape":
            a = a if is_contiguous(a) else g.add("cont", a)
            a = g.add("reshape", a, ne=draw(st.sampled_from([(4, 3, 2, T), (2, 6, 2, T), (24, 1, 1, T), (T, 1, 4, 6)])))
        elif kind == "window" and isinstance(ne[0], int) and ne[0] > 1:
            where = layout(a)
            a = g.add("view", a, ne=(ne[0] // 2, *ne[1:]), nb=where.nb, offset=where.nb[0])
            a = g.add("concat", a, a, dim=0)
            if a.type.ne != ne:
                a = g.add("reshape", g.add("silu", pool[0]), ne=ne)
        elif kind == "scale":
            a = g.add("scale", a, s=draw(st.sampled_from([1.0, 2.0])), b=draw(st.sampled_from([0.0, 1.0])))
        elif kind == "add":
            a = g.add(draw(st.sampled_from(["add", "sub", "mul"])), a, g.const(draw(st.sampled_from([0.0, 1.0]))))
        elif kind == "join":
            same = [b for b in pool if b.type == a.type]
            a = g.add("mul", a, draw(st.sampled_from(same)))
        elif kind in ("transpose", "cont", "neg"):
            a = g.add(kind, a)
        pool.append(a)
    g.outputs = {f"y{i}": g.add("neg", node) for i, node in enumerate(pool[-3:])}
    return g


@settings(max_examples=60, deadline=None)
@given(random_graphs(), st.sampled_from(["canonicalize", "cse", "canonicalize,cse,dce", "cse,canonicalize"]))
def test_cleaning_up_random_graphs_changes_no_value(built: Graph, pipeline: str) -> None:
    final = built.clone()
    PassManager.parse(pipeline).run(final)
    inputs = {"embd": np.random.default_rng(1).normal(size=(3, 24)).astype(np.float32)}
    want = interpret(built, {}, inputs, {}, {s: 3 for s in built.symbols})
    got = interpret(final, {}, inputs, {}, {s: 3 for s in built.symbols})
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    if pipeline == "canonicalize":
        (again,) = PassManager.parse(pipeline).run(final)
        assert not again.changed


@settings(max_examples=8, deadline=None)
@given(tiny_models())
def test_the_pipeline_is_idempotent(m: Tiny) -> None:
    g = tiny_model(m)
    manager = PassManager.parse(DEFAULT_PIPELINE)
    manager.run(g)
    once = print_graph(g)
    records = manager.run(g)
    assert [r.name for r in records if r.changed] == []
    assert print_graph(g) == once


@settings(max_examples=8, deadline=None)
@given(tiny_models())
def test_every_stage_prints_and_parses_back(m: Tiny) -> None:
    g = tiny_model(m)
    records = PassManager.parse(DEFAULT_PIPELINE).run(g, print_after=["all"])
    for record in records:
        assert print_graph(parse_graph(record.text)) == record.text, record.name


@pytest.mark.parametrize("m", [Tiny(), Tiny(window=3, cache="f32", head_norms=True), Tiny(kv_heads=1, heads=1, softcap="scaled")])
def test_windows_and_single_heads(m: Tiny) -> None:
    built = tiny_model(m)
    final = built.clone()
    PassManager.parse(DEFAULT_PIPELINE).run(final)
    assert_same_results(built, final, Weights(built, 7), [4, 5, 1, 1])


def test_the_window_matters_in_these_models() -> None:
    # so that the comparison above cannot pass with attention that ignores its mask
    narrow, wide = tiny_model(Tiny(window=2)), tiny_model(Tiny())
    weights = Weights(wide, 7)
    a, _ = evaluate(narrow, [6], weights=weights)
    b, _ = evaluate(wide, [6], weights=weights)
    assert np.abs(a[0] - b[0]).max() > 1e-2


def test_chunking_changes_no_bit_of_the_fused_reference() -> None:
    # the cells a token does not see contribute exactly nothing, whatever else lies in the cache
    g = tiny_model(Tiny(bias=True))
    weights = Weights(g, 3)
    PassManager.parse(DEFAULT_PIPELINE).run(g)
    _, whole = evaluate(g, [6], weights=weights)
    _, pieces = evaluate(g, [2, 3, 1], weights=weights)
    assert CELLS > 6
    # token ids are drawn per step, so only the first two tokens of both runs are the same
    same = np.random.default_rng(99).permutation(CELLS)[:2]
    for name in whole:
        assert np.array_equal(whole[name][same], pieces[name][same])


def test_a_decode_graph_has_no_stray_leaves_and_no_redundant_copies() -> None:
    # S74
    from ggufc.ir.layout import is_contiguous

    g = tiny_model(Tiny(bias=True, head_norms=True, factors=True))
    PassManager.parse(DEFAULT_PIPELINE).run(g)
    users = g.users()
    leaves = [n for n in g.nodes if n.is_leaf]
    declared = len(g.find("weight")) + len(g.find("cache")) + len(g.inputs())
    assert len(leaves) == declared
    assert all(users[leaf] for leaf in leaves)
    assert len({(n.op.name, n.name, n.attrs.get("tensor"), n.attrs.get("derived")) for n in leaves}) == len(leaves)
    assert [n for n in g.find("cont") if is_contiguous(n.operands[0])] == []
