"""Sequences, states and compacted windows wherever the rows are: on a device, divided by layers, divided by heads. What is left after an
operation goes on with the bits of a run that never needed it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from fat_models import FatModel, compiled
from ggufc.passes import DEFAULT_PIPELINE
from ggufc.passes.split_heads import with_split
from ggufc.runtime.cuda import on_device
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session
from simt_device import SimtDevice

PROMPT, MORE, OTHER = [5, 17, 200, 31, 7, 7], [90, 12, 4], [8, 8, 150, 3]
PLACES = [("whole", 0), ("whole", 1), ("whole", 3), ("halves", 0), ("halves", 1), ("halves", 2), ("halves", 3)]
"""Llama of two layers as it is, and with its caches divided after one and three of four heads; layers on the device."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, FatModel]:
    pipelines = {"whole": None, "halves": with_split(DEFAULT_PIPELINE, ["0:1", "1:3"])}
    return {
        name: compiled("llama-headdim", tmp_path_factory.mktemp(name), "cuda:sm_80", pipeline=pipeline)
        for name, pipeline in pipelines.items()
    }


Open = Callable[[], Session]


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def sessions(models, request) -> Iterator[Open]:
    """``sessions()``: another session of one placement."""
    kind, n = request.param
    opened: list[Session] = []

    def go() -> Session:
        executor = on_device(SimtDevice(races=False), n_gpu_layers=n)
        opened.append(Session(models[kind].path, n_ctx=256, n_threads=1, n_seq_max=3, executor=executor))
        return opened[-1]

    yield go
    for s in opened:
        s.close()


def logits(s: Session, tokens: list[int], seq: int = 0) -> bytes:
    return s.decode(tokens, seq=seq, logits="all").tobytes()


def fresh(go: Open, *texts: list[int]) -> list[bytes]:
    """The logits of texts one after another in a session that does nothing else."""
    s = go()
    return [logits(s, text) for text in texts]


def saved(s: Session, seq: int | None = None, partial: bool = False) -> bytes:
    blob = io.BytesIO()
    assert s.state_save(blob, seq, partial) == s.state_size(seq, partial) == len(blob.getvalue())
    return blob.getvalue()


def test_copied_kept_and_cut_sequences_go_on_as_alone(sessions):
    """A copy and its source continue apart; of two sequences one stays; a text is cut and another end follows."""
    prompt, more = fresh(sessions, PROMPT, MORE)
    other = fresh(sessions, PROMPT, OTHER)[1]
    s = sessions()
    assert logits(s, PROMPT) == prompt
    s.seq_cp(0, 1)
    s.seq_cp(0, 2, 0, 4)
    assert logits(s, OTHER, 1) == other and logits(s, MORE, 0) == more
    assert s.pos_max(2) == 3 and logits(s, PROMPT[4:] + MORE, 2) == prompt[-len(prompt) // len(PROMPT) * 2 :] + more
    s.seq_keep(1)
    assert [s.pos_max(i) for i in range(3)] == [-1, len(PROMPT + OTHER) - 1, -1]
    s.seq_rm(1, len(PROMPT), -1)
    assert logits(s, MORE, 1) == more
    s.seq_rm(1, len(PROMPT), -1)
    assert s.defrag() >= 0 and logits(s, OTHER, 1) == other
    assert logits(s, PROMPT, 0) == prompt, "rows that became free are clean"


def test_gathered_cells_keep_the_bits(sessions):
    """Cells with holes between them move to the front, in whichever memory they are."""
    other = fresh(sessions, OTHER, MORE)[1]
    s = sessions()
    for at in range(4):  # the two texts alternate, so that removing one leaves holes
        logits(s, [PROMPT[at]], 0)
        logits(s, [OTHER[at]], 1)
    s.seq_rm(0)
    assert s.defrag() > 0 and sorted(s.cells.list_of(1).cells) == [0, 1, 2, 3]
    assert logits(s, MORE, 1) == other


def test_a_sequence_returns_while_others_live(sessions):
    """S9: one of two sequences is saved, both go on, it is restored: it continues as at the save, the other as if nothing had been."""
    prompt, more = fresh(sessions, PROMPT, MORE)
    beside = fresh(sessions, OTHER, [1, 2], MORE)
    s = sessions()
    assert logits(s, PROMPT, 0) == prompt and logits(s, OTHER, 1) == beside[0]
    blob = saved(s, 0)
    logits(s, [60, 61], 0)
    assert logits(s, [1, 2], 1) == beside[1]
    s.seq_rm(0)
    assert s.state_load(blob, 0) == len(PROMPT)
    assert logits(s, MORE, 0) == more and logits(s, MORE, 1) == beside[2]
    s.state_load(blob, 2)  # and into a sequence of its own
    assert logits(s, MORE, 2) == more


def test_a_checkpoint_cuts_a_sequence_back(sessions):
    """A partial state holds no rows of whole caches: it says where the text ended."""
    more = fresh(sessions, PROMPT, MORE)[1]
    s = sessions()
    logits(s, PROMPT)
    checkpoint = saved(s, 0, partial=True)
    logits(s, OTHER)
    assert s.state_load(checkpoint, 0, partial=True) == len(PROMPT)
    assert len(checkpoint) < len(saved(s, 0)) and logits(s, MORE) == more


def test_a_whole_context_returns(sessions):
    """All sequences in one state, taken by another session of the placement."""
    s = sessions()
    logits(s, PROMPT, 0)
    s.seq_cp(0, 1)
    logits(s, OTHER, 1)
    blob = saved(s)
    want = [logits(s, MORE, seq) for seq in (0, 1)]
    other = sessions()
    other.state_load(blob)
    assert [logits(other, MORE, seq) for seq in (0, 1)] == want and saved(other) == saved(s)


def test_moved_positions_are_the_same_before_and_after_a_state(sessions):
    """Keys are turned once: decoding at once, or after a state was saved and taken elsewhere, gives the same bits."""
    s, other = sessions(), sessions()
    logits(s, PROMPT)
    s.seq_rm(0, 1, 3)
    s.seq_add(0, 3, -1, -2)
    blob = saved(s, 0)
    other.state_load(blob, 0)
    assert saved(other, 0) == blob and s.pos_max(0) == len(PROMPT) - 3
    assert logits(s, MORE) == logits(other, MORE)
    assert logits(s, MORE) != fresh(sessions, [PROMPT[0], *PROMPT[3:], *MORE], MORE)[1], "rows of a longer text are kept, not made anew"


# Compacted windows

TEXT = np.random.default_rng(4).integers(3, 200, 760).tolist()
START = 700


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> dict[str, FatModel]:
    """Seven layers of gemma3, six of them with a window of 8; whole and with the caches divided after one head."""
    return {
        name: compiled("gemma3-7", tmp_path_factory.mktemp(name), "cuda:sm_80", pipeline=pipeline)
        for name, pipeline in (("whole", None), ("halves", with_split(DEFAULT_PIPELINE, ["0-6:1"])))
    }


@contextmanager
def both(model: FatModel, n: int, device: Callable[[], SimtDevice], **more) -> Iterator[tuple[Session, Session]]:
    """Sessions with full and with compacted caches, after ``START`` tokens that the CPU evaluated."""
    options = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 64, "n_threads": 1, **more}
    opened = []
    for compact in (False, True):
        with Session(model.path, compact_windows=compact, **options) as cpu:
            cpu.decode(TEXT[:START], logits="none")
            blob = saved(cpu, 0)
        opened.append(Session(model.path, compact_windows=compact, executor=on_device(device(), n_gpu_layers=n), **options))
        assert opened[-1].state_load(blob, 0) == START
    try:
        yield opened[0], opened[1]
    finally:
        for s in opened:
            s.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind, n", [("whole", 8), ("whole", 3), ("halves", 3), ("halves", 8)])
