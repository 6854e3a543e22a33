"""The steps of a case on both sides in lockstep, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ggufc.diff.compare import Distance, Tolerances, distance, is_choice
from ggufc.diff.recording import Recording
from ggufc.diff.sides import CodeSide, GraphSide, InterpreterSide, StoredSide
from ggufc.diff.stored import StoredStep, divided, key
from ggufc.files import write_npz
from ggufc.ir import Node
from ggufc.ir.layout import layout
from ggufc.runtime.logits import check_case, run_steps

Known = Recording | StoredStep


@dataclass(frozen=True)
class Entry:
    """A node of one micro-batch on both sides. ``inside``: nodes computed in the same launches, whose own results are not known."""

    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    other_shape: tuple[int, ...]
    tolerance: float
    distance: Distance | None
    inside: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        return self.distance is None or not self.distance.error <= self.tolerance


@dataclass
class MicroBatch:
    """What was compared in one micro-batch of one step, in program order. ``missing``: nodes that only one side knows."""

    step: str
    number: int
    env: dict[str, int]
    entries: list[Entry]
    missing: list[str]

    @property
    def differing(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.differs]


@dataclass
class Report:
    """The outcome: ``left`` and ``right`` are what was compared; ``compiled`` tells whether a side is generated code, whose launches can
    be made to leave more results; ``strangers`` are names of stored tensors that no node has.
    """

    left: str
    right: str
    following: bool
    compiled: bool = False
    strangers: list[str] = field(default_factory=list)
    batches: list[MicroBatch] = field(default_factory=list)

    @property
    def first(self) -> tuple[MicroBatch, Entry] | None:
        """The first node that differs, in the order of evaluation."""
        return next(((batch, batch.differing[0]) for batch in self.batches if batch.differing), None)


Watch = Callable[[str, int, Recording], None]
"""Called with the step, the number of the micro-batch and what the left side computed in it."""


class Saver:
    """A ``Watch`` that stores the left side's values as ``stored.load`` reads them."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def __call__(self, step: str, number: int, recording: Recording) -> None:
        for node in recording.names.results():
            value = recording.value(node)
            if value is not None:
                self.arrays[key(step, number, node.name)] = value

    def write(self, path: Path) -> None:
        """An .npz file, whole or not at all."""
        write_npz(path, self.arrays)


def step_names(case: Mapping[str, Any]) -> list[str]:
    """The names of a case's steps, as they are reported."""
    return [str(step.get("name", f"step{index}")) for index, step in enumerate(case["steps"])]


def compare_sides(
    left: GraphSide,
    right: GraphSide | StoredSide,
    case: Mapping[str, Any],
    folder: Path,
    settings: Mapping[str, Any],
    tolerances: Tolerances,
    *,
    first_only: bool = False,
    watch: Watch | None = None,
) -> Report:
    """Evaluate a case on both sides. ``settings`` are arguments of ``Session``; with ``first_only`` the steps after the first difference
    are not run. With ``tolerances.following`` the side that is an interpreter follows the other.
    """
    check_case(case)
    report = Report(left.title, right.title, tolerances.following, isinstance(left, CodeSide) or isinstance(right, CodeSide))
    stored = right if isinstance(right, StoredSide) else None
    swapped = stored is not None or (isinstance(left, InterpreterSide) and not isinstance(right, InterpreterSide))
    with ExitStack() as stack:
        sides = [side for side in (left, right) if isinstance(side, GraphSide)]
        runs = {side: run_steps(stack.enter_context(side.open(settings)), case, folder) for side in sides}
        tolerances.check(node for side in sides for names in side.names.values() for node in names.results())
        for step in step_names(case):
            ahead: Sequence[Known] = stored.step(step) if stored else ()
            for side in reversed(sides) if swapped else sides:
                side.start(ahead if tolerances.following else ())
                next(runs[side])
                ahead = side.recordings
            follower = left if swapped or not tolerances.following else sides[-1]
            others: Sequence[Known] = sides[-1].recordings
            if stored:
                others = divided(stored.step(step), [int(recording.env["O"]) for recording in left.recordings])
            for number, (a, b) in enumerate(zip(left.recordings, others)):
                report.batches.append(_compare(step, number, follower.recordings[number], a, b, tolerances))
                if watch:
                    watch(step, number, a)
            if first_only and report.first:
                break
        if stored:
            nodes = {name for names in left.names.values() for name in names.by_name}
            report.strangers = [name for name in stored.tensors() if name not in nodes]
    return report


def _compare(step: str, number: int, order: Recording, left: Known, right: Known, tolerances: Tolerances) -> MicroBatch:
    entries: list[Entry] = []
    missing: list[str] = []
    compared: set[Node] = set()
    for node in order.names.results():
        if node.is_view and layout(node).root in compared:
            continue
        a, b = left.like(node), right.like(node)
        if a is None or b is None:
            missing.append(node.name)
            continue
        if a.size:
            entries.append(_entry(node, a, b, compared, order.names.rank, tolerances))
        compared.add(node)
    return MicroBatch(step, number, dict(order.env), entries, missing)


def _entry(node: Node, a: np.ndarray, b: np.ndarray, compared: set[Node], rank: Mapping[Node, int], tolerances: Tolerances) -> Entry:
    inside = sorted(_inside(node, compared), key=rank.__getitem__)

    def known(operand: Node) -> bool:
        source = layout(operand).root
        return operand in compared or source in compared or source.is_leaf

    bound = tolerances.of(node, inside, known)
    shapes = tuple(reversed(a.shape)), tuple(reversed(b.shape))
    apart = distance(a, b.reshape(a.shape), is_choice(node)) if a.size == b.size else None
    return Entry(node.name, node.op.name, node.dtype, *shapes, bound, apart, tuple(n.name for n in inside if not n.is_view))


def _inside(node: Node, compared: set[Node]) -> set[Node]:
    """What ``node`` was computed from since the last known results."""
    found: set[Node] = set()
    stack = list(node.operands)
    while stack:
        operand = stack.pop()
        if operand in found or operand in compared or operand.is_leaf or operand.op.writes_cache:
            continue
        found.add(operand)
        stack.extend(operand.operands)
    return found
