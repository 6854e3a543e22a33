"""Inputs about states of sequences: as the plain loops of ``sparse_runner`` fill them; batches and cuts that states cannot follow."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.formats.artifact import Cache, Input
from ggufc.runtime.batch import make_batch
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import KVCells
from ggufc.runtime.state_inputs import SHAPES, SequenceStates, cells_of_session, entry_rows, input_values, symbols
from sparse_runner import Batch as Loops
from sparse_runner import Runtime

N_CELLS, N_SEQ = 1536, 3


def cache(name: str, **rows: int) -> Cache:
    return Cache(name, 0, name, "f32", 8, 8, rows={key.removeprefix("_"): n for key, n in rows.items()})


COMPRESSED = [cache("entries", C4=1), cache("ring4", S=8, _=1), cache("wide", C128=1), cache("ring128", S=128, _=1)]
ROWS = [cache("conv", S=1, _=1)]


def batch_of(cells: KVCells, lengths: dict[int, int], order: list[int]):
    """Tokens of several sequences, continued, in the order of ``order``."""
    at = {seq: cells.pos_max(seq) + 1 for seq in lengths}
    pos, seqs = [], []
    for seq in order:
        pos.append(at[seq])
        seqs.append(seq)
        at[seq] += 1
    return make_batch(cells, [1] * len(pos), pos, seqs, "last", 10)


@st.composite
def rounds(draw):
    out = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = {seq: draw(st.integers(0, 150)) for seq in range(N_SEQ)}
        order = [seq for seq, n in lengths.items() for _ in range(n)]
        if order:
            out.append((lengths, draw(st.permutations(order)) if draw(st.booleans()) else order))
    return out


@settings(max_examples=25, deadline=None)
@given(rounds=rounds())
def test_inputs_are_those_of_the_loops(rounds):  # S44 S52
    states, cells = SequenceStates(COMPRESSED, N_CELLS, N_SEQ), KVCells(N_CELLS, N_SEQ, 256)
    hparams = SimpleNamespace(windows=lambda: [0])
    slow = Runtime(SimpleNamespace(hparams=hparams, caches=lambda options: [], weights={}), None, {"n_ctx": N_CELLS, "n_seq_max": N_SEQ})
    for lengths, order in rounds:
        batch = batch_of(cells, lengths, order)
        states.check(batch, cells)
        cells.insert_at(states.cells(batch.seqs, batch.pos, cells), batch.pos, batch.seqs)
        loops = Loops(slow, [1] * len(batch), batch.pos.tolist(), batch.seqs.tolist(), [0])
        loops.sequences.sort()
        step = states.step(batch)
        sizes = loops.sizes()
        assert step.symbols == {name: sizes[name] for name in step.symbols}
        most = symbols(len(batch), N_CELLS, N_SEQ)
        assert all(n <= most[name] for name, n in step.symbols.items())
        for ratio in (4, 128):
            for kind in SHAPES:
                if kind.startswith("state_"):
                    continue
                want = np.asarray(getattr(loops, f"_{kind}")({"ratio": ratio})).reshape(-1)
                assert np.array_equal(step.values(kind, ratio), want), (kind, ratio)
                # What tokens of one batch leave in the spare row of a ring depends on threads: nothing reads it.
                spare = states.rings[ratio] * N_SEQ
                assert kind not in ("entry_sources", "entry_previous") or spare not in want
                spec = Input(kind, kind, "i32", [], 0, ratio)
                assert input_values(spec, {"T": len(batch)} | sizes) == len(want)


@pytest.mark.parametrize("size", [1, 63, 500])
def test_a_token_sees_the_blocks_of_128_that_end_with_it_or_before(size):  # S42
    """From the filled inputs of a step: (p+1) div 128 entries of its own sequence at position p, in order, and no other."""
    states, cells = SequenceStates(COMPRESSED, N_CELLS, N_SEQ), KVCells(N_CELLS, N_SEQ, 256)
    length, seen = 500, {0: [], 2: []}
    for at in range(0, length, size):
        n = min(size, length - at)
        batch = batch_of(cells, dict.fromkeys(seen, n), [0, 2] * n)
        cells.insert_at(states.cells(batch.seqs, batch.pos, cells), batch.pos, batch.seqs)
        step = states.step(batch)
        rows = step.values("entry_cells", 128)
        for seq, pos, (base, lo, hi) in zip(batch.seqs.tolist(), batch.pos.tolist(), step.values("entry_visible", 128).reshape(-1, 3)):
            first = states.part(COMPRESSED[2], seq)[0]
            assert rows[base + lo : base + hi].tolist() == list(range(first, first + hi - lo))
            seen[seq].append((pos, int(hi - lo)))
    for visible in seen.values():
        assert visible == [(p, (p + 1) // 128) for p in range(length)]
        assert dict(visible)[126] == 0 and dict(visible)[127] == dict(visible)[254] == 1 and dict(visible)[255] == 2


def test_blocks_of_cells_go_to_whoever_needs_them():
    """Sequences fill whole blocks in order of position; a removed sequence leaves its blocks to others; too many are refused."""
    size = cells_of_session(600, 2)
    states, cells = SequenceStates(COMPRESSED, size, 2), KVCells(size, 2, 256)

    def add(seq, n):
        first = cells.pos_max(seq) + 1
        batch = make_batch(cells, [1] * n, list(range(first, first + n)), seq, "last", 10)
        states.check(batch, cells)
        cells.insert_at(states.cells(batch.seqs, batch.pos, cells), batch.pos, batch.seqs)

    def blocks(seq):
        held = cells.list_of(seq)
        assert np.array_equal(held.cells % 256, held.pos % 256)
        return [int(c) // 256 for c in held.cells[::256]]

    assert size == 1024
    add(1, 10)
    add(0, 200)
    add(0, 400)
    assert blocks(1) == [2] and blocks(0) == [0, 1, 3]
    add(1, 246)
    with pytest.raises(RuntimeRefusal, match=r"no room for position 256 of sequence 1: .* and 0 of 4 blocks are free") as refused:
        add(1, 1)
    assert refused.value.soft
    cells.seq_rm(0)
    add(1, 300)
    assert blocks(1) == [2, 3, 0]
    add(0, 1)
    assert blocks(0) == [1]


def test_a_state_row_is_read_from_position_1_on():
    states, cells = SequenceStates(ROWS, 256, 1), KVCells(256, 1, 256)
    for first, want in ((0, 1), (3, 0)):
        batch = make_batch(cells, [1, 2, 3], [first, first + 1, first + 2], 0, "last", 10)
        step = states.step(batch)
        assert step.values("state_reads", 0).tolist() == [want]
        assert step.values("state_slots", 0).tolist() == [0]
    assert states.next == [6]


@pytest.mark.parametrize(("kind", "ratio"), [("entry_slots", 8), ("state_reads", 4), ("nothing", 4)])
def test_inputs_nobody_can_fill(kind, ratio):
    assert input_values(Input("x", kind, "i32", [], 0, ratio), symbols(4, 256, 1) | {"T": 4}) == 0


def filled(caches, n, n_seq=1):
    states, cells = SequenceStates(caches, 1536, n_seq), KVCells(1536, n_seq, 256)
    pos = np.arange(n, dtype=np.int32)
    cells.insert_at(states.cells(0, pos, cells), pos, np.zeros(n, np.int32))
    states.next[0] = n
    return states, cells


@pytest.mark.parametrize("first", [39, 38, 36])
def test_a_tail_inside_the_block_can_be_cut(first):  # S54
    states, cells = filled(COMPRESSED, 40)
    states.check_rm(0, first, -1, cells)


@pytest.mark.parametrize(("p0", "p1", "why"), [(35, -1, "be cut at position 35"), (3, 5, "from the middle"), (0, 39, "from the middle")])
def test_other_cuts_are_refused_softly(p0, p1, why):  # S54
    states, cells = filled(COMPRESSED, 40)
    with pytest.raises(RuntimeRefusal, match=why) as refusal:
        states.check_rm(0, p0, p1, cells)
    assert refusal.value.soft


def test_rings_without_overlap_can_be_cut_where_a_block_begins():
    states, cells = filled([cache("wide", C128=1), cache("ring128", S=128, _=1)], 300)
    states.check_rm(0, 128, -1, cells)
    states.check_rm(0, 257, -1, cells)
    with pytest.raises(RuntimeRefusal, match="cannot be cut at position 200"):
        states.check_rm(0, 200, -1, cells)


def test_parts_of_sequences_do_not_overlap():
    states = SequenceStates(COMPRESSED, N_CELLS, N_SEQ)
    rows = entry_rows(N_CELLS, 4)
    assert [states.part(COMPRESSED[0], s) for s in range(3)] == [(0, rows), (rows, rows), (2 * rows, rows)]
    assert [states.part(COMPRESSED[1], s) for s in range(3)] == [(0, 8), (8, 8), (16, 8)]
    assert rows * 4 >= N_CELLS
