"""Operators without a fusion of their own, one rule each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import elementwise, matmul, quantize, rope, rowwise, select, softmax, strided_matmul
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.lower_hyper import HYPER_OPERANDS, HYPER_RULES
from ggufc.codegen.lower_operands import Emit, contiguous_copy, item_bytes, launch, refuse_holes, rope_table, stored_blocks, strided
from ggufc.codegen.lower_pointwise import POINTWISE, pointwise, same_storage
from ggufc.codegen.lower_routing import ROUTING_OPERANDS, ROUTING_RULES
from ggufc.codegen.lower_sparse import SPARSE_OPERANDS, SPARSE_RULES
from ggufc.codegen.lower_stacked import stacked_product
from ggufc.codegen.schedule import NULL, Ref, Step, fixed, form, integer, rows_grid
from ggufc.codegen.weights import activation_mode, q8_record
from ggufc.formats.ggml_types import row_bytes
from ggufc.ir.dims import Dim, IntDim, product
from ggufc.ir.graph import Node
from ggufc.ir.layout import contiguous_nb, layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


def lower_generic(low: Lowering, node: Node) -> None:
    """Emit the kernel of ``node``; CodegenError naming the node if its operator has none."""
    rule = RULES.get(node.op.name)
    if rule is None:
        raise CodegenError(
            f"node {node.name!r}: there is no kernel for the operator {node.op.name}; the model cannot be compiled with this pipeline, but "
            "its graph can be dumped and evaluated by the reference interpreter (ggufc.ir.interpret)"
        )
    most = OPERANDS.get(node.op.name, 1)
    if len(node.operands) > most:
        raise CodegenError(f"node {node.name!r}: {node.op.name} with {len(node.operands)} operands has no kernel; there is one for {most}")
    rule(low, node)


def copy_to_output(low: Lowering, node: Node, name: str) -> None:
    """An output that is no fresh result (a view, or a value others need as well) is copied."""
    at, source = strided(low, node)
    out = Ref("output", name)
    dtype = "i32" if node.dtype == "i32" else "f32"
    launch(low, elementwise.Copy(source, contiguous(dtype, node.ne)), (at, out), (1,), node)


def _copy(low: Lowering, node: Node) -> None:
    at, source = strided(low, node.operands[0])
    spec = elementwise.Copy(source, contiguous(node.dtype, node.ne))
    launch(low, spec, (at, low.result(node)), (1,), node)


def _cpy(low: Lowering, node: Node) -> None:
    """A write into a cache at a fixed offset, or from row ``head`` on: then the argument moves by the fixup that ``cache-fixups`` found."""
    source, target = node.operands
    where = layout(target)
    cache, dtype = low.root_ref(where.root), where.root.dtype
    at, a = strided(low, source)
    if a.ne != target.type.ne4:
        raise CodegenError(f"node {node.name!r}: a copy of {source.type} into {target.type} has no kernel; shapes must be equal")
    offset, fixup = where.offset, None
    if isinstance(offset, Dim):
        slot = next((slot for slot in low.graph.analysis.get("cache-fixups", ()) if slot["node"] == node.name), None)
        if slot is None:
            raise CodegenError(f"node {node.name!r} writes at the moving offset {offset}, but has no fixup; add cache-fixups to the passes")
        if any(slot["offset"].values()):
            raise CodegenError(f"node {node.name!r}: a write that begins {slot['offset']} bytes after row head has no kernel")
        offset, fixup = 0, (1, slot["cache"], slot["step"])
    spec = elementwise.Copy(a, Strided(dtype, where.ne, where.nb))
    launch(low, spec, (at, cache.at(offset * item_bytes(where.root)) if offset else cache), (1,), node, fixup=fixup)


def _concat(low: Lowering, node: Node) -> None:
    dim = node.attrs["dim"]
    if node.type.quantised:
        _concat_blocks(low, node, dim)
        return
    nb = contiguous_nb(node.type.ne4)
    out = low.result(node)
    start: Any = 0
    for operand in node.operands:
        at, source = strided(low, operand)
        ne = operand.type.ne4
        target = Strided(node.dtype, ne, nb, 0 if isinstance(start, int) else start)
        where = out.at(item_bytes(node) * start) if isinstance(start, int) else out
        launch(low, elementwise.Copy(source, target), (at, where), (1,), node)
        start = start + nb[dim] * ne[dim]


def _concat_blocks(low: Lowering, node: Node, dim: int) -> None:
    """Blocks are appended as they lie in memory, two bytes at a time, so that nothing is rounded again. Rows are whole blocks, so that they
    follow each other along dimension 0, too.
    """
    parts = [stored_blocks(low, operand) for operand in node.operands]
    out, ne = low.result(node), list(parts[0][1])
    ne[dim] = parts[0][1][dim] + parts[1][1][dim]
    nb = contiguous_nb(tuple(ne))
    start: IntDim = 0
    for at, size in parts:
        moved = product(size) * 4
        target = Strided("f16", size, nb, 0 if isinstance(start, int) else start)
        where = out.at(2 * start) if isinstance(start, int) else out
        launch(low, elementwise.Copy(contiguous("f16", size), target), (at, where), (1,), node, moved=moved)
        start = start + nb[dim] * size[dim]


def _soft_max(low: Lowering, node: Node) -> None:
    refs, shapes = zip(*(strided(low, o) for o in node.operands))
    mask = shapes[1] if len(shapes) > 1 else None
    if mask is not None:
        # The mask repeats over the outer dimensions of a.
        mask = Strided(mask.dtype, mask.ne, tuple(0 if n == 1 else s for n, s in zip(mask.ne, mask.nb)), mask.offset)
    out = low.result(node)
    inplace = (1, 0) if same_storage(node, node.operands[0]) else None
    spec = softmax.SoftMax(shapes[0], contiguous("f32", node.ne), float(node.attrs["scale"]), mask, len(shapes) > 2)
    launch(low, spec, (refs[0], out, *refs[1:], *[NULL] * (3 - len(refs))), (1,), node, inplace)


def _two(kernel: Callable[..., Any]) -> Emit:
    """Operators of one operand with a contiguous result: ``kernel(a, out, node)``."""

    def emit(low: Lowering, node: Node) -> None:
        at, a = strided(low, node.operands[0])
        launch(low, kernel(a, contiguous(node.dtype, node.ne), node), (at, low.result(node)), (1,), node)

    return emit


def _get_rows(low: Lowering, node: Node) -> None:
    table, chosen = node.operands
    refuse_holes(node, chosen)
    if table.op.name == "weight" and table.dtype == "i32":
        low.weights.request(table, "plain", _index_limit(low, node, node))
    (at, a), (ids, idx) = (strided(low, o) for o in node.operands)
    spec = select.GetRowsPlain(a, idx, contiguous(node.dtype, node.ne))
    launch(low, spec, (at, ids, low.result(node)), (2,), node)


_CHOSEN_FROM = {"mul_mat_id": 2, "get_rows": 1, "expert_weights": 0}
"""Operators whose last operand holds indices -> the dimension of the first operand that these count."""


def _index_limit(low: Lowering, node: Node, table: Node) -> int:
    """What the integers ``node`` holds must stay below: the number of things that those who use it choose from."""
    limits = []
    for user in low.users[node]:
        if user.is_view:
            limits.append(_index_limit(low, user, table))
        elif user.op.name in _CHOSEN_FROM and user.operands[-1] is node:
            limits.append(fixed(user.operands[0].ne[_CHOSEN_FROM[user.op.name]]))
        else:
            limits.append(0)
    if not limits or min(limits) < 1:
        raise CodegenError(f"node {table.name!r}: a table of integers that are more than indices of experts or rows has no kernel")
    return min(limits)


def _kq_mask(low: Lowering, node: Node) -> None:
    if node.attrs["first"] != 0:
        raise CodegenError(f"node {node.name!r}: a mask that begins at cell {node.attrs['first']} has no kernel; there is one from cell 0")
    cells, vis = (low.ref(o)[0] for o in node.operands)
    sym, mult = rows_grid(node.ne[1:])
    low.emit(Step(select.KqMask(node.ne[0]), (cells, vis, low.result(node)), (2,), node.name, sym, 1, mult))


def _norm_rows(low: Lowering, node: Node) -> None:
    x = node.operands[0]
    where = layout(x)
    ne0 = fixed(where.ne[0])
    if not where.contiguous:
        at, inplace = contiguous_copy(low, x), True
    else:
        at, inplace = low.ref(x)[0], same_storage(node, x)
    out = low.result(node)
    sym, mult = rows_grid(node.ne[1:])
    if node.op.name == "norm":
        low.emit(Step(rowwise.Norm(ne0, float(node.attrs["eps"])), (at, integer(ne0), out, integer(ne0)), (2,), node.name, sym, 1, mult))
        return
    weighted = node.op.name == "rms_norm_mul"
    weight = Ref("weight", low.weights.request(node.operands[1], "plain").name) if weighted else NULL
    spec = rowwise.RmsNorm(ne0, float(node.attrs["eps"]), weighted, False)
    args = (at, integer(ne0), weight, NULL, integer(0), out, integer(ne0))
    low.emit(Step(spec, args, (5,), node.name, sym, 1, mult, inplace=(5, 0) if inplace else None))


def _rope(low: Lowering, node: Node) -> None:
    """``rope`` without the split into table and application: the table is a value of its own."""
    x, pos = node.operands[:2]
    factors = node.operands[2] if len(node.operands) > 2 else None
    table = low.schedule.new_value(form(pos.type.numel, 4 * node.attrs["n_dims"]), f"{node.name} (table)")
    rope_table(low, node, pos, factors, table)
    rotate(low, node, x, table)


def _rope_apply(low: Lowering, node: Node) -> None:
    rotate(low, node, node.operands[0], low.root_ref(node.operands[1]))


def rotate(low: Lowering, node: Node, x: Node, table: Ref) -> None:
    """Rotation of any strided [D, H, T]: made contiguous first where heads do not follow each other."""
    where = layout(x)
    d, heads = fixed(where.ne[0]), fixed(where.ne[1]) if len(where.ne) > 1 else 1
    if where.nb[0] == 1 and (heads == 1 or where.nb[1] == d) and len(where.nb) == 3 and isinstance(where.nb[2], int):
        at, ldx = low.ref(x)[0], where.nb[2]
    else:
        at, ldx = contiguous_copy(low, x), d * heads
    spec = rope.RopeApply(d, heads, int(node.attrs["n_dims"]), node.attrs["mode"])
    sym, mult = rows_grid([where.ne[2]])
    args = (at, integer(fixed(ldx)), table, NULL, low.result(node), integer(d * heads), NULL)
    low.emit(Step(spec, args, (4,), node.name, sym, 1, mult))


def _mul_mat(low: Lowering, node: Node) -> None:
    a, b = node.operands
    where = layout(a)
    whole = where.contiguous and where.offset == 0 and a.type.numel == where.root.type.numel and a.ne[0] == where.root.ne[0]
    if where.root.op.name == "weight" and a.type.quantised and whole:
        _mul_mat_packed(low, node)
        return
    (at, left), (bt, right) = strided(low, a), strided(low, b)
    spec = strided_matmul.StridedMatMul(left, right, contiguous("f32", node.ne))
    launch(low, spec, (at, bt, low.result(node)), (2,), node)


def _mul_mat_packed(low: Lowering, node: Node) -> None:
    """Products of a quantised weight with activations that are no plain matrix: made contiguous first."""
    w, x = node.operands
    k, n = fixed(w.ne[0]), fixed(w.ne[1])
    slabs = fixed(w.type.ne4[2])
    if w.type.ne4[3] != 1 or x.type.ne4[3] != 1 or (slabs > 1 and x.type.ne4[2] != slabs):
        raise CodegenError(f"node {node.name!r}: a product of the {w.dtype} weight {w.type} with {x.type} has no kernel")
    if slabs > 1:
        stacked_product(low, node)
        return
    flat = contiguous_copy(low, x)
    rows = product(x.ne[1:])
    mode = activation_mode(w.dtype)
    record = q8_record(k).stride
    sym, mult = rows_grid([rows])
    if mult != 1 and sym:
        raise CodegenError(f"node {node.name!r}: a product over {rows} rows has no kernel")
    weight = Ref("weight", low.weights.request(layout(w).root, "packed", shape=w.ne).name)
    out = low.result(node)
    rounded = low.schedule.new_value(form(product(x.ne[1:]), record), f"{x.name} (q8)")
    all_sym, all_mult = rows_grid([product(x.ne[1:])])
    low.emit(Step(quantize.Quantize(k, mode, False, 0.0), (flat, integer(k), NULL, rounded), (3,), x.name + ".q8", all_sym, 1, all_mult))
    spec = matmul.MatMul(w.dtype, k, n, "none", False, sym or str(mult))
    args = (weight, rounded, out, integer(0), integer(n), NULL, integer(0), NULL, integer(rows_argument(spec.rows)))
    low.emit(Step(spec, args, (2,), node.name, "", 1, matmul.grid(spec), bytes={"": n * row_bytes(w.dtype, k)}))


RULES: dict[str, Emit] = {
    **dict.fromkeys(POINTWISE, pointwise),
    "cont": _copy,
    "cast": _copy,
    "repeat": _copy,
    "concat": _concat,
    "cpy": _cpy,
    "soft_max": _soft_max,
    "sum_rows": _two(lambda a, out, node: softmax.SumRows(a, out)),
    "argsort": _two(lambda a, out, node: select.TopK(a, a.ne[0], node.attrs["order"])),
    "top_k": _two(lambda a, out, node: select.TopK(a, int(node.attrs["k"]), "desc", node.attrs["ties"])),
    "get_rows": _get_rows,
    "kq_mask": _kq_mask,
    "rms_norm": _norm_rows,
    "rms_norm_mul": _norm_rows,
    "norm": _norm_rows,
    "rope": _rope,
    "rope_apply": _rope_apply,
    "mul_mat": _mul_mat,
    **SPARSE_RULES,
    **HYPER_RULES,
    **ROUTING_RULES,
}
"""Operator name -> how it is emitted."""

_TWO = ("add", "sub", "mul", "div", "glu", "concat", "cpy", "get_rows", "kq_mask", "rms_norm_mul", "rope_apply", "mul_mat")
OPERANDS = dict.fromkeys(_TWO, 2) | dict.fromkeys(("soft_max", "rope"), 3) | SPARSE_OPERANDS | HYPER_OPERANDS | ROUTING_OPERANDS
"""Operands that the rules of more than one operand know about: a node with others must not lose them silently."""
