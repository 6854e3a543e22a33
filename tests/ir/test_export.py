"""Other forms of a graph."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings

from ggufc.ir import Graph, IRError, TensorType, print_graph
from ggufc.ir.dims import Sym
from ggufc.ir.export import COLUMNS, FORMATS, export
from ggufc.ir.folding import fold
from ir_cases import T, graphs, layer_graph, tt


def stack(kinds: str) -> Graph:
    """One small feed-forward per letter; equal letters make equal layers."""
    g = Graph("stack", "llama", ("T",))
    x = g.input("embd", "embd", tt("f32", 32, T))
    for i, kind in enumerate(kinds):
        h = g.add("rms_norm", x, eps=1e-5, name=f"blk.{i}.norm")
        h = g.add("mul_mat", g.weight(f"blk.{i}.ffn.weight", tt("q4_0", 32, 32)), h, name=f"blk.{i}.ffn")
        h = g.add("gelu" if kind == "g" else "silu", h)
        x = g.add("add", x, h, name=f"blk.{i}.residual")
    g.outputs["logits"] = g.add("mul_mat", g.weight("output.weight", tt("q8_0", 32, 64)), x, name="logits")
    return g


def folds(kinds: str) -> list[tuple[str, ...]]:
    return [b.lines[:2] for b in fold(stack(kinds)).boxes.values() if b.kind == "fold"]


def test_equal_layers_are_folded():
    assert folds("sss") == [("x2", "blk.1 .. blk.2")]
    assert folds("s" * 30) == [("x29", "blk.1 .. blk.29")]
    assert folds("s") == []


def test_layers_of_two_kinds_are_each_shown_once():
    assert folds("ssgssg") == [("x1", "blk.1"), ("x2", "blk.3 .. blk.4"), ("x1", "blk.5")]
    shown = {b.lines[0] for b in fold(stack("ssgssg")).boxes.values()}
    assert {"rms_norm  blk.0.norm", "rms_norm  blk.2.norm"} <= shown
    assert "rms_norm  blk.1.norm" not in shown


def test_one_layer_with_what_feeds_it():
    picture = fold(stack("sgs"), 1)
    heads = [b.lines[0] for b in picture.boxes.values()]
    assert heads == ["add  blk.0.residual", "rms_norm  blk.1.norm", "mul_mat  blk.1.ffn", "gelu", "add  blk.1.residual"]
    assert list(picture.boxes.values())[2].lines[1] == "blk.1.ffn.weight: q4_0[32, 32]"
    with pytest.raises(IRError, match="has no layer 3; it has 0 to 2"):
        fold(stack("sgs"), 3)
    with pytest.raises(IRError, match="it has no named layers"):
        fold(Graph("g"), 0)


def test_drawings_as_expected(golden_text):
    golden_text(export(stack("sssg"), "dot"), "stack.dot")
    golden_text(export(stack("sssg"), "svg", layer=3), "stack_layer3.svg")


def test_svg_boxes_stand_below_what_they_use_and_do_not_overlap():
    root = ET.fromstring(export(layer_graph(), "svg"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in root.iter(f"{space}rect")]
    assert len(boxes) == len(fold(layer_graph()).boxes)
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and x + w <= float(root.get("width")) and y + h <= float(root.get("height"))
        for u, v, ww, hh in boxes[:i]:
            assert x + w <= u or u + ww <= x or y + h <= v or v + hh <= y
    arrows = [p.get("d").replace("M", "").replace("C", "").split() for p in root.iter(f"{space}path") if p.get("marker-end")]
    assert arrows and all(float(d[1]) < float(d[-1]) for d in arrows)


def test_json_holds_everything():
    g = layer_graph()
    g.analysis["a"] = {"x": [1]}
    data = json.loads(export(g, "json"))
    assert [n["op"] for n in data["nodes"]] == [n.op.name for n in g.nodes]
    assert data["nodes"][-1]["type"] == {"dtype": "f32", "ne": [32, "O"]}
    assert data["outputs"] == {"out": len(g.nodes) - 1, "plain": len(g.nodes) - 2}
    assert data["symbols"] == list(g.symbols) and data["analysis"] == {"a": {"x": [1]}}


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_lists_sizes_and_work():
    g = layer_graph("q4_0")
    by_name = {r["name"]: r for r in rows(export(g, "csv"))}
    assert tuple(by_name["blk.0.attn_q"]) == COLUMNS
    q = by_name["blk.0.attn_q"]
    assert [q[c] for c in ("op", "dtype", "shape", "bytes", "flops")] == ["mul_mat", "f32", "32xT", "128*T", "2048*T"]
    assert q["sources"].split() == [by_name["blk.0.attn_q.weight"]["id"], by_name["blk.0.attn_norm"]["id"]]
    assert by_name["blk.0.attn_q.weight"]["bytes"] == str(32 * 18)
    view = next(r for r in rows(export(g, "csv")) if r["op"] == "view")
    assert (view["bytes"], view["flops"]) == ("0", "0")
    known = rows(export(g, "csv", env={"T": 2, "O": 1, "C": 8, "KV": 8, "R": 2}))
    assert {r["name"]: r for r in known}["blk.0.attn_q"]["flops"] == "4096"
    assert all(r["bytes"].isdigit() and r["flops"].isdigit() for r in known)


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.external: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.external += [v for k, v in attrs if k in ("src", "href") and v]
        if tag == "link":
            self.external.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_alone_and_escapes_names():
    g = stack("ss")
    g.nodes[1].name = "<script>alert(1)</script>"
    page = export(g, "html")
    links = Links()
    links.feed(page)
    assert links.external == []
    assert "<script>alert" not in page
    assert print_graph(g).strip() in "".join(links.text)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_every_format_takes_every_graph(g):
    for format in FORMATS:
        assert export(g, format)
    ET.fromstring(export(g, "svg"))
    json.loads(export(g, "json"))
    assert len(rows(export(g, "csv"))) == len(g.nodes)


def test_unknown_formats_are_refused():
    with pytest.raises(IRError, match="Format 'pdf' is unknown; known are text, folded, json, dot, svg, csv, html"):
        export(Graph("g"), "pdf")


def test_csv_counts_what_a_cache_write_writes() -> None:
    g = Graph("g", "t", ("T", "C"))
    rows = g.input("x", "embd", TensorType("f32", (8, Sym("T"))))
    slots = g.input("s", "kv_slots", TensorType("i32", (Sym("T"),)))
    g.add("set_rows", g.cache("k", TensorType("f16", (8, Sym("C")))), rows, slots, name="store")
    lines = {row["op"]: row["bytes"] for row in csv.DictReader(io.StringIO(export(g, "csv")))}
    assert (lines["cache"], lines["set_rows"]) == ("16*C", "16*T")


def test_folded_text_shows_each_kind_of_layer_once() -> None:
    from ggufc.ir import parse_graph
    from ggufc.ir.folding import folded_text, repeated_layers

    g = parse_graph(
        'graph @g(T) {\n  %0 = input "x" {kind = "embd", window = 0} : f32[8, T]\n'
        + "".join(
            f'  %{i + 1} = {op}(%{i}) {{name = "blk.{i}.act"}} : f32[8, T]\n'
            for i, op in enumerate(["silu", "silu", "silu", "gelu", "silu", "gelu"])
        )
        + '  output "y" = %6\n}\n'
    )
    assert repeated_layers(g) == {1: 0, 2: 0, 4: 0, 5: 3}
    assert folded_text(g).splitlines() == [
        "graph @g(T) {",
        '  %0 = input "x" {kind = "embd", window = 0} : f32[8, T]',
        '  %1 = silu(%0) {name = "blk.0.act"} : f32[8, T]',
        "  # blk.1 .. blk.2: as blk.0, 1 nodes each",
        '  %4 = gelu(%3) {name = "blk.3.act"} : f32[8, T]',
        "  # blk.4: as blk.0, 1 nodes each",
        "  # blk.5: as blk.3, 1 nodes each",
        '  output "y" = %6',
        "}",
    ]
