"""A report as tables for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ggufc.diff.walk import Entry, MicroBatch, Report

_ROWS = 20
_NAMES = 8
_WIDTH = 200
"""Columns of a table that no terminal bounds."""


def show(report: Report, stream: IO[str], everything: bool = False) -> None:
    """The verdict, the first difference in words, and a table of all of them (the first few unless ``everything``)."""
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH)
    for line in summary(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    found = report.first
    if found is None:
        return
    for line in _words(report, *found, everything):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    rows = [(batch, entry) for batch in report.batches for entry in batch.differing]
    console.print(_table(report, rows if everything else rows[:_ROWS]))
    if len(rows) > _ROWS and not everything:
        console.print(f"... and {len(rows) - _ROWS} more (--all shows them)", highlight=False)


def summary(report: Report) -> Iterator[str]:
    """What was compared, and how much of it is equal."""
    entries = [entry for batch in report.batches for entry in batch.entries]
    equal = sum(entry.distance is not None and entry.distance.equal_bits for entry in entries)
    differing = sum(entry.differs for entry in entries)
    missing = {name for batch in report.batches for name in batch.missing}
    yield f"left   {report.left}"
    yield f"right  {report.right}"
    how = "each node from the other side's operands" if report.following else "each side from its own operands: errors add up"
    yield f"how    {how}"
    steps = len({batch.step for batch in report.batches})
    yield (
        f"{steps} steps, {len(report.batches)} micro-batches, {len(entries)} results compared: {equal} with equal bits, "
        f"{len(entries) - equal - differing} within tolerance, {differing} different; {len(missing)} nodes known to one side only"
    )
    if report.strangers:
        yield f"no node is called {_list(report.strangers, False)}: what --names says of these tensors fits none of the graph"


def _list(names: Sequence[str], everything: bool) -> str:
    shown = names if everything else names[:_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _words(report: Report, batch: MicroBatch, entry: Entry, everything: bool) -> Iterator[str]:
    yield ""
    yield f"first difference: {entry.name}  ({entry.op}, {_shape(entry)}), step {batch.step}, {_sizes(batch)}"
    apart = entry.distance
    if apart is None:
        other = f"{entry.dtype}[{', '.join(map(str, entry.other_shape))}]"
        yield f"  the shapes do not fit: left {_shape(entry)}, right {other}"
    else:
        what = "of the chosen entries differ" if entry.dtype == "i32" else "of the largest value of its row"
        yield f"  error {apart.error:.2e} {what}, tolerance {entry.tolerance:.1e}"
        yield f"  at {list(apart.index)} (ne order): left {apart.left:.9g}, right {apart.right:.9g}"
    if entry.inside:
        hint = " (--keep NAME,... makes them results)" if report.compiled else ""
        yield f"  computed along the way and not known by themselves: {_list(entry.inside, everything)}{hint}"
    yield ""


def _sizes(batch: MicroBatch) -> str:
    return f"micro-batch {batch.number} ({', '.join(f'{name} = {batch.env[name]}' for name in ('T', 'O', 'KV', 'R') if name in batch.env)})"


def _shape(entry: Entry) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"


def _table(report: Report, rows: list[tuple[MicroBatch, Entry]]) -> Table:
    table = Table("step", "node", "operator", "shape", "error", "tolerance", "worst at", "left", "right", box=None, pad_edge=False)
    for batch, entry in rows:
        step = batch.step if not batch.number else f"{batch.step}.{batch.number}"
        apart = entry.distance
        numbers = (
            ("shapes", f"{entry.tolerance:.1e}", "", _shape(entry), "x".join(map(str, entry.other_shape)))
            if apart is None
            else (f"{apart.error:.2e}", f"{entry.tolerance:.1e}", str(list(apart.index)), f"{apart.left:.7g}", f"{apart.right:.7g}")
        )
        table.add_row(step, entry.name, entry.op, _shape(entry), *numbers)
    return table


def as_data(report: Report) -> dict[str, Any]:
    """Everything as plain data; infinite errors and values are texts."""
    return {
        "left": report.left,
        "right": report.right,
        "following": report.following,
        "equal": report.first is None,
        "strangers": report.strangers,
        "first": None if report.first is None else {"step": report.first[0].step, **_entry_data(report.first[1])},
        "micro_batches": [
            {
                "step": batch.step,
                "number": batch.number,
                "sizes": batch.env,
                "compared": len(batch.entries),
                "missing": batch.missing,
                "entries": [_entry_data(entry) for entry in batch.entries],
            }
            for batch in report.batches
        ],
    }


def _entry_data(entry: Entry) -> dict[str, Any]:
    apart = entry.distance
    data: dict[str, Any] = {
        "node": entry.name,
        "op": entry.op,
        "dtype": entry.dtype,
        "ne": list(entry.shape),
        "differs": entry.differs,
        "tolerance": entry.tolerance,
        "inside": list(entry.inside),
    }
    if apart is None:
        return data | {"other_ne": list(entry.other_shape)}
    numbers = {"error": apart.error, "left": apart.left, "right": apart.right}
    plain = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    return data | plain | {"index": list(apart.index), "equal_bits": apart.equal_bits}
