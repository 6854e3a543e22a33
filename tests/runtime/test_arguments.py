"""What Python callers may ask of a session: wrong numbers are refused by name before anything is evaluated."""

from __future__ import annotations

import pytest

from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.sampling import GREEDY, SamplingOptions
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"n_predict": -5}, "n_predict"),
        ({"n_predict": 1.5}, "n_predict"),
        ({"n_predict": float("nan")}, "n_predict"),
        ({"n_predict": 1 << 40}, "n_predict"),
        ({"n_predict": True}, "n_predict"),
        ({"seq": -1}, "seq"),
        ({"seq": 3}, "seq"),
        ({"n_keep": -1}, "n_keep"),
        ({"sampling": 0.7}, "sampling"),
        ({"stop": [5]}, "stop"),
    ],
)
def test_generation(session, arguments: dict[str, object], name: str) -> None:
    s = session()
    with pytest.raises(RuntimeRefusal, match=name):
        s.generate([101, 102], **({"sampling": GREEDY} | arguments))
    assert s.pos_max() == -1, "nothing was evaluated"


def test_many_generations(session) -> None:
    s = session(n_seq_max=2)
    for arguments in ({"n_predict": -2}, {"n_parallel": 0}, {"n_parallel": 1.0}, {"n_parallel": 3}):
        with pytest.raises(RuntimeRefusal):
            s.generate_many([[101], [102]], sampling=GREEDY, **arguments)


@pytest.mark.parametrize(
    "bad",
    [
        {"top_k": 1.5}, {"top_k": True}, {"top_k": 1 << 40}, {"repeat_last_n": 2.0}, {"repeat_last_n": 1 << 40}, {"seed": 0.5},
        {"seed": 1 << 80},
        {"temp": 1e40}, {"repeat_penalty": 1e300}, {"repeat_penalty": 1e-300},
        {"temp": True}, {"temp": float("inf")}, {"top_p": float("nan")}, {"min_p": 1.01}, {"repeat_penalty": -1.0},
    ],
)  # fmt: skip
def test_sampling_options(bad: dict[str, object]) -> None:
    with pytest.raises(RuntimeRefusal, match=next(iter(bad))):
        SamplingOptions(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [{"n_ctx": -1}, {"n_ctx": 512.5}, {"n_ctx": 1 << 30}, {"n_batch": 0}, {"n_ubatch": True}, {"n_ubatch": "8"}, {"n_seq_max": 0},
     {"n_threads": 0}, {"n_threads": 100000}, {"defrag_threshold": float("nan")}],
)  # fmt: skip
def test_session_sizes(toy, bad: dict[str, object]) -> None:
    with pytest.raises(RuntimeRefusal, match=next(iter(bad))):
        Session(toy, **({"n_threads": 1} | bad))  # type: ignore[arg-type]


def test_sequences(session) -> None:
    s = session(n_seq_max=2)
    s.decode([101, 102])
    for refused in (
        lambda: s.pos_max(-1), lambda: s.pos_max(2), lambda: s.seq_rm(2), lambda: s.seq_rm(0.5), lambda: s.seq_cp(0, 2),
        lambda: s.seq_keep(-1),
        lambda: s.seq_add(5, 0, -1, 1), lambda: s.seq_div(0, 0, -1, 0), lambda: s.decode([103], seq=2), lambda: s.decode([103], seq=-1),
    ):  # fmt: skip
        with pytest.raises(RuntimeRefusal):
            refused()
    assert s.pos_max() == 1
