"""Kernel specifications to one image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from llvmlite import ir

from ggufc.codegen.cpu import driver, image, objectcode
from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.kernels.base import KernelSpec, code_of, parts_of, signature, symbol
from ggufc.formats.artifact import Kernel

Progress = Callable[[int, int], None]


def kernel_module(spec: KernelSpec, target: Target) -> ir.Module:
    """LLVM module holding one kernel."""
    module = objectcode.new_module(target, symbol(spec))
    spec.emit(Emitter(module, target, symbol(spec)))
    return module


def driver_module(target: Target) -> ir.Module:
    module = objectcode.new_module(target, "driver")
    driver.emit_driver(module, target)
    return module


def kernel_object(spec: KernelSpec | None, target: Target) -> bytes:
    """Object code of a kernel; of the driver functions for None."""
    return objectcode.emit_object(target, driver_module(target) if spec is None else kernel_module(spec, target))


def _with_parts(specs: Sequence[KernelSpec], target: Target) -> list[KernelSpec]:
    return list(dict.fromkeys([part for spec in specs for part in parts_of(spec, target)] + list(specs)))


def functions(specs: Sequence[KernelSpec], target: Target) -> list[KernelSpec]:
    """What must be compiled for ``specs``: each code and each part once."""
    return _with_parts([code_of(spec) for spec in specs], target)


def build_image(
    specs: Sequence[KernelSpec], target: Target, jobs: int, progress: Progress | None = None
) -> tuple[image.Image, list[Kernel]]:
    """Compile and link ``specs`` (with the driver functions); kernels keep the order of ``specs``, some share their code."""
    work: list[KernelSpec | None] = [None, *functions(specs, target)]
    objects: list[bytes] = []
    if jobs > 1 and len(work) > 2:
        # Spawned, not forked: LLVM's state must not be shared, and the parent may run threads.
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for done in pool.map(kernel_object, work, [target] * len(work)):
                objects.append(done)
                if progress:
                    progress(len(objects), len(work))
    else:
        for item in work:
            objects.append(kernel_object(item, target))
            if progress:
                progress(len(objects), len(work))
    linked = image.link(objects)
    kernels = []
    for spec in specs:
        offset, size = linked.symbols[symbol(code_of(spec))]
        kernels.append(Kernel(symbol(spec), signature(spec), offset, size, spec.scratch_bytes(target)))
    return linked, kernels


def llvm_text(specs: Sequence[KernelSpec], target: Target) -> str:
    """Optimised LLVM IR of the kernels and their parts."""
    shown = _with_parts(specs, target)
    return "\n".join(f"; {signature(spec)}\n{objectcode.optimise(target, kernel_module(spec, target))}" for spec in shown)


def asm_text(specs: Sequence[KernelSpec], target: Target) -> str:
    """Assembly of the kernels and their parts."""
    shown = _with_parts(specs, target)
    return "\n".join(f"# {signature(spec)}\n{objectcode.emit_assembly(target, kernel_module(spec, target))}" for spec in shown)
