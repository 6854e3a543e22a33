"""``node-budget``: the architecture's node estimate against the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Graph
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.errors import PassError

ESTIMATE = "node-estimate"
"""Key of ``graph.analysis`` where the driver (or the model) leaves the estimate for this graph."""
ANALYSIS = "node-budget"


@dataclass(frozen=True)
class NodeBudget(Pass):
    """Compare ``graph.analysis["node-estimate"]`` with the nodes there are and store ``{estimate, actual}``.

    Precondition: the estimate is set, or ``required=0`` (the default) accepts its absence, for graphs that come from text.
    Postcondition: the estimate, where there is one, is at least the actual number; otherwise ``PassError``, since fixed-size storage
    planned by the estimate would overflow (runtime-cache 4).
    """

    name: ClassVar[str] = ANALYSIS
    required: bool = False

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        actual = len(graph.nodes)
        estimate = graph.analysis.get(ESTIMATE)
        if estimate is None and self.required:
            raise PassError(
                f"Graph '{graph.name}' has no node estimate; set graph.analysis['{ESTIMATE}'] or run node-budget without required=1."
            )
        if estimate is not None and actual > estimate:
            raise PassError(
                f"Graph '{graph.name}' of architecture '{graph.arch}' has {actual} nodes, more than its estimate of {estimate}; "
                "correct the architecture's estimate, which must hold for every shape its builder can meet."
            )
        found = {"estimate": estimate, "actual": actual}
        changed = graph.analysis.get(ANALYSIS) != found
        graph.analysis[ANALYSIS] = found
        return PassResult(changed, {"estimate": estimate or 0, "actual": actual})
