"""``dce``: dead code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Graph
from ggufc.passes.base import Pass, PassResult


@dataclass(frozen=True)
class Dce(Pass):
    """Remove nodes that neither an output nor a cache write needs.

    Precondition: a valid graph. Postcondition: every node reaches an output or a cache write; unused inputs, weights and derived
    weights are gone.
    """

    name: ClassVar[str] = "dce"

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        removed = graph.remove_dead()
        return PassResult(bool(removed), {"removed": removed})
