"""Decode and prefill of sparse against dense attention at real width, over long contexts, for glm-dsa, openpangu and deepseek4.

    python benchmarks/sparse.py [--family openpangu ...] [--context 8192 --context 32768 ...] [--top-k 2048] [--keep FOLDER]

Each model has one layer of each kind of its family and random weights; caches are filled with random rows instead of being computed. Kinds:
`sparse` as the model says; `dense` without the indexer's choice (deepseek4: a choice of 8192 entries, those of 32768 tokens); `unfused`
as `sparse`, without the fusions of hyper-connections, routing and attention over two kinds of rows. One line per context and kind: the
best time of a decoded token, the time of a prefill at that depth, what attention reads per token, and the process's peak memory so far.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.formats.artifact import evaluate
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.formats.quants.quantize import quantize
from ggufc.inspection import attention_reads
from ggufc.models.registry import ARCHITECTURES
from ggufc.passes import DEFAULT_PIPELINE
from ggufc.runtime.session import Session

COMMON = {
    "context_length": 1 << 17, "embedding_length": 2048, "vocab_size": 1024, "attention.head_count": 16, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1,
    "expert_feed_forward_length": 512, "expert_weights_scale": 2.5, "expert_weights_norm": True, "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
}  # fmt: skip
LATENT = {
    "attention.key_length": 192, "attention.value_length": 128, "attention.kv_lora_rank": 512, "attention.q_lora_rank": 768,
    "rope.dimension_count": 64, "leading_dense_block_count": 1, "feed_forward_length": 4096, "expert_gating_func": 2,
}  # fmt: skip
WINDOWS = {"swa_layers": [0, 1], "sliding_window_list": [512, 512]}
KEYS: dict[str, dict[str, Any]] = {
    "glm-dsa": COMMON | LATENT | {"block_count": 4, "attention.head_count_kv": 16},
    "openpangu": COMMON | LATENT | WINDOWS | {"block_count": 3, "mhc_num_stream": 4, "mhc_recur_norm": 20, "param_sink_number": 128},
    "deepseek4": COMMON
    | {
        "block_count": 3, "attention.key_length": 512, "rope.dimension_count": 64, "attention.q_lora_rank": 1024,
        "attention.sliding_window": 128, "attention.output_group_count": 8, "attention.output_lora_rank": 256,
        "attention.compress_ratios": [0, 4, 128], "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6, "swiglu_clamp_exp": 10.0,
    },
}  # fmt: skip

NEW = ("fuse-hyper-connections", "fuse-routing", "fuse-sparse-attention")
UNFUSED = ",".join(name for name in DEFAULT_PIPELINE.split(",") if name not in NEW)


def kinds(family: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, metadata that differs, compile options) of what is measured."""
    builder = {"dsa": True} if family == "glm-dsa" else {}
    dense: dict[str, Any] = {"builder": {"dsa_top_k": 8192}} if family == "deepseek4" else {}
    # Without a schedule of windows openpangu reads every row in every layer.
    yield "dense", {"swa_layers": None, "sliding_window_list": None} if family == "openpangu" else {}, dense
    yield "sparse", {}, {"builder": builder}
    yield "unfused", {}, {"builder": builder, "pipeline": UNFUSED}


def write_model(path: Path, family: str, top_k: int, other: dict[str, Any]) -> None:
    """A model file of the widths above; vectors and short rows are f32, other matrices q8_0."""
    rng = np.random.default_rng(0)
    keys = KEYS[family] | {"attention.indexer.top_k": top_k} | other
    metadata = {f"{family}.{key}": value for key, value in keys.items() if value is not None} | {"general.architecture": family}
    architecture = ARCHITECTURES[family]
    with GGUFWriter(path) as out:
        for key, value in metadata.items():
            out.add(key, value)
        present = {f"blk.{i}.attn_indexer_q_b.weight" for i in range(keys["block_count"])}
        for spec in architecture.tensors(architecture.read(metadata), present):
            width, n = spec.ne[0], int(np.prod(spec.ne))
            if spec.vector or width % 32:
                # Factors of gates stay small, so that residual streams do too.
                mean, spread = (1.0, 0.1) if "norm" in spec.name or "gamma" in spec.name else (0.0, 0.1)
                out.add_tensor(spec.name, spec.ne, "f32", rng.normal(mean, spread, n).astype(np.float32))
                continue
            blocks = np.empty((n // 32, 34), np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(1.5e-2 / np.sqrt(width)).tobytes(), np.uint8)
            blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 32), np.uint8)
            out.add_tensor(spec.name, spec.ne, "q8_0", blocks.reshape(-1))


