"""Building and editing graphs."""

from __future__ import annotations

import pytest

from ggufc.ir import OPS, Graph, IRError, print_graph, structural_equal, verify
from ir_cases import SYMBOLS, T, fused_attention, layer_graph, tt


def chain() -> Graph:
    g = Graph("g", symbols=("T",))
    x = g.input("x", "embd", tt("f32", 4, T))
    a = g.add("silu", x, name="a")
    b = g.add("neg", a, name="b")
    g.outputs["b"] = b
    return g


def names(g: Graph) -> list[str]:
    return [n.name for n in g.nodes]


def test_cursor_inserts_in_order_before_and_after():
    g = chain()
    x, a, b = g.nodes
    with g.insert_before(b):
        g.add("exp", a, name="e1")
        with g.insert_before(a):
            g.add("exp", x, name="early")
        g.add("exp", a, name="e2")
    with g.insert_after(a):
        g.add("exp", a, name="after")
    g.add("exp", b, name="end")
    assert names(g) == ["x", "early", "a", "after", "e1", "e2", "b", "end"]
    verify(g)


def test_replace_all_uses_spares_the_replacement_and_moves_outputs():
    g = chain()
    x, a, b = g.nodes
    with g.insert_after(b):
        c = g.add("scale", b, s=2.0, name="c")
    assert g.replace_all_uses(b, c) == 1
    assert g.outputs["b"] is c
    assert c.operands == (b,)
    with g.insert_after(a):
        d = g.add("relu", x)
    assert g.replace_all_uses(a, d) == 1
    assert b.operands == (d,)
    assert g.remove_dead() == 1
    assert a not in g.nodes
    verify(g)


def test_replacement_must_have_the_same_type():
    g = chain()
    with pytest.raises(IRError, match="the types differ"):
        g.replace_all_uses(g.nodes[1], g.weight("w", tt("f32", 4)))


def test_remove_refuses_nodes_in_use():
    g = chain()
    with pytest.raises(IRError, match="cannot be removed while this one uses it"):
        g.remove([g.nodes[1]])
    with pytest.raises(IRError, match="output 'b' names it"):
        g.remove([g.nodes[2]])


def test_cache_writes_are_never_dead():
    g = layer_graph()
    g.outputs.clear()
    g.remove_dead()
    assert [n.op.name for n in g.find(lambda n: n.op.writes_cache)] == ["set_rows", "set_rows"]
    assert not g.find("soft_max")
    verify(g)


def test_remove_dead_drops_derived_weights_nobody_uses():
    g = chain()
    sub = g.derived["d"] = Graph("d")
    sub.outputs["value"] = sub.weight("w", tt("f32", 4))
    g.weight("", tt("f32", 4), derived="d")
    verify(g)
    g.remove_dead()
    assert g.derived == {}


def test_users_lists_each_user_once():
    g = Graph("g")
    w = g.weight("w", tt("f32", 4))
    square = g.add("mul", w, w)
    other = g.add("neg", w)
    assert g.users() == {w: [square, other], square: [], other: []}


def test_clone_is_equal_and_independent():
    g = layer_graph()
    h = g.clone()
    assert structural_equal(g, h)
    assert not set(g.nodes) & set(h.nodes)
    h.find("rms_norm")[0].attrs["eps"] = 1.0
    h.add("neg", h.nodes[-1])
    assert not structural_equal(g, h)
    assert structural_equal(g, layer_graph())


def test_sort_restores_a_legal_order_and_keeps_a_legal_one():
    g = layer_graph()
    before = print_graph(g)
    g.sort()
    assert print_graph(g) == before
    g.nodes.reverse()
    g.sort()
    verify(g)
    assert len(g.nodes) == len(layer_graph().nodes)


def test_sort_puts_reads_of_a_version_before_its_successor():
    g = layer_graph()
    early = fused_attention(g)
    old = g.find("set_rows")[0]
    with g.insert_after(old):
        newer = g.add("set_rows", old, old.operands[1], old.operands[2])
    with pytest.raises(IRError, match="already superseded"):
        verify(g)
    g.sort()
    verify(g)
    assert g.index(early.operands[0]) < g.index(newer)


def test_sort_reports_cycles():
    g = chain()
    _, a, b = g.nodes
    a.operands = (b,)
    with pytest.raises(IRError, match="has a cycle"):
        g.sort()


def test_optional_operands_may_be_none_at_the_end():
    g = Graph("g", symbols=SYMBOLS)
    w = g.weight("w", tt("f32", 4, 2, 2))
    p = g.add("soft_max", w, None)
    assert p.operands == (w,)
    assert p.operand("mask") is None
    assert p.operand("a") is w
    with pytest.raises(IRError, match="has no operand 'b'"):
        p.operand("b")


def test_leaves_are_named_by_what_they_stand_for():
    g = Graph("g", symbols=SYMBOLS)
    assert g.input("tokens", "tokens", tt("i32", T)).name == "tokens"
    assert g.weight("blk.0.attn_q.weight", tt("f32", 4)).name == "blk.0.attn_q.weight"
    assert g.weight("", tt("f32", 4), derived="d").name == "d"
    assert g.cache("blk.0.k", tt("f16", 4, 8)).name == "blk.0.k"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g, w: g.add("frobnicate", w), "Operator 'frobnicate' is unknown"),
        (lambda g, w: g.add("silu"), r"0 operand\(s\) given; it takes \(a\)"),
        (lambda g, w: g.add("silu", w, w), r"2 operand\(s\) given"),
        (lambda g, w: g.add("silu", w, eps=1), "unknown attribute 'eps'; it has no attributes"),
        (lambda g, w: g.add("scale", w), "attribute 's' is missing"),
        (lambda g, w: g.add("scale", w, s="2"), "s = '2' must be of kind float"),
        (lambda g, w: g.add("scale", w, s=float("nan")), "is not a number"),
        (lambda g, w: g.add("top_k", w, k=True), "k = True must be of kind int"),
        (lambda g, w: g.add("glu", w, w, fn="tanh"), "must be one of silu, gelu"),
        (lambda g, w: g.add("weight", tensor="t"), "the result type must be given"),
        (lambda g, w: g.add("soft_max", None, w), "operand 0 is missing"),
        (lambda g, w: g.add("silu", g.add("top_k", w, k=1)), "operand a is i32"),
    ],
)
def test_mistakes_when_adding_are_explained(make, message):
    g = Graph("g")
    w = g.weight("w", tt("f32", 4, 2))
    with pytest.raises(IRError, match=message):
        make(g, w)


def test_errors_show_the_node_and_its_neighbours(golden_text):
    g = layer_graph()
    with pytest.raises(IRError) as caught, g.insert_before(g.nodes[12]):
        g.add("mul_mat", g.nodes[8], g.nodes[3], name="wrong")
    golden_text(f"{caught.value}\n", "add_error.txt")


def test_every_operator_documents_itself():
    for op in OPS.values():
        assert type(op).__doc__ and "Base of" not in type(op).__doc__, op.name
        for part in (*op.operands, *op.attrs):
            assert part.doc, f"{op.name}.{part.name}"
