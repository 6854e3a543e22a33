"""Convolutions with carried history: what a builder composes of eight copies and one convolution is one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufc.codegen.kernels import convolution
from ggufc.codegen.lower_fusions import Fusion
from ggufc.codegen.lower_operands import whole
from ggufc.codegen.schedule import Step, fixed, form, integer
from ggufc.ir.dims import Sym
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout
from ggufc.ir.ops.cache import is_version

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


@dataclass
class Carried(Fusion):
    """``x + ssm_conv([state | x])`` and the store of the last inputs."""

    x: Node
    taps: Node
    read: Node
    store: Node

    def emit(self, low: Lowering) -> None:
        taps, channels = (fixed(d) for d in self.taps.ne)
        at, ldx, count = low.rows(self.x)
        spec = convolution.CarriedConv(channels, taps)
        cache = low.root_ref(self.store.operands[0])
        reads, slots = low.ref(self.read.operands[1])[0], low.ref(self.store.operands[2])[0]
        args = (at, integer(ldx), whole(low, self.taps), cache, reads, slots, low.result(self.anchor))
        low.emit(Step(spec, args, (3, 6), self.anchor.name, "", 1, spec.tiles, bytes=form(count, 8 * channels)))


def match_carried(low: Lowering, node: Node) -> Carried | None:
    if node.op.name != "ssm_conv" or node.operands[1].op.name != "weight" or node.operands[1].dtype != "f32":
        return None
    both, taps = node.operands
    added = low.single_user(node)
    if both.op.name != "concat" or both.attrs["dim"] != 0 or added is None or added.op.name != "add" or added in low.claimed:
        return None
    x = added.operands[0] if added.operands[1] is node else added.operands[1]
    held, new = both.operands
    if x is node or new.op.name != "cont" or layout(new.operands[0]).root is not layout(x).root or x.ne != (node.ne[0], Sym("T")):
        return None
    if not _turned(new.operands[0], x) or held.op.name != "reshape" or held.operands[0].op.name != "get_rows":
        return None
    read = held.operands[0]
    kept, channels = fixed(taps.ne[0]) - 1, fixed(taps.ne[1])
    store = _store(low, both, node, kept, channels)
    if store is None or not is_version(read.operands[0]) or store.operands[0] is not read.operands[0] or read.operands[1].ne != (1,):
        return None
    if read.operands[0].dtype != "f32" or read.ne != (kept * channels, 1) or held.ne != (kept, channels):
        return None
    inner = [read, new, both, node, added, store, layout(store.operands[1]).root]
    alone = all(low.single_user(n) is not None for n in (read, held, new))
    return Carried(added, tuple(inner), x, taps, read, store) if alone and not low.claimed.intersection(inner) else None


def _turned(view: Node, x: Node) -> bool:
    """Does ``view`` show x [channels, T] as [T, channels]?"""
    a, b = layout(view), layout(x)
    return a.offset == b.offset and a.ne == b.ne[::-1] and a.nb == b.nb[::-1] and b.nb[0] == 1 and isinstance(b.nb[1], int)


def _store(low: Lowering, both: Node, conv: Node, kept: int, channels: int) -> Node | None:
    """The ``set_rows`` of the last ``kept`` inputs of every channel, if nothing else reads ``both``."""
    tails = [user for user in low.users[both] if user is not conv]
    tokens = conv.ne[1]
    if len(tails) != 1 or both in low.output_of or not tails[0].is_view:
        return None
    where = layout(tails[0])
    if where.offset != tokens or where.ne != (kept, channels) or where.nb != (1, tokens + kept):
        return None
    node = tails[0]
    for name in ("cont", "reshape", "set_rows"):
        users = low.users[node]
        if len(users) != 1 or users[0].op.name != name or node in low.output_of:
            return None
        node = users[0]
    return node if node.operands[2].ne == (1,) else None


CONV_MATCHERS: tuple[Callable[[Lowering, Node], Fusion | None], ...] = (match_carried,)
