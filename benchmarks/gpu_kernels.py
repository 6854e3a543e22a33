"""What a GPU run measures of memory and single kernels (``gpu``): sizes, copies, products, products with experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.nvptx import describe, emit_ptx, roofline
from ggufc.codegen.nvptx.expert_tiles import tile_from
from ggufc.codegen.nvptx.products import TILE_FROM
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.formats import cuda
from ggufc.formats.abi import PARAMS
from ggufc.runtime.cuda import Device


@dataclass(frozen=True)
class Sizes:
    """What to measure: an output and input width, token counts, the prompt and decoding of the model, its own shape, and experts'."""

    k: int = 4096
    n: int = 28672
    tokens: tuple[int, ...] = (1, 4, 16, 64, 512)
    types: tuple[str, ...] = ("q4_k", "q6_k", "q8_0", "f16", "f32")
    expert_types: tuple[str, ...] = ("q4_k", "q6_k", "f16")
    prompt: int = 512
    decode: int = 64
    copies: int = 4
    buffer: int = 256 << 20
    rounds: int = 10
    model: dict[str, int] = field(
        default_factory=lambda: {"embd": 4096, "ffn": 14336, "heads": 32, "groups": 8, "head": 128, "vocab": 128256}
    )
    experts: dict[str, int] = field(default_factory=lambda: {"embd": 2048, "ffn": 768, "all": 128, "used": 8})


TINY = Sizes(
    256, 32, (1, 17), ("q8_0",), ("q8_0",), 3, 3, 2, 1 << 12, 2,
    {"embd": 256, "ffn": 256, "heads": 4, "groups": 2, "head": 64, "vocab": 64}, {"embd": 64, "ffn": 32, "all": 4, "used": 2},
)  # fmt: skip


def best_of(device: Device, rounds: int, action: Callable[[int], None]) -> float:
    """Seconds of the fastest round."""
    best = float("inf")
    for i in range(rounds):
        start = device.mark()
        action(i)
        stop = device.mark()
        device.synchronize()
        best = min(best, device.elapsed(start, stop) / 1e3)
    return max(best, 1e-9)


@contextmanager
def buffers(device: Device, *sizes: int) -> Iterator[list[int]]:
    held = []
    try:
        for size in sizes:
            held.append(device.alloc(size))
        yield held
    finally:
        for address in held:
            device.free(address)


def copies(device: Device, size: int) -> str:
    pinned = device.host_array(size)
    with buffers(device, size) as (address,):
        there = best_of(device, 5, lambda _: device.send(address, pinned))
        back = best_of(device, 5, lambda _: device.receive(address, pinned))
    return f"{size / there / 1e9:.1f} GB/s to the device, {size / back / 1e9:.1f} from it (pinned)"


def launcher(device: Device, target: str, spec: MatMul | MatMulId, tokens: int) -> Callable[[list[int], int], None]:
    """``launch(arguments, params)`` of the entry that computes a product of ``tokens`` tokens; ``params``: address of the symbols."""
    module = device.load(emit_ptx([spec], target.removeprefix("cuda:")))
    (entry,) = [e for e in describe(spec).entries if e.low <= tokens and (not e.high or tokens <= e.high)]
    count = cuda.tiles(entry.grid, {"T": tokens})
    function = device.function(module, entry.symbol)
    return lambda words, params: device.launch(function, min(count, cuda.MAX_GRID), entry.block, [*words, params, 0, 0, count])


def activation_bytes(dtype: str, k: int) -> int:
    return 4 * k if dtype in ("f32", "f16", "bf16") else q8_record(k).stride


def outcome(dtype: str, seconds: float, moved: float, operations: float, tiles: bool) -> str:
    """Rates, and the share of what the roofline allows."""
    machine = roofline.H200
    rate = machine.f32 if dtype in ("f32", "f16", "bf16") else machine.tensor if tiles else machine.dp4a
    limit = max(moved / machine.bandwidth, operations / rate)
    return (
        f"{1e6 * seconds:.1f} us, {moved / seconds / 1e9:.0f} GB/s, {operations / seconds / 1e12:.1f} Top/s; "
        f"{100 * limit / seconds:.0f} % of the roofline of {machine.name}"
    )


def symbols_of(tokens: int) -> np.ndarray:
    return np.array([tokens if name == "T" else 0 for name in PARAMS], np.int64)


def product(device: Device, target: str, dtype: str, tokens: int, sizes: Sizes) -> str:
    """Time of one product, cycling through copies of the weights so that the second-level cache does not hold them."""
    k, n = sizes.k, sizes.n
    spec = MatMul(dtype, k, n, "none", False, "T")
    launch = launcher(device, target, spec, tokens)
    weight, activation = weight_format(dtype).packed_bytes(k, n), activation_bytes(dtype, k)
    with buffers(device, *[weight] * sizes.copies, tokens * activation, 4 * tokens * n, symbols_of(tokens).nbytes) as held:
        *weights, x, y, params = held
        for address, size in [*((w, weight) for w in weights), (x, tokens * activation)]:
            device.fill(address, size)
        device.upload(params, symbols_of(tokens))

        def once(i: int) -> None:
            launch([weights[i % len(weights)], x, y, k, n, 0, 0, 0, rows_argument("T")], params)

        seconds = best_of(device, sizes.rounds, once)
    return outcome(dtype, seconds, weight, 2.0 * k * n * tokens, tokens >= TILE_FROM)


def experts(device: Device, target: str, dtype: str, tokens: int, sizes: Sizes) -> str:
    """Time of gate and up of the experts that tokens choose at random."""
    shape = sizes.experts
    spec = MatMulId(dtype, shape["embd"], shape["ffn"], shape["all"], shape["used"], True, epilogue="silu_glu")
    launch = launcher(device, target, spec, tokens)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(spec.n_expert)[: spec.n_used] for _ in range(tokens)]).astype(np.int32)
    weights, activation = spec.n_expert * spec.expert_bytes, activation_bytes(dtype, spec.k)
    results = 4 * ids.size * spec.n
    with buffers(device, weights, weights, tokens * activation, results, ids.nbytes, symbols_of(tokens).nbytes) as held:
        gate, up, x, y, chosen, params = held
        for address, size in ((gate, weights), (up, weights), (x, tokens * activation)):
            device.fill(address, size)
        device.upload(chosen, ids)
        device.upload(params, symbols_of(tokens))
        seconds = best_of(device, sizes.rounds, lambda _: launch([gate, x, y, chosen, rows_argument("T"), up], params))
    moved = 2.0 * len(np.unique(ids)) * spec.expert_bytes
    return outcome(dtype, seconds, moved, 4.0 * ids.size * spec.k * spec.n, tokens >= tile_from(spec, TILE_FROM))
