"""Compacted caches of sliding-window layers: the bits of full caches, cutting back, states, refusals."""

from __future__ import annotations

import io
import struct

import msgspec
import numpy as np
import pytest

import fake_model
from ggufc.formats.artifact import Cache
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import KVCells
from ggufc.runtime.session import Session
from ggufc.runtime.windows import WindowRows, rows_for

pytest_plugins = ("runtime_fixtures",)

N_CTX, ROWS, W = 2560, 512, 8
TEXT = np.random.default_rng(4).integers(3, 250, 2400).tolist()


@pytest.fixture
def both(compiled):
    """``both(**options)``: sessions with full and with compacted caches on a model whose odd layers have a window of 8."""
    opened: list[Session] = []

    def go(**options) -> tuple[Session, Session]:
        options = {"n_ctx": N_CTX, "n_batch": N_CTX, "n_ubatch": 64, "n_threads": 2, **options}
        pair = Session(compiled("gemma3-7"), **options), Session(compiled("gemma3-7"), compact_windows=True, **options)
        opened.extend(pair)
        return pair

    yield go
    for s in opened:
        s.close()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def decoded(pair: tuple[Session, Session], tokens: list[int]) -> bool:
    full, small = (s.decode(tokens, logits="all") for s in pair)
    return same(full, small)


@pytest.mark.parametrize("n_ubatch", [1, 64, 600])
def test_long_texts_have_the_bits_of_full_caches(both, n_ubatch):
    full, small = both(n_ubatch=n_ubatch)
    n = 3 * small.window_rows.rows
    assert decoded((full, small), TEXT[: n - 40])
    for token in TEXT[n - 40 : n]:
        assert same(small.decode([token]), full.decode([token]))
    rows = small.executor.caches.n_rows
    assert {rows[c.name] == N_CTX for c in small.artifact.manifest.caches if not c.window} == {True}
    assert {rows[c.name] for c in small.artifact.manifest.caches if c.window} == {768 if n_ubatch == 600 else 512}
    assert small.executor.caches.memory.size < 0.75 * full.executor.caches.memory.size
    assert small.window_rows.base > 0


