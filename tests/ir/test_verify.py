"""The verifier: each rule with a graph that keeps it and one that breaks it."""

from __future__ import annotations

import pytest

from ggufc.ir import Graph, IRError, TensorType, parse_graph, print_graph, verify
from ir_cases import SYMBOLS, C, T, fused_attention, inputs, layer_graph, tt


def refused(g: Graph) -> str:
    with pytest.raises(IRError) as caught:
        verify(g)
    return str(caught.value)


def cache_graph() -> tuple[Graph, dict]:
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    cache = g.cache("blk.0.k", tt("f16", 32, C))
    first = g.add("set_rows", cache, i["embd"], i["kv_slots"], name="first")
    return g, {"cache": cache, "first": first, **i}


def test_a_built_layer_is_valid():
    g = layer_graph()
    g.outputs["fused"] = fused_attention(g)
    verify(g)


def test_operands_come_before_their_users():
    g = layer_graph()
    g.nodes.append(g.nodes.pop(8))
    assert "which stands behind it; operands must be defined before their users" in refused(g)


def test_operands_belong_to_the_graph():
    g = layer_graph()
    del g.nodes[8]
    assert "which is not part of the graph" in refused(g)


def test_a_node_is_listed_once():
    g = layer_graph()
    g.nodes.append(g.nodes[0])
    assert "The node is listed twice" in refused(g)


def test_types_are_inferred_again():
    g = layer_graph()
    node = g.find("mul_mat")[0]
    node.type = TensorType("f32", (33, T))
    message = refused(g)
    assert "the type is stated as f32[33, T] but its operands give f32[32, T]" in message
    assert node.type.ne[0] == 33, "the verifier must not repair what it finds"


def test_attributes_are_canonical():
    g = layer_graph()
    g.find("rms_norm")[0].attrs["eps"] = 1
    assert "not in canonical form" in refused(g)
    g.find("rms_norm")[0].attrs["epsilon"] = 1.0
    assert "unknown attribute 'epsilon'" in refused(g)
    g = layer_graph()
    g.find("view")[0].attrs["ne"] = list(g.find("view")[0].attrs["ne"])
    assert "not in canonical form" in refused(g)


def test_dtypes_exist_and_rows_are_whole_blocks():
    g = Graph("g")
    g.weight("w", tt("q4_0", 33))
    assert "q4_0[33]: rows of q4_0 must be multiples of 32" in refused(g)
    g = Graph("g")
    g.weight("w", tt("q77", 32))
    assert "Dtype 'q77' is unknown" in refused(g)


def test_symbols_are_declared():
    g = layer_graph()
    g.symbols = ("T", "O", "C", "R")
    assert "Symbol KV is not declared by graph 'layer'(T, O, C, R)" in refused(g)
    g.symbols = (*SYMBOLS, "T")
    assert "declares symbol T twice" in refused(g)


def test_inputs_and_caches_have_one_name_each():
    g = Graph("g", symbols=SYMBOLS)
    g.input("x", "tokens", tt("i32", T))
    g.input("x", "positions", tt("i32", T))
    assert "A second input is called 'x'" in refused(g)
    g = Graph("g", symbols=SYMBOLS)
    g.cache("k", tt("f16", 4, C))
    g.cache("k", tt("f16", 4, C))
    assert "A second cache is called 'k'" in refused(g)


def test_a_weight_has_one_type():
    g = Graph("g")
    g.weight("w", tt("f32", 4))
    g.weight("w", tt("f32", 4))
    verify(g)
    g.weight("w", tt("f32", 5))
    assert "Weight 'w' is f32[5] here but f32[4] before" in refused(g)


def test_reads_of_a_version_stand_before_the_write_that_supersedes_it(golden_text):
    g, n = cache_graph()
    g.add("get_rows", n["first"], n["out_ids"], name="early")
    second = g.add("set_rows", n["first"], n["embd"], n["kv_slots"], name="second")
    g.add("get_rows", second, n["out_ids"], name="current")
    verify(g)
    view = g.add("view", n["first"], ne=(32, T), nb=(1, 32))
    verify(g)  # a view alone reads nothing
    g.add("scale", view, s=1.0, name="late")
    message = refused(g)
    assert "scale reads a version of cache 'blk.0.k' that set_rows 'second' has already superseded" in message
    golden_text(f"{message}\n", "stale_read.txt")


