"""``fuse-hyper-connections``: gates of residual streams, reading from the streams and writing to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ggufc.ir import Node
from ggufc.ir.layout import layout
from ggufc.passes.base import RulePass
from ggufc.passes.canonicalize import LAYOUT_RULES
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule

READ, WRITE, MATRIX = range(3)
"""Parts of a site's mixture, in the order of its rows; the part's number is that of its scale."""


class _Site(NamedTuple):
    """Where gates come from: the projected streams [S*S+2S, T], three scales, and as many summands as there are rows."""

    mixture: Node
    scale: Node
    base: Node


@rule("sinkhorn-start", op("div", any_node("m"), any_node("sums")))
def do_start(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """Softmax of rows, columns divided by their sums; epsilon added to the softmax and to the sums, or to neither."""
    softmax, eps = _plus(m["m"])
    if softmax.op.name != "soft_max" or len(softmax.operands) != 1 or softmax.attrs["scale"] != 1.0:
        return None
    logits = softmax.operands[0]
    square = logits.type.rank in (2, 3) and isinstance(logits.type.ne[0], int) and logits.type.ne[0] == logits.type.ne[1]
    if not square or not _sums(m["sums"], m["m"], 1, eps):
        return None
    return rw.add("sinkhorn", logits, iterations=1, eps=eps)


@rule("sinkhorn-step", op("div", op("div", op("sinkhorn", bind="before"), any_node("row_sums"), bind="rows"), any_node("sums")))
def do_step(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """One more division of rows and columns, unless something else reads what lies between."""
    before, rows, eps = m["before"], m["rows"], m["before"].attrs["eps"]
    if not _sums(m["row_sums"], before, 0, eps) or not _sums(m["sums"], rows, 1, eps):
        return None
    between = {before: {rows, _plus(m["row_sums"])[0]}, rows: {node, _plus(m["sums"])[0]}}
    if any(rw.is_output(n) or set(rw.users(n)) != readers for n, readers in between.items()):
        return None
    return rw.add("sinkhorn", before.operands[0], iterations=before.attrs["iterations"] + 1, eps=eps)


@rule("hc-mix", op("sum_rows_ext", op("mul", any_node("x"), op("reshape", any_node("read")), once=True)))
def do_mix(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``sum_s read_s x_s``. Read gates that have a matrix beside them become part of ``hc_pre``, others stay what they are."""
    x, read = m["x"], m["read"]
    if node.attrs["dim"] != 1 or x.type.rank != 3 or x.dtype != "f32":
        return None
    e, s, n = x.type.ne
    if not isinstance(s, int) or read.type.ne != (s, n) or node.operands[0].operands[1].type.ne != (1, s, n):
        return None
    mixed = rw.add("hc_mix", x, _gates_of_read(rw, read, s) or read)
    return rw.add("reshape", mixed, ne=(e, 1, n))


