"""Drawings of a folded graph: Graphviz dot, and an SVG laid out here so that no other program is needed."""

from __future__ import annotations

from html import escape

import networkx as nx

from ggufc.ir.folding import Picture, printable

COLOURS = {"op": "#dbe9f6", "view": "#f2f2f2", "leaf": "#e3f1df", "output": "#fdebd0", "fold": "#eadcf2"}
"""Fill of a box by its kind."""

_CHAR = 6.7
_LINE = 15
_PAD = 8
_GAP_X = 24
_GAP_Y = 40


def to_dot(picture: Picture) -> str:
    """Graphviz source."""

    def quoted(*lines: str) -> str:
        return '"' + "\\n".join(printable(s).replace("\\", "\\\\").replace('"', '\\"') for s in lines) + '"'

    out = [
        f"digraph {quoted(picture.title)} {{",
        "  node [shape=box, style=filled, fontname=monospace, fontsize=10];",
        "  edge [arrowsize=0.6];",
    ]
    for box in picture.boxes.values():
        style = ", peripheries=2" if box.kind == "fold" else ""
        out.append(f"  {quoted(box.key)} [label={quoted(*box.lines)}, fillcolor={quoted(COLOURS[box.kind])}{style}];")
    out += [f"  {quoted(a)} -> {quoted(b)};" for a, b in picture.arrows]
    return "\n".join([*out, "}", ""])


def to_svg(picture: Picture) -> str:
    """A standalone SVG: data flows from top to bottom, a box stands below everything it uses."""
    g = picture.digraph()
    rows = _rows(g)
    size = {key: (max(map(len, b.lines)) * _CHAR + 2 * _PAD, float(len(b.lines) * _LINE + 2 * _PAD)) for key, b in picture.boxes.items()}
    place, width, height = _place(rows, size)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="monospace" font-size="11">',
        f"<title>{escape(picture.title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
    ]
    for a, b in g.edges:
        (xa, ya), (xb, yb) = place[a], place[b]
        x1, y1 = xa + size[a][0] / 2, ya + size[a][1]
        x2, y2 = xb + size[b][0] / 2, yb
        bend = max(_GAP_Y / 2, (y2 - y1) / 3)
        path = f"M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
        out.append(f'<path d="{path}" fill="none" stroke="#777" marker-end="url(#tip)"/>')
    for key, box in picture.boxes.items():
        (x, y), (w, h) = place[key], size[key]
        dash = ' stroke-dasharray="5 3"' if box.kind == "fold" else ""
        out.append(
            f'<g><rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="4" fill="{COLOURS[box.kind]}" stroke="#444"{dash}/>'
        )
        out += [
            f'<text x="{x + w / 2:.0f}" y="{y + _PAD + _LINE * (i + 0.8):.0f}" text-anchor="middle">{escape(line)}</text>'
            for i, line in enumerate(box.lines)
        ]
        out.append("</g>")
    return "\n".join([*out, "</svg>", ""])


def _rows(g: nx.DiGraph) -> list[list[str]]:
    """Generations of the graph; leaves sink to just above their first user, and rows are ordered by where their sources stand."""
    depth = {key: i for i, row in enumerate(nx.topological_generations(g)) for key in row}
    for key in reversed(list(nx.topological_sort(g))):
        if g.in_degree(key) == 0 and g.out_degree(key):
            depth[key] = min(depth[user] for user in g.successors(key)) - 1
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for key in g:
        rows[depth[key]].append(key)
    at: dict[str, float] = {}
    for row in rows:
        sources = {key: [at[s] for s in g.predecessors(key) if s in at] for key in row}
        row.sort(key=lambda key: sum(sources[key]) / len(sources[key]) if sources[key] else 0.5)
        at.update({key: (i + 0.5) / len(row) for i, key in enumerate(row)})
    return rows


def _place(rows: list[list[str]], size: dict[str, tuple[float, float]]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Top left corners, and the size of the drawing; each row is centred."""
    widths = [sum(size[key][0] for key in row) + _GAP_X * (len(row) - 1) for row in rows]
    total = max(widths, default=0) + 2 * _GAP_X
    place: dict[str, tuple[float, float]] = {}
    y = float(_GAP_X)
    for row, width in zip(rows, widths):
        x = (total - width) / 2
        for key in row:
            place[key] = (x, y)
            x += size[key][0] + _GAP_X
        y += max((size[key][1] for key in row), default=0) + _GAP_Y
    return place, total, y
