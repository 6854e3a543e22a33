"""Hyper-connections: a sublayer's gates with what it reads in one launch, its result with the streams after it in another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufc.codegen.kernels import hyper
from ggufc.codegen.lower_fusions import Fusion
from ggufc.codegen.lower_operands import Emit, covers, whole
from ggufc.codegen.schedule import NULL, Ref, Step, fixed, form, integer, rows_grid
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


@dataclass
class ReadStreams(Fusion):
    """``hc_pre`` and the ``hc_mix`` after it."""

    def emit(self, low: Lowering) -> None:
        gates, mixed = self.nodes
        _emit_gates(low, gates, mixed)


def match_read(low: Lowering, node: Node) -> ReadStreams | None:
    if node.op.name != "hc_pre" or node in low.output_of or not low.users[node]:
        return None
    first = low.users[node][0]
    if first.op.name != "hc_mix" or first.operands[1] is not node or first in low.claimed:
        return None
    return ReadStreams(first, (node, first))


def _emit_gates(low: Lowering, gates: Node, mixed: Node | None) -> None:
    m, scale, base = gates.operands
    a = gates.attrs
    at, ldm, count = low.rows(m)
    n = fixed(mixed.ne[0]) if mixed is not None else 0
    spec = hyper.HcIn(n, int(a["streams"]), int(a["iterations"]), float(a["eps"]))
    x = whole(low, mixed.operands[0]) if mixed is not None else NULL
    args = (at, integer(ldm), whole(low, scale), whole(low, base), x, low.result(gates), low.result(mixed) if mixed is not None else NULL)
    sym, mult = rows_grid([count])
    moved = form(count, 4 * (n * (spec.streams + 1) + 2 * fixed(gates.ne[0])))
    low.emit(Step(spec, args, (5, 6) if n else (5,), (mixed or gates).name, sym, 1, mult, bytes=moved))


@dataclass
class WriteStreams(Fusion):
    """``hc_post`` with the norm of the sublayer's result before it."""

    def emit(self, low: Lowering) -> None:
        *norms, node = self.nodes
        _emit_post(low, node, norms[0] if norms else None)


def match_write(low: Lowering, node: Node) -> WriteStreams | None:
    if node.op.name != "hc_post":
        return None
    y = node.operands[1]
    if y.op.name == "rms_norm_mul" and low.single_user(y) is node and y not in low.claimed and layout(y.operands[0]).row_contiguous:
        return WriteStreams(node, (y, node))
    return WriteStreams(node, (node,))


def _emit_post(low: Lowering, node: Node, norm: Node | None) -> None:
    x, y, gates = node.operands
    n, streams, tokens = node.ne
    at, ldy, _ = low.rows(norm.operands[0] if norm is not None else y)
    spec = hyper.HcPost(fixed(n), fixed(streams), norm is not None, float(norm.attrs["eps"]) if norm is not None else 0.0)
    w = Ref("weight", low.weights.request(norm.operands[1], "plain").name) if norm is not None else NULL
    source = whole(low, x)
    args = (source, at, integer(ldy), whole(low, gates), w, low.result(node))
    sym, mult = rows_grid([tokens])
    moved = form(tokens, 4 * spec.n * (2 * spec.streams + 1))
    low.emit(Step(spec, args, (5,), node.name, sym, 1, mult * spec.blocks, bytes=moved, inplace=(5, 0) if covers(x) else None))


def _mix(low: Lowering, node: Node) -> None:
    x, gates = node.operands
    at, ldg, _ = low.rows(gates)
    n, streams = fixed(node.ne[0]), fixed(x.ne[1])
    sym, mult = rows_grid([node.ne[1]])
    args = (whole(low, x), at, integer(ldg), low.result(node))
    low.emit(Step(hyper.HcMix(n, streams), args, (3,), node.name, sym, 1, mult, bytes=form(node.ne[1], 4 * n * (streams + 1))))


def _sinkhorn(low: Lowering, node: Node) -> None:
    spec = hyper.Sinkhorn(fixed(node.ne[0]), int(node.attrs["iterations"]), float(node.attrs["eps"]))
    sym, mult = rows_grid(node.ne[2:])
    args = (whole(low, node.operands[0]), low.result(node))
    low.emit(Step(spec, args, (1,), node.name, sym, 1, mult, bytes=form(node.type.numel, 8)))


HYPER_MATCHERS: tuple[Callable[[Lowering, Node], Fusion | None], ...] = (match_read, match_write)

HYPER_RULES: dict[str, Emit] = {"hc_pre": lambda low, node: _emit_gates(low, node, None), "hc_mix": _mix, "sinkhorn": _sinkhorn}
"""Operator name -> how it is emitted where no fusion claims it."""

HYPER_OPERANDS = {"hc_pre": 3, "hc_mix": 2}
