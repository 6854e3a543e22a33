"""Sparse families at long contexts: the same bits in micro-batches of any size, token by token, after a state came back, and whatever
buffers held before.

At 2048 tokens every choice bites: ``glm-dsa`` keeps 8 cells, ``openpangu`` a window of 8 and 10 rows (with 64 heads a window of 64 and 512
rows), ``deepseek4`` a window of 24 and 8 of 512 compressed entries."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ggufc.runtime import Artifact, Session
from ggufc.runtime.logits import graph_options
from support import compiled, fill_results, golden_cases, one_by_one, random_tokens

NAMES = ("glm-dsa-topk8", "openpangu-swa-dsa-ubatch", "openpangu-chunked", "deepseek4-split-decode")
PROMPT, MORE = 2048, 40
SIZES = (2048, 1000, 512, 257)
"""Tokens of a micro-batch: all, a cut inside compressed blocks, a multiple of every block, and one more than attention's chunk."""


@pytest.fixture(scope="module", params=[case for case in golden_cases(*NAMES) if case.name in NAMES], ids=lambda p: p.name)
def artifact(request: pytest.FixtureRequest) -> Iterator[Artifact]:
    options = json.loads((request.param / "case.json").read_text())["options"]
    with compiled(request.param, builder=graph_options(options)) as opened:
        yield opened


def session(artifact: Artifact, **options: Any) -> Session:
    return Session(artifact, **{"n_ctx": 2304, "n_batch": PROMPT, "n_seq_max": 1, "n_threads": 2, **options})


def tokens_of(artifact: Artifact) -> list[int]:
    return random_tokens(artifact, PROMPT + MORE)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.fixture(scope="module")
def reference(artifact: Artifact) -> np.ndarray:
    """Logits of every position: one token at a time on one thread, from graphs bound anew each time."""
    with session(artifact, n_threads=1, n_ubatch=1, graph_reuse=False) as s:
        return one_by_one(s, tokens_of(artifact))


@pytest.mark.parametrize("n_ubatch", SIZES)
def test_micro_batches_of_any_size(artifact: Artifact, reference: np.ndarray, n_ubatch: int) -> None:  # S46, S100, S138
    """A prompt in one call and the tokens after it; each size with another number of threads."""
    tokens, threads = tokens_of(artifact), 1 + SIZES.index(n_ubatch) % 3
    with session(artifact, n_ubatch=n_ubatch, n_threads=threads) as s:
        assert same(s.decode(tokens[:PROMPT], logits="all"), reference[:PROMPT])
        assert same(one_by_one(s, tokens[PROMPT:]), reference[PROMPT:])


@pytest.mark.parametrize("n", [257, 1000, 2048])
def test_prompts_in_one_batch_and_in_chunks(artifact: Artifact, reference: np.ndarray, n: int) -> None:  # S100
    """Lengths on both sides of the chunk of 256: whole, in chunks, and in calls that end elsewhere than chunks do."""
    tokens = tokens_of(artifact)[:n]
    for n_ubatch, call in ((2048, n), (256, n), (256, 600), (14, n)):
        with session(artifact, n_ubatch=n_ubatch) as s:
            rows = [s.decode(tokens[at : at + call], logits="all") for at in range(0, n, call)]
        assert same(np.concatenate(rows), reference[:n]), (n_ubatch, call)


def saved(s: Session, seq: int | None = 0, **options: Any) -> bytes:
    file = io.BytesIO()
    assert s.state_save(file, seq, **options) == len(file.getvalue())
    return file.getvalue()


FORMS = ({"n_threads": 1, "n_ubatch": 2048}, {"n_threads": 2, "n_ubatch": 257, "graph_reuse": False}, {"n_threads": 3, "n_ubatch": 100})


