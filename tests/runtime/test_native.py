"""Native code under the runtime: bit invariance and sequence operations on two tiny compiled models."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.runtime.artifact import Artifact
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

MODELS = ("llama-gqa-tied", "gemma3-7")
TOKENS = [int(t) for t in np.random.default_rng(5).integers(3, 290, 70)]


@pytest.fixture(scope="module", params=MODELS)
def artifact(request, compiled):
    with Artifact.open(compiled(request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(artifact) -> np.ndarray:
    """Logits of TOKENS in one sequence, one thread, one micro-batch."""
    with Session(artifact, n_ctx=256, n_threads=1) as s:
        logits = s.decode(TOKENS, logits="all")
    assert np.isfinite(logits).all() and np.abs(logits).max() > 1
    return logits


@settings(max_examples=12, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    n_ubatch=st.sampled_from([1, 3, 16, 512]),
    n_threads=st.integers(1, 3),
    reuse=st.booleans(),
)
def test_logits_have_the_same_bits_however_they_are_computed(artifact, alone, chunks, n_ubatch, n_threads, reuse):  # S109
    with Session(artifact, n_ctx=300, n_ubatch=n_ubatch, n_threads=n_threads, graph_reuse=reuse) as s:
        at = 0
        for n in chunks:
            if at == len(TOKENS):
                break
            part = TOKENS[at : at + n]
            assert np.array_equal(s.decode(part, logits="all"), alone[at : at + len(part)])
            at += len(part)


def test_prefill_then_forty_single_tokens_reuse_the_graph(artifact, alone):  # S109, S110
    with Session(artifact, n_ctx=256, n_threads=2) as s:
        s.decode(TOKENS[:1])
        for i in range(1, 41):
            assert np.array_equal(s.decode([TOKENS[i]])[0], alone[i])
        assert s.stats.reuse_hits / (s.stats.reuse_hits + s.stats.reuse_misses) > 0.9


def test_scattered_cells_and_a_resident_sequence_change_nothing(artifact, alone):
    with Session(artifact, n_ctx=256, n_threads=2, n_seq_max=3) as s:
        s.decode(TOKENS[30:60], seq=1, logits="none")
        s.decode(TOKENS[:7], seq=0, logits="none")
        s.seq_rm(1, 5, 21)
        s.decode(TOKENS[7:17], seq=0, logits="none")
        s.seq_cp(1, 2)
        s.seq_rm(1)
        assert np.array_equal(s.decode(TOKENS[17:], seq=0, logits="all"), alone[17:])
        cells = s.cells.list_of(0).cells
        assert (np.diff(cells) != 1).any()


def test_packed_sequences_equal_each_alone(artifact, alone):
    with Session(artifact, n_ctx=256, n_threads=2, n_seq_max=2) as s:
        s.decode(TOKENS[:40], seq=0, logits="none")
        s.decode(TOKENS[:3], seq=1, logits="none")
        seqs = [0, 1, 0, 1, 1]
        got = s.decode([TOKENS[40], TOKENS[3], TOKENS[41], TOKENS[4], TOKENS[5]], seq=seqs, logits="all")
        assert np.array_equal(got, alone[[40, 3, 41, 4, 5]])


def test_a_copy_continues_like_its_original(artifact, alone):
    with Session(artifact, n_ctx=256, n_threads=1, n_seq_max=2) as s:
        s.decode(TOKENS[:12], logits="none")
        s.seq_cp(0, 1)
        s.decode(TOKENS[50:60], seq=0)
        assert np.array_equal(s.decode(TOKENS[12:20], seq=1, logits="all"), alone[12:20])
        s.seq_rm(0, 12, -1)
        assert np.array_equal(s.decode(TOKENS[12:20], seq=0, logits="all"), alone[12:20])


def test_shifted_context_stays_close(artifact, alone):
    with Session(artifact, n_ctx=256, n_threads=1) as s:
        s.decode(TOKENS[:20], logits="none")
        s.seq_add(0, 0, -1, 7)
        got = s.decode(TOKENS[20:22], logits="all")
    assert np.abs(got - alone[20:22]).max() < 5e-3 * np.abs(alone).max()
    assert not np.array_equal(got, alone[20:22])


def test_a_full_cache_recovers_exactly(artifact):
    tokens = [TOKENS[i % 70] for i in range(260)]
    with Session(artifact, n_ctx=256, n_threads=2) as s, Session(artifact, n_ctx=1024, n_threads=1) as roomy:
        s.decode(tokens[:200], logits="none")
        with pytest.raises(RuntimeRefusal) as refusal:
            s.decode(tokens[200:])
        assert refusal.value.soft
        roomy.decode(tokens[:200], logits="none")
        for session in (s, roomy):
            session.seq_rm(0, 0, 100)
        assert np.array_equal(s.decode(tokens[200:], logits="all"), roomy.decode(tokens[200:], logits="all"))


def test_profile_names_every_launch(artifact):
    with Session(artifact, n_ctx=256, n_threads=2, profile=True) as s:
        s.decode(TOKENS[:5])
        cycles = s.executor.profile()
        assert cycles.shape == (len(s.executor.program.launches), 2) and (cycles >= 0).all() and cycles.sum() > 0


def test_a_process_may_end_without_closing_its_session(artifact):
    code = f"from ggufc.runtime import Session; s = Session({str(artifact.path)!r}, n_threads=3); print(len(s.decode([5, 6, 7])))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
