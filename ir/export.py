"""Other forms of a graph: JSON, CSV, dot, SVG and a web page. ``export`` picks by name."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from ggufc.ir.dims import Dim, IntDim, evaluate
from ggufc.ir.drawing import to_dot, to_svg
from ggufc.ir.errors import IRError
from ggufc.ir.folding import fold, folded_text, printable
from ggufc.ir.graph import Graph, Node
from ggufc.ir.text import print_graph
from ggufc.ir.types import TensorType

FORMATS = ("text", "folded", "json", "dot", "svg", "csv", "html")
COLUMNS = ("id", "op", "name", "dtype", "shape", "bytes", "flops", "sources")
"""Columns of the CSV form. Views own no bytes; a write into a cache counts the rows it writes, not the cache again."""


def _own_bytes(n: Node) -> IntDim:
    if n.is_view:
        return 0
    if n.op.writes_cache:
        written = n.operands[1 if n.op.name == "set_rows" else 0]
        return TensorType(n.dtype, written.ne).nbytes
    return n.type.nbytes


def export(g: Graph, format: str, *, layer: int | None = None, env: Mapping[str, int] | None = None) -> str:
    """``g`` in one of ``FORMATS``. ``layer`` restricts the drawings to one layer; ``env`` replaces symbols in the CSV by numbers."""
    if format not in FORMATS:
        raise IRError(f"Format {format!r} is unknown; known are {', '.join(FORMATS)}.")
    if format == "text":
        return print_graph(g)
    if format == "folded":
        return folded_text(g)
    if format == "json":
        return to_json(g)
    if format == "csv":
        return to_csv(g, env)
    if format == "html":
        return to_html(g, layer=layer, env=env)
    picture = fold(g, layer)
    return to_dot(picture) if format == "dot" else to_svg(picture)


def to_json(g: Graph) -> str:
    """Nodes with operands as indices; dimensions are numbers or text such as ``2*T+1``."""
    return json.dumps(_graph_data(g), indent=1, ensure_ascii=False) + "\n"


def _graph_data(g: Graph) -> dict[str, Any]:
    at = {n: i for i, n in enumerate(g.nodes)}
    nodes = [
        {
            "id": at[n],
            "op": n.op.name,
            "name": n.name,
            "operands": [at[o] for o in n.operands],
            "attrs": {key: _plain(v) for key, v in n.attrs.items()},
            "type": _type_data(n.type),
            "view": n.is_view,
            "loc": n.loc,
        }
        for n in g.nodes
    ]
    return {
        "name": g.name,
        "arch": g.arch,
        "symbols": list(g.symbols),
        "nodes": nodes,
        "outputs": {key: at[n] for key, n in g.outputs.items()},
        "derived": {key: _graph_data(sub) for key, sub in g.derived.items()},
        "analysis": g.analysis,
    }


def _plain(v: Any) -> Any:
    if isinstance(v, (tuple, list)):
        return [_plain(x) for x in v]
    # JSON has no infinity; its text form is unambiguous beside numbers.
    return str(v) if isinstance(v, Dim) or (isinstance(v, float) and abs(v) == float("inf")) else v


def _type_data(t: TensorType) -> dict[str, Any]:
    return {"dtype": t.dtype, "ne": _plain(t.ne)}


def table(g: Graph, env: Mapping[str, int] | None = None) -> list[dict[str, str]]:
    """One row per node with the columns ``COLUMNS``; without ``env`` sizes are formulas over the symbols."""

    def number(d: IntDim) -> str:
        return str(d if env is None else evaluate(d, env))

    at = {n: i for i, n in enumerate(g.nodes)}
    return [
        {
            "id": str(at[n]),
            "op": n.op.name,
            "name": printable(n.name),
            "dtype": n.type.dtype,
            "shape": "x".join(number(d) for d in n.type.ne),
            "bytes": number(_own_bytes(n)),
            "flops": number(n.op.flops(n)),
            "sources": " ".join(str(at[o]) for o in n.operands),
        }
        for n in g.nodes
    ]


def to_csv(g: Graph, env: Mapping[str, int] | None = None) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table(g, env))
    return out.getvalue()


_STYLE = (
    "body{font-family:sans-serif;margin:1.5em}table{border-collapse:collapse;font-size:13px}"
    "td,th{border:1px solid #ccc;padding:2px 6px;text-align:left}td{font-family:monospace}"
    ".pic{overflow:auto;border:1px solid #ccc;max-height:85vh}pre{overflow:auto;background:#f7f7f7;padding:1em}"
)
_FILTER = (
    "const f=document.getElementById('filter');f.addEventListener('input',()=>{for(const r of document.querySelectorAll('#nodes tbody tr'))"
    "r.hidden=!r.textContent.toLowerCase().includes(f.value.toLowerCase())});"
)


def to_html(g: Graph, *, layer: int | None = None, env: Mapping[str, int] | None = None) -> str:
    """One page without external resources: summary, drawing, a table of nodes with a filter, and the text."""
    picture = fold(g, layer)
    weights = sum(t.nbytes for t in {n.name: n.type for n in g.find("weight")}.values() if isinstance(t.nbytes, int))
    counts = ", ".join(f"{op} {k}" for op, k in sorted(Counter(n.op.name for n in g.nodes).items(), key=lambda c: (-c[1], c[0])))
    rows = table(g, env)
    head = "".join(f"<th>{c}</th>" for c in COLUMNS)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(r[c])}</td>" for c in COLUMNS) + "</tr>" for r in rows)
    title = escape(picture.title)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>
<body>
<h1>{title}</h1>
<p>{len(g.nodes)} nodes, {weights} bytes of weights, symbols {escape(", ".join(g.symbols)) or "none"}.</p>
<p>{escape(counts)}</p>
<h2>Drawing</h2>
<div class="pic">{to_svg(picture)}</div>
<h2>Nodes</h2>
<p><input id="filter" placeholder="filter" aria-label="filter nodes"></p>
<table id="nodes"><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
<h2>Text</h2>
<pre>{escape(print_graph(g))}</pre>
<script>{_FILTER}</script>
</body></html>
"""
