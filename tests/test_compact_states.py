"""Compacted windows of models that keep state per sequence: the bits of full caches, also after a state was restored."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggufc.codegen.compile import CompileOptions
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session
from support import artifact_of, golden_cases

CASES = [case for case in golden_cases("openpangu-swa-compress", "deepseek4-long")]
LENGTH = 700

Open = Callable[..., Session]


@pytest.fixture(scope="module", params=CASES, ids=lambda p: p.name)
def opened(request: pytest.FixtureRequest) -> Open:
    artifact = artifact_of(request.param / "model.gguf", CompileOptions(jobs=1))

    def make(compact: bool = True, **options: Any) -> Session:
        return Session(artifact, compact_windows=compact, **{"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 64, "n_threads": 1, **options})

    return make


def tokens(n: int = LENGTH) -> list[int]:
    return np.random.default_rng(5).integers(0, 250, n).tolist()


def decode(s: Session, mine: list[int], size: int = 150) -> np.ndarray:
    return np.concatenate([s.decode(mine[i : i + size], logits="all") for i in range(0, len(mine), size)])


def test_logits_have_the_bits_of_full_caches(opened: Open) -> None:  # S98, S111
    with opened(compact=False) as full, opened() as compact:
        want, got = decode(full, tokens()), decode(compact, tokens())
        assert compact.window_rows is not None and compact.window_rows.base > 0, "rows were given away"
        small, large = (sum(s.executor.caches.bytes_of(n) for n in s.executor.caches.specs) for s in (compact, full))
    assert np.array_equal(want, got)
    assert small < large


@pytest.mark.parametrize("partial", [False, True])
def test_states_come_back_with_their_rows(opened: Open, partial: bool) -> None:  # S105
    mine = tokens()
    with opened() as s:
        want = decode(s, mine)[600:]
    with opened() as s:
        decode(s, mine[:600])
        blob = io.BytesIO()
        s.state_save(blob, seq=0, partial=partial)
        # What follows gives away rows that the saved position still needs.
        decode(s, tokens()[::-1][:90])
        blob.seek(0)
        assert s.state_load(blob, seq=0, partial=partial) == 600
        assert np.array_equal(decode(s, mine[600:]), want)


def test_a_blob_of_compacted_windows_does_not_fit_full_caches(opened: Open) -> None:
    with opened() as s:
        decode(s, tokens()[:40])
        blob = io.BytesIO()
        s.state_save(blob, seq=0)
    with opened(compact=False) as s, pytest.raises(RuntimeRefusal, match="open the session with the same compact_windows"):
        s.state_load(io.BytesIO(blob.getvalue()), seq=0)


def test_windows_of_several_sequences_are_refused(opened: Open) -> None:  # S104
    with pytest.raises(RuntimeRefusal, match="n_seq_max is 2"):
        opened(n_seq_max=2)