def fill(session: Session, n: int) -> None:
    """Occupy ``n`` cells with random rows, as if that many tokens had been decoded."""
    rng = np.random.default_rng(1)
    executor = session.executor
    env = executor.limits.env()
    for name, spec in executor.caches.specs.items():
        rows = min(n, evaluate(spec.rows, env))
        executor.caches.view(name)[:rows] = quantize(spec.dtype, rng.normal(size=(rows, spec.row)).astype(np.float32))
    positions = np.arange(n, dtype=np.int32)
    session.cells.insert_at(positions, positions, np.zeros(n, np.int32))
    if session.states:
        session.states.next[0] = n


def measure(session: Session, n: int, prefill: int) -> tuple[float, float]:
    """Seconds of the best of 20 decoded tokens and of a prefill, ``n`` tokens deep."""
    fill(session, n)
    start = time.perf_counter()
    session.decode(np.arange(prefill) % 1000)
    deep = time.perf_counter() - start
    times = []
    for token in range(20):
        start = time.perf_counter()
        session.decode([token])
        times.append(time.perf_counter() - start)
    return min(times), deep


@click.command(help=__doc__)
@click.option("--family", "families", multiple=True, type=click.Choice(list(KEYS)), default=list(KEYS), show_default=True)
@click.option(
    "--kind", "wanted", multiple=True, type=click.Choice(["dense", "sparse", "unfused"]), default=("dense", "sparse"), show_default=True
)
@click.option("--context", "contexts", multiple=True, type=int, default=(2048, 8192, 32768), show_default=True)
@click.option("--top-k", type=int, default=2048, show_default=True)
@click.option("--threads", type=int, default=None)
@click.option("--prefill", type=int, default=128, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="A folder for models and artifacts; what lies there is used again.")
@click.option("--compile-only", is_flag=True, help="Only make the artifacts of --keep.")
def main(
    families: tuple[str, ...], wanted: tuple[str, ...], contexts: tuple[int, ...], top_k: int, threads: int | None, prefill: int,
    keep: Path | None, compile_only: bool,
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for family in families:
            for kind, other, options in kinds(family):
                if kind not in wanted:
                    continue
                artifact = folder / f"{family}-{kind}.ggufc"
                if not artifact.exists():
                    source = folder / f"{family}.gguf"
                    write_model(source, family, top_k, other)
                    compile_file(source, artifact, CompileOptions(jobs=1, **options))
                    source.unlink()
                for n in contexts if not compile_only else ():
                    size = max(16, prefill)
                    with Session(artifact, n_ctx=n + prefill + 64, n_batch=size, n_ubatch=size, n_threads=threads) as s:
                        token, deep = measure(s, n, prefill)
                        program = next(p for p in s.artifact.manifest.programs if p.name == "eval")
                        reads = attention_reads(s.artifact.manifest, program, (n,))[0]["attention"]
                        launches = len(program.launches)
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                    speed = f"{1000 * token:7.2f} ms per token, prefill of {prefill} {deep:6.2f} s"
                    size_of = f"attention reads {reads / 1e6:6.2f} MB, {launches} launches, peak {peak} MiB"
                    click.echo(f"{family:9} {kind:7} {n:6} cells: {speed}, {size_of}")


if __name__ == "__main__":
    main()
