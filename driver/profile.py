"""Where the time of an evaluation goes: per node group and per kernel, with bytes moved and the share of the memory's speed.

Each launch's time is the median over the evaluations of a test, so that a launch that happened to be interrupted does not distort the
picture.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufc.formats.artifact import evaluate, layer_of

if TYPE_CHECKING:
    import numpy as np

    from ggufc.benchmark import Test
    from ggufc.runtime import Session
    from ggufc.runtime.cuda import Device

_STREAM_BYTES = 1 << 28
_FEED_FORWARD = re.compile(r"(ffn|post_ffw|exp)")


@dataclass(frozen=True)
class Entry:
    """One launch: seconds waiting for earlier launches, seconds working, bytes it moves, and where it runs (``CPU`` or ``GPU``)."""

    node: str
    kernel: str
    waiting: float
    working: float
    bytes: int
    place: str = "CPU"

    @property
    def group(self) -> str:
        """``blk.*.attn``, ``blk.*.ffn``, ``embedding`` or ``output``."""
        if layer_of(self.node) is None:
            return "embedding" if self.node.startswith("embd") else "output"
        return "blk.*.ffn" if _FEED_FORWARD.search(self.node) else "blk.*.attn"


def stream_read(threads: int) -> float:
    """Bytes per second of ``threads`` threads that read memory once: the limit of decoding."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    parts = [np.ones(_STREAM_BYTES // 8 // threads, np.int64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(6):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = max(best, sum(p.nbytes for p in parts) / (time.perf_counter() - start))
    return best


def device_fill(device: Device, most: int = _STREAM_BYTES) -> float:
    """Bytes per second at which a GPU fills up to ``most`` bytes of its memory: what it can move, without a kernel of its own."""
    size = min(most, device.free_memory() // 2)
    address = device.alloc(size)
    try:
        best = 0.0
        for _ in range(6):
            start = device.mark()
            device.fill(address, size)
            stop = device.mark()
            device.synchronize()
            best = max(best, size / (device.elapsed(start, stop) / 1e3))
        return best
    finally:
        device.free(address)


def record(session: Session, test: Test) -> list[Entry]:
    """Run ``test`` once more and return its launches with their median times; the session was opened with ``profile=True``."""
    import numpy as np

    from ggufc.benchmark import rewind

    executor = session.executor
    tokens = np.random.default_rng(1234).integers(0, session.n_vocab, test.tokens, dtype=np.int32)
    rewind(session, test, session.n_batch)
    cycles: list[np.ndarray] = []
    step = min(test.n_prompt, session.n_ubatch) or 1
    start = time.perf_counter()
    for at in range(0, test.tokens - test.tokens % step, step):
        session.decode(tokens[at : at + step], logits="last")
        cycles.append(executor.profile())
    seconds = time.perf_counter() - start
    stacked = np.stack(cycles).astype(np.float64)
    # Python's share lies between evaluations, so the cycle counter runs a little slower than this says.
    times = np.median(stacked, axis=0) * (seconds / stacked.sum())
    env = {"T": step, "O": 1, "C": session.cells.size, "KV": session.cells.n_kv(), "R": session.cells.used}
    kernels = session.artifact.manifest.kernels
    return [
        Entry(
            launch.node,
            kernels[launch.kernel].signature,
            float(wait),
            float(work),
            evaluate(launch.bytes, env),
            "GPU" if executor.on_device(i) else "CPU",
        )
        for i, (launch, (wait, work)) in enumerate(zip(executor.program.launches, times))
    ]


def report(entries: Sequence[Entry], limits: Mapping[str, float], top: int = 12) -> list[str]:
    """Two tables: node groups (with ``barriers``: waiting for other launches and copies), and the kernels that take longest. ``limits``:
    bytes per second that the memory of each place moves; with more than one place, groups and kernels are told apart by it.
    """
    whole = sum(e.waiting + e.working for e in entries) or 1.0
    groups = _gathered(entries, len(limits) > 1, lambda entry: entry.group)
    width = max([12, *(len(name) for name in groups)])
    lines = [f"{'group':{width}} {'launches':>8} {'us':>9} {'share':>6} {'MB':>8} {'GB/s':>6} {'% of stream read':>17}"]

    def line(name: str, members: Sequence[Entry], seconds: float) -> str:
        size = sum(e.bytes for e in members)
        ideal = sum(e.bytes / limits[e.place] for e in members)
        speed, share = (size / seconds, ideal / seconds) if seconds else (0.0, 0.0)
        left = f"{name:{width}} {len(members):8} {1e6 * seconds:9.1f} {100 * seconds / whole:5.1f}%"
        return f"{left} {size / 1e6:8.2f} {speed / 1e9:6.1f} {100 * share:16.0f}%"

    lines += [line(name, members, _worked(members)) for name, members in groups.items()]
    waited = sum(e.waiting for e in entries)
    lines.append(f"{'barriers':{width}} {'':8} {1e6 * waited:9.1f} {100 * waited / whole:5.1f}%")
    lines.append(line("total", entries, whole))
    kernels = _gathered(entries, len(limits) > 1, lambda entry: entry.kernel)
    lines.append("kernels")
    for name, members in list(kernels.items())[:top]:
        seconds = _worked(members)
        lines.append(f"  {100 * seconds / whole:5.1f}% {1e6 * seconds / len(members):8.1f} us x {len(members):<4} {_short(name)}")
    if len(kernels) > top:
        lines.append(f"  and {len(kernels) - top} more")
    return lines


def _gathered(entries: Sequence[Entry], by_place: bool, what: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    """Entries by name, and by place before it if wanted; what takes longest first."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(f"{entry.place} {what(entry)}" if by_place else what(entry), []).append(entry)
    return dict(sorted(found.items(), key=lambda item: -_worked(item[1])))


def _worked(entries: Sequence[Entry]) -> float:
    return sum(e.working for e in entries)


def _short(signature: str, width: int = 110) -> str:
    return signature if len(signature) <= width else signature[: width - 3] + "..."
