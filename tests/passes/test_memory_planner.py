"""The planner never lets two live values share bytes, in any environment, and wastes little."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.passes.errors import PassError
from ggufc.passes.memory_planner import Interval, check_plan, plan

ENV = {"T": 16, "O": 2, "C": 64}


@st.composite
def interval_lists(draw: st.DrawFn) -> list[Interval]:
    """Values with affine sizes; some may take over the buffer of a value whose last read is their definition."""
    result: list[Interval] = []
    for i in range(draw(st.integers(0, 14))):
        size = draw(st.dictionaries(st.sampled_from(["", "T", "O", "C"]), st.integers(0, 40), max_size=3))
        start = draw(st.integers(0, 12))
        partners = [it.id for it in result if it.end == start]
        inplace = draw(st.sampled_from(partners)) if partners and draw(st.booleans()) else None
        result.append(Interval(i, size, start, start + draw(st.integers(0, 6)), inplace, f"v{i}"))
    return result


@settings(max_examples=100, deadline=None)
@given(interval_lists(), st.dictionaries(st.sampled_from(["T", "O", "C"]), st.integers(0, 500), min_size=3))
def test_live_values_never_share_a_slot(intervals: list[Interval], env: dict[str, int]) -> None:
    result = plan(intervals, ENV)
    check_plan(intervals, result)
    for a in intervals:
        need = sum(k * (env[s] if s else 1) for s, k in a.size.items())
        assert result.slots[result.assignment[a.id]].bytes(env) >= need
        for b in intervals:
            if a is not b and result.assignment[a.id] == result.assignment[b.id] and a.start <= b.start <= a.end:
                assert b.inplace_with == a.id and b.start == a.end
    assert result.peak(env) == sum(holder.bytes for holder in result.holders(env))


@settings(max_examples=40, deadline=None)
@given(interval_lists())
def test_the_peak_is_between_the_live_bytes_and_the_sum(intervals: list[Interval]) -> None:
    result = plan(intervals, ENV)
    total = sum(sum(k * (ENV[s] if s else 1) for s, k in it.size.items()) for it in intervals)
    assert result.live_peak(ENV)[1] <= result.peak(ENV) <= total


def test_a_chain_of_layers_needs_two_buffers() -> None:
    chain = [Interval(i, {"T": 4}, i, i + 1, label=f"blk.{i}") for i in range(10)]
    assert len(plan(chain).slots) == 2


def test_an_inplace_chain_needs_one_buffer() -> None:
    chain = [Interval(i, {"T": 4}, i, i + 1, i - 1 if i else None) for i in range(10)]
    result = plan(chain)
    assert len(result.slots) == 1
    check_plan(chain, result)


def test_live_bytes_count_a_handed_over_buffer_once() -> None:
    values = [Interval("gate", {"": 8}, 0, 2), Interval("up", {"": 8}, 1, 2), Interval("hidden", {"": 8}, 2, 3, "gate")]
    assert plan(values).live_peak({}) == (1, 16)
    assert plan([*values[:2], dataclasses.replace(values[2], inplace_with=None)]).live_peak({}) == (2, 24)


def test_a_value_read_later_keeps_its_buffer() -> None:
    # "in place" is a permission, not an order: the residual is read again at step 5
    values = [Interval("residual", {"T": 4}, 0, 5), Interval("norm", {"T": 4}, 1, 2, "residual")]
    assert len(plan(values).slots) == 2


def test_two_takers_cannot_both_have_the_buffer() -> None:
    values = [Interval("x", {"": 8}, 0, 1), Interval("a", {"": 8}, 1, 2, "x"), Interval("b", {"": 8}, 1, 2, "x")]
    result = plan(values)
    check_plan(values, result)
    assert result.assignment["a"] != result.assignment["b"]


def test_sizes_that_cross_keep_both_alternatives() -> None:
    values = [Interval("logits", {"O": 1000}, 0, 0), Interval("ffn", {"T": 10}, 1, 1)]
    result = plan(values, {"T": 16, "O": 2})
    assert len(result.slots) == 1
    assert result.peak({"T": 1000, "O": 1}) == 10000
    assert result.peak({"T": 1, "O": 1}) == 1000


def test_holders_name_what_fills_the_peak() -> None:
    values = [Interval(0, {"T": 4}, 0, 2, label="blk.0.attn_q"), Interval(1, {"T": 64}, 1, 2, label="blk.0.ffn_gate")]
    top = plan(values).holders({"T": 8})[0]
    assert (top.label, top.bytes) == ("blk.0.ffn_gate", 512)


def test_check_refuses_an_overlap() -> None:
    values = [Interval("a", {"": 8}, 0, 1), Interval("b", {"": 8}, 2, 3)]
    result = plan(values)
    moved = [values[0], dataclasses.replace(values[1], start=1)]
    with pytest.raises(PassError, match=r"a \(steps 0\.\.1\) and b \(steps 1\.\.3\) are live together in slot 0"):
        check_plan(moved, result)


def test_check_refuses_a_slot_that_is_too_small() -> None:
    values = [Interval("a", {"T": 8}, 0, 1)]
    result = plan(values)
    with pytest.raises(PassError, match="can be smaller than value a"):
        check_plan([Interval("a", {"T": 8, "": 1}, 0, 1)], result)


def test_check_refuses_a_missing_value() -> None:
    with pytest.raises(PassError, match="b has no slot"):
        check_plan([Interval("b", {"": 8}, 0, 1)], plan([]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([Interval("a", {"": 1}, 3, 2)], "ends at step 2, before its definition"),
        ([Interval("a", {"": 1}, 0, 1), Interval("a", {"": 1}, 2, 3)], "occurs twice"),
        ([Interval("a", {"T": -1}, 0, 1)], "shrinks with T"),
        ([Interval("a", {"B": 1}, 0, 1)], "symbol B, which the representative environment lacks"),
    ],
)
def test_malformed_input_is_refused(bad: list[Interval], message: str) -> None:
    with pytest.raises(PassError, match=message):
        plan(bad)
