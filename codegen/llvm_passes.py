"""LLVM's part of code generation that both targets share: text of a module to an optimised module."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from ggufc.codegen.errors import CodegenError


@lru_cache(maxsize=1)
def initialise() -> None:
    """Make LLVM's back ends known; safe to call again."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # the CPU driver's system calls are inline assembly


def optimise(module: ir.Module, text: str, machine: Any) -> Any:
    """Parse, verify and optimise ``text``, the module with its attributes.

    Kernels are vectorised and unrolled by hand (GPU kernels by ``ptxas``, where registers allow), so LLVM does neither. Raises CodegenError
    if the module is not valid.
    """
    try:
        parsed = llvm.parse_assembly(text)
        parsed.verify()
    except RuntimeError as error:
        raise CodegenError(f"internal: kernel {module.name!r} is not valid LLVM IR: {error}") from error
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_interleaving = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed
