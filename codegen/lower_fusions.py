"""Fusions of lowering: several nodes that become one launch.

Products take their bias, residual or gated activation along, normalisation its residual, rotation the head norm before it and the
cache store after it. ``MATCHERS`` are tried in order on each node that nothing has claimed yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import matmul, rope, rowwise
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.lower_operands import covers
from ggufc.codegen.schedule import NULL, Ref, Step, add_forms, fixed, form, integer, rows_grid
from ggufc.codegen.weights import activation_mode
from ggufc.codegen.weights.base import ROWS
from ggufc.formats.artifact import Affine
from ggufc.formats.ggml_types import row_bytes
from ggufc.ir.dims import product
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


@dataclass
class Fusion:
    """Several nodes that become one launch (plus the rounding of its activations), emitted at ``anchor``."""

    anchor: Node
    nodes: tuple[Node, ...]

    def emit(self, low: Lowering) -> None:
        raise NotImplementedError


@dataclass
class Product(Fusion):
    """``mul_mat`` by a weight with bias, residual or gate taken along."""

    product: Node
    bias: Node | None = None
    residual: Node | None = None
    glu: str = ""

    def emit(self, low: Lowering) -> None:
        w, x = self.product.operands
        k, n = fixed(w.ne[0]), fixed(w.ne[1])
        mode = activation_mode(w.dtype)
        if mode == "f32":
            at, ldx, count = low.rows(x)
        else:
            at, ldx, count = low.rounded_rows(x, mode), 0, product(x.ne[1:])
        weight = low.weights.request(w, "glu" if self.glu else "packed")
        sym, mult = rows_grid([count])
        if not sym:
            rows: str = str(mult)
        elif mult == 1:
            rows = sym
        else:
            raise CodegenError(f"node {self.product.name!r}: products over {count} rows are not supported")
        epilogue = f"{self.glu}_glu" if self.glu else "add" if self.residual is not None else "none"
        spec = matmul.MatMul(w.dtype, k, n, epilogue, self.bias is not None, rows)
        residual, ldr = NULL, 0
        if self.residual is not None:
            residual, ldr, _ = low.rows(self.residual)
        bias = Ref("weight", low.weights.request(self.bias, "plain").name) if self.bias is not None else NULL
        out = low.result(self.anchor)
        ldy = n // 2 if self.glu else n
        args = (Ref("weight", weight.name), at, out, integer(ldx), integer(ldy), residual, integer(ldr), bias, integer(rows_argument(rows)))
        weight_bytes: Affine = {"": n * row_bytes(w.dtype, k)}
        low.emit(
            Step(
                spec,
                args,
                (2,),
                self.product.name,
                "",
                1,
                matmul.grid(spec),
                bytes=add_forms(weight_bytes, form(count, 4 * ldy)),
                flops=form(count, 2 * k * n),
                inplace=(2, 5) if self.residual is not None and covers(self.residual) else None,
            )
        )


def match_product(low: Lowering, node: Node) -> Product | None:
    if node.op.name != "mul_mat" or node.operands[0].op.name != "weight" or node.operands[0].type.rank != 2 or node.type.rank != 2:
        return None
    if not all(isinstance(d, int) for d in layout(node.operands[1]).nb) or layout(node.operands[1]).nb[0] != 1:
        return None
    gated = _match_glu(low, node)
    if gated is not None:
        return gated
    claimed, tail, bias, residual = [node], node, None, None
    user = low.single_user(tail)
    if user is not None and user.op.name == "add" and user not in low.claimed:
        other = user.operands[1] if user.operands[0] is tail else None
        if other is not None and other.op.name == "weight" and other.type.ne == (node.ne[0],):
            bias, tail = other, user
            claimed.append(user)
            user = low.single_user(tail)
    if user is not None and user.op.name == "add" and user not in low.claimed and user.type == tail.type:
        other = user.operands[0] if user.operands[1] is tail else user.operands[1]
        if other is not tail and other.type == tail.type and _has_rows(other) and layout(other).root.op.name != "weight":
            residual, tail = other, user
            claimed.append(user)
    return Product(tail, tuple(claimed), node, bias, residual)


def _match_glu(low: Lowering, node: Node) -> Product | None:
    """gate and up in one product whose two row halves meet in one ``glu``."""
    w = node.operands[0]
    users = low.users[node]
    n = fixed(w.ne[1])
    if len(users) != 2 or n % (2 * ROWS) or node in low.output_of or not low.weights.two_sources(w):
        return None
    glus = {u for view in users for u in low.users[view]}
    if len(glus) != 1 or not all(v.is_view and len(low.users[v]) == 1 for v in users):
        return None
    (glu,) = glus
    if glu.op.name != "glu":
        return None
    gate, up = glu.operands
    half = (n // 2, node.ne[1])
    for view, offset in ((gate, 0), (up, n // 2)):
        where = layout(view)
        if view not in users or where.offset != offset or tuple(where.ne) != half or where.nb[0] != 1 or where.nb[1] != n:
            return None
    return Product(glu, (node, gate, up, glu), node, glu=glu.attrs["fn"])


@dataclass
class AddNorm(Fusion):
    """``residual + rms_norm_mul(x)`` in one launch (gemma's post-norms)."""

    norm: Node
    residual: Node

    def emit(self, low: Lowering) -> None:
        emit_norm(low, self.norm, self.anchor, self.residual)


def match_add_norm(low: Lowering, node: Node) -> AddNorm | None:
    if node.op.name != "rms_norm_mul" or node.type.rank != 2:
        return None
    user = low.single_user(node)
    if user is None or user.op.name != "add" or user in low.claimed or user.type != node.type:
        return None
    other = user.operands[0] if user.operands[1] is node else user.operands[1]
    if other is node or other.type != node.type or not _has_rows(other):
        return None
    return AddNorm(user, (node, user), node, other)


def emit_norm(low: Lowering, norm: Node, anchor: Node, residual: Node | None) -> None:
    """RMS norm of rows with weight, and a residual where given."""
    x, w = norm.operands
    at, ldx, count = low.rows(x)
    ne0 = fixed(norm.ne[0])
    res, ldr, _ = low.rows(residual) if residual is not None else (NULL, 0, 0)
    out = low.result(anchor)
    spec = rowwise.RmsNorm(ne0, float(norm.attrs["eps"]), True, residual is not None)
    weight = Ref("weight", low.weights.request(w, "plain").name)
    sym, mult = rows_grid([count])
    args = (at, integer(ldx), weight, res, integer(ldr), out, integer(ne0))
    inplace = None
    if residual is not None and covers(residual):
        inplace = (5, 3)
    elif residual is None and covers(x):
        inplace = (5, 0)
    low.emit(Step(spec, args, (5,), norm.name, sym, 1, mult, bytes=form(count, 8 * ne0), inplace=inplace))


@dataclass
class Rotation(Fusion):
    """``rope_apply`` with the head norm before it and the cache store after it."""

    rope: Node
    norm: Node | None
    store: Node | None

    def emit(self, low: Lowering) -> None:
        x = self.norm.operands[0] if self.norm is not None else self.rope.operands[0]
        at, where = low.ref(x)
        d, heads = fixed(where.ne[0]), fixed(where.ne[1])
        a = self.rope.attrs
        to = self.store.operands[0].dtype if self.store is not None else "f32"
        eps = float(self.norm.attrs["eps"]) if self.norm is not None else 0.0
        spec = rope.RopeApply(d, heads, int(a["n_dims"]), a["mode"], self.norm is not None, eps, self.store is not None, to)
        weight = Ref("weight", low.weights.request(self.norm.operands[1], "plain").name) if self.norm is not None else NULL
        table = low.root_ref(self.rope.operands[1])
        if self.store is not None:
            out, slots = low.root_ref(self.store.operands[0]), low.ref(self.store.operands[2])[0]
        else:
            out, slots = low.result(self.rope), NULL
        sym, mult = rows_grid([where.ne[2]])
        args = (at, integer(fixed(where.nb[2])), table, weight, out, integer(d * heads), slots)
        inplace = (4, 0) if self.store is None and covers(x) else None
        low.emit(Step(spec, args, (4,), self.rope.name, sym, 1, mult, bytes=form(where.ne[2], 8 * d * heads), inplace=inplace))


def match_rope(low: Lowering, node: Node) -> Rotation | None:
    if node.op.name != "rope_apply":
        return None
    x = node.operands[0]
    norm = None
    if x.op.name == "rms_norm_mul" and low.single_user(x) is node and _has_heads(x.operands[0]):
        norm = x
    elif not _has_heads(x):
        return None
    claimed = [node] if norm is None else [node, norm]
    store, user = None, low.single_user(node)
    if user is not None and user.op.name == "reshape":
        last = low.single_user(user)
        if last is not None and last.op.name == "set_rows" and last.operands[1] is user:
            store = last
            claimed.append(last)
    return Rotation(store or node, tuple(claimed), node, norm, store)


def _has_heads(node: Node) -> bool:
    """[D, H, T] with adjacent heads and a fixed token stride."""
    where = layout(node)
    return len(where.ne) == 3 and where.nb[0] == 1 and where.nb[1] == where.ne[0] and isinstance(where.nb[2], int)


def _has_rows(node: Node) -> bool:
    where = layout(node)
    return len(where.ne) == 2 and where.nb[0] == 1 and isinstance(where.nb[1], int)


MATCHERS: tuple[Callable[[Lowering, Node], Fusion | None], ...] = (match_product, match_add_norm, match_rope)
