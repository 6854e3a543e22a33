"""Operators of sparse attention: lists of chosen cells, masks made from them, the indexer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import attention_sparse, convolution, hadamard, indexer, lists, sums
from ggufc.codegen.kernels.attention_cells import STEP
from ggufc.codegen.kernels.attention_cpu import LANE, SPLIT, window_lanes
from ggufc.codegen.kernels.softmax import SumRows
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.lower_operands import Emit, contiguous_copy, launch, strided
from ggufc.codegen.schedule import NULL, Ref, Step, add_forms, fixed, form, integer, rows_grid
from ggufc.formats.abi import PARAMS
from ggufc.formats.artifact import Affine
from ggufc.formats.ggml_types import row_bytes
from ggufc.ir.dims import Dim
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


def _adjacent(low: Lowering, node: Node) -> tuple[Ref, Strided]:
    """As ``strided``, copied first where elements of a row are apart."""
    at, x = strided(low, node)
    if x.nb[0] == 1:
        return at, x
    return contiguous_copy(low, node), contiguous("i32" if node.dtype == "i32" else "f32", node.ne)


def _fill(low: Lowering, node: Node) -> None:
    spec = lists.Fill(float(node.attrs["value"]), contiguous(node.dtype, node.ne))
    launch(low, spec, (low.result(node),), (0,), node, moved=node.type.numel * 4)


def _blend(low: Lowering, node: Node) -> None:
    (at, a), (ids, idx) = strided(low, node.operands[0]), _adjacent(low, node.operands[1])
    spec = lists.Blend(a, idx, float(node.attrs["value"]), contiguous("f32", node.ne))
    launch(low, spec, (at, ids, low.result(node)), (2,), node, moved=node.type.numel * 8)


def _hadamard(low: Lowering, node: Node) -> None:
    at, a = _adjacent(low, node.operands[0])
    spec = hadamard.Hadamard(a, int(node.attrs["n"]), contiguous("f32", node.ne))
    launch(low, spec, (at, low.result(node)), (1,), node, moved=node.type.numel * 8)


def _sum_rows_ext(low: Lowering, node: Node) -> None:
    at, a = strided(low, node.operands[0])
    dim, out = int(node.attrs["dim"]), contiguous("f32", node.ne)
    spec: Any = SumRows(a, out) if dim == 0 else sums.SumRowsExt(a, dim, out)
    launch(low, spec, (at, low.result(node)), (1,), node, moved=node.operands[0].type.numel * 4)


def _mask_to_index(low: Lowering, node: Node) -> None:
    at, mask = _adjacent(low, node.operands[0])
    spec = lists.MaskToIndex(mask, int(node.attrs["k"]))
    launch(low, spec, (at, low.result(node)), (1,), node, moved=node.operands[0].type.numel * 4)


def _list_spans(low: Lowering, node: Node) -> None:
    entries = node.operands[0]
    if not layout(entries).contiguous:
        raise CodegenError(f"node {node.name!r}: lists that are a strided view have no kernel")
    sym, mult = rows_grid(node.ne[1:])
    spec = lists.ListSpans(fixed(entries.ne[0]))
    low.emit(Step(spec, (low.ref(entries)[0], low.result(node)), (1,), node.name, sym, 1, mult))


def _indexer_topk(low: Lowering, node: Node) -> None:
    """Scores of all entries and tokens, then the choice: a number per entry and token lies between the two launches."""
    q, weights, keys, cells, vis = node.operands
    d, heads, tokens = q.ne
    d, heads = fixed(d), fixed(heads)
    at, ldq = _heads(low, q, d, heads)
    factors, ldw = _rows(low, weights)
    where = layout(keys)
    if where.offset != 0 or not where.contiguous:
        raise CodegenError(f"node {node.name!r}: index keys that are a view of a cache's rows have no kernel")
    (entries,) = cells.ne
    if not isinstance(entries, Dim) or str(entries) not in PARAMS:
        raise CodegenError(f"node {node.name!r}: lists of {entries} entries have no kernel; their number must be a symbol alone")
    listed = str(entries)
    scores = low.schedule.new_value(add_forms(form(tokens * entries, 4), form(tokens, 4 * STEP)), f"{node.name} (scores)")
    lists_at, spans = low.ref(cells)[0], low.ref(vis)[0]
    spec = indexer.IndexerScores(d, heads, keys.dtype, listed)
    args = (at, integer(ldq), factors, integer(ldw), low.root_ref(where.root), lists_at, spans, scores)
    read = {listed: row_bytes(keys.dtype, d)}
    flops = form(tokens * entries, 2 * d * heads)
    low.emit(Step(spec, args, (7,), f"{node.name}.scores", listed, indexer.ENTRIES, 1, bytes=read, flops=flops))
    a = node.attrs
    choice = indexer.IndexerSelect(int(a["k"]), int(a["sinks"]), a["ties"], listed)
    sym, mult = rows_grid([tokens])
    # The choice overwrites the scores while it sorts them.
    low.emit(Step(choice, (scores, lists_at, spans, low.result(node)), (0, 3), node.name, sym, 1, mult, bytes=form(tokens * entries, 4)))


def _sparse_attn(low: Lowering, node: Node) -> None:
    """Two launches, as ``flash_attn``: splits of long lists for a few tokens, then everything else."""
    q, k, cells, vis, more, *others = node.operands
    d, heads, tokens = fixed(q.ne[0]), fixed(q.ne[1]), q.ne[2]
    at, ldq = _heads(low, q, d, heads)
    rows_at, rows = low.root_ref(_stored(node, k)), _stored(node, more)
    bound, most = _most_listed(vis), _most_listed(others[1]) if others else 0
    entries: int | str = fixed(more.ne[1]) if not others else "" if most else str(others[0].ne[0])
    if others and not most and entries not in PARAMS:
        raise CodegenError(f"node {node.name!r}: lists of {entries} entries have no kernel; their number must be a symbol alone")
    sinks = low.ref(others[2])[0] if len(others) > 2 else NULL
    spec = attention_sparse.SparseAttn(
        d, int(node.attrs["n_value"]), heads, k.dtype, more.dtype, float(node.attrs["scale"]), entries, most, sinks is not NULL
    )
    walk = spec.first
    sym, mult = rows_grid([tokens])
    if mult != 1:
        raise CodegenError(f"internal: node {node.name!r} has a fixed token count")
    seen = most or entries
    each = walk.partials_bytes
    size = add_forms({"R": -(-each // SPLIT)}, _per(seen, -(-each // SPLIT)), {"": 2 * each})
    partials = low.schedule.new_value(size, f"{node.name} (splits)")
    out = low.result(node)
    lists = low.ref(cells)[0], low.ref(vis)[0]
    second = (low.root_ref(rows), *((low.ref(o)[0] for o in others[:2]) if others else (NULL, NULL)))
    args = (at, integer(ldq), rows_at, rows_at, *lists, out, integer(walk.dv * heads), sinks, partials, *second)
    lanes = window_lanes(bound) + (-(-seen // SPLIT) if isinstance(seen, int) else 1) if bound else 0
    grid = ("", 1, walk.units * lanes) if lanes else ("R", LANE, walk.units)
    apart = attention_sparse.SparseAttnSplits(spec)
    low.emit(Step(apart, (*args[:6], NULL, *args[7:], integer(lanes)), (9,), f"{node.name}.splits", *grid))
    read = {"T" if bound else "R": (bound or 1) * row_bytes(k.dtype, d)}
    moved = add_forms(read, _per("T" if most else seen, (most or 1) * row_bytes(more.dtype, d)))
    low.emit(Step(spec, args, (6,), node.name, sym, walk.token_block, walk.units, bytes=moved))


def _stored(node: Node, rows: Node) -> Node:
    """What holds whole rows; CodegenError for rows that are a view of others."""
    where = layout(rows)
    if where.offset != 0 or not where.contiguous:
        raise CodegenError(f"node {node.name!r}: rows that are a part of others have no kernel")
    return where.root


def _most_listed(vis: Node) -> int:
    """The most rows a token sees, 0 where the lists tell: a window, or a choice."""
    if vis.op.name == "list_spans":
        return fixed(vis.operands[0].ne[0])
    return int(vis.attrs.get("window", 0)) if vis.op.name == "input" else 0


def _per(count: int | str, amount: int) -> Affine:
    return {"": count * amount} if isinstance(count, int) else {count: amount}


def _ssm_conv(low: Lowering, node: Node) -> None:
    (at, x), (taps, w) = (strided(low, o) for o in node.operands)
    spec = convolution.SsmConv(x, w, contiguous("f32", node.ne))
    launch(low, spec, (at, taps, low.result(node)), (2,), node)


def _heads(low: Lowering, q: Node, d: int, heads: int) -> tuple[Ref, int]:
    """Address of [d, heads, T] with adjacent heads, and the distance of tokens."""
    at, x = strided(low, q)
    if x.nb[0] == 1 and (heads == 1 or x.nb[1] == d) and isinstance(x.nb[2], int) and x.dtype == "f32":
        return at, x.nb[2]
    return contiguous_copy(low, q), d * heads


def _rows(low: Lowering, x: Node) -> tuple[Ref, int]:
    """Address of a matrix of adjacent f32 rows, and the distance of rows."""
    at, s = strided(low, x)
    if s.nb[0] == 1 and isinstance(s.nb[1], int) and s.dtype == "f32":
        return at, s.nb[1]
    return contiguous_copy(low, x), fixed(x.ne[0])


SPARSE_RULES: dict[str, Emit] = {
    "fill": _fill,
    "blend": _blend,
    "hadamard": _hadamard,
    "sum_rows_ext": _sum_rows_ext,
    "mask_to_index": _mask_to_index,
    "list_spans": _list_spans,
    "indexer_topk": _indexer_topk,
    "sparse_attn": _sparse_attn,
    "ssm_conv": _ssm_conv,
}
"""Operator name -> how it is emitted."""

SPARSE_OPERANDS = {"blend": 2, "indexer_topk": 5, "sparse_attn": 8, "ssm_conv": 2}
"""Operands of the rules that know more than one."""
