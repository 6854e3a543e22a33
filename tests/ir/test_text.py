"""The printed form: round trips on random graphs, a golden text, and parse errors that show where."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.ir import Graph, IRError, parse_graph, print_graph, structural_equal
from ggufc.ir.equality import difference
from ir_cases import SYMBOLS, T, fused_attention, graphs, layer_graph, tt


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_round_trip_of_random_graphs(g):
    text = print_graph(g)
    back = parse_graph(text)
    assert difference(g, back) == ""
    assert print_graph(back) == text


def test_a_layer_prints_as_expected(golden_text):
    g = layer_graph("q4_0")
    g.outputs["fused"] = fused_attention(g, softcap=50.0)
    merged = g.derived["blk.0.attn_kv.weight"] = Graph("blk.0.attn_kv.weight")
    parts = [merged.weight(f"blk.0.attn_{p}.weight", tt("q4_0", 32, 16)) for p in "kv"]
    merged.outputs["value"] = merged.add("concat", *parts, dim=1)
    g.weight("", tt("q4_0", 32, 32), derived="blk.0.attn_kv.weight")
    g.analysis["memory-plan"] = {"slots": [{"bytes": {"T": 128}, "holders": ["blk.0.attn_norm"]}], "peak": 0.5}
    golden_text(print_graph(g), "layer.ggir")
    assert structural_equal(parse_graph(print_graph(g)), g)


def test_names_and_locations_survive():
    g = Graph("g", symbols=("T",))
    x = g.input("x", "embd", tt("f32", 4, T), loc="models/llama.py:12")
    g.outputs["o"] = g.add("silu", x, name='a "quoted" # name\n%0', loc="here")
    node = parse_graph(print_graph(g)).outputs["o"]
    assert (node.name, node.loc, node.operands[0].loc) == (g.outputs["o"].name, "here", "models/llama.py:12")


def test_floats_keep_their_bits():
    g = Graph("g")
    w = g.weight("w", tt("f32", 4))
    for s in (0.1, 1 / 3, 5e-324, -0.0, 1e300, float("inf")):
        g.add("scale", w, s=s)
    back = parse_graph(print_graph(g))
    assert [repr(n.attrs["s"]) for n in back.find("scale")] == [repr(n.attrs["s"]) for n in g.find("scale")]


def test_comments_free_layout_and_defaults_are_accepted():
    g = parse_graph(
        """
        # one operator
        graph @g(T) {   # symbols follow the name
          %x = input "x" {kind = "embd"} : f32[4,T]
          %y =
            scale( %x ) { s = 2 } : f32 [ 4 , T ]
          output "y" = %y
        }"""
    )
    assert g.outputs["y"].attrs == {"s": 2.0, "b": 0.0}
    assert g.inputs()[0].attrs["window"] == 0


GOOD = """graph @g(T) arch "llama" {
  %0 = input "x" {kind = "embd", window = 0} : f32[4, T]
  %1 = weight "w" {derived = ""} : f32[4, 8]
  %2 = mul_mat(%1, %0) {name = "y"} : f32[8, T]
  %3 = view(%2) {ne = [4, T], nb = [1, 8], offset = 4} : f32[4, T]
  output "y" = %3
  analysis "a" = {"b": 1}
}
"""

BAD = {
    "undefined": ("mul_mat(%1, %0)", "mul_mat(%1, %9)"),
    "redefined": ("%1 = weight", "%0 = weight"),
    "type": ("f32[8, T]", "f32[9, T]"),
    "shape": ("f32[4, 8]", "f32[5, 8]"),
    "operator": ("mul_mat(", "mulmat("),
    "attribute": ("window = 0", "widow = 0"),
    "choice": ('"embd"', '"pixels"'),
    "kind": ("offset = 4", "offset = 4.5"),
    "dim": ("ne = [4, T]", "ne = [4, 2T]"),
    "twice": ("window = 0", 'kind = "embd"'),
    "missing attribute": ("ne = [4, T], ", ""),
    "string": ('name = "y"', "name = y"),
    "unclosed": ("}\n}", "}"),
    "trailing": ("}\n}\n", "}\n}\nx"),
    "json": ('{"b": 1}', '{"b": 01}'),
    "section": ('output "y"', 'outputs "y"'),
    "header": ("graph @g", "graph g"),
    "dtype": ("} : f32[4, 8]", "} : F32[4, 8]"),
    "operand count": ("mul_mat(%1, %0)", "mul_mat(%1)"),
}


DAMAGED = [GOOD, print_graph(layer_graph())]


def test_parse_errors_point_at_the_place(golden_text):
    parse_graph(GOOD)
    report = []
    for label, (old, new) in BAD.items():
        assert GOOD.count(old) >= 1, label
        with pytest.raises(IRError) as caught:
            parse_graph(GOOD.replace(old, new, 1))
        assert caught.value.line and caught.value.column, label
        report.append(f"--- {label}\n{caught.value}\n")
    golden_text("".join(report), "parse_errors.txt")


def test_undeclared_symbols_are_found_when_text_is_read():
    with pytest.raises(IRError, match="Symbol T is not declared"):
        parse_graph(GOOD.replace("@g(T)", "@g()"))
    assert len(parse_graph(GOOD.replace("@g(T)", "@g()"), check=False).nodes) == 4


@pytest.mark.parametrize("cut", range(0, len(GOOD) - 3, 7))
def test_truncated_text_is_refused(cut):
    with pytest.raises(IRError):
        parse_graph(GOOD[:cut])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_text_is_refused_in_words_or_read(data):
    """No input makes the reader fail in any other way than with an ``IRError``."""
    text = data.draw(st.sampled_from(DAMAGED))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        piece = data.draw(
            st.sampled_from(["", "{", "}", "[", '"', "%0", "-", "9" * 5000, "T", "derived", " ", "\n", "#", "(", "\\u", "é", "0"])
        )
        text = text[:at] + piece + text[at + data.draw(st.integers(0, 5)) :]
    try:
        g = parse_graph(text)
    except IRError:
        return
    assert structural_equal(parse_graph(print_graph(g)), g)


def test_nesting_without_end_is_refused():
    with pytest.raises(IRError, match="stands inside another derived weight"):
        parse_graph("graph @g() {" + 'derived "a" {' * 5000)
    with pytest.raises(IRError, match=r"cannot be read|is not JSON"):
        parse_graph('graph @g() { analysis "a" = ' + "[" * 100000)


def test_difference_names_what_differs():
    a, b = layer_graph(), layer_graph()
    assert structural_equal(a, b)
    assert difference(a, a.clone()) == ""
    b.find("rms_norm")[0].attrs["eps"] = 2e-5
    assert difference(a, b).startswith("node 7, attributes")
    c = layer_graph()
    c.symbols = SYMBOLS[::-1]
    assert difference(a, c).startswith("symbols")
