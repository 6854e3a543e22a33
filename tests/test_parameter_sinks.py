"""Sinks of openpangu 5000 positions deep: each layer reads all of them beside the few rows its window or its indexer leaves."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.runtime import Artifact, Session
from support import compiled, golden_cases, random_tokens

CASE = next(case for case in golden_cases("openpangu-swa-dsa-ubatch"))
AT, WINDOW, TOP_K, SINKS, HEADS, LATENT, ROW = 5000, 8, 10, 16, 4, 48, 64
INDEXED, WINDOWED = 2, (0, 1, 3)


@pytest.fixture(scope="module")
def artifact() -> Iterator[Artifact]:
    with compiled(CASE, keep="stored", builder={"idx_type_k": "f32"}) as opened:
        yield opened


def session(artifact: Artifact | Path) -> Session:
    return Session(artifact, n_ctx=AT + 120, n_batch=AT, n_ubatch=1000, n_threads=2)


@pytest.fixture(scope="module")
def deep(artifact: Artifact) -> bytes:
    """The state after the tokens of positions 0 to 4999."""
    blob = io.BytesIO()
    with session(artifact) as s:
        s.decode(random_tokens(artifact, AT), logits="none")
        s.state_save(blob, 0)
    return blob.getvalue()


def next_token(artifact: Artifact | Path, state: bytes) -> tuple[np.ndarray, Session]:
    """Logits of a token at position 5000, and the session, which is closed but keeps what the launches left."""
    with session(artifact) as s:
        s.state_load(state, 0)
        return s.decode([17], logits="all").copy(), s


def sinks_of(layer: int) -> np.ndarray:
    """f32 [16, 64]: latents under the norm of cached ones, then what stands for the rotated part (openpangu.md section 2)."""
    with GGUFFile.open(CASE / "model.gguf") as file:
        read = lambda name: np.array(file.data(f"blk.{layer}.{name}")).view(np.float32)  # noqa: E731
        raw, norm = read("attn_param_sink_kv").reshape(SINKS, LATENT), read("attn_kv_a_norm.weight")
        eps = file.metadata["openpangu.attention.layer_norm_rms_epsilon"]
        latents = raw / np.sqrt((raw**2).mean(axis=1, keepdims=True) + eps) * norm
        return np.concatenate([latents, read("attn_param_sink_k_pe").reshape(SINKS, ROW - LATENT)], axis=1)


def attention(q: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 [heads, 48] and weights [heads, rows] of queries [heads, 64]; the scale is that of heads of 32 values."""
    scores = (q @ rows.T).astype(np.float64) / np.sqrt(32)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights @ rows[:, :LATENT], weights


def test_sinks_stay_open_beyond_window_and_choice(artifact: Artifact, deep: bytes) -> None:  # S91
    """Each layer's attention at position 5000 is that over its 16 sinks and the rows of its window or choice, and is not that without."""
    _, s = next_token(artifact, deep)
    chosen = s.executor.output(f"keep:blk.{INDEXED}.indexer.top_k").view(np.int32).reshape(-1)
    assert len(set(chosen.tolist())) == TOP_K and chosen.min() >= 0 and chosen.max() <= AT
    assert chosen.min() < AT - 100, "the choice reaches far back"
    for layer in (*WINDOWED, INDEXED):
        cells = chosen if layer == INDEXED else np.arange(AT + 1 - WINDOW, AT + 1)
        rows = s.executor.caches.view(f"blk.{layer}.k")[cells].view(np.float16).reshape(-1, ROW).astype(np.float32)
        q = s.executor.output(f"keep:blk.{layer}.kqv.latents.q").reshape(HEADS, ROW)
        got = s.executor.output(f"keep:blk.{layer}.kqv.latents.fused").reshape(HEADS, LATENT)
        want, weights = attention(q, np.concatenate([sinks_of(layer), rows]))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=f"layer {layer}")
        assert (weights[:, :SINKS].sum(axis=1) > 1e-3).all() and (weights > 0).all(), layer
        assert np.abs(got - attention(q, rows)[0]).max() > 0.1, layer


@pytest.mark.parametrize("layer", [INDEXED, WINDOWED[-1]], ids=["indexed", "windowed"])
def test_other_sinks_change_the_logits_there(artifact: Artifact, deep: bytes, layer: int, tmp_path: Path) -> None:  # S91
    """Sinks exchanged after 5000 tokens were evaluated: only that one token can tell."""
    want, _ = next_token(artifact, deep)
    assert np.array_equal(next_token(artifact, deep)[0], want)
    other = tmp_path / "other.ggufc"
    data = bytearray(artifact.path.read_bytes())
    (info,) = (t for name, t in artifact.file.tensors.items() if name.startswith(f"blk.{layer}.attn_param_sink.rows"))
    rows = np.frombuffer(data, np.float32, info.nbytes // 4, info.offset)
    rows *= -1
    other.write_bytes(data)
    with Artifact.open(other) as changed:
        assert np.abs(next_token(changed, deep)[0] - want).max() > 0.5
