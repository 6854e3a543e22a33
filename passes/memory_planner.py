"""Assignment of values with symbolic sizes to shared buffers.

A *slot* is one buffer; the values in it are never live at the same time. Sizes are affine forms in the graph's symbols (``{"": 64, "T":
2304}``: 64 + 2304 T bytes; unfused attention also has products, written ``"KV*T"``), so the order of two sizes may depend on the
symbols. The planner compares them at one representative environment, which only affects how much memory is used: a slot is as large as
the *maximum* of its members in whichever environment the graph runs, so every assignment it makes is safe for all of them.

Two greedy strategies are tried, in definition order with best fit and in order of decreasing size (Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference", 2020, "shared objects"); the one with the smaller peak is returned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from ggufc.formats.artifact import Affine, evaluate
from ggufc.passes.errors import PassError

REPRESENTATIVE_ENV: Mapping[str, int] = {
    **{"T": 512, "O": 1, "C": 4096, "KV": 4096, "R": 4096, "S": 1},
    **{"C4": 1024, "E4": 1024, "V4": 1024, "W4": 129, "C128": 256, "E128": 32, "V128": 256, "W128": 5},
}
"""Where sizes are compared unless the caller knows better: one full micro-batch of a prompt."""


@dataclass(frozen=True)
class Interval:
    """One value: ``size`` bytes (affine), defined at step ``start``, last read at step ``end`` (inclusive).

    ``inplace_with`` names the value that may hand its buffer over although both are live at ``start`` (its last read is the definition
    of this one).
    """

    id: Hashable
    size: Affine
    start: int
    end: int
    inplace_with: Hashable | None = None
    label: str = ""


@dataclass(frozen=True)
class PlannedSlot:
    """One buffer: the sizes that can be its largest, and the ids of its members in order of definition."""

    sizes: tuple[Affine, ...]
    members: tuple[Hashable, ...]

    def bytes(self, env: Mapping[str, int]) -> int:
        """Size of the buffer in ``env``."""
        return max((evaluate(size, env) for size in self.sizes), default=0)


@dataclass(frozen=True)
class Holder:
    """A slot at its size in some environment, with the label of the value that makes it that large."""

    slot: int
    bytes: int
    label: str
    members: int


@dataclass(frozen=True)
class Plan:
    """The slots, and the slot index of each value."""

    slots: tuple[PlannedSlot, ...]
    assignment: Mapping[Hashable, int]
    intervals: tuple[Interval, ...]

    def peak(self, env: Mapping[str, int], align: int = 1) -> int:
        """Bytes of all slots together, each rounded up to ``align``."""
        return sum(-(-slot.bytes(env) // align) * align for slot in self.slots)

    def holders(self, env: Mapping[str, int]) -> list[Holder]:
        """What the peak consists of, largest slot first."""
        by_id = {interval.id: interval for interval in self.intervals}
        result = []
        for index, slot in enumerate(self.slots):
            largest = max((by_id[member] for member in slot.members), key=lambda it: evaluate(it.size, env))
            result.append(Holder(index, slot.bytes(env), largest.label or str(largest.id), len(slot.members)))
        return sorted(result, key=lambda h: (-h.bytes, h.slot))

    def live_peak(self, env: Mapping[str, int]) -> tuple[int, int]:
        """``(step, bytes)`` where most bytes are live at once, a buffer handed over in place counted once: no plan can need less."""
        by_id = {it.id: it for it in self.intervals}
        handed_over = {it.inplace_with for it in self.intervals if it.inplace_with in by_id and _hands_over(by_id[it.inplace_with], it)}
        deltas: dict[int, int] = {}
        for it in self.intervals:
            size = evaluate(it.size, env)
            after = it.end if it.id in handed_over else it.end + 1
            deltas[it.start] = deltas.get(it.start, 0) + size
            deltas[after] = deltas.get(after, 0) - size
        best, live = (0, 0), 0
        for step in sorted(deltas):
            live += deltas[step]
            if live > best[1]:
                best = (step, live)
        return best


def plan(intervals: Sequence[Interval], env: Mapping[str, int] = REPRESENTATIVE_ENV) -> Plan:
    """Assign every interval to a slot.

    Raises ``PassError`` for an interval that ends before it starts, a repeated id, a negative coefficient or a symbol missing from ``env``.
    """
    _refuse_malformed(intervals, env)
    sizes = {it.id: evaluate(it.size, env) for it in intervals}
    in_order = sorted(intervals, key=lambda it: (it.start, it.end))
    by_size = sorted(intervals, key=lambda it: (-sizes[it.id], it.start, it.end))
    candidates = [_assign(order, sizes) for order in (in_order, by_size)]
    best = min(candidates, key=lambda slots: sum(slot.size for slot in slots))
    return _finish(best, intervals)


def check_plan(intervals: Sequence[Interval], result: Plan) -> None:
    """Raise ``PassError`` unless every value has a slot that is large enough in every environment and holds no other live value."""
    members: dict[int, list[Interval]] = {}
    for it in intervals:
        index = result.assignment.get(it.id)
        if index is None or not 0 <= index < len(result.slots):
            raise PassError(f"Value {it.label or it.id} has no slot in the memory plan.")
        if not any(_dominates(size, it.size) for size in result.slots[index].sizes):
            raise PassError(
                f"Slot {index} ({list(result.slots[index].sizes)} bytes) can be smaller than value {it.label or it.id} ({it.size} bytes)."
            )
        members.setdefault(index, []).append(it)
    for index, values in members.items():
        values.sort(key=lambda it: (it.start, it.end))
        latest = values[0]
        for value in values[1:]:
            if value.start <= latest.end and not _hands_over(latest, value):
                raise PassError(
                    f"Values {latest.label or latest.id} (steps {latest.start}..{latest.end}) and {value.label or value.id} "
                    f"(steps {value.start}..{value.end}) are live together in slot {index}."
                )
            latest = value if value.end >= latest.end else latest


def _refuse_malformed(intervals: Sequence[Interval], env: Mapping[str, int]) -> None:
    seen: set[Hashable] = set()
    for it in intervals:
        what = it.label or it.id
        if it.id in seen:
            raise PassError(f"Value {what} occurs twice in the memory plan's input; give each value its own id.")
        seen.add(it.id)
        if it.end < it.start:
            raise PassError(f"Value {what} ends at step {it.end}, before its definition at step {it.start}.")
        for symbol, factor in it.size.items():
            if factor < 0:
                raise PassError(
                    f"The size of value {what} shrinks with {symbol or 'nothing'} ({it.size}); a buffer needs a size that only grows."
                )
            for name in filter(None, symbol.split("*")):
                if name not in env:
                    raise PassError(f"The size of value {what} depends on symbol {name}, which the representative environment lacks.")


def _hands_over(earlier: Interval, later: Interval) -> bool:
    """May ``later`` be written into the buffer it is computed from?"""
    return (
        later.inplace_with is not None and later.inplace_with == earlier.id and later.start == earlier.end and later.start > earlier.start
    )


class _OpenSlot:
    """A slot being filled; members sorted by start never overlap, so only the neighbours of a newcomer can."""

    def __init__(self) -> None:
        self.members: list[tuple[int, int, int]] = []
        self.intervals: list[Interval] = []
        self.size = 0

    def fits(self, it: Interval) -> bool:
        at = bisect_left(self.members, (it.start, -1, -1))
        if at > 0:
            before = self.intervals[self.members[at - 1][2]]
            if before.end >= it.start and not _hands_over(before, it):
                return False
        if at < len(self.members):
            after = self.intervals[self.members[at][2]]
            if after.start <= it.end and not _hands_over(it, after):
                return False
        return True

    def add(self, it: Interval, size: int) -> None:
        insort(self.members, (it.start, it.end, len(self.intervals)))
        self.intervals.append(it)
        self.size = max(self.size, size)


def _assign(order: Sequence[Interval], sizes: Mapping[Hashable, int]) -> list[_OpenSlot]:
    """Greedy: the fitting slot that grows least, then wastes least; a new slot only if none fits."""
    slots: list[_OpenSlot] = []
    for it in order:
        need = sizes[it.id]
        best: _OpenSlot | None = None
        best_cost = (0, 0)
        for slot in slots:
            cost = (max(0, need - slot.size), max(0, slot.size - need))
            if (best is None or cost < best_cost) and slot.fits(it):
                best, best_cost = slot, cost
        if best is None:
            best = _OpenSlot()
            slots.append(best)
        best.add(it, need)
    return slots


def _dominates(big: Affine, small: Affine) -> bool:
    """Is ``big`` at least ``small`` wherever all symbols are at least zero?"""
    return all(big.get(symbol, 0) >= factor for symbol, factor in small.items())


def _finish(slots: Sequence[_OpenSlot], intervals: Sequence[Interval]) -> Plan:
    assignment: dict[Hashable, int] = {}
    planned = []
    for index, slot in enumerate(slots):
        sizes: list[Affine] = []
        for it in slot.intervals:
            size = {symbol: factor for symbol, factor in it.size.items() if factor} or {"": 0}
            if not any(_dominates(other, size) for other in sizes):
                sizes = [other for other in sizes if not _dominates(size, other)] + [size]
        members = tuple(slot.intervals[at].id for _, _, at in slot.members)
        planned.append(PlannedSlot(tuple(sizes), members))
        assignment.update(dict.fromkeys(members, index))
    return Plan(tuple(planned), assignment, tuple(intervals))
