"""Random walks over everything a session can do, against sessions that do nothing clever.

The model of a sequence is a session of its own that holds only that sequence and takes its tokens one at a time, in the order of its
history: no batches, no other sequence, no shared cells, no blobs, no gathered cells. A copied or restored sequence is a new session that
lives through the history again. Logits must be equal to the bit.
"""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ggufc.runtime.artifact import Artifact
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

N_SEQ, CELLS = 3, 256
ROTATE = ("rotate",)
Step = tuple
SEQ = st.integers(0, N_SEQ - 1)
TOKENS = st.lists(st.integers(3, 300), min_size=1, max_size=12)


class Plain:
    """One sequence, lived through step by step."""

    def __init__(self, artifact: Artifact, history: list[Step]) -> None:
        self.session = Session(artifact, n_ctx=CELLS, n_ubatch=1, n_threads=1)
        self.history: list[Step] = []
        for step in history:
            self.do(step)

    def do(self, step: Step) -> np.ndarray | None:
        self.history.append(step)
        kind, *args = step
        if kind == "token":
            return self.session.decode([args[0]])[0]
        if kind == "rotate":
            self.session.apply_shift()
        else:
            getattr(self.session, kind)(0, *args)
        return None

    def close(self) -> None:
        self.session.close()


class Walk(RuleBasedStateMachine):
    """``artifact`` is set by the test."""

    artifact: Artifact

    @initialize(ubatch=st.sampled_from([1, 3, 8, 64]), reuse=st.booleans(), tokens=TOKENS)
    def open(self, ubatch: int, reuse: bool, tokens: list[int]) -> None:
        self.s = Session(self.artifact, n_ctx=CELLS, n_ubatch=ubatch, n_seq_max=N_SEQ, n_threads=1, graph_reuse=reuse)
        self.plain = [Plain(self.artifact, []) for _ in range(N_SEQ)]
        self.shared: set[int] = set()  # sequences that may share cells with another
        self.blobs: list[tuple[bytes, int | None, list[list[Step]]]] = []
        self.checkpoints: list[tuple[bytes, int, int]] = []
        self.decode(0, tokens)
        self.decode_mixed([(1, tokens[:4]), (2, tokens[1:5])])
        self.save(1)

    def teardown(self) -> None:
        if hasattr(self, "s"):
            for one in (self.s, *self.plain):
                one.close()

    def replace(self, seq: int, history: list[Step]) -> None:
        self.plain[seq].close()
        self.plain[seq] = Plain(self.artifact, history)

    def rotated(self) -> None:
        """Pending rotations have been applied to all cells: sequences rotate when the session does, though not at their own step."""
        for one in self.plain:
            if one.session.cells.needs_shift:
                one.do(ROTATE)

    def check(self, batch: list[tuple[int, int]]) -> None:
        """Decode (sequence, token) pairs at once and compare each row."""
        if len(batch) > CELLS - self.s.cells.used:
            return
        try:
            got = self.s.decode([token for _, token in batch], seq=[seq for seq, _ in batch], logits="all")
        except RuntimeRefusal as refusal:
            assert refusal.soft  # free cells, but not side by side
            return
        self.rotated()
        for (seq, token), row in zip(batch, got):
            want = self.plain[seq].do(("token", token))
            assert want is not None and np.array_equal(row.view(np.uint32), want.view(np.uint32))

    @rule(seq=SEQ, tokens=TOKENS)
    def decode(self, seq: int, tokens: list[int]) -> None:
        self.check([(seq, token) for token in tokens])

    @rule(parts=st.lists(st.tuples(SEQ, st.lists(st.integers(3, 300), min_size=1, max_size=4)), min_size=2, max_size=5))
    def decode_mixed(self, parts: list[tuple[int, list[int]]]) -> None:
        rows = [[(seq, token) for token in tokens] for seq, tokens in parts]
        self.check([pair for column in itertools.zip_longest(*rows) for pair in column if pair is not None])

    @rule(seq=SEQ, p0=st.integers(-1, 20), n=st.integers(1, 30))
    def rm(self, seq: int, p0: int, n: int) -> None:
        p1 = max(p0, 0) + n if n < 30 else -1
        self.s.seq_rm(seq, p0, p1)
        self.plain[seq].do(("seq_rm", p0, p1))

    @rule(src=SEQ, dst=SEQ, p1=st.integers(-1, 20))
    def cp(self, src: int, dst: int, p1: int) -> None:
        if src == dst:
            self.s.seq_cp(src, dst)
            return
        self.s.seq_rm(dst)
        self.s.seq_cp(src, dst, -1, p1)
        self.shared |= {src, dst}
        self.replace(dst, [*self.plain[src].history, *([("seq_rm", p1, -1)] if p1 >= 0 else [])])

    @rule(seq=SEQ)
    def keep(self, seq: int) -> None:
        self.s.seq_keep(seq)
        self.shared.clear()
        for other in set(range(N_SEQ)) - {seq}:
            self.replace(other, [])

    @rule(seq=SEQ, p0=st.integers(0, 12), d=st.integers(-3, 5))
    def add(self, seq: int, p0: int, d: int) -> None:
        """Positions of [p0, end) move; down only as far as no two come to lie on one, and up only at the end."""
        pos = self.s.cells.list_of(seq).pos
        before = pos[pos < p0]
        after = pos[pos >= p0]
        if seq in self.shared or (len(after) and len(before) and after[0] + d <= before[-1]):
            return
        self.s.seq_add(seq, p0, -1, d)
        self.plain[seq].do(("seq_add", p0, -1, d))

    @rule(seq=SEQ)
    def div(self, seq: int) -> None:
        """Halve positions that lie two apart or more, such as ``spread`` leaves."""
        pos = self.s.cells.list_of(seq).pos
        if seq not in self.shared and len(np.unique(pos // 2)) == len(pos):
            self.s.seq_div(seq, 0, -1, 2)
            self.plain[seq].do(("seq_div", 0, -1, 2))

    @rule(seq=SEQ)
    def spread(self, seq: int) -> None:
        """Drop every other position."""
        for p in range(1, min(self.s.pos_max(seq) + 1, 12), 2):
            self.s.seq_rm(seq, p, p + 1)
            self.plain[seq].do(("seq_rm", p, p + 1))

    @rule(token=st.integers(3, 300))
    def defrag(self, token: int) -> None:
        self.s.defrag()
        self.check([(seq, token) for seq in range(N_SEQ)])

    @rule(seq=st.one_of(st.none(), SEQ))
    def save(self, seq: int | None) -> None:
        file = io.BytesIO()
        assert self.s.state_save(file, seq) == self.s.state_size(seq) == len(file.getvalue())
        self.rotated()
        histories = [list(one.history) for one in self.plain]
        self.blobs.append((file.getvalue(), seq, histories if seq is None else [histories[seq]]))

    @rule(data=st.data(), dst=SEQ, token=st.integers(3, 300))
    def load(self, data: st.DataObject, dst: int, token: int) -> None:
        blob, seq, histories = data.draw(st.sampled_from(self.blobs))
        if seq is None:
            self.s.state_load(blob)
            self.shared = set(range(N_SEQ))
            for i, history in enumerate(histories):
                self.replace(i, history)
            self.check([(i, token) for i in range(N_SEQ)])
            return
        try:
            self.s.state_load(blob, dst)
        except RuntimeRefusal as refusal:
            assert refusal.soft and self.s.pos_max(dst) == -1
            histories = [[]]
        self.shared.discard(dst)
        self.replace(dst, histories[0])
        self.check([(dst, token)])

    @rule(seq=SEQ)
    def checkpoint(self, seq: int) -> None:
        file = io.BytesIO()
        assert self.s.state_save(file, seq, partial=True) == self.s.state_size(seq, partial=True) == len(file.getvalue())
        self.rotated()
        self.checkpoints.append((file.getvalue(), seq, self.s.pos_max(seq)))

    @rule(data=st.data(), token=st.integers(3, 300))
    def rewind(self, data: st.DataObject, token: int) -> None:
        """A checkpoint without rows: what came after it is dropped, or nothing changes where the sequence is another one by now."""
        if not self.checkpoints:
            return
        blob, seq, last = data.draw(st.sampled_from(self.checkpoints))
        try:
            self.s.state_load(blob, seq, partial=True)
        except RuntimeRefusal:
            pass
        else:
            self.plain[seq].do(("seq_rm", last + 1, -1))
        self.check([(seq, token)])

    @rule(data=st.data(), dst=SEQ, cut=st.floats(0, 0.999))
    def load_damaged(self, data: st.DataObject, dst: int, cut: float) -> None:
        blob, seq, _ = data.draw(st.sampled_from(self.blobs))
        with pytest.raises(RuntimeRefusal):
            self.s.state_load(blob[: int(len(blob) * cut)], None if seq is None else dst)
        for gone in range(N_SEQ) if seq is None else [dst]:
            self.shared.discard(gone)
            self.replace(gone, [])

    @rule()
    def clear(self) -> None:
        self.s.reset()
        self.shared.clear()
        for seq in range(N_SEQ):
            self.replace(seq, [])

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "s"):
            return
        cells = self.s.cells
        assert cells.used == int((cells.pos >= 0).sum()) == int(cells.member.any(axis=0).sum())
        for seq, one in enumerate(self.plain):
            assert np.array_equal(cells.list_of(seq).pos, one.session.cells.list_of(0).pos)


MIXED = {"type_k": "q8_0", "type_v": "q4_1", "builder": {"k_hadamard": True, "v_hadamard": True, "type_k_last": "bf16,1"}}


@pytest.mark.parametrize(("case", "options"), [("llama-gqa-tied", {}), ("gemma3-7", {}), ("llama-fa-q8", MIXED)], ids=lambda x: str(x)[:14])
def test_walk(compiled, case, options):
    with Artifact.open(compiled(case, **options)) as artifact:
        Walk.artifact = artifact
        run_state_machine_as_test(
            Walk, settings=settings(max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
        )
