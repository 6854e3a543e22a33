"""NVIDIA targets: what the shared emitter asks about a GPU.

A thread holds single values: ``lanes`` is 1, and what is a vector lane on a CPU is a thread here (``Emitter.spmd``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufc.codegen.errors import CodegenError
from ggufc.formats.cuda import PTX_VERSIONS, split_target

TRIPLE = "nvptx64-nvidia-cuda"


@dataclass(frozen=True)
class PtxTarget:
    """A GPU architecture, with the properties kernels know from CPU targets."""

    sm: str

    triple = TRIPLE
    lanes = 1
    has_fma = True
    has_f16c = True
    vnni = ""
    is_arm = False
    signed_dot = False
    has_tiles = False
    features: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        return f"cuda:{self.sm}"

    @property
    def ptx_version(self) -> int:
        """80 for PTX 8.0."""
        return PTX_VERSIONS[self.sm]

    def feature_string(self) -> str:
        return f"+ptx{self.ptx_version}"


def split(text: str) -> tuple[str, tuple[PtxTarget, ...]]:
    """A ``--target`` text as (CPU target, GPU targets)."""
    cpu, items = split_target(text)
    return cpu, tuple(dict.fromkeys(resolve(item) for item in items))


def resolve(text: str) -> PtxTarget:
    """Target from ``sm_90`` or ``cuda:sm_90``; CodegenError lists the known architectures."""
    sm = text.strip().removeprefix("cuda:")
    if sm not in PTX_VERSIONS:
        raise CodegenError(f"--target {text!r}: unknown GPU architecture; use one of {', '.join('cuda:' + name for name in PTX_VERSIONS)}")
    return PtxTarget(sm)
