"""What a kernel is: a frozen specification that can emit itself."""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from typing import ClassVar, Protocol

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import Emitter


class KernelSpec(Protocol):
    """A kernel's signature. Implementations are frozen dataclasses: equal specifications are one kernel, emitted once.

    ``emit`` receives an ``Emitter`` positioned at the start of a function ``void(args, params, tile, scratch)`` and ends it with ``ret``.
    ``arg_names`` documents the argument array in order. A kernel may name others: ``code`` (``code_of``), ``parts`` (``parts_of``).
    """

    arg_names: ClassVar[tuple[str, ...]]

    def emit(self, e: Emitter) -> None: ...

    def scratch_bytes(self, target: Target) -> int: ...


def signature(spec: KernelSpec) -> str:
    """Readable form: ``matmul(format='q4_1', k=576, n=960)``."""
    inside = ", ".join(f"{f.name}={getattr(spec, f.name)!r}" for f in fields(spec))  # type: ignore[arg-type]
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(spec).__name__).lower()
    return f"{name}({inside})"


def symbol(spec: KernelSpec) -> str:
    """Stable symbol of the kernel's function."""
    text = signature(spec)
    return f"{text.split('(')[0]}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def code_of(spec: KernelSpec) -> KernelSpec:
    """The specification whose code serves ``spec``: its ``code`` where it names one, else itself."""
    return getattr(spec, "code", spec)


def parts_of(spec: KernelSpec, target: Target) -> tuple[KernelSpec, ...]:
    """The specifications whose functions the CPU code of ``spec`` calls (``Emitter.call``); kernels with equal parts share them."""
    parts = getattr(spec, "parts", None)
    return parts(target) if parts else ()