def test_cutting_back_within_and_beyond_the_rows(both):
    pair = both()
    small = pair[1]
    assert decoded(pair, TEXT[:1500])
    for s in pair:
        s.seq_rm(0, 1500 - W // 2, -1)
    assert decoded(pair, TEXT[:30])
    base = small.window_rows.base
    reach = base + W - 1
    for s in pair:
        s.seq_rm(0, reach, -1)
    assert decoded(pair, TEXT[30:60])  # as far as the rows reach
    used, last = small.cells.used, small.pos_max(0)
    with pytest.raises(RuntimeRefusal, match=f"have rows from {small.window_rows.base} on; remove an end from {reach} on") as refusal:
        small.seq_rm(0, reach - 1, -1)
    assert refusal.value.soft
    with pytest.raises(RuntimeRefusal, match="positions 700 to 799 cannot be removed"):
        small.seq_rm(0, 700, 800)
    assert (small.cells.used, small.pos_max(0)) == (used, last)
    assert decoded(pair, TEXT[60:70])  # a refusal changed nothing
    for s in pair:
        s.seq_rm(0)
    assert small.window_rows.base == 0 and decoded(pair, TEXT[100:700])


def test_a_reused_prefix_whose_rows_are_gone_is_evaluated_again(both):
    full, small = both()
    for s in (full, small):
        s.decode(TEXT[:1200], logits="none")
    prompt = [*TEXT[:1180], 5, 6, 7]
    assert full.keep_prefix(prompt) == small.keep_prefix(prompt) == 1180
    assert same(small.decode(prompt[1180:]), full.decode(prompt[1180:]))
    prompt = [*TEXT[:300], 9]
    assert (full.keep_prefix(prompt), small.keep_prefix(prompt)) == (300, 0)
    assert same(small.decode(prompt), full.decode(prompt[300:]))


def test_blocks_of_embeddings(both):
    full, small = both()
    rows = np.random.default_rng(1).normal(size=(40, full.artifact.manifest.n_embd)).astype(np.float32)
    got = []
    for s in (full, small):
        s.decode(TEXT[:1000], logits="none")
        s.causal = False
        got.append(s.decode(embd=rows, logits="all"))
        s.causal = True
        got.append(s.decode(TEXT[:10], logits="all"))
    assert same(got[0], got[2]) and same(got[1], got[3])


def saved(s: Session, partial: bool = False) -> bytes:
    file = io.BytesIO()
    assert s.state_save(file, 0, partial) == s.state_size(0, partial) == len(file.getvalue())
    return file.getvalue()


def test_a_sequence_is_saved_and_restored(both):
    full, small = pair = both()
    assert decoded(pair, TEXT[:1100])
    blob = saved(small)
    head = struct.unpack_from("<IIIiII", blob, 12 + 4 * 1100)
    live = len(small.window_rows.live())
    assert head == (0x53574143, ROWS, live, 1100 - live, live, 1100) and W <= live <= ROWS
    want = full.decode(TEXT[1100:1110], logits="all")
    small.decode(TEXT[:400], logits="none")
    assert small.state_load(blob, 0) == 1100
    assert same(small.decode(TEXT[1100:1110], logits="all"), want)
    other = both()[1]
    other.decode(TEXT[7:70], logits="none")
    assert other.state_load(blob, 0) == 1100
    assert same(other.decode(TEXT[1100:1110], logits="all"), want)
    reach = other.window_rows.base + W - 1
    for s in (full, other):
        s.seq_rm(0, reach, -1)
    assert same(other.decode(TEXT[:50], logits="all"), full.decode(TEXT[:50], logits="all"))


def test_a_checkpoint_carries_the_rows_that_exist_nowhere_else(both):
    full, small = pair = both()
    assert decoded(pair, TEXT[:600])
    blob = saved(small, partial=True)
    assert decoded(pair, TEXT[600:1500])  # further than dropping cells could undo
    assert small.window_rows.base > 600
    assert small.state_load(blob, 0, partial=True) == 600
    full.seq_rm(0, 600, -1)
    assert small.pos_max(0) == 599 and decoded(pair, TEXT[900:1300])
    assert len(blob) < len(saved(small))


def test_states_of_the_other_kind_are_refused(both):
    full, small = both()
    for s in (full, small):
        s.decode(TEXT[:40], logits="none")
    of_full, of_small = saved(full), saved(small)
    with pytest.raises(RuntimeRefusal, match="number of rows is for windows in the saved state and for every cell here"):
        full.state_load(of_small, 0)
    with pytest.raises(RuntimeRefusal, match="number of rows is for every cell in the saved state and for windows here"):
        small.state_load(of_full, 0)
    with pytest.raises(RuntimeRefusal, match="rows of window caches is 512 in the saved state and 768 here"):
        both(n_ubatch=600)[1].state_load(of_small, 0)
    assert full.cells.used == small.cells.used == 0
    with pytest.raises(RuntimeRefusal, match="state is that of sequence 0"):
        small.state_save(io.BytesIO())
    for at, value in ((12 + 160 + 8, 3), (12 + 160 + 12, -1), (12 + 160 + 16, 99)):
        bad = bytearray(of_small)
        struct.pack_into("<i", bad, at, value)
        with pytest.raises(RuntimeRefusal, match="damaged, save it again"):
            small.state_load(bytes(bad), 0)
    for cut in range(0, len(of_small), 997):
        with pytest.raises(RuntimeRefusal):
            small.state_load(of_small[:cut], 0)
    assert small.state_load(of_small, 0) == 40


def test_what_one_window_cannot_hold_is_refused(both, compiled):
    _, small = both()
    small.decode(TEXT[:20], logits="none")
    for pos, words in (
        ([19], "position 19 of sequence 0 is taken"),
        ([22], "tokens follow one another: position 20 is next"),
        ([20, 22], "tokens follow one another: position 20 is next"),
    ):
        with pytest.raises(RuntimeRefusal, match=words):
            small.decode(TEXT[: len(pos)], pos)
    with pytest.raises(RuntimeRefusal, match="with compacted window caches tokens follow one another: position 20 is next"):
        small.decode(embd=np.zeros((2, small.artifact.manifest.n_embd)), pos=[20, 20])
    for move in (lambda: small.seq_add(0, 0, -1, 2), lambda: small.seq_div(0, 0, -1, 2), small.shift_context):
        with pytest.raises(RuntimeRefusal, match="cannot be moved in compacted window caches") as refusal:
            move()
        assert refusal.value.soft
    with pytest.warns(RuntimeWarning, match="stays fragmented"):
        assert small.defrag() == 0
    assert small.cells.used == 20 and small.pos_max(0) == 19
    with pytest.raises(RuntimeRefusal, match="n_seq_max is 2"):
        Session(compiled("gemma3-7"), n_seq_max=2, compact_windows=True)


def test_nothing_to_gain_is_said_and_ignored(compiled):
    for case, n_ctx in (("gemma3-7", 256), ("llama-gqa-tied", 1024)):
        with pytest.warns(RuntimeWarning, match="changes nothing"):
            s = Session(compiled(case), n_ctx=n_ctx, compact_windows=True, n_threads=1)
        assert s.window_rows is None and s.decode([5]).shape[0] == 1
        s.close()


def test_a_program_that_reads_window_caches_otherwise_is_refused(tmp_path):
    manifest = fake_model.manifest()
    caches = [msgspec.structs.replace(cache, window=5) for cache in manifest.caches]
    path = fake_model.write(tmp_path / "w.ggufc", msgspec.structs.replace(manifest, caches=caches))
    with pytest.raises(RuntimeRefusal, match=r"blk.0.attn of eval reads blk.0.k, blk.0.v in another way"):
        Session(path, n_ctx=1024, compact_windows=True, n_threads=1)


def test_the_number_of_rows():
    caches = [Cache("k", 0, "k", "f16", 8, 8), Cache("k1", 1, "k", "f16", 8, 8, 700)]
    assert rows_for(caches, 4096, 512, 256) == 1280
    assert rows_for(caches, 4096, 8, 256) == 1024
    assert rows_for(caches, 1280, 512, 256) == 0 and rows_for(caches[:1], 4096, 512, 256) == 0


def test_rows_are_given_away_oldest_first_and_only_when_needed():
    cells = KVCells(64, 1, 1)
    windows = WindowRows(cells, 8, 4)
    for at in range(0, 20, 2):
        cells.insert(at, np.array([at, at + 1], np.int32), np.zeros(2, np.int32))
        rows = windows.take(np.array([at, at + 1], np.int32), at)
        assert len(set(rows.tolist())) == 2
        assert windows.base == max(0, at + 2 - 8)
        kept = cells.list_of(0).cells[-8:]
        assert (windows.row_of[kept] >= 0).all() and len(set(windows.row_of[kept].tolist())) == min(8, at + 2)
