"""The recording step: what a builder looked at is the reuse key, and nothing else is."""

from __future__ import annotations

import pytest

from ggufc.models import ModelError, Step
from ggufc.models.step import SYMBOLS


def test_symbols_bake_nothing() -> None:
    step = Step(sizes={"T": 5})
    assert [str(getattr(step, name)) for name in SYMBOLS] == list(SYMBOLS)
    assert step.observations == {}


def test_observing_records_value_and_predicate() -> None:
    step = Step({"type_k": "f32"}, {"T": 5, "KV": 256})
    assert step.observe("type_k") == "f32"
    assert step.observe("T > 4") is True
    assert step.observe("KV <= 255") is False
    assert step.observe("T == KV") is False
    assert step.observations == {"KV <= 255": False, "T == KV": False, "T > 4": True, "type_k": "f32"}
    assert step.key() == tuple(step.observations.items())


def test_predicate_serves_every_size_of_the_same_truth() -> None:
    built = Step(sizes={"T": 9})
    built.observe("T > 8")
    assert Step(sizes={"T": 100}).matches(built.observations) == []
    assert Step(sizes={"T": 8}).matches(built.observations) == ["T > 8: True -> False"]


def test_value_reads_bake_the_value() -> None:
    built = Step(sizes={"KV": 256})
    built.observe("KV")
    assert Step(sizes={"KV": 512}).matches(built.observations) == ["KV: 256 -> 512"]


@pytest.mark.parametrize("name", ["head", "T > head", "T + 1", "type_k > 3", "__class__", "T > 4 and T < 9"])
def test_what_the_step_does_not_say_is_refused(name: str) -> None:
    step = Step(sizes={"T": 5})
    with pytest.raises(ModelError):
        step.observe(name)
    assert step.observations == {}


@pytest.mark.parametrize("options", [{"type_q": "f16"}, {"type_k": "q2_k"}, {"type_v": 16}, {"embd_input": "yes"}, {"embd_input": 1}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=f"{next(iter(options))}"):
        Step(options)  # type: ignore[arg-type]
