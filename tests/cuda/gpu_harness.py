"""Running kernels in the interpreter: emit, launch as the runtime does, return the arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ggufc.codegen.kernels.base import KernelSpec
from ggufc.codegen.nvptx import describe, emit_ptx
from ggufc.formats import cuda as fmt
from ggufc.formats.abi import PARAMS
from simt import GlobalMemory, Simt

SM = "sm_80"


@lru_cache(maxsize=64)
def ptx_of(spec: KernelSpec, sm: str = SM) -> str:
    return emit_ptx([spec], sm)


def run(
    spec: KernelSpec,
    args: Sequence[np.ndarray | int | None],
    writes: Sequence[int],
    tiles: int,
    *,
    slice_tokens: int | None = None,
    max_blocks: int | None = None,
    races: bool = True,
    text: str | None = None,
    only: str = "",
    **params: int,
) -> list[np.ndarray | None]:
    """Launch ``spec``; arrays not in ``writes`` are read-only. ``tiles``: what the schedule gives the launch; ``slice_tokens``: attention's
    slices; ``text``: PTX to run in place of the kernel's; ``only``: run the entry with this suffix whatever the number of tokens.
    """
    memory = GlobalMemory()
    gpu = Simt(ptx_of(spec) if text is None else text, memory, races)
    args = [*args, *[None] * (len(spec.arg_names) - len(args))]
    words, arrays = [], []
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray):
            address = memory.store(a, spec.arg_names[i], read_only=i not in writes)
            words.append(address)
            arrays.append((address, a))
        else:
            words.append(a or 0)
            arrays.append(None)
    kernel = describe(spec)
    env = {name: params.get(name, 0) for name in PARAMS}
    symbols = memory.store(np.array([env[name] for name in PARAMS], np.int64), "params", read_only=True)
    tokens = env["T"]
    step = slice_tokens or max(tokens, 1) if kernel.extra_bytes else max(tokens, 1)
    extra = memory.alloc(kernel.extra_bytes * step * -(-env["R"] // kernel.extra_div), "extra") if kernel.extra_bytes else 0
    for first in range(0, max(tokens, 1), step) if kernel.extra_bytes else (0,):
        local = dict(env, T=min(step, tokens - first)) if kernel.extra_bytes else env
        for entry in kernel.entries:
            if only:
                if not entry.symbol.endswith(only):
                    continue
            elif entry.sym and not (entry.low <= env[entry.sym] and (not entry.high or env[entry.sym] <= entry.high)):
                continue
            count = fmt.tiles(entry.grid, local) if entry.grid else tiles
            if count:
                grid = min(count, max_blocks or fmt.MAX_GRID)
                gpu.launch(entry.symbol, grid, entry.block, [*words, symbols, extra, first, count])
    assert memory.guards_intact()
    return [None if a is None else memory.read(a[0], a[1].shape, a[1].dtype.type) for a in arrays]