def test_versions_form_a_chain():
    g, n = cache_graph()
    g.add("set_rows", n["cache"], n["embd"], n["kv_slots"], name="fork")
    assert "set_rows writes a version of cache 'blk.0.k' that was superseded before" in refused(g)


def test_cpy_supersedes_the_version_its_view_looks_at():
    g, n = cache_graph()
    dst = g.add("view", n["first"], ne=(32, T), nb=(1, 32))
    new = g.add("cpy", n["embd"], dst, name="store")
    verify(g)
    assert new.type == n["cache"].type
    g.add("get_rows", n["first"], n["out_ids"])
    assert "that cpy 'store' has already superseded" in refused(g)


def test_outputs_exist_and_name_current_versions():
    g, n = cache_graph()
    g.outputs["k"] = n["first"]
    verify(g)
    g.outputs["k"] = n["cache"]
    assert "Output 'k' names an old version of cache 'blk.0.k'" in refused(g)
    g.outputs["k"] = layer_graph().nodes[0]
    assert "Output 'k' is" in refused(g)


def derived_graph() -> Graph:
    g = Graph("g", symbols=SYMBOLS)
    g.weight("", tt("f32", 4, 2), derived="both")
    sub = g.derived["both"] = Graph("both")
    a, b = (sub.weight(n, tt("f32", 4)) for n in "ab")
    sub.outputs["value"] = sub.add("concat", a, b, dim=1)
    return g


def test_derived_weights_are_weight_only_graphs_with_one_output():
    verify(derived_graph())
    verify(parse_graph(print_graph(derived_graph())))
    g = derived_graph()
    del g.derived["both"]
    assert "Derived weight 'both' has no entry" in refused(g)
    g = derived_graph()
    g.derived["both"].outputs["extra"] = g.derived["both"].nodes[0]
    assert "exactly one output called value, not value, extra" in refused(g)
    g = derived_graph()
    g.derived["both"].outputs["value"] = g.derived["both"].nodes[0]
    assert "is f32[4, 2] here but its graph computes f32[4]" in refused(g)
    g = derived_graph()
    g.derived["both"].cache("k", tt("f16", 4, 8))
    assert "may be computed from weights only" in refused(g)
    g = derived_graph()
    g.derived["both"].symbols = ("T",)
    assert "cannot use symbols" in refused(g)
    g = derived_graph()
    g.derived["both"].derived["x"] = Graph("x")
    assert "contains derived weights of its own" in refused(g)


@pytest.mark.parametrize("data", [{1: "a"}, (1, 2), {"a": object()}, float("nan"), {"a": {1, 2}}])
def test_analyses_are_plain_data(data):
    g = Graph("g")
    g.analysis["a"] = {"list": [1, 2.5, None, True, "x"]}
    verify(g)
    g.analysis["a"] = data
    assert "analysis 'a'" in refused(g)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g.input("x", "tokens", tt("f32", T)), r"kind tokens must be i32 with 1 dimension\(s\), not f32\[T\]"),
        (lambda g: g.input("x", "visible", tt("i32", 2, T)), r"ne\[0\] must be 3, not 2"),
        (lambda g: g.input("x", "tokens", tt("i32", T), window=4), "window = 4 does not fit kind tokens"),
        (lambda g: g.input("", "tokens", tt("i32", T)), "the name is empty"),
        (lambda g: g.weight("w", tt("f32", T)), r"the shape of w must be fixed, not f32\[T\]"),
        (lambda g: g.weight("", tt("f32", 4)), "give the name of a tensor or of a derived weight"),
        (lambda g: g.cache("k", tt("f16", 4)), "must have two dimensions"),
        (lambda g: g.cache("", tt("f16", 4, C)), "the name is empty"),
    ],
)
def test_leaves_are_checked_when_made(make, message):
    with pytest.raises(IRError, match=message):
        make(Graph("g", symbols=SYMBOLS))
