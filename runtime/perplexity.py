"""Perplexity of a text, by llama.cpp's convention.

The text is cut into chunks of ``n_ctx`` tokens, each evaluated from an empty cache (its first token replaced by BOS where the model uses
one), several of them at once where the session has room for several sequences: the figure is the same to the bit. The second half of each
chunk is scored, so every scored token has at least n_ctx/2 tokens of context. A token's score is -log p(token | tokens before it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import RuntimeRefusal
from .session import Session


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(mean negative log-likelihood) over ``n_tokens`` scored tokens of ``n_chunks`` chunks; ``error`` is its standard
    error, None where a single token was scored.
    """

    value: float
    error: float | None
    n_tokens: int
    n_chunks: int


def nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """f64 [rows]: negative log-likelihood of ``targets`` under f32 ``logits`` [rows, n_vocab]."""
    top = logits.max(axis=1)
    # The sum is formed in f64 row by row, so that no f64 copy of all logits is made.
    total = np.array([np.exp((row - m).astype(np.float64)).sum() for row, m in zip(logits, top)])
    chosen = logits[np.arange(len(targets)), targets]
    return np.log(total) + top.astype(np.float64) - chosen.astype(np.float64)


def perplexity(
    session: Session,
    text: str | Sequence[int],
    n_ctx: int | None = None,
    n_chunks: int = -1,
    on_chunk: Callable[[int, int, Perplexity], None] | None = None,
    n_parallel: int | None = None,
) -> Perplexity:
    """Perplexity of ``text`` (or token ids) in chunks of ``n_ctx`` tokens, the session's context by default; resets the session.

    ``n_parallel`` chunks are evaluated at once, by default as many as the session has sequences and cells for.
    ``on_chunk(done, total, so_far)`` is called after each chunk. RuntimeRefusal if the text is shorter than two chunks, as llama.cpp does.
    """
    size = session.n_ctx if n_ctx is None else n_ctx
    if not 4 <= size <= session.cells.size:
        raise RuntimeRefusal(f"perplexity: chunks of {size} tokens do not fit; give an n_ctx from 4 to {session.cells.size}")
    given = isinstance(text, str)
    tokens = np.asarray(session.tokenize(text) if isinstance(text, str) else text, np.int64)
    available = len(tokens) // size
    if len(tokens) < 2 * size:
        raise RuntimeRefusal(f"perplexity: the text has {len(tokens)} tokens; give at least {2 * size} (two chunks), or a smaller n_ctx")
    total = available if n_chunks < 0 else min(n_chunks, available)
    bos = session.tokenizer.bos if given and session.tokenizer.add_bos else None
    fitting = min(session.n_seq_max, session.cells.size // size)
    width = fitting if n_parallel is None else n_parallel
    if not 1 <= width <= fitting:
        raise RuntimeRefusal(
            f"perplexity: {width} chunks of {size} tokens at once do not fit; {fitting} do (n_seq_max {session.n_seq_max}, "
            f"{session.cells.size} cells)"
        )
    scores: list[np.ndarray] = []
    result = Perplexity(math.nan, None, 0, 0)
    for begin in range(0, total, width):
        targets = tokens[begin * size : min(begin + width, total) * size].reshape(-1, size)
        inputs = targets.copy()
        if bos is not None:
            inputs[:, 0] = bos
        session.reset()
        for row in _scores(session, inputs, targets):
            scores.append(row)
            result = _summary(np.concatenate(scores), len(scores))
            if on_chunk is not None:
                on_chunk(len(scores), total, result)
    session.reset()
    return result


def _scores(session: Session, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """f64 [chunks, scored]: scores of the second halves of chunks i64 [chunks, size], each chunk in a sequence of its own."""
    width, size = inputs.shape
    first = size // 2
    parts = []
    # The step keeps the rows of all chunks within one micro-batch: the logits of whole half chunks of a large vocabulary need not exist
    # at once.
    for begin, end, step, wanted in (
        (0, first, max(1, session.n_batch // width), "none"),
        (first, size - 1, max(1, session.n_ubatch // width), "all"),
    ):
        for at in range(begin, end, step):
            stop = min(end, at + step)
            n = stop - at
            logits = session.decode(
                inputs[:, at:stop].reshape(-1), np.tile(np.arange(at, stop), width), np.repeat(np.arange(width), n), wanted
            )
            if wanted == "all":
                parts.append(nll(logits, targets[:, at + 1 : stop + 1].reshape(-1)).reshape(width, n))
    return np.concatenate(parts, axis=1)


def _summary(scores: np.ndarray, n_chunks: int) -> Perplexity:
    mean = float(scores.mean())
    value = math.exp(mean) if mean < 700 else math.inf
    error = value * float(scores.std(ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return Perplexity(value, error, len(scores), n_chunks)
