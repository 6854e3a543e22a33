"""``ggufc bench``: prompt and decode speed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufc.cli import options

if TYPE_CHECKING:
    from ggufc.benchmark import Test
    from ggufc.devices import Placement
    from ggufc.runtime import Session


@click.command()
@options.model
@click.option("-p", "--n-prompt", default="512", show_default=True, metavar="N,...", help="Prompt lengths; 0 = none.")
@click.option("-n", "--n-gen", default="128", show_default=True, metavar="N,...", help="Numbers of tokens to decode; 0 = none.")
@click.option("-d", "--n-depth", default="0", show_default=True, metavar="N,...", help="Tokens in the cache before a test begins.")
@click.option("-t", "--threads", default=None, metavar="N,...", help="Thread counts (default: physical cores available).")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, help="Measured runs of each test.")
@click.option("-b", "--batch-size", type=options.token_count, default=2048, show_default=True, help="Most tokens handed over at once.")
@click.option("-ub", "--ubatch-size", type=options.token_count, default=512, show_default=True, help="Most tokens evaluated at once.")
@click.option(
    "-o", "--output", "form", type=click.Choice(["md", "json", "csv"]), default="md", show_default=True, help="Format of the result."
)
@click.option("--profile", is_flag=True, help="Also print where the time of each test goes: node groups, kernels, bytes (on stderr).")
@options.compact_windows
@options.build
@options.device
def command(
    model: str,
    n_prompt: str,
    n_gen: str,
    n_depth: str,
    threads: str | None,
    repetitions: int,
    batch_size: int,
    ubatch_size: int,
    form: str,
    profile: bool,
    compact_windows: bool,
    type_k: str | None,
    type_v: str | None,
    target: str,
    n_gpu_layers: int | None,
    device: str,
) -> None:
    """Measure tokens per second as llama-bench does.

    ppN evaluates N tokens at once, tgN decodes N tokens one by one, from an empty cache or after -d tokens. JSON and CSV rows have
    llama-bench's field names.
    """
    from ggufc import benchmark, devices
    from ggufc.cli import terminal
    from ggufc.errors import DriverError
    from ggufc.runtime import Session
    from ggufc.runtime.cpuinfo import physical_cores

    chosen = benchmark.tests(*(benchmark.parse_counts(text, flag) for text, flag in ((n_prompt, "-p"), (n_gen, "-n"), (n_depth, "-d"))))
    if not chosen:
        raise DriverError("-p 0 and -n 0 leave nothing to measure")
    counts = benchmark.parse_counts(threads, "-t", least=1) if threads else [physical_cores()]
    rows = []
    with devices.choose(device, n_gpu_layers, terminal.say) as place:
        artifact = options.artifact(model, type_k, type_v, place.target(target))
        for count in counts:
            settings: dict[str, Any] = {
                "n_ctx": benchmark.context_for(chosen),
                "n_batch": batch_size,
                "n_ubatch": ubatch_size,
                "profile": profile,
                "compact_windows": compact_windows,
                **place.session_options(close=False),
            }
            with Session(artifact, n_threads=count, **settings) as session:
                benchmark.require_memory(session)
                facts = _facts(model, session, count, batch_size, ubatch_size, place)
                for test in chosen:
                    with terminal.progress() as progress:
                        samples = benchmark.measure(session, test, repetitions, batch_size, _reporter(progress, test, count, repetitions))
                    rows.append(benchmark.row(test, samples, facts))
                    if profile:
                        _show_profile(session, test, count)
    sys.stdout.write(benchmark.render(rows, form))


def _reporter(progress: Any, test: Test, threads: int, repetitions: int) -> Any:
    def report(done: int) -> None:
        if progress:
            progress(f"{test.name}, {threads} threads", done, repetitions)

    return report


def _facts(model: str, session: Session, threads: int, batch_size: int, ubatch_size: int, place: Placement) -> dict[str, Any]:
    """What all rows of one session share, with llama-bench's names."""
    from ggufc import __version__
    from ggufc.inspection import model_type
    from ggufc.machine import cpu_name

    manifest = session.artifact.manifest
    path = Path(model).expanduser()
    size, parameters = _size(model, session)
    return {
        "build_commit": f"ggufc-{__version__}",
        "build_number": 0,
        "cpu_info": cpu_name(),
        "gpu_info": place.device.name if place.device else "",
        "backends": f"CUDA, {place.words}" if place.device else f"CPU {manifest.level}",
        "n_gpu_layers": place.n_gpu_layers,
        "model_filename": str(path) if path.is_file() else model,
        "model_type": model_type(session.artifact.metadata, parameters),
        "model_size": size,
        "model_n_params": parameters,
        "n_batch": batch_size,
        "n_ubatch": ubatch_size,
        "n_threads": threads,
        "type_k": manifest.type_k,
        "type_v": manifest.type_v,
    }


def _size(model: str, session: Session) -> tuple[int, int]:
    """Bytes and parameters of the model; an artifact's repacked weights no longer tell the parameters (0)."""
    from ggufc import inspection
    from ggufc.formats.gguf_reader import GGUFFile
    from ggufc.resolve import is_artifact, model_file

    path = model_file(model)
    if is_artifact(path):
        return sum(t.nbytes for t in session.artifact.file.tensors.values()), 0
    with GGUFFile.open(path) as file:
        data = inspection.describe_model(file)
        return sum(t["bytes"] for t in data["types"].values()), data["parameters"]


def _show_profile(session: Session, test: Test, threads: int) -> None:
    from ggufc.cli import terminal
    from ggufc.profile import device_fill, record, report, stream_read
    from ggufc.runtime.cuda import CudaExecutor, OffloadExecutor

    entries = record(session, test)
    limits, told = {}, []
    if isinstance(session.executor, (CudaExecutor, OffloadExecutor)):
        limits["GPU"] = device_fill(session.executor.device)
        told.append(f"the GPU's memory is filled at {limits['GPU'] / 1e9:.1f} GB/s")
    if any(entry.place == "CPU" for entry in entries):
        limits["CPU"] = stream_read(threads)
        told.append(f"memory is read at {limits['CPU'] / 1e9:.1f} GB/s")
    terminal.say(f"{test.name}, {session.executor.where}; {', '.join(told)}")
    for line in [*report(entries, limits), *session.stats.reuse_lines()]:
        terminal.say(f"  {line}")
