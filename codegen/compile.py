"""Compiling a model file to an artifact, in a child process.

LLVM never returns all the memory it used and may fail hard, so the caller's process stays out of it: ``compile_file`` starts ``python -m
ggufc.codegen.child``, forwards its progress and turns its errors into exceptions.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.options import CompileOptions, CompileReport

if TYPE_CHECKING:
    from ggufc.ir.graph import Graph

Progress = Callable[[str, int, int], None]

__all__ = ["CompileOptions", "CompileReport", "asm_text", "compile_file", "llvm_text", "schedule_text", "stages"]


def compile_file(
    source: str | os.PathLike[str], output: str | os.PathLike[str], options: CompileOptions | None = None, progress: Progress | None = None
) -> CompileReport:
    """Compile ``source`` to ``output`` (written under a temporary name, then renamed).

    ``progress(phase, done, total)``. Raises CodegenError with the child's message; an interrupted compilation leaves nothing behind.
    """
    request = {"source": os.fspath(source), "output": os.fspath(output), "options": msgspec.to_builtins(options or CompileOptions())}
    report = None
    failure = None
    # A file takes whatever the child says; a pipe nobody reads meanwhile would stop it.
    with tempfile.TemporaryFile("w+") as messages:
        child = subprocess.Popen(
            [sys.executable, "-m", "ggufc.codegen.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            process_group=0,  # one signal ends the child together with the processes it compiles in
        )
        try:
            assert child.stdin and child.stdout
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stdout:
                event = json.loads(line)
                if "phase" in event:
                    if progress:
                        progress(event["phase"], event["done"], event["total"])
                elif "error" in event:
                    failure = event["error"]
                else:
                    report = msgspec.convert(event["report"], CompileReport)
            status = child.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
        finally:
            for stream in (child.stdin, child.stdout):
                if stream:
                    stream.close()
        messages.seek(0)
        trouble = messages.read()
    if failure is not None:
        raise CodegenError(failure)
    if report is None:
        last = trouble.strip().splitlines()[-1] if trouble.strip() else "no message"
        raise CodegenError(f"the code generator stopped with status {status}: {last}")
    return report


def stages(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> Iterator[tuple[str, Graph]]:
    """(stage name, graph) for every stage up to ``final``."""
    from ggufc.codegen import frontend

    return frontend.stages(source, options, program)


def schedule_text(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> str:
    """The scheduled graph as text."""
    from ggufc.codegen import frontend

    return frontend.schedule_text(source, options, program)


def _kernel_text(source: str | os.PathLike[str], options: CompileOptions, program: str, what: str) -> str:
    from ggufc.codegen import frontend, kernel_build

    with frontend.open_model(source) as (_, model):
        graph = frontend.build_graph(model, options, program)
        frontend.run_passes(graph, options)
        specs = frontend.lower(graph, program)[0].kernels()
    return getattr(kernel_build, what)(specs, frontend.target_of(options))


def llvm_text(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> str:
    """Optimised LLVM IR of every kernel of a program."""
    return _kernel_text(source, options, program, "llvm_text")


def ptx_text(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> str:
    """PTX of every kernel of a program for the first GPU among the targets, ``sm_80`` if there is none."""
    from ggufc.codegen import frontend, nvptx

    with frontend.open_model(source) as (_, model):
        graph = frontend.build_graph(model, options, program)
        frontend.run_passes(graph, options)
        specs = frontend.lower(graph, program)[0].kernels()
    gpus = nvptx.split(options.target)[1]
    return nvptx.emit_ptx(specs, gpus[0] if gpus else "sm_80")


def asm_text(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> str:
    """Assembly of every kernel of a program."""
    return _kernel_text(source, options, program, "asm_text")
