"""How many threads of a kernel a multiprocessor can hold, from what the kernel takes.

Limits per architecture: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability". Registers are given to warps
in steps of 256; each block takes 1 KiB of shared memory beside its own.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
_REGISTERS = 65536
_REGISTER_STEP, _SHARED_STEP, _SHARED_OWN = 256, 128, 1024


@dataclass(frozen=True)
class Multiprocessor:
    """Most threads and blocks at once, and bytes of shared memory."""

    threads: int
    blocks: int
    shared: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(2048, 32, 164 << 10),
    "sm_86": Multiprocessor(1536, 16, 100 << 10),
    "sm_89": Multiprocessor(1536, 24, 100 << 10),
    "sm_90": Multiprocessor(2048, 32, 228 << 10),
    "sm_100": Multiprocessor(2048, 32, 228 << 10),
}


def occupancy(sm: str, block: int, registers: int, shared: int) -> float:
    """Share of the threads of a multiprocessor that are busy when blocks of ``block`` threads fill it: 0 (no block fits) to 1."""
    limits = MULTIPROCESSORS[sm]
    warps = -(-block // WARP)
    by_warps = limits.threads // WARP // warps
    per_warp = -(-max(registers, 1) * WARP // _REGISTER_STEP) * _REGISTER_STEP
    by_registers = _REGISTERS // per_warp // warps
    by_shared = limits.shared // (-(-(shared + _SHARED_OWN) // _SHARED_STEP) * _SHARED_STEP)
    return min(by_warps, by_registers, by_shared, limits.blocks) * warps * WARP / limits.threads
