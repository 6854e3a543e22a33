"""Speed of the product kernels against the machine's own limits, in one run.

    python benchmarks/kernels.py [--type q4_1 ...] [--shape 4096x4096 ...] [--threads N] [--target LEVEL]

Decode is one token: packed weight bytes per second, and their share of the memory stream read in the same run. Prefill is many tokens:
integer multiply-adds per second, and their share of the rate of the dot-product instruction alone. Weights are random bytes and cycled
through memory larger than the caches; figures are the best of several rounds. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import ClassVar

import click
import numpy as np

from ggufc.codegen.cpu import driver
from ggufc.codegen.cpu.target import Target, resolve
from ggufc.codegen.emitter import I32, Emitter, vec
from ggufc.codegen.kernel_build import build_image
from ggufc.codegen.kernels.base import KernelSpec, symbol
from ggufc.codegen.kernels.matmul import MatMul, grid
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.weights import FloatFormat, q8_record, weight_format
from ggufc.formats import abi
from ggufc.runtime.image import CodeImage
from ggufc.runtime.team import Team

STREAM_BYTES = 96 << 20
STREAM_PART = 8 << 20
STREAM_TILE = 256 << 10


@dataclass(frozen=True)
class StreamRead:
    """Reads ``STREAM_TILE`` bytes per tile; their sum goes to one word per tile."""

    arg_names: ClassVar[tuple[str, ...]] = ("data", "sums")

    def scratch_bytes(self, target: Target) -> int:
        return 0

    def emit(self, e: Emitter) -> None:
        ty = vec(I32, e.target.lanes)
        size = 4 * e.target.lanes
        data = e.at(e.arg_ptr(0), e.tile, STREAM_TILE)
        sums = [e.var(ty, e.const(ty, 0)) for _ in range(8)]
        with e.for_range(0, STREAM_TILE, 8 * size) as i:
            for j, s in enumerate(sums):
                s.set(e.b.add(s.get(), e.load(ty, e.gep(e.gep(data, i), j * size))))
        total = sums[0].get()
        for s in sums[1:]:
            total = e.b.add(total, s.get())
        e.store(total, e.at(e.arg_ptr(1), e.tile, 64))
        e.ret()


@dataclass(frozen=True)
class DotRate:
    """``ROUNDS`` x 8 independent dot products of registers."""

    arg_names: ClassVar[tuple[str, ...]] = ("data", "sums")
    ROUNDS: ClassVar[int] = 200_000

    def scratch_bytes(self, target: Target) -> int:
        return 0

    def emit(self, e: Emitter) -> None:
        ty = vec(I32, e.target.lanes)
        u, s = e.load(ty, e.arg_ptr(0)), e.load(ty, e.gep(e.arg_ptr(0), 64))
        sums = [e.var(ty, e.const(ty, j)) for j in range(8)]
        with e.for_range(0, self.ROUNDS):
            for v in sums:
                v.set(e.dot4(v.get(), u, s, 127))
        total = sums[0].get()
        for v in sums[1:]:
            total = e.b.add(total, v.get())
        e.store(total, e.at(e.arg_ptr(1), e.tile, 64))
        e.ret()


class Bench:
    """A thread team over the kernels of one target."""

    def __init__(self, target: Target, specs: list[KernelSpec], threads: int) -> None:
        linked, _ = build_image(specs, target, jobs=1)
        self._code = CodeImage(np.frombuffer(linked.code, np.uint8))
        self._entry = {name: self._code.address(at) for name, (at, _) in linked.symbols.items()}
        scratch = max(64, *(spec.scratch_bytes(target) for spec in specs))
        self._team = Team(self._entry[driver.WORKER], self._entry[driver.EVAL], threads, scratch, keep=self._code)

    def close(self) -> None:
        self._team.close()

    def seconds(self, spec: KernelSpec, launches: list[list[int]], tiles: int, tokens: int, rounds: int) -> float:
        """Time of running ``launches`` (argument lists) one after the other: the sum of each one's best time over the rounds.

        Single launches are short, so most of them escape whatever else the machine does.
        """
        table = np.zeros((len(launches), abi.LAUNCH_WORDS), np.int64)
        args = np.array(launches, np.int64)
        counters, told = np.zeros(abi.COUNTER_WORDS, np.int64), np.zeros(1, np.int64)
        claims = np.zeros((self._team.n_threads, abi.CLAIM_WORDS), np.int64)
        params = np.full(len(abi.PARAMS), tokens, np.int64)
        records = np.zeros((len(launches), abi.EXEC_WORDS), np.int64)
        for i in range(len(launches)):
            table[i, : abi.LAUNCH_WAIT + 1] = [self._entry[symbol(spec)], args[i].ctypes.data, -1, 1, tiles, 0]
            records[i, :4] = [1, table[i].ctypes.data, params.ctypes.data, counters.ctypes.data]
            records[i, [abi.EXEC_TILES, abi.EXEC_CLAIMS]] = [told.ctypes.data, claims.ctypes.data]
        best = np.full(len(launches), np.inf)
        for _ in range(rounds):
            for i, record in enumerate(records):
                start = time.perf_counter()
                self._team.eval(record.ctypes.data)
                best[i] = min(best[i], time.perf_counter() - start)
        return float(best.sum())


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes at a 64-byte boundary."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def random_weight(rng: np.random.Generator, spec: MatMul) -> np.ndarray:
    """A packed weight of random codes and scales near one: denormals and infinities would slow or spoil the arithmetic."""
    fmt = weight_format(spec.format)
    packed = aligned(fmt.packed_bytes(spec.k, spec.n))
    if isinstance(fmt, FloatFormat):
        one = {2: 0x3C, 4: 0x3F}[fmt.size]
        packed.reshape(-1, fmt.size)[:, -1] = one
        return packed
    packed[:] = rng.integers(0, 256, packed.size, np.uint8)
    size, m = fmt.chunk_bytes(spec.k), fmt.chunk_blocks(spec.k)
    groups = packed.reshape(-1, fmt.group_bytes(spec.k))[:, : spec.k // 32 // m * size]
    groups.reshape(len(groups), -1, size)[:, :, 1 : fmt.chunk_head(spec.k) : 2] = 0x34
    return packed


def measure(bench: Bench, spec: MatMul, prefill: int, rounds: int) -> dict[str, float]:
    """GB/s of decode and GMAC/s of prefill."""
    fmt = weight_format(spec.format)
    rng = np.random.default_rng(1)
    one = random_weight(rng, spec)
    copies = max(1, round(STREAM_BYTES / one.size))
    weights = aligned(one.size * copies)
    weights.reshape(copies, -1)[:] = one
    row = 4 * spec.k if isinstance(fmt, FloatFormat) else q8_record(spec.k).stride
    x = aligned(row * prefill)
    x.reshape(prefill, row)[:, : spec.k] = rng.integers(0, 60, spec.k, np.uint8)
    y = aligned(4 * spec.n * prefill)
    tail = [x.ctypes.data, y.ctypes.data, spec.k, spec.n, 0, 0, 0, rows_argument(spec.rows)]
    launches = [[weights.ctypes.data + i * one.size, *tail] for i in range(copies)]
    decode = bench.seconds(spec, launches, grid(spec), 1, rounds)
    few = launches[: max(1, min(copies, 2_000_000_000 // (spec.k * spec.n * prefill) + 1))]
    many = bench.seconds(spec, few, grid(spec), prefill, max(2, rounds // 3))
    return {
        "decode_gb_s": one.size * copies / decode / 1e9,
        "prefill_gmac_s": len(few) * spec.k * spec.n * prefill / many / 1e9,
    }


@click.command(help=__doc__)
@click.option("--type", "types", multiple=True, default=("q4_1", "q8_0", "q5_0", "q6_k", "q4_k"), show_default=True)
@click.option("--shape", "shapes", multiple=True, default=("4096x4096",), show_default=True, help="columns x rows")
@click.option("--threads", default=1, show_default=True)
@click.option("--target", default="native", show_default=True)
@click.option("--prefill", default=512, show_default=True, help="tokens of a prefill")
@click.option("--rounds", default=7, show_default=True)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def main(types: tuple[str, ...], shapes: tuple[str, ...], threads: int, target: str, prefill: int, rounds: int, output: str) -> None:
    resolved = resolve(target)
    stream, dots = StreamRead(), DotRate()
    data = aligned(STREAM_BYTES)
    data[:] = 1
    sums = aligned(64 * (STREAM_BYTES // STREAM_TILE))
    rows = []
    for shape in shapes:
        k, n = (int(v) for v in shape.split("x"))
        for name in types:
            if k % weight_format(name).columns:
                continue
            spec = MatMul(name, k, n, "none", False, "T")
            bench = Bench(resolved, [stream, dots, spec], threads)
            try:
                parts = [[data.ctypes.data + i * STREAM_PART, sums.ctypes.data] for i in range(STREAM_BYTES // STREAM_PART)]
                read = bench.seconds(stream, parts, STREAM_PART // STREAM_TILE, 1, rounds)
                dot = bench.seconds(dots, [[data.ctypes.data, sums.ctypes.data]], threads, 1, rounds)
                result = measure(bench, spec, prefill, rounds)
            finally:
                bench.close()
            limit = STREAM_BYTES / read / 1e9
            mac_limit = threads * DotRate.ROUNDS * 8 * 4 * resolved.lanes / dot / 1e9
            result |= {"type": name, "k": k, "n": n, "threads": threads, "stream_gb_s": limit, "dot_gmac_s": mac_limit}
            rows.append(result)
            if output == "text":
                decode, prefill_rate = result["decode_gb_s"], result["prefill_gmac_s"]
                click.echo(
                    f"{name:8} {k:6}x{n:<6} decode {decode:6.1f} GB/s ({decode / limit:5.0%} of {limit:.1f})   "
                    f"prefill {prefill_rate:6.0f} GMAC/s ({prefill_rate / mac_limit:5.0%} of {mac_limit:.0f})"
                )
    if output == "json":
        click.echo(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
