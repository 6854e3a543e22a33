"""Measuring prompt and decode speed the way llama-bench does, so that its numbers and ours can stand in one table.

``pp N``: N tokens evaluated at once, logits of the last one. ``tg N``: N tokens evaluated one by one, logits of each, no sampling. Both
start from an empty cache, or (``@ dM``) after M tokens that do not count. One unmeasured run of the same kind comes first. Tokens are
random, the same for every run.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ggufc.errors import DriverError
from ggufc.files import size_words
from ggufc.machine import memory

if TYPE_CHECKING:
    from ggufc.runtime import Session

FORMATS = ("md", "json", "csv")
Row = dict[str, Any]


@dataclass(frozen=True)
class Test:
    """``n_prompt`` tokens at once, or ``n_gen`` tokens one by one (one of them is 0), after ``n_depth`` tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        return test_name(self.n_prompt, self.n_gen, self.n_depth)

    @property
    def tokens(self) -> int:
        return self.n_prompt or self.n_gen


def test_name(n_prompt: int, n_gen: int, n_depth: int) -> str:
    """``pp512``, ``tg128 @ d8192``: llama-bench's names."""
    return (f"pp{n_prompt}" if n_prompt else f"tg{n_gen}") + (f" @ d{n_depth}" if n_depth else "")


def tests(n_prompt: Sequence[int], n_gen: Sequence[int], n_depth: Iterable[int] = (0,)) -> list[Test]:
    """The tests of lists of prompt and generation lengths at every depth; a length of 0 leaves a kind out."""
    return [test for d in n_depth for test in [*(Test(n, 0, d) for n in n_prompt if n), *(Test(0, n, d) for n in n_gen if n)]]


def context_for(chosen: Sequence[Test]) -> int:
    """Cells the longest test needs."""
    return max(test.n_depth + test.tokens for test in chosen)


def require_memory(session: Session) -> None:
    """Refuse tests whose caches the machine cannot hold: memory is taken as cells are filled, so that the system would end the process
    after minutes of reading. DriverError.
    """
    from ggufc.runtime.executor import Executor

    machine = memory()
    if machine is None or not isinstance(session.executor, Executor):
        return
    caches, activations = session.executor.buffers.size, session.executor.arena_bytes
    if caches + activations > machine[1]:
        raise DriverError(
            f"{session.n_ctx} cells need {size_words(caches)} for caches and {size_words(activations)} for activations, but only "
            f"{size_words(machine[1])} of memory are available; use a smaller -p, -n or -d, or smaller cache types (-ctk q8_0 -ctv q8_0)"
        )


def rewind(session: Session, test: Test, n_batch: int, again: bool = False) -> None:
    """Leave the tokens before ``test`` in the cache and nothing else; ``again``: they have been evaluated for this test.

    Dropping cells leaves their memory in place, as llama-bench does: no page is touched for the first time while time runs.
    """
    import numpy as np

    from ggufc.runtime import RuntimeRefusal

    if again and test.n_depth:
        # Recurrent state and compacted windows cannot be cut back.
        with contextlib.suppress(RuntimeRefusal):
            session.seq_rm(0, test.n_depth, -1)
            return
    session.seq_rm(-1)
    tokens = np.random.default_rng(4321).integers(0, session.n_vocab, test.n_depth, dtype=np.int32)
    for at in range(0, test.n_depth, n_batch):
        session.decode(tokens[at : at + n_batch], logits="none")


def measure(session: Session, test: Test, repetitions: int, n_batch: int, on_run: Callable[[int], None] = lambda _: None) -> list[int]:
    """Nanoseconds of each repetition of ``test``."""
    import numpy as np

    tokens = np.random.default_rng(1234).integers(0, session.n_vocab, test.tokens, dtype=np.int32)

    def once(again: bool = True) -> int:
        rewind(session, test, n_batch, again)
        start = time.perf_counter_ns()
        if test.n_prompt:
            for at in range(0, test.n_prompt, n_batch):
                last = at + n_batch >= test.n_prompt
                session.decode(tokens[at : at + n_batch], logits="last" if last else "none")
        else:
            for at in range(test.n_gen):
                session.decode_view([int(tokens[at])])
        return time.perf_counter_ns() - start

    once(again=False)
    samples = []
    for index in range(repetitions):
        samples.append(once())
        on_run(index + 1)
    return samples


def row(test: Test, samples_ns: Sequence[int], facts: Row) -> Row:
    """One result with llama-bench's field names; speeds in tokens per second."""
    speeds = [1e9 * test.tokens / ns for ns in samples_ns]
    return {
        **facts,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(_deviation(samples_ns)),
        "avg_ts": round(statistics.fmean(speeds), 6),
        "stddev_ts": round(_deviation(speeds), 6),
        "samples_ns": list(samples_ns),
        "samples_ts": [round(speed, 6) for speed in speeds],
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def render(rows: Sequence[Row], form: str) -> str:
    """Rows as a Markdown table, a JSON array, or CSV (without the samples)."""
    if form == "json":
        return json.dumps(list(rows), indent=2) + "\n"
    if form == "csv":
        out = io.StringIO()
        names = [name for name in rows[0] if not name.startswith("samples_")] if rows else []
        writer = csv.DictWriter(out, names, extrasaction="ignore", quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    if form != "md":
        raise DriverError(f"there is no output format {form!r}; use {', '.join(FORMATS)}")
    header = ("model", "size", "params", "backend", "threads", "test", "t/s")
    table = [header, *(_cells(r) for r in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in table]
    rule = "| " + " | ".join("-" * width if i in {0, 3} else "-" * (width - 1) + ":" for i, width in enumerate(widths)) + " |"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def _cells(r: Row) -> tuple[str, ...]:
    params = f"{r['model_n_params'] / 1e6:.2f} M" if r["model_n_params"] else "-"
    name = test_name(r["n_prompt"], r["n_gen"], r["n_depth"])
    return (
        str(r["model_type"]),
        size_words(r["model_size"]),
        params,
        str(r["backends"]),
        str(r["n_threads"]),
        name,
        f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
    )


def parse_counts(text: str, what: str, least: int = 0) -> list[int]:
    """``"512,128"`` -> ``[512, 128]``; also ``1-4`` for ranges, as llama-bench takes them. Raises ``DriverError``."""
    values: list[int] = []
    for item in text.split(","):
        low, dash, high = item.strip().partition("-")
        try:
            first = int(low)
            last = int(high) if dash else first
        except ValueError:
            raise DriverError(f"{what} {text!r}: numbers separated by commas are expected, or a range such as 1-4") from None
        if first < least or last < first or last - first > 1024:
            raise DriverError(f"{what} {text!r}: {item.strip()!r} is out of range (at least {least}, ranges ascending)")
        values.extend(range(first, last + 1))
    return values
