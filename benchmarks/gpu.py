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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from bounded import Report, Step, supervise, work

from ggufc.benchmark import Test
from ggufc.codegen import frontend
from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.lower import lower
from ggufc.codegen.nvptx import describe, emit_ptx, roofline
from ggufc.codegen.nvptx.expert_tiles import tile_from
from ggufc.codegen.nvptx.products import TILE_FROM
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.formats import cuda
from ggufc.formats.abi import PARAMS
from ggufc.formats.ggml_types import row_bytes
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.passes import DEFAULT_PIPELINE
from ggufc.passes.split_heads import with_split
from ggufc.profile import device_fill, record
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


@dataclass(frozen=True)
class Sizes:
    """What to measure: an output and input width, token counts, the prompt and decoding of the model, its own shape, and experts'."""

    k: int = 4096
    n: int = 28672
    tokens: tuple[int, ...] = (1, 4, 16, 64, 512)
    types: tuple[str, ...] = ("q4_k", "q6_k", "q8_0", "f16", "f32")
    expert_types: tuple[str, ...] = ("q4_k", "q6_k", "f16")
    prompt: int = 512
    decode: int = 64
    copies: int = 4
    buffer: int = 256 << 20
    rounds: int = 10
    model: dict[str, int] = field(
        default_factory=lambda: {"embd": 4096, "ffn": 14336, "heads": 32, "groups": 8, "head": 128, "vocab": 128256}
    )
    experts: dict[str, int] = field(default_factory=lambda: {"embd": 2048, "ffn": 768, "all": 128, "used": 8})


TINY = Sizes(
    256, 32, (1, 17), ("q8_0",), ("q8_0",), 3, 3, 2, 1 << 12, 2,
    {"embd": 256, "ffn": 256, "heads": 4, "groups": 2, "head": 64, "vocab": 64}, {"embd": 64, "ffn": 32, "all": 4, "used": 2},
)  # fmt: skip


# Right


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


# Fast


def best_of(device: Device, rounds: int, action: Callable[[int], None]) -> float:
    """Seconds of the fastest round."""
    best = float("inf")
    for i in range(rounds):
        start = device.mark()
        action(i)
        stop = device.mark()
        device.synchronize()
        best = min(best, device.elapsed(start, stop) / 1e3)
    return max(best, 1e-9)


@contextmanager
def buffers(device: Device, *sizes: int) -> Iterator[list[int]]:
    held = []
    try:
        for size in sizes:
            held.append(device.alloc(size))
        yield held
    finally:
        for address in held:
            device.free(address)


def copies(device: Device, size: int) -> str:
    pinned = device.host_array(size)
    with buffers(device, size) as (address,):
        there = best_of(device, 5, lambda _: device.send(address, pinned))
        back = best_of(device, 5, lambda _: device.receive(address, pinned))
    return f"{size / there / 1e9:.1f} GB/s to the device, {size / back / 1e9:.1f} from it (pinned)"


def launcher(device: Device, target: str, spec: MatMul | MatMulId, tokens: int) -> Callable[[list[int], int], None]:
    """``launch(arguments, params)`` of the entry that computes a product of ``tokens`` tokens; ``params``: address of the symbols."""
    module = device.load(emit_ptx([spec], target.removeprefix("cuda:")))
    (entry,) = [e for e in describe(spec).entries if e.low <= tokens and (not e.high or tokens <= e.high)]
    count = cuda.tiles(entry.grid, {"T": tokens})
    function = device.function(module, entry.symbol)
    return lambda words, params: device.launch(function, min(count, cuda.MAX_GRID), entry.block, [*words, params, 0, 0, count])


def activation_bytes(dtype: str, k: int) -> int:
    return 4 * k if dtype in ("f32", "f16", "bf16") else q8_record(k).stride


def outcome(dtype: str, seconds: float, moved: float, operations: float, tiles: bool) -> str:
    """Rates, and the share of what the roofline allows."""
    machine = roofline.H200
    rate = machine.f32 if dtype in ("f32", "f16", "bf16") else machine.tensor if tiles else machine.dp4a
    limit = max(moved / machine.bandwidth, operations / rate)
    return (
        f"{1e6 * seconds:.1f} us, {moved / seconds / 1e9:.0f} GB/s, {operations / seconds / 1e12:.1f} Top/s; "
        f"{100 * limit / seconds:.0f} % of the roofline of {machine.name}"
    )


