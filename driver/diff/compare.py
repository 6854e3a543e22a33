"""How far two arrays are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from ggufc.errors import DriverError
from ggufc.ir import Node
from ggufc.ir.layout import layout
from ggufc.ir.types import is_quantised

_TINY_ROW = 1e-3
"""Rows far smaller than the largest one are compared on the scale of this share of it: what they hold is mostly cancellation."""
_STORED = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2, "q8_0": 2e-2, "q5_0": 0.1, "q5_1": 0.1}
"""What one unit of a cache's last digit is at most, beside the row's largest value."""
_CHOICES = ("top_k", "indexer_topk", "mask_to_index")


@dataclass(frozen=True)
class Distance:
    """``error`` is the largest |a - b| of an element over the largest |b| of its row (for choices: the share of entries that differ);
    ``index`` is that element's position in ``ne`` order.
    """

    error: float
    index: tuple[int, ...]
    left: float
    right: float
    equal_bits: bool


def distance(a: np.ndarray, b: np.ndarray, choice: bool = False) -> Distance:
    """The distance of two arrays of one shape; a NaN on either side is infinitely far from everything."""
    if choice:
        return _choices(a, b)
    equal_bits = a.dtype == b.dtype and a.tobytes() == b.tobytes()
    left, right = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.where(left == right, 0.0, np.abs(left - right))
    size = np.where(np.isfinite(right), np.abs(right), 0.0)
    scale = np.maximum(size.max(-1, keepdims=True), _TINY_ROW * size.max())
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(off == 0.0, 0.0, off / scale)
    error = np.where(np.isnan(error), np.inf, error)
    at = np.unravel_index(int(error.argmax()), error.shape)
    return Distance(float(error[at]), tuple(int(i) for i in reversed(at)), float(left[at]), float(right[at]), equal_bits)


def _choices(a: np.ndarray, b: np.ndarray) -> Distance:
    """Rows are sets: the order of what was chosen does not matter, and entries below 0 stand for nothing. A side that fills up with
    entries nobody sees may hold more.
    """
    wrong, first = 0, None
    shape = a.shape[:-1]
    for at in np.ndindex(*shape):
        mine, other = {int(i) for i in a[at] if i >= 0}, {int(i) for i in b[at] if i >= 0}
        few, many = (mine, other) if len(mine) <= len(other) else (other, mine)
        odd = few - many
        wrong += len(odd)
        if odd and first is None:
            here = next(k for k, i in enumerate((a if few is mine else b)[at]) if int(i) in odd)
            first = (*at, here)
    index = first or (0,) * a.ndim
    error = wrong / max(1, a.size)
    return Distance(error, tuple(reversed(index)), float(a[index]), float(b[index]), a.dtype == b.dtype and a.tobytes() == b.tobytes())


def is_choice(node: Node) -> bool:
    """Whether a node's values are indices of what was chosen."""
    return node.op.name in _CHOICES


@dataclass(frozen=True)
class Tolerances:
    """The largest error that is no difference.

    Where each node is computed from the other side's operands (``following``), one operator's roundings are all there is: 1e-5 of the
    row's largest value; 1e-4 where an operand is f16; 1e-2 where one is bf16; of cache rows a unit of what they are stored in. Where the
    operand of a product with quantised weights was rounded to 8 bits inside the launch it is a few units of that rounding, 0.1 /
    sqrt(row length), and three times as much for quantised cells, whose queries only generated code rounds. Otherwise errors add up
    over the layers, and the bound is ``free``. Indices must be equal. ``rules`` are (pattern of a node's or operator's name, bound), the
    last match counts.
    """

    following: bool = True
    free: float = 2e-2
    rules: Sequence[tuple[str, float]] = field(default=())

    def of(self, node: Node, inside: Sequence[Node], known: Callable[[Node], bool]) -> float:
        """The bound for ``node``. ``inside`` are the nodes computed in the same launch, ``known`` tells which results exist."""
        for pattern, bound in reversed(self.rules):
            if _fits(node, pattern):
                return bound
        if node.dtype == "i32":
            return 0.0
        return max(_bound(n, known) for n in (node, *inside)) if self.following else self.free

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise ``DriverError`` for a rule that is about none of ``nodes``: a misspelt one would silently loosen nothing."""
        known = list(nodes)
        for pattern, bound in self.rules:
            if not any(_fits(node, pattern) for node in known):
                names = {name for node in known for name in (node.name, node.op.name)}
                near = get_close_matches(pattern, names, n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else "; ggufc dump --stage built shows the names"
                raise DriverError(f"--tolerance {pattern}={bound:g}: no node or operator is called {pattern!r}{hint}")


def _fits(node: Node, pattern: str) -> bool:
    return fnmatchcase(node.name, pattern) or fnmatchcase(node.op.name, pattern)


def _bound(node: Node, known: Callable[[Node], bool]) -> float:
    if node.op.writes_cache:
        return _STORED.get(node.dtype, 0.2)
    if node.op.name not in ("mul_mat", "mul_mat_id", "flash_attn", "sparse_attn", "indexer_topk"):
        return 1e-5 if node.op.name != "cast" else 1e-3
    stored = [o.dtype for o in node.operands if o.dtype != "i32"]
    bound = 1e-5
    if "f16" in stored:
        bound = 1e-4
    if "bf16" in stored:
        bound = 1e-2
    weights = next((o for o in node.operands if is_quantised(o.dtype)), None)
    if weights is not None:
        of_model = layout(weights).root.op.name == "weight"
        row = weights.ne[0] if isinstance(weights.ne[0], int) else 32
        bound = 0.3 / math.sqrt(row) if not of_model else 1e-5 if known(node.operands[1]) else 0.1 / math.sqrt(row)
    return bound


def parse_rules(texts: Sequence[str]) -> list[tuple[str, float]]:
    """``1e-4`` (for all that no other rule names) and ``PATTERN=1e-3`` as rules; ``DriverError`` for anything else."""
    rules = []
    for text in texts:
        pattern, _, number = text.rpartition("=")
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if not bound >= 0:
            raise DriverError(f"--tolerance {text}: give a number such as 1e-4, or NAME=NUMBER for nodes or operators (mul_mat=1e-3)")
        rules.append((pattern or "*", bound))
    return sorted(rules, key=lambda rule: rule[0] != "*")
