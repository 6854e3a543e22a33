"""``fuse-routing``: the choice of experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Node
from ggufc.passes.base import RulePass
from ggufc.passes.canonicalize import LAYOUT_RULES
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule


def _ungated(p: Node) -> tuple[Node, str]:
    """(scores, gate) of what may be gated scores."""
    kind = p.op.name
    if kind == "soft_max" and len(p.operands) == 1 and p.attrs["scale"] == 1.0:
        return p.operands[0], "softmax"
    if kind == "sigmoid":
        return p.operands[0], kind
    if kind == "sqrt" and p.operands[0].op.name == "softplus":
        return p.operands[0].operands[0], "sqrt_softplus"
    return p, "none"


def _looks_up(user: Node, p: Node) -> bool:
    """Does ``user`` look up single numbers of ``p`` [X, T], token by token?"""
    if user.op.name != "get_rows":
        return False
    table = user.operands[0]
    return table.op.name == "reshape" and table.operands[0] is p and table.type.ne == (1, *p.type.ne)


def _chooses(rw: Rewriter, choice: Node, p: Node) -> bool:
    """Is ``choice`` used to look up numbers of ``p``?"""
    return any(_looks_up(user, p) for user in rw.users(choice))


@rule("expert-choice", op("top_k", any_node("choice")))
def do_choice(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``top_k(gate(scores) + bias)`` whose result looks up gated scores: other choices stay what they are."""
    p, bias = m["choice"], []
    if not _chooses(rw, node, p) and p.op.name == "add" and p.operands[1].type.ne == p.type.ne[:1]:
        p, bias = p.operands[0], [p.operands[1]]
    if not _chooses(rw, node, p) or p.type.rank != 2 or p.dtype != "f32" or not isinstance(p.type.ne[0], int):
        return None
    if node.attrs["ties"] != "lowest":
        return None
    scores, gate = _ungated(p)
    return rw.add("expert_choice", scores, *bias, k=node.attrs["k"], gate=gate)


@rule("expert-weights", op("get_rows", op("reshape", any_node("p")), any_node("ids")))
def do_weights(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """Gated scores of given experts; without a gate only of experts chosen among the same scores."""
    p, ids = m["p"], m["ids"]
    if p.type.rank != 2 or p.dtype != "f32" or not _looks_up(node, p) or ids.type.rank != 2:
        return None
    scores, gate = _ungated(p)
    if gate == "none" and (ids.op.name != "expert_choice" or ids.operands[0] is not scores):
        return None
    k, tokens = ids.type.ne
    return rw.add("reshape", rw.add("expert_weights", scores, ids, gate=gate), ne=(1, k, tokens))


_WEIGHTS = op("expert_weights", bind="w")


@rule("weights-normalised", op("div", _WEIGHTS, op("sum_rows", op("expert_weights", bind="w"), once=True)))
def do_normalise(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """Divided by their sum."""
    w = m["w"]
    if (w.attrs["normalise"], w.attrs["scale"]) != ("none", 1.0) or len(rw.users(w)) != 2 or rw.is_output(w):
        return None
    return rw.add("expert_weights", *w.operands, gate=w.attrs["gate"], normalise="sum")


@rule("weights-softmax", op("soft_max", op("expert_weights", bind="w", once=True)))
def do_softmax(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """A softmax of the chosen."""
    w = m["w"]
    if (w.attrs["normalise"], w.attrs["scale"], node.attrs["scale"]) != ("none", 1.0, 1.0):
        return None
    return rw.add("expert_weights", *w.operands, gate=w.attrs["gate"], normalise="softmax")


@rule("weights-scaled", op("scale", op("expert_weights", bind="w", once=True)))
def do_scale(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """Times a factor."""
    w = m["w"]
    if node.attrs["b"] != 0.0 or w.attrs["scale"] != 1.0:
        return None
    return rw.add("expert_weights", *w.operands, gate=w.attrs["gate"], normalise=w.attrs["normalise"], scale=node.attrs["s"])


@dataclass(frozen=True)
class FuseRouting(RulePass):
    """Gate, bias and choice -> ``expert_choice``; look-up of the chosen, their normalisation and scale -> ``expert_weights``.

    Precondition: a valid graph, canonicalised. Postcondition: no ``top_k`` chooses experts whose gated scores are then looked up, and
    what is done with the weights of the chosen is part of ``expert_weights``. Gates are softmax, sigmoid, the root of softplus, and none.
    """

    name: ClassVar[str] = "fuse-routing"
    rules: ClassVar[tuple[Rule, ...]] = (do_choice, do_weights, do_normalise, do_softmax, do_scale, *LAYOUT_RULES)
