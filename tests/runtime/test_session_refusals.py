"""What a session refuses, and that nothing has changed then."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest

import fake_model as toy_model
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

TOKENS = [(7 * i * i + 3) % 97 + 100 for i in range(60)]


def expected(tokens: list[int], rows) -> np.ndarray:
    return np.array([toy_model.reference(tokens, list(range(len(tokens))), r) for r in rows])


def test_full_cache_is_refused_softly_and_nothing_changes(session):
    s = session(n_ctx=256)
    tokens = [(i % 90) + 100 for i in range(260)]
    s.decode(tokens[:200], logits="none")
    before = (s.cells.used, s.cells.head, s.cells.pos.copy(), s.cells.list_of(0).cells.copy())
    with pytest.raises(RuntimeRefusal, match="no room for 60 tokens") as refusal:
        s.decode(tokens[200:260])
    assert refusal.value.soft
    after = (s.cells.used, s.cells.head, s.cells.pos, s.cells.list_of(0).cells)
    assert all(np.array_equal(a, b) for a, b in zip(before, after))
    s.seq_rm(0, 0, 100)
    got = s.decode(tokens[200:260])
    want = toy_model.reference(tokens[100:260], list(range(100, 260)), 159)
    assert np.array_equal(got[0], want)


def test_a_batch_that_fits_only_in_part_is_refused_whole(session):
    s = session(n_ctx=256, n_ubatch=16)
    s.decode([100] * 240, logits="none")
    evaluations = s.executor.n_evals
    with pytest.raises(RuntimeRefusal) as refusal:
        s.decode([100] * 20)
    assert refusal.value.soft and s.cells.used == 240 and s.executor.n_evals == evaluations


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": [toy_model.N_VOCAB]}, "outside the vocabulary"),
        ({"tokens": [-1]}, "outside the vocabulary"),
        ({"tokens": []}, "empty"),
        ({"tokens": [1.5]}, "integers"),
        ({}, "either tokens or embeddings"),
        ({"tokens": [1, 2], "pos": [0]}, "1 positions"),
        ({"tokens": [1], "pos": [-1]}, "positions must be"),
        ({"tokens": [1], "pos": [2**31 - 1]}, "positions must be"),
        ({"tokens": [1], "seq": 1}, "sequence 1 does not exist"),
        ({"tokens": [1], "seq": -1}, "sequence -1 does not exist"),
        ({"tokens": [1, 2], "seq": [0]}, "1 sequence entries"),
        ({"tokens": [1], "seq": [(0, 4)]}, "ids run from 0"),
        ({"tokens": [1], "logits": "some"}, "'last', 'all'"),
        ({"tokens": [1], "logits": [1]}, "ascending"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(session, kwargs, message):
    s = session()
    with pytest.raises(RuntimeRefusal, match=message):
        s.decode(**kwargs)
    assert s.cells.used == 0 and s.executor.n_evals == 0


@pytest.mark.parametrize(
    ("pos", "seq", "named"),
    [
        ([4], 0, "position 4 of sequence 0 is taken; leave pos out to go on at 5, or remove"),
        ([2], 0, "position 2 of sequence 0 is taken"),
        ([5, 5], 0, "position 5 of sequence 0 is taken; leave pos out to go on at 6"),
        ([6, 5], 0, "position 5 of sequence 0 comes after position 6; leave pos out to go on at 7, or put the batch in order"),
        ([9, 3, 3], [1, 2, 2], "position 3 of sequence 2 is taken"),
        (None, [(0, 3)], "position 5 of sequence 3 is taken"),
    ],
)
def test_positions_are_free_and_in_order(session, pos, seq, named):
    s = session(n_seq_max=4)
    s.decode(TOKENS[:5])
    s.decode(TOKENS[:3], [0, 1, 5], seq=3)
    n = len(pos or [5])
    with pytest.raises(RuntimeRefusal, match=named):
        s.decode(TOKENS[5 : 5 + n], pos, seq)
    assert s.cells.used == 8 and s.pos_max(0) == 4
    assert np.array_equal(s.decode(TOKENS[5:6], [5]), expected(TOKENS[:6], [5]))


def test_a_gap_may_be_left_and_filled(session):
    """Whatever the order in which positions came, a token sees those before its own."""
    s = session()
    s.decode(TOKENS[:5])
    s.decode(TOKENS[8:10], [8, 9])
    s.decode(TOKENS[5:8], [5, 6, 7])
    s.seq_rm(0, 8, -1)
    assert np.array_equal(s.decode(TOKENS[8:9]), expected(TOKENS[:9], [8]))


def test_an_empty_sequence_begins_anywhere(session):
    s = session(n_seq_max=2)
    s.decode(TOKENS[:5])
    assert np.array_equal(s.decode([TOKENS[5]], [5], [(0, 1)]), expected(TOKENS[:6], [5]))
    assert s.pos_min(1) == s.pos_max(1) == 5


def test_embeddings_may_share_a_position(session):
    s = session()
    s.decode(TOKENS[:5])
    rows = np.ones((3, s.artifact.manifest.n_embd), np.float32)
    s.decode(embd=rows, pos=[5, 5, 5])
    s.decode(embd=rows, pos=[5, 6, 6])  # the rest of an image, then another
    assert s.cells.list_of(0).pos.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5, 6, 6]
    with pytest.raises(RuntimeRefusal, match="position 7 of sequence 0 comes after position 8"):
        s.decode(embd=rows, pos=[7, 8, 7])


def test_the_last_position_is_not_passed(session):
    s = session()
    s.decode([5], pos=[2**31 - 2])
    with pytest.raises(RuntimeRefusal, match="positions must be from 0 to 2147483646, got 2147483648"):
        s.decode([5, 6])


@pytest.mark.parametrize("options", [{"n_ctx": -1}, {"n_ubatch": 0}, {"n_seq_max": 0}, {"n_threads": 0}, {"n_threads": 10**6}])
def test_impossible_options_are_refused_by_name(toy, options):
    with pytest.raises(RuntimeRefusal, match=next(iter(options))):
        Session(toy, **options)


def test_a_closed_session_refuses(toy):
    s = Session(toy, n_threads=2, n_seq_max=2)
    s.decode([1])
    blob = io.BytesIO()
    s.state_save(blob)
    many = s.generate_many([[100]], n_predict=4)
    next(many)
    s.close()
    s.close()
    many.close()  # its sequences are gone already
    for name, args in {
        "decode": ([1],), "decode_view": ([1],), "decode_rows": (None,), "keep_prefix": ([1],), "seq_rm": (0,), "seq_cp": (0, 0),
        "seq_keep": (0,), "seq_add": (0, 0, -1, 1), "seq_div": (0, 0, -1, 2), "shift_context": (), "defrag": (), "apply_shift": (),
        "state_size": (), "state_save": (blob,), "state_load": (blob.getvalue(),), "reset": (), "clear": (),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeRefusal, match="this session is closed; open a new one"):
            getattr(s, name)(*args)
    with pytest.raises(RuntimeRefusal, match="closed"):
        s.generate([1]).text()


def test_a_second_thread_is_refused_and_changes_nothing(session, monkeypatch):
    s = session(n_seq_max=2)
    s.decode(TOKENS[:4])
    entered, leave, rows = threading.Event(), threading.Event(), []
    evaluate = s.executor.eval

    def slow(*args, **kwargs):
        entered.set()
        leave.wait(30)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(s.executor, "eval", slow)
    first = threading.Thread(target=lambda: rows.append(s.decode(TOKENS[4:6])))
    first.start()
    assert entered.wait(30)
    try:
        for call in (lambda: s.decode([5], seq=1), lambda: s.seq_rm(0), s.reset, lambda: s.state_save(io.BytesIO(), 0), s.defrag):
            with pytest.raises(RuntimeRefusal, match="another thread is using this session"):
                call()
    finally:
        leave.set()
        first.join()
    assert np.array_equal(rows[0], expected(TOKENS[:6], [5]))
    assert np.array_equal(s.decode(TOKENS[6:7]), expected(TOKENS[:7], [6]))  # one after another they may


def test_closing_waits_for_the_evaluation_of_another_thread(toy, monkeypatch):
    s = Session(toy, n_threads=1)
    entered, rows = threading.Event(), []
    evaluate = s.executor.eval

    def slow(*args, **kwargs):
        entered.set()
        threading.Event().wait(0.3)
        assert not s.closed
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(s.executor, "eval", slow)
    other = threading.Thread(target=lambda: rows.append(s.decode(TOKENS[:3])))
    other.start()
    assert entered.wait(30)
    s.close()
    other.join()
    assert np.array_equal(rows[0], expected(TOKENS[:3], [2]))
