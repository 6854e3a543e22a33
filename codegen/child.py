"""The compiling process: a JSON request on standard input, JSON lines (progress, error or report) on standard output."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from ggufc.codegen.options import CompileOptions, CompileReport
from ggufc.formats.cuda import CudaManifest
from ggufc.formats.errors import GgufcError

if TYPE_CHECKING:
    from ggufc.codegen.schedule import Schedule


def compile_here(
    source: Path,
    output: Path,
    options: CompileOptions,
    progress: Callable[[str, int, int], None] | None = None,
    before_writing: Callable[[], None] = lambda: None,
) -> CompileReport:
    """Compile in this process; ``progress(phase, done, total)``. ``before_writing`` is called before any file is made."""
    from ggufc.codegen import frontend
    from ggufc.codegen.artifact_writer import require_space, write_artifact
    from ggufc.codegen.kernel_build import build_image
    from ggufc.codegen.manifest import make_manifest
    from ggufc.ir import print_graph

    say = progress or (lambda phase, done, total: None)
    clock = time.perf_counter
    started = clock()
    phases: dict[str, float] = {}

    def lap(name: str) -> None:
        phases[name] = clock() - started - sum(phases.values())

    with frontend.open_model(source) as (gguf, model):
        target = frontend.target_of(options)
        say("graph", 0, 1)
        compilations = frontend.compile_graphs(model, options)
        weights = {w.name: (c.weights, w) for c in compilations for w in c.weights.stored.values()}
        require_space(output, [weight for _, weight in weights.values()])
        specs = list(dict.fromkeys(spec for c in compilations for spec in c.schedule.kernels()))
        lap("graph")
        jobs = min(options.jobs or 2, len(os.sched_getaffinity(0)), len(specs))
        image, kernels = build_image(specs, target, jobs, lambda done, total: say("kernels", done, total))
        lap("kernels")
        manifest = make_manifest(gguf, model, options, target, compilations, specs, kernels, image)
        graphs = {c.name: print_graph(c.graph) for c in compilations}
        ptx = _gpu_code([c.schedule for c in compilations], options.target, say)
        before_writing()
        write_artifact(output, gguf, manifest, graphs, image, list(weights.values()), lambda done, total: say("weights", done, total), ptx)
        lap("weights")
        notes = options.notes() + model.notes(options.for_builder())
        source_bytes = sum(os.path.getsize(p) for p in gguf.paths)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    helpers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return CompileReport(
        str(output),
        clock() - started,
        source_bytes,
        output.stat().st_size,
        len(kernels),
        sum(len(c.schedule.steps) for c in compilations),
        len(image.code),
        target.level,
        1024 * (own + jobs * helpers),
        phases,
        notes,
    )


def _gpu_code(schedules: list[Schedule], target: str, say: Callable[[str, int, int], None]) -> tuple[CudaManifest, dict[str, str]] | None:
    """PTX of every kernel for every GPU among the targets; None if there is none."""
    from ggufc.codegen import nvptx

    gpus = nvptx.split(target)[1]
    if not gpus:
        return None
    say("gpu kernels", 0, 1)
    texts = nvptx.emit_all(list(dict.fromkeys(spec for schedule in schedules for spec in schedule.kernels())), gpus)
    say("gpu kernels", 1, 1)
    return nvptx.manifest(schedules, texts), texts


def _send(event: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _stop_by_unwinding() -> None:
    """From here on a signal must remove the temporary file. Before, it ends the process at once: a call of LLVM takes seconds, and Python
    would deliver the signal only after it.
    """
    signal.signal(signal.SIGTERM, _stop)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = json.load(sys.stdin)
    last = [0.0]

    def progress(phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - last[0] > 0.05:
            last[0] = now
            _send({"phase": phase, "done": done, "total": total})

    try:
        options = msgspec.convert(request["options"], CompileOptions)
        report = compile_here(Path(request["source"]), Path(request["output"]), options, progress, _stop_by_unwinding)
    except (GgufcError, OSError) as error:
        _send({"error": str(error)})
        return 2
    except KeyboardInterrupt:
        return 130
    _send({"report": msgspec.to_builtins(report)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
