"""Decode and prefill of sparse against dense attention at real width, over long contexts.

    python benchmarks/sparse.py [--context 8192 --context 32768 ...] [--top-k 2048] [--threads N] [--prefill 256]

The model is a glm-dsa with one layer of each kind (dense feed-forward and experts, layers that choose and one that shares) and random
weights; the cache is filled with random rows instead of being computed. One line per context and kind: the best time of a decoded token,
the time of a prefill at that depth, and the process's peak memory so far.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.models.glm_dsa import GLM_DSA
from ggufc.runtime.session import Session

KEYS = {
    "block_count": 4, "context_length": 1 << 17, "embedding_length": 2048, "feed_forward_length": 4096, "vocab_size": 1024,
    "attention.head_count": 16, "attention.head_count_kv": 16, "attention.key_length": 192, "attention.value_length": 128,
    "attention.kv_lora_rank": 512, "attention.q_lora_rank": 768, "rope.dimension_count": 64, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5, "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 2,
    "expert_shared_count": 1, "expert_feed_forward_length": 512, "expert_weights_scale": 2.5, "expert_weights_norm": True,
    "expert_gating_func": 2, "attention.indexer.head_count": 32, "attention.indexer.key_length": 128,
}  # fmt: skip


def write_model(path: Path, top_k: int) -> None:
    """A model file of the widths above; vectors are f32, matrices q8_0."""
    rng = np.random.default_rng(0)
    metadata = {f"glm-dsa.{key}": value for key, value in (KEYS | {"attention.indexer.top_k": top_k}).items()}
    metadata |= {"general.architecture": "glm-dsa"}
    with GGUFWriter(path) as out:
        for key, value in metadata.items():
            out.add(key, value)
        for spec in GLM_DSA.tensors(GLM_DSA.read(metadata), ()):
            if spec.vector:
                out.add_tensor(spec.name, spec.ne, "f32", rng.normal(1, 0.1, spec.ne[0]).astype(np.float32))
                continue
            blocks = np.empty((int(np.prod(spec.ne)) // 32, 34), np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(1.5e-2 / np.sqrt(spec.ne[0])).tobytes(), np.uint8)
            blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 32), np.uint8)
            out.add_tensor(spec.name, spec.ne, "q8_0", blocks.reshape(-1))


def fill(session: Session, n: int) -> None:
    """Occupy ``n`` cells with random rows, as if that many tokens had been decoded."""
    rng = np.random.default_rng(1)
    for name in session._executor.caches.specs:
        rows = session._executor.caches.view(name)[:n]
        rows[:] = rng.normal(size=(n, rows.shape[1] // 2)).astype(np.float16).view(np.uint8)
    session.cells.insert(0, np.arange(n, dtype=np.int32), np.zeros(n, np.int32))


@click.command(help=__doc__)
@click.option("--context", "contexts", multiple=True, type=int, default=(2048, 8192, 32768), show_default=True)
@click.option("--top-k", type=int, default=2048, show_default=True)
@click.option("--threads", type=int, default=None)
@click.option("--prefill", type=int, default=128, show_default=True)
def main(contexts: tuple[int, ...], top_k: int, threads: int | None, prefill: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model.gguf"
        write_model(source, top_k)
        for kind, builder in (("dense", {}), ("sparse", {"dsa": True})):
            artifact = Path(folder) / f"{kind}.ggufc"
            compile_file(source, artifact, CompileOptions(jobs=1, builder=builder))
            for n in contexts:
                with Session(artifact, n_ctx=n + prefill + 64, n_batch=max(16, prefill), n_ubatch=max(16, prefill), n_threads=threads) as s:
                    fill(s, n)
                    start = time.perf_counter()
                    s.decode(np.arange(prefill) % 1000)
                    deep = time.perf_counter() - start
                    times = []
                    for token in range(20):
                        start = time.perf_counter()
                        s.decode([token])
                        times.append(time.perf_counter() - start)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                speed = f"{1000 * min(times):7.2f} ms per token, prefill of {prefill} {deep:6.2f} s"
                click.echo(f"{kind:6} {n:7} cells: {speed}, peak {peak} MiB")


if __name__ == "__main__":
    main()
