"""Everything about the GPU side in one run of at most ten minutes: is it right, and how fast is it?

    python benchmarks/gpu.py [--golden DIR] [--model MODEL] [--layers 4] [--minutes 9] [--output FILE] [--device 0] [--binding auto]

Makes one table: golden cases on the device against their tolerance, bits that must not depend on the batch or on recordings, layers and
heads on either side, the rates of memory and copies, prompts and decoding of a model shaped like Llama 3.1 8B (``--layers`` of them, made
up on the spot) or of ``--model``, beside what the performance model expects, where a token's time goes, and products against the roofline.
Steps run in a process of their own, each bounded in time (``bounded``): what fails or hangs costs its own row, what no longer fits the time
is left out and says so, and ``--output`` holds what is known at any moment. The exit status is 1 if anything is wrong. ``--simulate`` runs
the same on the tests' PTX interpreter with tiny sizes: nothing it measures means anything, but all of it must work.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from bounded import Report, Step, supervise, work
from gpu_kernels import TINY, Sizes, copies, experts, product
from gpu_models import decoding, prompts, shares, write_model

from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.formats import cuda
from ggufc.passes import DEFAULT_PIPELINE
from ggufc.passes.split_heads import with_split
from ggufc.profile import device_fill
from ggufc.runtime.cuda import Device, make_device, on_device
from ggufc.runtime.logits import run_case, session_options
from ggufc.runtime.session import Session

ROOT = Path(__file__).resolve().parents[1]
DEVICE_FACTOR = 3
"""How much wider than the CPU's a device's tolerance is."""
CASES = (
    "llama-gqa-tied", "gemma3-7", "llama-moe", "quant-q4_k", "llama-fa-q8", "llama-cacheops", "qwen3moe-a", "deepseek2-v3-fa-mla1",
    "gpt-oss-mxfp4", "glm-dsa-dense",
)  # fmt: skip
CHECKED, MEASURED = "checked", "measured"


def golden(case: Path, device: Device, target: str, folder: Path) -> str:
    """Every step of a golden case; the largest error in units of its tolerance."""
    spec = json.loads((case / "case.json").read_text())
    types = {key: spec["options"][key] for key in ("type_k", "type_v") if key in spec["options"]}
    path = folder / f"{case.name}.ggufc"
    compile_file(case / "model.gguf", path, CompileOptions(target=f"native,{target}", **types))
    results = run_case(lambda o: Session(path, **session_options(o), executor=on_device(device)), spec, case)
    worst = 0.0
    for name in (step["name"] for step in spec["steps"] if "name" in step):
        want = np.load(case / f"{name}.npy")
        assert np.isfinite(results[name]).all(), f"step {name} has numbers that are not finite"
        worst = max(worst, float((np.abs(results[name] - want) / (spec["atol"] + spec["rtol"] * np.abs(want))).max()))
    assert worst <= DEVICE_FACTOR, f"{worst:.2f} times the CPU's tolerance, {DEVICE_FACTOR} are allowed"
    return f"{worst:.3f} of the CPU's tolerance"


def same_bits(path: Path, device: Device, n_tokens: int) -> None:
    """A prompt at once, in pieces, token by token (recorded and replayed), and after a saved state."""
    import io

    tokens = np.random.default_rng(0).integers(0, 200, n_tokens)
    with Session(path, n_ctx=256, executor=on_device(device)) as s:
        whole = s.decode(tokens, logits="all")
        for cuts in ([1, 2], list(range(1, n_tokens))):
            s.reset()
            parts = [s.decode(part, logits="all") for part in np.split(tokens, cuts)]
            assert np.concatenate(parts).tobytes() == whole.tobytes(), f"cut at {cuts[:4]} the logits have other bits"
        s.seq_rm(0, n_tokens // 2, -1)
        blob = io.BytesIO()
        s.state_save(blob, 0)
        s.seq_rm(0)
        s.state_load(blob.getvalue(), 0)
        assert s.decode(tokens[n_tokens // 2 :], logits="all").tobytes() == whole[n_tokens // 2 :].tobytes(), (
            "a restored state goes on otherwise"
        )


def offloaded(path: Path, device: Device, n_tokens: int) -> None:
    """One layer on the device: near the CPU's logits; none: the CPU's bits."""
    tokens = np.random.default_rng(1).integers(0, 200, n_tokens)

    def logits(**options: Any) -> np.ndarray:
        with Session(path, n_ctx=256, **options) as s:
            return s.decode(tokens, logits="all")

    cpu = logits()
    assert logits(executor=on_device(device, n_gpu_layers=0)).tobytes() == cpu.tobytes(), "-ngl 0 has other bits than the CPU"
    far = float(np.abs(logits(executor=on_device(device, n_gpu_layers=1)) - cpu).max() / np.abs(cpu).max())
    assert far < 1e-2, f"-ngl 1 is {far:.1e} of the largest logit away from the CPU"


def halves(case: Path, whole: Path, device: Device, target: str, folder: Path, n_tokens: int) -> None:
    """The first layer's caches divided by heads: the bits of whole ones on the CPU, near them with one part on the device."""
    path = folder / f"{case.name}.halves.ggufc"
    compile_file(case / "model.gguf", path, CompileOptions(target=f"native,{target}", pipeline=with_split(DEFAULT_PIPELINE, ["0:1"])))
    tokens = np.random.default_rng(2).integers(0, 200, n_tokens)
    rows = []
    for artifact, options in ((whole, {}), (path, {}), (path, {"executor": on_device(device)})):
        with Session(artifact, n_ctx=256, **options) as s:
            rows.append(s.decode(tokens, logits="all"))
    assert rows[0].tobytes() == rows[1].tobytes(), "divided caches have other bits on the CPU"
    far = float(np.abs(rows[2] - rows[0]).max() / np.abs(rows[0]).max())
    assert far < 1e-2, f"divided caches are {far:.1e} of the largest logit away from the CPU"