def test_states_of_long_contexts_come_back_bit_for_bit(artifact: Artifact, reference: np.ndarray) -> None:  # S8, S44, S105, S144
    """Saved 2001 tokens deep, inside compressed blocks. The bytes of a state do not depend on chunks, threads or reuse; whichever session
    loads it goes on as the one that saved it."""
    tokens, cut, end = tokens_of(artifact), 2001, PROMPT + MORE
    blobs, contexts = [], set()
    for form, call in zip(FORMS, (1200, 777, 64)):
        with session(artifact, **form) as s:
            for at in range(0, cut, call):
                s.decode(tokens[at : min(at + call, cut)], logits="none")
            blobs.append(saved(s))
            part = saved(s, partial=True)
            if not s.states.rows_per_sequence:
                contexts.add(saved(s, None))
            assert same(s.decode(tokens[cut:end], logits="all"), reference[cut:])
            if s.states.rows_per_sequence:
                s.seq_rm(0, cut, -1)
            assert s.state_load(part, 0, partial=True) == cut
            assert same(s.decode(tokens[cut:end], logits="all"), reference[cut:])
            s.reset()
            s.decode(tokens[5:1500], logits="none")
            s.state_load(blobs[0], 0)
            assert same(s.decode(tokens[cut:end], logits="all"), reference[cut:])
    assert blobs[0] == blobs[1] == blobs[2] and len(contexts) <= 1
    for form, step in zip(FORMS, (len(tokens), 1, 7)):
        with session(artifact, **form) as s:
            s.state_load(blobs[1], 0)
            rows = [s.decode(tokens[at : min(at + step, end)], logits="all") for at in range(cut, end, step)]
        assert same(np.concatenate(rows), reference[cut:])


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "rebuild"])
def test_a_graph_kept_through_a_long_context(artifact: Artifact, reference: np.ndarray, reuse: bool) -> None:  # S109, S146
    """Calls of many lengths, each after steps of one token: a kept graph meets every size again deeper in the cache."""
    tokens, at, rows = tokens_of(artifact), 0, []
    with session(artifact, n_ubatch=300, n_threads=3, graph_reuse=reuse) as s:
        for n in (1, 1, 299, 1, 300, 1, 1, 33, 256, 1, 2, 301, 1, 600, 1, 15, 14, 1):
            rows.append(s.decode(tokens[at : at + n], logits="all"))
            at += n
        rows.append(one_by_one(s, tokens[at : at + 60]))
        at += 60
        hits = s.stats.reuse_hits
    assert same(np.concatenate(rows), reference[:at]) and at > 1800
    assert (hits > 60) == reuse


@pytest.mark.parametrize("n_ubatch", [512, 257, 64])
def test_compacted_windows_at_every_depth(artifact: Artifact, reference: np.ndarray, n_ubatch: int) -> None:  # S98
    """Rows of windowed layers are given away and used again while the other layers choose from the whole context."""
    if not any(cache.window for cache in artifact.manifest.caches):
        pytest.skip("no windows")
    tokens = tokens_of(artifact)
    with session(artifact, n_ubatch=n_ubatch, n_threads=1 + n_ubatch % 3, compact_windows=True) as s:
        rows = [s.decode(tokens[:1300], logits="all"), s.decode(tokens[1300:PROMPT], logits="all"), one_by_one(s, tokens[PROMPT:])]
        assert s.window_rows is not None and s.window_rows.base > 0, "rows were given away"
    assert same(np.concatenate(rows), reference)


FILLS = (0x00, 0xFF, 0x7B)
"""Zeros; NaN in every float type; large finite numbers, which a maximum that drops NaN would let through."""


def fill_caches(s: Session, byte: int) -> None:
    """Give every row of every cache the same bytes, but the row of zeros from which convolutions start."""
    store = s.executor.caches
    for name, spec in store.specs.items():
        rows = store.view(name)
        rows[: -1 if spec.rows == {"S": 1, "": 1} else None] = byte


def two_sequences(artifact: Artifact, byte: int | None) -> list[np.ndarray]:
    """Logits of two sequences of 300 and 171 tokens (one where the model keeps one), mixed in one batch and token by token; last of the
    first one after its state came back into caches full of ``byte``."""
    tokens, n_seq = tokens_of(artifact), 1 if artifact.manifest.arch == "openpangu" else 2
    first, second = 200, 141
    batches = [[(seq, p) for p in range(first) for seq in range(n_seq) if seq == 0 or p < second]]
    batches += [[(seq, (first, second)[seq] + i)] for i in range(30) for seq in range(n_seq)]
    batches.append([(0, p) for p in range(first + 30, first + 100)])
    rows = []
    with session(artifact, n_ctx=1024, n_seq_max=n_seq, n_ubatch=90) as s:
        if byte is not None:
            fill_caches(s, byte)
        for at, batch in enumerate(batches):
            if byte is not None:
                fill_results(s, byte)
            rows.append(s.decode([tokens[1000 * q + p] for q, p in batch], [p for _, p in batch], [q for q, _ in batch], logits="all"))
            if at == 0:
                state = saved(s)
        if byte is not None:
            fill_caches(s, byte)
        s.state_load(state, 0)
        rows.append(s.decode(tokens[first : first + 100], logits="all"))
    assert same(rows[-1], np.concatenate([got for got, batch in zip(rows[1:], batches[1:], strict=False) if batch[0][0] == 0]))
    return rows


def test_what_caches_and_buffers_held_is_never_seen(artifact: Artifact) -> None:  # S40, S52, S140
    """Rows not yet written, rows of the other sequence, the spare row that overwritten ring rows go to, and buffers between launches."""
    clean = two_sequences(artifact, None)
    for byte in FILLS:
        for got, want in zip(two_sequences(artifact, byte), clean, strict=True):
            assert same(got, want), f"bytes {byte:#x}"