def test_compacted_windows_have_the_bits_of_full_caches(windowed, kind, n):
    """At once, token by token, after cutting back, after a state and a checkpoint; rows are given away meanwhile."""
    with both(windowed[kind], n, lambda: SimtDevice(races=False)) as pair:
        full, small = pair
        assert small.window_rows is not None and len(small.window_rows.live()) == small.window_rows.rows == 512

        def same(tokens: list[int]) -> bool:
            return logits(full, tokens) == logits(small, tokens)

        assert same(TEXT[START : START + 9]) and small.window_rows.base == START + 9 - 512
        assert all(same([token]) for token in TEXT[START + 9 : START + 12])
        for s in pair:
            s.seq_rm(0, START + 4, -1)
        assert same(OTHER)
        blob, checkpoint = saved(small, 0), saved(small, 0, partial=True)
        want = logits(full, MORE)
        assert logits(small, MORE) == want and len(checkpoint) < len(blob)
        for data, partial in ((checkpoint, True), (blob, False)):
            if not partial:
                small.seq_rm(0)
            assert small.state_load(data, 0, partial=partial) == START + 8
            assert logits(small, MORE) == want
        small.clear()
        full.clear()
        assert same(PROMPT), "after everything was removed"


@pytest.mark.slow
def test_compacted_windows_take_less_memory_of_a_device(windowed):
    """The device holds the window's rows; races and bounds are watched; what did not fit does."""
    devices = [SimtDevice(), SimtDevice()]
    taken = iter(devices)
    with both(windowed["whole"], 8, lambda: next(taken)) as (full, small):
        rows = small.executor.buffers.n_rows
        assert {rows[c.name] for c in small.artifact.manifest.caches if c.window} == {512} and set(rows.values()) == {512, 1024}
        assert small.executor.buffers.size < 0.7 * full.executor.buffers.size
        assert logits(full, MORE) == logits(small, MORE)
        small.clear()
    assert not devices[0].allocated and not devices[1].allocated
    path, options = windowed["whole"].path, {"n_ctx": 1 << 18, "n_ubatch": 8, "n_threads": 1}
    free = 250 << 20
    with pytest.raises(RuntimeRefusal, match=r"MiB are needed \(weights .* caches .*a smaller cache type, compact_windows, fewer layers"):
        Session(path, executor=on_device(SimtDevice(free=free)), **options)
    with Session(path, compact_windows=True, executor=on_device(SimtDevice(free=free)), **options) as s:
        assert s.window_rows is not None
