"""The walk of attention over the entries of a list: a function of its own, which the kernels of a graph call.

A walk is most of the code of an attention kernel, and all kernels over caches of one shape take the same: those that compute splits and
those that do not, over one kind of rows or two, of any layer. So it is compiled once, and a kernel is what surrounds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.kernels.attention_rows import Scratch
from ggufc.codegen.kernels.attention_scores import Span
from ggufc.codegen.kernels.attention_steps import Steps

if TYPE_CHECKING:
    from ggufc.codegen.kernels.attention_cpu import FlashAttn


@dataclass(frozen=True)
class AttentionWalk:
    """Part of a kernel: all steps of a span for rows whose queries, bounds and states lie in the scratch of ``attention``.

    ``alone``: the rows are those of one token under this many KV heads, which lie side by side; 0: they are the first ``rows`` rows, of one
    KV head. ``k``, ``v``: where the (first) KV head of cell 0 lies; the others are the fields of ``Span``. ``attention`` tells the shapes;
    its ``scale`` and ``sinks`` do not matter here.
    """

    attention: FlashAttn
    alone: int
    arg_names: ClassVar[tuple[str, ...]] = ("k", "v", "rows", *Span._fields)

    def emit(self, e: Emitter) -> None:
        walk = Steps(self.attention, e, e.arg_ptr(0), e.arg_ptr(1), max(1, self.alone))
        span = Span(e.arg_ptr(3), *(e.arg_int(3 + i) for i in range(1, len(Span._fields))))
        if self.alone:
            walk.walk_alone(span)
        else:
            walk.walk_together(span, e.arg_int(2))
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return Scratch(self.attention).size
