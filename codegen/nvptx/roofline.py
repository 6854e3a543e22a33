"""A performance model on paper: what a schedule moves and computes, and the time a machine's limits allow.

Counts come from the schedule's own steps (``Step.bytes``, ``Step.flops``); attention, whose work depends on the context, and products with
experts, which read those that were chosen, are counted here from their shapes. A launch takes the larger of its memory and its arithmetic
time, and at least ``launch`` seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggufc.codegen.kernels.attention_cpu import FlashAttn, FlashAttnSplits
from ggufc.codegen.kernels.base import KernelSpec
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.schedule import Schedule, Step
from ggufc.codegen.weights import activation_mode, q8_record, weight_format
from ggufc.formats.artifact import evaluate

from .attention import token_block
from .expert_tiles import tile_from
from .products import TILE_FROM


@dataclass(frozen=True)
class Machine:
    """Bytes per second of memory; operations per second of ``dp4a`` and of int8 tensor cores (a product and a sum are two) and of f32;
    seconds per dependent launch.
    """

    name: str
    bandwidth: float
    dp4a: float
    tensor: float
    f32: float
    launch: float


H200 = Machine("H200 SXM", 4.8e12, 132 * 64 * 8 * 1.98e9, 1979e12, 132 * 128 * 2 * 1.98e9, 2.0e-6)
"""4.8 TB/s; 132 SMs at 1.98 GHz with 64 ``dp4a`` and 128 fused multiply-adds per clock each. 2 us is what launches on one stream cost each
other.
"""


@dataclass
class Share:
    """What all launches of one kind move and compute, and how long that takes at least."""

    kind: str
    launches: int = 0
    bytes: float = 0.0
    operations: float = 0.0
    seconds: float = 0.0


def estimate(schedule: Schedule, machine: Machine, tokens: int, context: int, outputs: int = 1) -> list[Share]:
    """Shares by kind, the longest first, for ``tokens`` tokens that end a context of ``context`` entries."""
    env = symbols(tokens, context, outputs)
    shares: dict[str, Share] = {}
    for step in schedule.steps:
        if isinstance(step.spec, FlashAttnSplits):  # no launch on a GPU
            continue
        moved, operations = _work(step, env)
        computing = _arithmetic(step, machine, tokens, operations)
        share = shares.setdefault(_kind(step), Share(_kind(step)))
        launches = 2 if isinstance(step.spec, FlashAttn) else 1
        share.launches += launches
        share.bytes += moved
        share.operations += operations
        share.seconds += max(moved / machine.bandwidth, computing, launches * machine.launch)
    return sorted(shares.values(), key=lambda s: -s.seconds)


def launches(schedule: Schedule, shapes: Sequence[tuple[int, int]]) -> str:
    """Markdown table of the launches of one kernel and size: where the first stands, how many there are, and what one moves and computes
    for every (tokens, context) of ``shapes``.
    """
    found: dict[tuple[KernelSpec, str], list[Step]] = {}
    for step in schedule.steps:
        if not isinstance(step.spec, FlashAttnSplits):
            found.setdefault((step.spec, f"{step.bytes} {step.flops}"), []).append(step)
    lines = [
        "| first launch | launches |" + "".join(f" MB, T={t} | Gop, T={t} |" for t, _ in shapes),
        "|---|---:|" + "---:|" * 2 * len(shapes),
    ]
    for steps in found.values():
        numbers = [_work(steps[0], symbols(t, context)) for t, context in shapes]
        cells = "".join(f" {moved / 1e6:.2f} | {operations / 1e9:.3f} |" for moved, operations in numbers)
        lines.append(f"| `{steps[0].node}` | {len(steps)} |{cells}")
    return "\n".join(lines)


def symbols(tokens: int, context: int, outputs: int = 1) -> dict[str, int]:
    """Values of the graph's symbols for ``tokens`` tokens that end a context of ``context`` entries."""
    return {"T": tokens, "O": outputs, "C": context, "KV": context, "R": context}


def _work(step: Step, env: Mapping[str, int]) -> tuple[float, float]:
    spec, values = step.spec, dict(env)
    if isinstance(spec, FlashAttn):
        # Keys and values pass once for each block of tokens; seen entries grow by one per token.
        seen = env["T"] * (env["R"] - (env["T"] - 1) / 2)
        together = token_block(spec)
        cache = evaluate(step.bytes, values) * seen / env["R"] / (together if env["T"] >= together else 1)
        return cache + 4.0 * env["T"] * spec.n_head * (spec.d + spec.dv), 2.0 * spec.n_head * (spec.d + spec.dv) * seen
    if isinstance(spec, MatMulId):
        return _expert_bytes(spec, env), float(evaluate(step.flops, values))
    return float(evaluate(step.bytes, values)), float(evaluate(step.flops, values))


def _expert_bytes(spec: MatMulId, env: Mapping[str, int]) -> float:
    """Weights of the experts that tokens choosing evenly at random may be expected to choose, once each; activations and results."""
    tokens = int(spec.rows) if spec.rows.isdigit() else env[spec.rows]
    chosen = spec.n_expert * (1 - (1 - spec.n_used / spec.n_expert) ** tokens)
    mode = activation_mode(spec.format)
    row = 4 * spec.k if mode == "f32" else q8_record(spec.k).stride
    rows = tokens * (1 if spec.broadcast_x else spec.n_used)
    weights = chosen * spec.unit * weight_format(spec.format).packed_bytes(spec.k, spec.n)
    return weights + rows * row + 4.0 * tokens * spec.n_used * spec.n


def _arithmetic(step: Step, machine: Machine, tokens: int, operations: float) -> float:
    """Seconds of the busiest unit. Integer products turn each block sum into f32, scale it and add it: three instructions per scale, one
    more per minimum.
    """
    spec = step.spec
    if not isinstance(spec, MatMul | MatMulId) or activation_mode(spec.format) == "f32":
        return operations / machine.f32
    format = weight_format(spec.format)
    scaling = operations / 2 / format.group * (4 if format.has_min else 3) / (machine.f32 / 2)
    tiles = spec.rows == "T" and tokens >= (TILE_FROM if isinstance(spec, MatMul) else tile_from(spec, TILE_FROM))
    return max(operations / (machine.tensor if tiles else machine.dp4a), scaling)


def _kind(step: Step) -> str:
    spec = step.spec
    if isinstance(spec, MatMul):
        return f"products {spec.format}"
    if isinstance(spec, MatMulId):
        return f"expert products {spec.format}"
    return {"FlashAttn": "attention", "Quantize": "norm and rounding", "RopeApply": "rotation", "StoreRows": "cache store"}.get(
        type(spec).__name__, "other"
    )


def table(shares: list[Share]) -> str:
    """The shares as a Markdown table, with their sum."""
    total = Share("all", *(sum(getattr(s, f) for s in shares) for f in ("launches", "bytes", "operations", "seconds")))
    lines = ["| kernels | launches | MB moved | Gop | time (us) |", "|---|---:|---:|---:|---:|"]
    for s in [*shares, total]:
        lines.append(f"| {s.kind} | {s.launches} | {s.bytes / 1e6:.1f} | {s.operations / 1e9:.2f} | {s.seconds * 1e6:.0f} |")
    return "\n".join(lines)