@rule("hc-post", op("add", op("mul_mat", any_node("sources"), any_node("columns"), once=True), op("mul", once=True, bind="written")))
def do_post(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``x'_c = write_c y + sum_u matrix[u, c] x_u``, of all tokens or of wanted ones."""
    sources, columns = m["sources"], m["columns"]
    spread, factors = m["written"].operands
    if not (_crossed(sources) and _crossed(columns) and spread.op.name == "repeat" and factors.op.name == "reshape"):
        return None
    x, matrix, one, write = sources.operands[0], columns.operands[0], spread.operands[0], factors.operands[0]
    e, s, n = x.type.ne
    if node.type.ne != (e, s, n) or matrix.type.ne != (s, s, n) or one.type.ne != (e, 1, n) or write.type.ne != (s, n):
        return None
    if factors.type.ne != (1, s, n) or not isinstance(s, int):
        return None
    gates = _gates_of_columns(rw, write, matrix, s)
    if gates is None:
        return None
    y = one.operands[0] if one.op.name == "reshape" and one.operands[0].type.ne == (e, n) else rw.add("reshape", one, ne=(e, n))
    return rw.add("hc_post", x, y, gates)


def _plus(node: Node) -> tuple[Node, float]:
    """What a small number is added to, and the number."""
    if node.op.name == "scale" and node.attrs["s"] == 1.0 and node.attrs["b"] > 0:
        return node.operands[0], float(node.attrs["b"])
    return node, 0.0


def _sums(node: Node, of: Node, dim: int, eps: float) -> bool:
    """Is ``node`` the sum of ``of`` over ``dim``, plus ``eps``?"""
    total, plus = _plus(node)
    if plus != eps or total.operands[:1] != (of,):
        return False
    return total.op.name == "sum_rows" if dim == 0 else total.op.name == "sum_rows_ext" and total.attrs["dim"] == dim


def _crossed(node: Node) -> bool:
    """A permutation that exchanges the first two dimensions of three."""
    return node.op.name == "permute" and node.attrs["axes"][:3] == (1, 0, 2) and node.operands[0].type.rank == 3


def _site(logits: Node, part: int, streams: int) -> _Site | None:
    """The site whose part ``part`` becomes ``logits``: ``scale_part * rows of the mixture + as many of base``."""
    width = streams * streams + 2 * streams
    offset, n = part * streams, streams * streams if part == MATRIX else streams
    if logits.op.name != "add" or logits.operands[0].op.name != "mul":
        return None
    (rows, factor), summand = logits.operands[0].operands, logits.operands[1]
    m, scale, base = layout(rows), layout(factor), layout(summand)
    tokens = rows.type.ne4[1]
    if m.root.type.ne != (width, tokens) or m.offset != offset or m.ne != (n, tokens) or m.nb[:2] != (1, width):
        return None
    if scale.root.type.ne != (3,) or scale.offset != part or scale.ne != (1,):
        return None
    if base.root.type.ne != (width,) or base.offset != offset or base.ne != (n,) or base.nb[0] != 1:
        return None
    return _Site(m.root, scale.root, base.root)


def _matrix_site(node: Node, streams: int) -> _Site | None:
    """The site of a ``sinkhorn``."""
    square = node.operands[0]
    return _site(square.operands[0], MATRIX, streams) if square.op.name == "reshape" else None


def _gates(rw: Rewriter, site: _Site, streams: int, matrix: Node) -> Node:
    """The site's ``hc_pre``, one for all that read its gates."""
    iterations, eps = matrix.attrs["iterations"], matrix.attrs["eps"]
    for user in rw.users(site.mixture):
        if user.op.name == "hc_pre" and user.operands == tuple(site) and (user.attrs["iterations"], user.attrs["eps"]) == (iterations, eps):
            return user
    name = site.mixture.name.removesuffix(".mixture") + ".gates"
    return rw.add("hc_pre", *site, name=name, streams=streams, iterations=iterations, eps=eps)


def _gates_of_read(rw: Rewriter, read: Node, streams: int) -> Node | None:
    """``hc_pre`` of the site that ``read`` belongs to; None where it has no matrix, or another epsilon."""
    sigmoid, eps = _plus(read)
    site = _site(sigmoid.operands[0], READ, streams) if sigmoid.op.name == "sigmoid" else None
    if site is None:
        return None
    for view in rw.users(site.mixture):
        for matrix in _sinkhorns(rw, view):
            if _matrix_site(matrix, streams) == site and matrix.attrs["eps"] == eps:
                return _gates(rw, site, streams, matrix)
    return None


def _sinkhorns(rw: Rewriter, rows: Node) -> list[Node]:
    """The matrices made of ``rows``: scaled, shifted, squared."""
    found = [rows]
    for name in ("mul", "add", "reshape", "sinkhorn"):
        found = [user for node in found for user in rw.users(node) if user.op.name == name]
    return found


def _gates_of_columns(rw: Rewriter, write: Node, matrix: Node, streams: int) -> Node | None:
    """``hc_pre`` of write gates and matrix, or its columns of wanted tokens where both are such columns."""
    rows = None
    if write.op.name == "get_rows" and matrix.op.name == "reshape" and matrix.operands[0].op.name == "get_rows":
        (write, rows), (flat, others) = write.operands, matrix.operands[0].operands
        if rows is not others or flat.op.name != "reshape" or flat.operands[0].type.rank != 3:
            return None
        matrix = flat.operands[0]
    if matrix.op.name != "sinkhorn" or write.op.name != "scale" or (write.attrs["s"], write.attrs["b"]) != (2.0, 0.0):
        return None
    sigmoid = write.operands[0]
    site = _site(sigmoid.operands[0], WRITE, streams) if sigmoid.op.name == "sigmoid" else None
    if site is None or _matrix_site(matrix, streams) != site:
        return None
    gates = _gates(rw, site, streams, matrix)
    return gates if rows is None else rw.add("get_rows", gates, rows, name=f"{gates.name}.rows")


@dataclass(frozen=True)
class FuseHyperConnections(RulePass):
    """Sinkhorn's iterations -> ``sinkhorn``; a site's three kinds of gates -> ``hc_pre``, with ``sinkhorn`` inside; reading the streams ->
    ``hc_mix``, writing them -> ``hc_post``.

    Precondition: a valid graph, canonicalised, after ``fuse-sum-rows-ext``. Postcondition: of every site whose gates only its sublayer
    reads, one ``hc_pre``, ``hc_mix`` and ``hc_post`` are left; the merge after the last layer, a read gate alone, is an ``hc_mix``.
    Sums are rounded once instead of after each step.
    """

    name: ClassVar[str] = "fuse-hyper-connections"
    rules: ClassVar[tuple[Rule, ...]] = (do_start, do_step, do_mix, do_post, *LAYOUT_RULES)
