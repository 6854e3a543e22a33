"""LLVM modules to machine code."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ggufc.codegen import llvm_passes
from ggufc.codegen.cpu.target import Target


def new_module(target: Target, name: str) -> ir.Module:
    """An empty module for one kernel."""
    module = ir.Module(name)
    module.triple = target.triple
    return module


def target_machine(target: Target) -> Any:
    """Position-independent code in the small model: references stay relative, so the image can be mapped anywhere."""
    llvm_passes.initialise()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu="generic" if target.is_arm else "x86-64",
        features=target.feature_string(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )


def optimise(target: Target, module: ir.Module) -> Any:
    """The module optimised for the target."""
    return llvm_passes.optimise(module, _with_function_attributes(str(module), target), target_machine(target))


def _with_function_attributes(text: str, target: Target) -> str:
    """Attach the attribute group llvmlite cannot express (string attributes) to every definition."""
    lines = []
    for line in text.splitlines():
        if line.startswith("define "):
            line += " #7"
        lines.append(line)
    width = target.vector_bits
    lines.append(f'attributes #7 = {{ nounwind "prefer-vector-width"="{width}" "min-legal-vector-width"="{width}" "no-builtins" }}')
    return "\n".join(lines)


def emit_object(target: Target, module: ir.Module) -> bytes:
    """Relocatable ELF object of a module."""
    return target_machine(target).emit_object(optimise(target, module))


def emit_assembly(target: Target, module: ir.Module) -> str:
    """Assembly text of a module, for ``ggufc dump --stage asm``."""
    return target_machine(target).emit_assembly(optimise(target, module))
