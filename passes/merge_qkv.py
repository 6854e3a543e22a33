"""``merge-qkv``: the projections of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Graph, Node
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.merge_gate_up import gate_up_pairs
from ggufc.passes.merge_products import is_projection, merge, mergeable
from ggufc.passes.rules import Rewriter

_PER_TOKEN = frozenset(["add", "sub", "mul", "div", "scale", "cont", "cast", "rms_norm", "norm", "rms_norm_mul", "rope", "rope_apply"])
"""What may lie, besides views, between a projection and the cache its result is written to."""


@dataclass(frozen=True)
class MergeQkv(Pass):
    """Products of the activation whose keys or values go into a cache -> one ``mul_mat`` with the concatenated weights and row views.

    Precondition: activations are fused (``fuse-glu``), so that gate and up are recognised as such and left to ``merge-gate-up``.
    Postcondition: of the projections that share their activation with one that is written to a cache, those of equal weight dtype and
    row length are one product; files that give v another type than q and k keep it apart. Biases stay additions on the views; a user
    that needs contiguous rows gets a ``cont``.
    """

    name: ClassVar[str] = "merge-qkv"

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        rw = Rewriter(graph)
        feed_forward = {node for pair in gate_up_pairs(rw) for node in pair}
        products = [node for node in graph.nodes if node not in feed_forward and is_projection(rw, node)]
        stored = {node.operands[1] for node in products if _reaches_cache(rw, node)}
        groups = mergeable(node for node in products if node.operands[1] in stored)
        for group in groups:
            merge(rw, group)
        rw.commit()
        counts = {"two": 0, "three": 0, "more": 0}
        for group in groups:
            counts[{2: "two", 3: "three"}.get(len(group), "more")] += 1
        return PassResult(bool(groups), counts)


def _reaches_cache(rw: Rewriter, node: Node) -> bool:
    """Does a cache write store this value, possibly normalised, rotated or biased?"""
    stack, seen = [node], {node}
    while stack:
        for user in rw.users(stack.pop()):
            if user.op.writes_cache:
                return True
            if (user.is_view or user.op.name in _PER_TOKEN) and user not in seen:
                seen.add(user)
                stack.append(user)
    return False
