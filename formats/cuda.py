"""How an artifact describes its GPU code: the one definition of the key ``ggufc.cuda``.

A fat artifact is a CPU artifact with PTX beside the native image: tensors ``ggufc.ptx.<architecture>`` (I8, text) and this description.
Launches, slots and weights are shared with the CPU; a launch of kernel i runs the entries of ``kernels[i]``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .artifact import Affine

KEY = "ggufc.cuda"
TENSOR = "ggufc.ptx"
MAX_GRID = 2**31 - 1
"""Blocks of a one-dimensional grid; kernels step through their tiles, so a smaller grid computes them all."""


PTX_VERSIONS = {"sm_80": 70, "sm_86": 71, "sm_89": 78, "sm_90": 78, "sm_100": 86}
"""Architecture -> the PTX version its code is written in: the oldest that knows it, so that old drivers can load the code."""


DRIVERS = {70: (11, 0), 71: (11, 1), 78: (11, 8), 86: (12, 7)}
"""PTX version -> the CUDA version that introduced it; older drivers refuse the code (NVIDIA, PTX ISA, release notes)."""


def newest_for(capability: int, driver: tuple[int, ...] = ()) -> str | None:
    """The newest architecture whose code a device of ``capability`` (90 for sm_90) runs, and, with ``driver``, a driver for that CUDA
    version loads; None if there is none.
    """
    usable = [
        name for name, ptx in PTX_VERSIONS.items() if int(name.removeprefix("sm_")) <= capability and (not driver or DRIVERS[ptx] <= driver)
    ]
    return max(usable, key=lambda name: int(name.removeprefix("sm_")), default=None)


def split_target(text: str) -> tuple[str, list[str]]:
    """A ``--target`` text as (CPU target, GPU items): items ``cuda:...`` are GPU targets, the rest is the CPU's (``native`` if nothing is
    left).
    """
    items = [item.strip() for item in text.split(",")]
    return ",".join(i for i in items if not i.startswith("cuda:")) or "native", [i for i in items if i.startswith("cuda:")]


class Factor(msgspec.Struct, frozen=True, omit_defaults=True):
    """``mult * ceil(params[sym] / div)``; without a symbol ``mult``."""

    sym: str = ""
    div: int = 1
    mult: int = 1


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A PTX function of ``block`` threads over the product of ``grid`` tiles; an empty grid: as many as the launch has on the CPU.

    It runs when ``low <= params[sym] <= high`` (``high`` 0: no upper bound; no symbol: always).
    """

    symbol: str
    block: int
    grid: list[Factor] = []
    sym: str = ""
    low: int = 0
    high: int = 0


class CudaKernel(msgspec.Struct, frozen=True, omit_defaults=True):
    """The entries that together do what one CPU kernel does, in order.

    With ``extra_bytes`` they share extra memory of that
    many bytes per token and per ``extra_div`` entries of the cell list, and run over slices of the tokens so that it stays within the
    runtime's budget; slices are whole multiples of ``slice_tokens``, which share a tile.
    """

    signature: str
    n_args: int
    entries: list[Entry]
    extra_bytes: int = 0
    extra_div: int = 1
    slice_tokens: int = 1


class CudaManifest(msgspec.Struct, frozen=True):
    """GPU code of an artifact: ``targets`` in ascending order, ``kernels`` in the order of the CPU manifest, PTX versions (80 for 8.0) and
    digests.

    ``writes``: by program, per launch, the arguments (by index) it writes, with the bytes of the value that begins there (nothing for
    outputs and caches); all others it reads.
    """

    targets: list[str]
    ptx_versions: list[int]
    sha256: list[str]
    kernels: list[CudaKernel]
    writes: dict[str, list[dict[int, Affine]]] = {}


def tiles(factors: list[Factor], env: Mapping[str, int]) -> int:
    """Number of tiles for values of the symbols."""
    total = 1
    for f in factors:
        total *= f.mult * (-(-env[f.sym] // f.div) if f.sym else 1)
    return total


def dumps(manifest: CudaManifest) -> str:
    return msgspec.json.encode(manifest).decode()


def loads(text: str | bytes) -> CudaManifest:
    """Decode and type-check; raises ``msgspec.DecodeError`` on anything unexpected."""
    return msgspec.json.decode(text, type=CudaManifest)