@dataclass
class Bench:
    """What is measured where: steps in order of what one wants to know first. The device is opened by the first step that needs it."""

    open_device: Callable[[], Device]
    sizes: Sizes
    cases: list[Path]
    model: Path | None
    layers: int
    folder: Path

    @cached_property
    def device(self) -> Device:
        return self.open_device()

    @property
    def target(self) -> str:
        return f"cuda:{cuda.newest_for(self.device.capability)}"

    def steps(self) -> list[Step]:
        """All steps; making the list touches no device."""
        device = Step(MEASURED, "device", self._describe, 120, essential=True)
        goldens = [Step(CHECKED, f"golden {case.name}", partial(self._golden, case), 90) for case in self.cases]
        return [device, *goldens[:1], *self._checks(), *self._rates(), *self._timings(), *goldens[1:], *self._products()]

    def _describe(self) -> str:
        device = self.device
        return f"{device.name}, sm_{device.capability}, {device.free_memory() / 2**30:.0f} GiB free, code for {self.target}"

    def _golden(self, case: Path) -> str:
        return golden(case, self.device, self.target, self.folder)

    def _checks(self) -> Iterator[Step]:
        if not self.cases:
            return
        case, n = self.cases[0], 100 if self.sizes.prompt > 100 else 6
        path = self.folder / f"{case.name}.ggufc"
        yield Step(CHECKED, "bits of a text in one piece, in many, and restored", lambda: same_bits(path, self.device, n))
        yield Step(CHECKED, "offload by layers", lambda: offloaded(path, self.device, n))
        yield Step(CHECKED, "caches divided by heads", lambda: halves(case, path, self.device, self.target, self.folder, n), 90)

    def _rates(self) -> Iterator[Step]:
        size = self.sizes.buffer
        yield Step(MEASURED, "memory", lambda: f"filled at {device_fill(self.device, size) / 1e9:.0f} GB/s", 30)
        yield Step(MEASURED, "copies", lambda: copies(self.device, size), 30)

    def _timings(self) -> Iterator[Step]:
        sizes, source, words = self.sizes, self.model, str(self.model)
        if source is None and not self.layers:
            return
        if source is None:
            source, words = self.folder / "made-up.gguf", f"{self.layers} layers shaped like Llama 3.1 8B"
            made = source
            yield Step(MEASURED, f"write {words}", lambda: write_model(made, self.layers, sizes.model) or "done", 90)
        path = self.folder / "timed.ggufc"

        def compiled() -> str:
            report = compile_file(source, path, CompileOptions(target=f"native,{self.target}"))
            return f"{report.launches} launches"

        yield Step(MEASURED, f"compile {words}", compiled, 180)
        yield Step(MEASURED, "decoding, recorded", lambda: decoding(source, path, self.device, sizes, recorded=True))
        yield Step(MEASURED, "decoding, call by call", lambda: decoding(source, path, self.device, sizes, recorded=False))
        yield Step(MEASURED, f"prompt of {sizes.prompt}", lambda: prompts(source, path, self.device, sizes))
        yield Step(MEASURED, "a token's time", lambda: shares(path, self.device, sizes, prompt=False))
        yield Step(MEASURED, "a prompt's time", lambda: shares(path, self.device, sizes, prompt=True))

    def _products(self) -> Iterator[Step]:
        for dtype in self.sizes.types:
            for tokens in self.sizes.tokens:
                what = f"{dtype} {self.sizes.n}x{self.sizes.k}, {tokens} tokens"
                yield Step(MEASURED, what, partial(self._product, dtype, tokens), 30)

        shape = self.sizes.experts
        for dtype in self.sizes.expert_types:
            for tokens in self.sizes.tokens:
                what = f"{dtype} {shape['used']} of {shape['all']} experts {shape['ffn']}x{shape['embd']}, {tokens} tokens"
                yield Step(MEASURED, what, partial(self._experts, dtype, tokens), 30)

    def _product(self, dtype: str, tokens: int) -> str:
        return product(self.device, self.target, dtype, tokens, self.sizes)

    def _experts(self, dtype: str, tokens: int) -> str:
        return experts(self.device, self.target, dtype, tokens, self.sizes)


