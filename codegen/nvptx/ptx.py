"""LLVM modules to PTX text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ggufc.codegen import llvm_passes

from .target import TRIPLE, PtxTarget

DATA_LAYOUT = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64"


def new_module(name: str) -> ir.Module:
    module = ir.Module(name)
    module.triple = TRIPLE
    module.data_layout = DATA_LAYOUT
    return module


def target_machine(target: PtxTarget) -> Any:
    llvm_passes.initialise()
    return llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=target.sm, features=target.feature_string(), opt=3)


def optimise(target: PtxTarget, module: ir.Module, bounds: dict[str, tuple[int, int]]) -> Any:
    """The module optimised; ``bounds``: of each kernel, threads per block and resident threads (``entry.Entry``)."""
    return llvm_passes.optimise(module, _with_attributes(str(module), bounds), target_machine(target))


def _with_attributes(text: str, bounds: dict[str, tuple[int, int]]) -> str:
    """Attach what llvmlite cannot express: the launch bound of every kernel."""
    lines: list[str] = []
    groups: list[str] = []
    for line in text.splitlines():
        if line.startswith("define "):
            name = line.split("@", 1)[1].split("(", 1)[0].strip('"')
            if name in bounds:
                limits = f'"nvvm.maxntid"="{bounds[name][0]},1,1" "nvvm.minctasm"="{_blocks(*bounds[name])}"'
                groups.append(f"attributes #{len(groups) + 1} = {{ nounwind {limits} }}")
                line += f" #{len(groups)}"
        lines.append(line)
    return "\n".join([*lines, *groups])


def _blocks(threads: int, resident: int) -> int:
    """Blocks a multiprocessor should hold; kernels of a warp per block walk rows in order and may take all registers they want."""
    return max(1, resident // threads) if threads > 32 else 1


def to_text(targets: Sequence[PtxTarget], module: ir.Module, bounds: dict[str, tuple[int, int]]) -> list[str]:
    """PTX of a module for each target; it is optimised once, for the first, and all others get the same arithmetic."""
    best = optimise(targets[0], module, bounds)
    return [target_machine(target).emit_assembly(best.clone()) for target in targets]
