"""Where the time of an evaluation goes: per node group and per kernel, with bytes moved and the share of the memory's speed.

Each launch's time is the median over the evaluations of a test, so that a launch that happened to be interrupted does not distort the
picture.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
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
    """One launch: seconds waiting for earlier launches, seconds working, bytes it moves."""

    node: str
    kernel: str
    waiting: float
    working: float
    bytes: int

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
        Entry(launch.node, kernels[launch.kernel].signature, float(wait), float(work), evaluate(launch.bytes, env))
        for launch, (wait, work) in zip(executor.program.launches, times)
    ]


def report(entries: Sequence[Entry], limit: float, top: int = 12) -> list[str]:
    """Two tables: node groups (with ``barriers``: waiting for other launches), and the kernels that take longest. ``limit``: bytes/s."""
    whole = sum(e.waiting + e.working for e in entries) or 1.0
    lines = [f"{'group':12} {'launches':>8} {'us':>9} {'share':>6} {'MB':>8} {'GB/s':>6} {'% of stream read':>17}"]
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    for name, members in sorted(groups.items(), key=lambda item: -sum(e.working for e in item[1])):
        lines.append(_line(name, len(members), sum(e.working for e in members), whole, sum(e.bytes for e in members), limit))
    lines.append(
        f"{'barriers':12} {'':8} {1e6 * sum(e.waiting for e in entries):9.1f} {100 * sum(e.waiting for e in entries) / whole:5.1f}%"
    )
    lines.append(_line("total", len(entries), whole, whole, sum(e.bytes for e in entries), limit))
    kernels: dict[str, list[Entry]] = {}
    for entry in entries:
        kernels.setdefault(entry.kernel, []).append(entry)
    order = sorted(kernels.items(), key=lambda item: -sum(e.working for e in item[1]))
    lines.append("kernels")
    for name, members in order[:top]:
        seconds = sum(e.working for e in members)
        lines.append(f"  {100 * seconds / whole:5.1f}% {1e6 * seconds / len(members):8.1f} us x {len(members):<4} {_short(name)}")
    if len(order) > top:
        lines.append(f"  and {len(order) - top} more")
    return lines


def _line(name: str, launches: int, seconds: float, whole: float, size: int, limit: float) -> str:
    speed = size / seconds if seconds else 0.0
    left = f"{name:12} {launches:8} {1e6 * seconds:9.1f} {100 * seconds / whole:5.1f}%"
    return f"{left} {size / 1e6:8.2f} {speed / 1e9:6.1f} {100 * speed / limit:16.0f}%"


def _short(signature: str, width: int = 110) -> str:
    return signature if len(signature) <= width else signature[: width - 3] + "..."
