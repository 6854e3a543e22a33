"""What a GPU run measures of a whole model (``gpu``): one made up on the spot, its prompts and tokens beside the performance model, and
where their time goes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_kernels import Sizes

from ggufc.benchmark import Test
from ggufc.codegen import frontend
from ggufc.codegen.compile import CompileOptions
from ggufc.codegen.lower import lower
from ggufc.codegen.nvptx import roofline
from ggufc.formats.ggml_types import row_bytes
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.profile import record
from ggufc.runtime.cuda import Device, on_device
from ggufc.runtime.session import Session


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
