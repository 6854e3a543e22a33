"""Several products of one activation as a single product with the weights stacked: shared by ``merge-qkv`` and ``merge-gate-up``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from ggufc.ir import IRError, Node
from ggufc.ir.dims import IntDim
from ggufc.ir.graph import infer_type
from ggufc.ir.layout import contiguous_nb
from ggufc.passes.rules import Rewriter


def is_projection(rw: Rewriter, node: Node) -> bool:
    """``mul_mat`` with a 2-D weight that nothing else reads: stacking a shared weight (tied embeddings) would store it twice.

    Outputs stay as they are, since they are handed out as contiguous tensors.
    """
    if node.op.name != "mul_mat" or rw.is_output(node):
        return False
    weight = node.operands[0]
    return weight.op.name == "weight" and weight.type.rank == 2 and rw.used_once(weight)


def mergeable(products: Iterable[Node]) -> list[list[Node]]:
    """Groups of two or more products that agree in activation, weight dtype and row length, in the order given."""
    groups: dict[Hashable, list[Node]] = {}
    for node in products:
        weight, x = node.operands
        groups.setdefault((x, weight.dtype, weight.type.ne[0]), []).append(node)
    return [group for group in groups.values() if len(group) > 1]


def merge(rw: Rewriter, group: Sequence[Node]) -> None:
    """Replace the products by row views of one product with the concatenated weight.

    Every result element is the same dot product as before, so its bits do not change. A user that cannot take the strided view gets a copy.
    """
    rw.at = group[0]
    x = group[0].operands[1]
    weights = [node.operands[0] for node in group]
    stacked = weights[0]
    for i, weight in enumerate(weights[1:], start=2):
        stacked = rw.add("concat", stacked, weight, dim=1, name=join_names([w.name for w in weights[:i]]))
    merged = rw.add("mul_mat", stacked, x, name=join_names([node.name for node in group]))
    offset: IntDim = 0
    for node in group:
        view = rw.add("view", merged, ne=node.type.ne, nb=contiguous_nb(merged.type.ne), offset=offset, name=node.name, loc=node.loc)
        offset = offset + node.type.ne[0]
        for user in rw.replace(node, view):
            if not _accepts(rw, user):
                rw.at = user
                rw.substitute(user, view, rw.add("cont", view, name=f"{node.name}.cont"))
                rw.at = group[0]


def _accepts(rw: Rewriter, user: Node) -> bool:
    """Do ``user`` and what reads it through views still verify, and mean the same?

    A ``view`` states strides of the storage it was written for, so it must see a contiguous product.
    """
    if user.op.name == "view":
        return False
    try:
        infer_type(user, None if user.op.declared_type else user.type)
    except IRError:
        return False
    return not user.is_view or all(_accepts(rw, after) for after in rw.users(user))


def join_names(names: Sequence[str]) -> str:
    """``blk.0.attn_q.weight``, ``blk.0.attn_k.weight`` -> ``blk.0.attn_q+attn_k.weight``."""
    parts = [name.split(".") for name in names]
    shortest = min(len(p) for p in parts)
    head = 0
    while head < shortest - 1 and len({p[head] for p in parts}) == 1:
        head += 1
    tail = 0
    while tail < shortest - 1 - head and len({p[-1 - tail] for p in parts}) == 1:
        tail += 1
    middles = [".".join(p[head : len(p) - tail]) for p in parts]
    return ".".join([*parts[0][:head], "+".join(middles), *parts[0][len(parts[0]) - tail :]])
