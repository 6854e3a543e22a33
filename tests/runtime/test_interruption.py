"""Ctrl-C and failures in the middle of a decode call: nothing half-evaluated stays in a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.runtime import inputs
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.executor import Executor
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

TEXT = np.random.default_rng(11).integers(3, 250, 60).tolist()


@pytest.fixture(params=["before the code ran", "after it"])
def interrupt(request, monkeypatch):
    """``interrupt(n)``: the n-th micro-batch from now on is interrupted, before or after its evaluation."""
    place, name = (inputs, "fill") if request.param == "before the code ran" else (Executor, "eval")
    original = getattr(place, name)
    left = [0]

    def counted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and place is inputs:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if left[0] == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(place, name, counted)

    def go(n: int) -> None:
        left[0] = n

    return go


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupted_batch_is_taken_back(session, interrupt, nth: int) -> None:
    s, undisturbed = session(n_seq_max=3, n_ubatch=8), session(n_seq_max=3, n_ubatch=8)
    for one in (s, undisturbed):
        one.decode(TEXT[:10], seq=0)
        one.decode(TEXT[:4], seq=1)
    interrupt(nth)
    with pytest.raises(KeyboardInterrupt):
        s.decode(TEXT[10:26], seq=[0, 1] * 8)
    assert [s.pos_max(seq) for seq in range(3)] == [9, 3, -1] and s.cells.used == 14
    assert s.history.tokens(0) == TEXT[:10]
    for seq in (0, 1):
        assert np.array_equal(s.decode(TEXT[30:50], seq=seq, logits="all"), undisturbed.decode(TEXT[30:50], seq=seq, logits="all"))


def test_tokens_of_several_sequences_are_taken_from_each(session, interrupt) -> None:
    s = session(n_seq_max=2)
    s.decode(TEXT[:3], seq=[[0, 1]] * 3)
    interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        s.decode(TEXT[3:5], seq=[[0, 1]] * 2)
    assert (s.pos_max(0), s.pos_max(1), s.cells.used) == (2, 2, 3)


@pytest.mark.parametrize("case", ["openpangu-swa-dsa-ubatch", "deepseek4-split-decode"])
def test_states_go_back_or_are_refused_by_name(compiled, interrupt, case: str) -> None:
    """A state that has moved on cannot be continued from the place before it: never silently, and from the start always."""
    with Session(compiled(case), n_ctx=512, n_ubatch=8, n_threads=1) as s:
        expected = s.decode(TEXT[:40], logits="all")
        s.reset()
        s.decode(TEXT[:10])
        interrupt(2)
        with pytest.raises(KeyboardInterrupt):
            s.decode(TEXT[10:40])
        interrupt(0)
        kept = s.pos_max() + 1
        assert kept in (0, 10)
        try:
            assert np.array_equal(s.decode(TEXT[kept:40], logits="all"), expected[kept:])
        except RuntimeRefusal as refusal:
            assert "restore a state saved there" in str(refusal)
        s.seq_rm(0)
        assert np.array_equal(s.decode(TEXT[:40], logits="all"), expected)