def symbols_of(tokens: int) -> np.ndarray:
    return np.array([tokens if name == "T" else 0 for name in PARAMS], np.int64)


def product(device: Device, target: str, dtype: str, tokens: int, sizes: Sizes) -> str:
    """Time of one product, cycling through copies of the weights so that the second-level cache does not hold them."""
    k, n = sizes.k, sizes.n
    spec = MatMul(dtype, k, n, "none", False, "T")
    launch = launcher(device, target, spec, tokens)
    weight, activation = weight_format(dtype).packed_bytes(k, n), activation_bytes(dtype, k)
    with buffers(device, *[weight] * sizes.copies, tokens * activation, 4 * tokens * n, symbols_of(tokens).nbytes) as held:
        *weights, x, y, params = held
        for address, size in [*((w, weight) for w in weights), (x, tokens * activation)]:
            device.fill(address, size)
        device.upload(params, symbols_of(tokens))

        def once(i: int) -> None:
            launch([weights[i % len(weights)], x, y, k, n, 0, 0, 0, rows_argument("T")], params)

        seconds = best_of(device, sizes.rounds, once)
    return outcome(dtype, seconds, weight, 2.0 * k * n * tokens, tokens >= TILE_FROM)


def experts(device: Device, target: str, dtype: str, tokens: int, sizes: Sizes) -> str:
    """Time of gate and up of the experts that tokens choose at random."""
    shape = sizes.experts
    spec = MatMulId(dtype, shape["embd"], shape["ffn"], shape["all"], shape["used"], True, epilogue="silu_glu")
    launch = launcher(device, target, spec, tokens)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(spec.n_expert)[: spec.n_used] for _ in range(tokens)]).astype(np.int32)
    weights, activation = spec.n_expert * spec.expert_bytes, activation_bytes(dtype, spec.k)
    results = 4 * ids.size * spec.n
    with buffers(device, weights, weights, tokens * activation, results, ids.nbytes, symbols_of(tokens).nbytes) as held:
        gate, up, x, y, chosen, params = held
        for address, size in ((gate, weights), (up, weights), (x, tokens * activation)):
            device.fill(address, size)
        device.upload(chosen, ids)
        device.upload(params, symbols_of(tokens))
        seconds = best_of(device, sizes.rounds, lambda _: launch([gate, x, y, chosen, rows_argument("T"), up], params))
    moved = 2.0 * len(np.unique(ids)) * spec.expert_bytes
    return outcome(dtype, seconds, moved, 4.0 * ids.size * spec.k * spec.n, tokens >= tile_from(spec, TILE_FROM))


def write_model(path: Path, layers: int, shape: dict[str, int]) -> None:
    """A llama of the given shape in the mixture of Q4_K_M (half of ``attn_v`` and ``ffn_down`` in Q6_K), all weights zero but their scales:
    its time does not depend on them.
    """
    e, f, v, kv = shape["embd"], shape["ffn"], shape["vocab"], shape["groups"] * shape["head"]
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", "llama")
        for key, value in {
            "block_count": layers, "context_length": 8192, "embedding_length": e, "feed_forward_length": f,
            "attention.head_count": shape["heads"], "attention.head_count_kv": shape["groups"], "vocab_size": v,
            "rope.dimension_count": shape["head"],
        }.items():  # fmt: skip
            writer.add(f"llama.{key}", value, "uint32")
        writer.add("llama.rope.freq_base", 500000.0, "float32")
        writer.add("llama.attention.layer_norm_rms_epsilon", 1e-5, "float32")

        def matrix(name: str, k: int, n: int, dtype: str = "q4_k") -> None:
            def rows() -> Iterator[np.ndarray]:
                for at in range(0, n, 1024):
                    yield np.zeros(min(1024, n - at) * row_bytes(dtype, k), np.uint8)

            writer.add_tensor(name, (k, n), dtype, rows)

        def vector(name: str, k: int) -> None:
            writer.add_tensor(name, (k,), "f32", np.ones(k, np.float32))

        matrix("token_embd.weight", e, v)
        matrix("output.weight", e, v, "q6_k")
        vector("output_norm.weight", e)
        for i in range(layers):
            better = "q6_k" if i % 2 else "q4_k"
            vector(f"blk.{i}.attn_norm.weight", e)
            vector(f"blk.{i}.ffn_norm.weight", e)
            for name, k, n, dtype in (
                ("attn_q", e, shape["heads"] * shape["head"], "q4_k"), ("attn_k", e, kv, "q4_k"), ("attn_v", e, kv, better),
                ("attn_output", shape["heads"] * shape["head"], e, "q4_k"), ("ffn_gate", e, f, "q4_k"), ("ffn_up", e, f, "q4_k"),
                ("ffn_down", f, e, better),
            ):  # fmt: skip
                matrix(f"blk.{i}.{name}.weight", k, n, dtype)
        writer.finish()


