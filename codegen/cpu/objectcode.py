"""LLVM modules to machine code."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.errors import CodegenError


@lru_cache(maxsize=1)
def _initialise() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # the driver's system calls are inline assembly


def new_module(target: Target, name: str) -> ir.Module:
    """An empty module for one kernel."""
    module = ir.Module(name)
    module.triple = target.triple
    return module


def target_machine(target: Target) -> Any:
    """Position-independent code in the small model: references stay relative, so the image can be mapped anywhere."""
    _initialise()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu="generic" if target.is_arm else "x86-64",
        features=target.feature_string(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )


def optimise(target: Target, module: ir.Module) -> Any:
    """Parse, verify and optimise; kernels are vectorised by hand, so LLVM's vectorisers stay off."""
    _initialise()
    text = _with_function_attributes(str(module), target)
    try:
        parsed = llvm.parse_assembly(text)
        parsed.verify()
    except RuntimeError as error:
        raise CodegenError(f"internal: kernel {module.name!r} is not valid LLVM IR: {error}") from error
    machine = target_machine(target)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_interleaving = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


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