def golden_folder(given: Path | None) -> Path:
    return given if given is not None else ROOT / "tests" / "golden"


@click.command(help=__doc__)
@click.option(
    "--golden", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Golden cases [default: tests/golden]."
)
@click.option("--case", "names", multiple=True, help="Only these cases.")
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A .gguf file instead of the made-up model.")
@click.option("--layers", type=click.IntRange(0), default=4, show_default=True, help="Layers of the made-up model; 0: none.")
@click.option("--minutes", type=float, default=9.0, show_default=True, help="Nothing begins after this time.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Also write the table here, after every step.")
@click.option("--device", "index", type=click.IntRange(0), default=0, show_default=True, help="Which GPU.")
@click.option("--binding", default="auto", show_default=True, help="auto, pycuda or library.")
@click.option("--simulate", is_flag=True, help="On the tests' interpreter, with tiny sizes.")
@click.option("--work", "place", nargs=2, type=(click.Path(path_type=Path), int), hidden=True, help="Be the process that runs the steps.")
def main(
    folder: Path | None,
    names: tuple[str, ...],
    model: Path | None,
    layers: int,
    minutes: float,
    output: Path | None,
    index: int,
    binding: str,
    simulate: bool,
    place: tuple[Path, int] | None,
) -> None:
    end = time.monotonic() + 60 * minutes
    cases = [case for name in names or CASES if (case := golden_folder(folder) / name).is_dir()]

    def bench(work_folder: Path) -> Bench:
        if simulate:
            return Bench(simulated, TINY, cases, model, min(layers, 1), work_folder)
        return Bench(lambda: make_device(index, binding), Sizes(), cases, model, layers, work_folder)

    if place is not None:
        work(bench(place[0]).steps(), place[1])
        return
    report, patience = Report(output), 10 if simulate else 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave as after an error: processes stopped, the table printed
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as given:
        try:
            again = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--work", given]
            steps = [replace(step, seconds=step.seconds * patience) for step in bench(Path(given)).steps()]
            supervise(steps, lambda first: [*again, str(first)], report, end)
        finally:
            click.echo(report.table())
    sys.exit(1 if report.wrong else 0)


def simulated() -> Device:
    """The tests' interpreter as a device."""
    sys.path.insert(0, str(ROOT / "tests" / "cuda"))
    from simt_device import SimtDevice

    return SimtDevice(races=False)


if __name__ == "__main__":
    main()
