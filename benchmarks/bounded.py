"""Steps one after another in a process of their own, each bounded in time, and their results in a table that is on disk at any moment.

A step that fails, hangs or takes its process down costs its own row: the process is stopped with everything it started, and another goes on
with the next step. So an error that leaves a GPU unusable for a process spoils nothing else either.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

STARTING = 60.0
"""Seconds a process may take before its first step."""
GRACE = 20.0
"""Seconds that the last step may run on when time is over."""


@dataclass(frozen=True)
class Step:
    """``action`` returns the result, None for a check that holds, and raises for one that does not; it is stopped after ``seconds``. Where
    an ``essential`` step fails, nothing after it is tried, nor listed.
    """

    kind: str
    what: str
    action: Callable[[], str | None]
    seconds: float = 60.0
    essential: bool = False


@dataclass
class Report:
    """Rows of the table: (kind, what, result, seconds it took), written to ``output`` as they come. ``wrong`` counts what failed."""

    output: Path | None = None
    rows: list[tuple[str, str, str, float]] = field(default_factory=list)
    wrong: int = 0

    def add(self, step: Step, result: str, took: float = 0.0, failed: bool = False) -> None:
        result = f"FAILED: {result}" if failed else result
        self.wrong += failed
        self.rows.append((step.kind, step.what, result, took))
        print(f"{step.what}: {result}", file=sys.stderr, flush=True)
        if self.output is not None:
            beside = self.output.with_name(self.output.name + ".part")
            beside.write_text(self.table() + "\n", encoding="utf-8")
            beside.replace(self.output)

    def table(self) -> str:
        lines = ["| kind | what | result | s |", "|---|---|---|---:|"]
        return "\n".join([*lines, *(f"| {kind} | {what} | {result} | {took:.1f} |" for kind, what, result, took in self.rows)])


def work(steps: Sequence[Step], first: int) -> None:
    """What the process does: the steps from ``first`` on, up to one that fails; a line of JSON on stdout for each."""
    told = sys.stdout
    with redirect_stdout(sys.stderr):
        for step in steps[first:]:
            began = time.perf_counter()
            failed = False
            try:
                result = step.action() or "holds"
            except Exception as error:  # the rest is worth having whatever this one runs into
                failed, result = True, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(json.dumps([result, time.perf_counter() - began, failed]), file=told, flush=True)
            if failed:
                return


def supervise(steps: Sequence[Step], command: Callable[[int], Sequence[str]], report: Report, end: float) -> None:
    """Run all steps by processes; ``command(first)`` starts one that calls ``work(steps, first)``. Nothing begins after ``end`` (by
    ``time.monotonic``).
    """
    at = 0
    while at < len(steps) and time.monotonic() <= end:
        at = _by_one_process(steps, at, command(at), report, end)
    for step in steps[at:]:
        report.add(step, "left out: no time")


def _by_one_process(steps: Sequence[Step], at: int, command: Sequence[str], report: Report, end: float) -> int:
    """The step to go on with: the first that this process did not get to."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    spare = STARTING
    try:
        while at < len(steps) and time.monotonic() <= end:
            step, began = steps[at], time.monotonic()
            at += 1
            limit = min(step.seconds, end + GRACE - began) + spare
            try:
                line = lines.get(timeout=max(limit, 1.0))
            except queue.Empty:
                report.add(step, f"stopped after {time.monotonic() - began:.0f} s", time.monotonic() - began, failed=True)
                return len(steps) if step.essential else at
            spare = 0.0
            if not line:
                status = process.wait()
                report.add(step, f"its process ended with status {status}", time.monotonic() - began, failed=True)
                return len(steps) if step.essential else at
            result, took, failed = json.loads(line)
            report.add(step, result, took, failed)
            if failed:
                return len(steps) if step.essential else at
        return at
    finally:
        _stop(process)


def _pump(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Lines as they come, and an empty one at the end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def _stop(process: subprocess.Popen[str]) -> None:
    """End the process with all it started; one that the system cannot end is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
