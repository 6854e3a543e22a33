"""Bitwise invariance: the same bits alone, in any chunking, with any thread count, on a new or a reused graph, beside other sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import compiled, golden_cases, one_by_one, random_tokens

NAMES = ("llama-gqa-tied", "gemma3-7", "quant-q4_k", "llama-moe-split")
MIXED = {"type_k": "q4_0", "type_v": "q8_0", "builder": {"k_hadamard": True, "v_hadamard": True, "type_k_first": "q5_1,1"}}
MODELS = [(case, {}) for case in golden_cases(*NAMES) if case.name != "quant-q4_k-batch"]
MODELS += [(case, MIXED) for case in golden_cases("llama-fa-q8")]
LENGTH = 96


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: p[0].name + "-mixed" * bool(p[1]))
def artifact(request):
    case, options = request.param
    with compiled(case, **options) as opened:
        yield opened


def session(artifact, **options):
    from ggufc.runtime.session import Session

    return Session(artifact, **{"n_ctx": 256, "n_batch": 256, "n_seq_max": 3, **options})


def tokens_of(artifact) -> list[int]:
    return random_tokens(artifact, LENGTH)


@pytest.fixture(scope="module")
def reference(artifact):
    """Logits of every position, one token at a time on one thread."""
    with session(artifact, n_threads=1, n_ubatch=1) as s:
        return one_by_one(s, tokens_of(artifact))


@st.composite
def chunkings(draw) -> list[int]:
    left, sizes = LENGTH, []
    while left:
        sizes.append(draw(st.integers(1, min(64, left))))
        left -= sizes[-1]
    return sizes


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=chunkings(), threads=st.integers(1, 3), n_ubatch=st.sampled_from([1, 3, 8, 17, 64]), reuse=st.booleans())
def test_chunks_threads_and_reuse(artifact, reference, sizes, threads, n_ubatch, reuse):
    tokens = tokens_of(artifact)
    with session(artifact, n_threads=threads, n_ubatch=n_ubatch, graph_reuse=reuse) as s:
        at, rows = 0, []
        for size in sizes:
            rows.append(s.decode(tokens[at : at + size], logits="all"))
            at += size
    assert np.array_equal(np.concatenate(rows).view(np.uint32), reference.view(np.uint32))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_other_sequences_do_not_matter(artifact, reference, data):
    """Sequences 1 and 2 are interleaved with sequence 0 at random; its logits keep their bits wherever its cells lie."""
    tokens = tokens_of(artifact)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    at, got = 0, []
    with session(artifact, n_threads=2, n_ubatch=data.draw(st.sampled_from([4, 16, 64]))) as s:
        others = {1: 0, 2: 0}
        while at < LENGTH:
            batch, pos, seq, mine = [], [], [], []
            for _ in range(int(rng.integers(1, 12))):
                who = int(rng.integers(0, 3))
                if who == 0 and at < LENGTH:
                    mine.append(len(batch))
                    batch.append(tokens[at])
                    pos.append(at)
                    at += 1
                elif who and others[who] < 60:
                    batch.append(int(rng.integers(3, artifact.manifest.n_vocab - 1)))
                    pos.append(others[who])
                    others[who] += 1
                else:
                    continue
                seq.append(who)
            if batch:
                logits = s.decode(batch, pos, seq, logits="all")
                got.append(logits[mine])
    assert np.array_equal(np.concatenate(got).view(np.uint32), reference.view(np.uint32))


def test_context_size_does_not_matter(artifact, reference):
    tokens = tokens_of(artifact)
    with session(artifact, n_ctx=1024, n_ubatch=32) as s:
        assert np.array_equal(s.decode(tokens, logits="all"), reference)


def test_removed_tokens_leave_no_trace(artifact, reference):
    """Decode, remove a tail, fill the freed cells with another sequence, continue."""
    tokens = tokens_of(artifact)
    with session(artifact, n_ubatch=16) as s:
        s.decode(tokens[:60], logits="none")
        s.seq_rm(0, 40, -1)
        s.decode(tokens[5:25], seq=1, logits="none")
        assert np.array_equal(s.decode(tokens[40:], logits="all"), reference[40:])