def expected(source: Path, tokens: int, context: int) -> float:
    """Seconds of a micro-batch by the performance model, for an H200."""
    options = CompileOptions()
    with frontend.open_model(source) as (_, model):
        graph = frontend.build_graph(model, options, "eval")
        frontend.run_passes(graph, options)
        schedule = lower(graph, "eval")[0]
    return sum(share.seconds for share in roofline.estimate(schedule, roofline.H200, tokens, context))


def timed_session(path: Path, device: Device, sizes: Sizes, **options: Any) -> Session:
    return Session(
        path, n_ctx=sizes.prompt + sizes.decode + 256, n_batch=sizes.prompt, n_ubatch=sizes.prompt, executor=on_device(device), **options
    )


def prompts(source: Path, path: Path, device: Device, sizes: Sizes) -> str:
    """The fastest of four prompts, the first of which also loads the kernels."""
    tokens = np.ones(sizes.prompt, np.int32)
    with timed_session(path, device, sizes) as s:
        best = float("inf")
        for _ in range(4):
            s.seq_rm(-1)
            began = time.perf_counter()
            s.decode(tokens)
            best = min(best, time.perf_counter() - began)
    limit = expected(source, sizes.prompt, sizes.prompt)
    return f"{sizes.prompt / best:.0f} tokens/s, {1e3 * best:.2f} ms; roofline {1e3 * limit:.2f} ms, {100 * limit / best:.0f} %"


def decoding(source: Path, path: Path, device: Device, sizes: Sizes, recorded: bool) -> str:
    """Tokens one by one, replayed from a recording or started call by call."""
    usable, device.graphs = device.graphs, device.graphs and recorded
    try:
        with timed_session(path, device, sizes) as s:
            s.decode_view([1])
            s.decode_view([1])
            began = time.perf_counter()
            for _ in range(sizes.decode):
                s.decode_view([1])
            each = (time.perf_counter() - began) / sizes.decode
            counts = s.executor.recordings  # type: ignore[attr-defined]
    finally:
        device.graphs = usable
    limit = expected(source, 1, sizes.decode)
    return (
        f"{1 / each:.1f} tokens/s, {1e3 * each:.3f} ms; roofline {1e3 * limit:.3f} ms, {100 * limit / each:.0f} % "
        f"({counts.recorded} recordings, {counts.replayed} replays)"
    )


def shares(path: Path, device: Device, sizes: Sizes, prompt: bool) -> str:
    """The kernels that take most of a prompt's or of a decoded token's time."""
    test = Test(sizes.prompt if prompt else 0, 0 if prompt else min(sizes.decode, 8))
    with timed_session(path, device, sizes, profile=True) as s:
        entries = record(s, test)
    kernels: dict[str, list[float]] = {}
    for entry in entries:
        kernels.setdefault(entry.kernel, []).append(entry.working)
    whole = sum(map(sum, kernels.values()))
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:6]
    told = (f"{100 * sum(each) / whole:.0f} % {name[:60]} ({len(each)} x {1e6 * sum(each) / len(each):.1f} us)" for name, each in longest)
    return "; ".join(told)


# All of it


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
