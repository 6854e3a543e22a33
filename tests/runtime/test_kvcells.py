"""Cells and sequences against a naive model: a list of (position, set of sequences) per cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import CellList, KVCells

SIZE, SEQS, PAD = 24, 3, 8


class Naive:
    """The specification, cell by cell."""

    def __init__(self) -> None:
        self.pos = [-1] * SIZE
        self.seqs: list[set[int]] = [set() for _ in range(SIZE)]
        self.delta = [0] * SIZE
        self.head = 0

    @property
    def used(self) -> int:
        return sum(bool(s) for s in self.seqs)

    def find(self, n: int) -> int | None:
        head = 0 if self.head > self.used + 2 * n else self.head
        tested = 0
        while tested < SIZE:
            if head + n > SIZE:
                tested += SIZE - head
                head = 0
                continue
            blocked = next((i for i in range(n) if self.seqs[head + i]), None)
            if blocked is None:
                return head
            head += blocked + 1
            tested += blocked + 1
        return None

    def insert(self, start: int, pos: list[int], groups: list[tuple[int, ...]]) -> None:
        for i, (p, group) in enumerate(zip(pos, groups)):
            self.pos[start + i], self.seqs[start + i], self.delta[start + i] = p, set(group), 0
        self.head = start + len(pos) if start + len(pos) < SIZE else 0

    def _free(self, cells: list[int]) -> None:
        for c in cells:
            self.pos[c], self.delta[c] = -1, 0
            self.seqs[c] = set()
        if cells:
            self.head = min(self.head, min(cells))

    def matching(self, seq: int, p0: int, p1: int) -> list[int]:
        p0, p1 = max(p0, 0), 2**31 - 1 if p1 < 0 else p1
        return [c for c in range(SIZE) if (self.seqs[c] if seq < 0 else seq in self.seqs[c]) and p0 <= self.pos[c] < p1]

    def rm(self, seq: int, p0: int, p1: int) -> None:
        freed = []
        for c in self.matching(seq, p0, p1):
            self.seqs[c] = set() if seq < 0 else self.seqs[c] - {seq}
            if not self.seqs[c]:
                freed.append(c)
        self._free(freed)

    def cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        for c in self.matching(src, p0, p1):
            self.seqs[c].add(dst)

    def keep(self, seq: int) -> None:
        freed = [c for c in range(SIZE) if self.seqs[c] and seq not in self.seqs[c]]
        for c in range(SIZE):
            self.seqs[c] &= {seq}
        self._free(freed)

    def move(self, seq: int, p0: int, p1: int, change) -> None:
        gone = []
        for c in self.matching(seq, p0, p1):
            new = change(self.pos[c])
            self.delta[c] += new - self.pos[c]
            self.pos[c] = new
            if new < 0:
                gone.append(c)
        self._free(gone)

    def n_kv(self) -> int:
        top = max((c + 1 for c in range(SIZE) if self.seqs[c]), default=0)
        return min(SIZE, max(PAD, -(-top // PAD) * PAD))


def agree(real: KVCells, naive: Naive) -> None:
    assert real.pos.tolist() == naive.pos
    assert real.delta.tolist() == naive.delta
    assert real.used == naive.used and real.head == naive.head and real.n_kv() == naive.n_kv()
    assert real.needs_shift == any(naive.delta)
    for seq in range(SEQS):
        cells = [c for c in range(SIZE) if seq in naive.seqs[c]]
        entries = real.list_of(seq)
        assert np.flatnonzero(real.member[seq]).tolist() == cells
        assert sorted(entries.cells.tolist()) == cells
        assert entries.pos.tolist() == sorted(naive.pos[c] for c in cells)
        assert entries.pos.tolist() == [naive.pos[c] for c in entries.cells.tolist()]
        present = [naive.pos[c] for c in cells]
        assert (real.pos_min(seq), real.pos_max(seq)) == (min(present, default=-1), max(present, default=-1))


BOUND = st.integers(-1, 14)
SEQ = st.integers(0, SEQS - 1)
OPERATION = st.one_of(
    st.tuples(st.just("insert"), st.lists(st.tuples(st.integers(0, 12), st.sets(SEQ, min_size=1)), min_size=1, max_size=7)),
    st.tuples(st.just("append"), SEQ, st.integers(1, 6)),
    st.tuples(st.just("rm"), st.integers(-1, SEQS - 1), BOUND, BOUND),
    st.tuples(st.just("cp"), SEQ, SEQ, BOUND, BOUND),
    st.tuples(st.just("keep"), SEQ),
    st.tuples(st.just("add"), SEQ, BOUND, BOUND, st.integers(-6, 6)),
    st.tuples(st.just("div"), SEQ, BOUND, BOUND, st.integers(1, 3)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATION, max_size=14))
def test_every_operation_agrees_with_the_naive_model(operations):
    real, naive = KVCells(SIZE, SEQS, PAD), Naive()
    for op, *args in operations:
        if op in ("insert", "append"):
            if op == "insert":
                pos, groups = [p for p, _ in args[0]], [tuple(sorted(s)) for _, s in args[0]]
            else:
                first = real.pos_max(args[0]) + 1
                pos, groups = list(range(first, first + args[1])), [(args[0],)] * args[1]
            start = naive.find(len(pos))
            assert real.plan([len(pos)]) == (None if start is None else [start])
            if start is None:
                continue
            single = all(len(g) == 1 for g in groups)
            seqs = np.array([g[0] for g in groups], np.int32) if single else groups
            real.insert(start, np.array(pos, np.int32), seqs)
            naive.insert(start, pos, groups)
        elif op == "add":
            real.seq_add(*args)
            naive.move(*args[:3], lambda p, d=args[3]: p + d)
        elif op == "div":
            real.seq_div(*args)
            naive.move(*args[:3], lambda p, k=args[3]: p // k)
        else:
            getattr(real, f"seq_{op}")(*args)
            getattr(naive, op)(*args)
        agree(real, naive)
    real.clear()
    agree(real, Naive())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, SIZE - 1), unique=True, max_size=18),
    st.integers(0, SIZE - 1),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_a_plan_is_where_the_batches_go_one_after_another(occupied, head, counts):
    real, naive = KVCells(SIZE, 1, PAD), Naive()
    for cell in occupied:
        real.insert(cell, np.array([cell], np.int32), np.zeros(1, np.int32))
        naive.insert(cell, [cell], [(0,)])
    real.head = naive.head = head
    if sum(counts) > SIZE:
        with pytest.raises(RuntimeRefusal):
            real.plan(counts)
        return
    before = real.pos.copy()
    starts: list[int] | None = []
    for n in counts:
        start = naive.find(n)
        if start is None:
            starts = None
            break
        starts.append(start)
        naive.insert(start, [0] * n, [(0,)] * n)
    assert real.plan(counts) == starts
    assert np.array_equal(real.pos, before) and real.head == head


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), max_size=8))
def test_cell_list_is_a_stable_sort(batches):
    entries, arrived = CellList(), []
    for batch in batches:
        cells = np.arange(len(arrived), len(arrived) + len(batch), dtype=np.int32)
        entries.add(cells, np.array(batch, np.int32))
        arrived += list(zip(batch, cells.tolist()))
    assert list(zip(entries.pos.tolist(), entries.cells.tolist())) == sorted(arrived)


def test_negative_positions_free_their_cells():
    cells = KVCells(16, 2, 4)
    cells.insert(0, np.arange(6, dtype=np.int32), np.zeros(6, np.int32))
    cells.seq_cp(0, 1, 2, 4)
    cells.seq_add(0, -1, -1, -4)
    assert cells.used == 2 and cells.head == 0
    assert cells.list_of(0).pos.tolist() == [0, 1] and cells.pos_max(1) == -1
    assert cells.delta[:6].tolist() == [0, 0, 0, 0, -4, -4] and cells.needs_shift


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        ("seq_rm", (3,)),
        ("seq_cp", (0, 3)),
        ("seq_cp", (-1, 0)),
        ("seq_keep", (-1,)),
        ("seq_add", (3, 0, -1, 1)),
        ("seq_div", (0, 0, -1, 0)),
        ("pos_max", (7,)),
    ],
)
def test_impossible_operations_are_refused(operation, args):
    with pytest.raises(RuntimeRefusal):
        getattr(KVCells(16, 3), operation)(*args)


def test_positions_cannot_overflow():
    cells = KVCells(16)
    cells.insert(0, np.array([5, 6], np.int32), np.zeros(2, np.int32))
    with pytest.raises(RuntimeRefusal, match="beyond"):
        cells.seq_add(0, 0, -1, 2**31 - 7)
    assert cells.pos[:2].tolist() == [5, 6] and not cells.needs_shift


def test_copy_onto_itself_and_no_moves_change_nothing():
    cells = KVCells(16, 2)
    cells.insert(0, np.arange(4, dtype=np.int32), np.zeros(4, np.int32))
    cells.seq_cp(0, 0)
    cells.seq_cp(0, 1)
    cells.seq_cp(0, 1)
    cells.seq_add(0, 0, -1, 0)
    cells.seq_div(0, 0, -1, 1)
    assert cells.list_of(1).cells.tolist() == [0, 1, 2, 3] and not cells.needs_shift
