"""How far two arrays are apart, and which tolerance counts."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.diff.compare import Tolerances, distance, parse_rules
from ggufc.diff.stored import translate
from ggufc.ir import parse_graph


def test_the_worst_element_is_named_in_ne_order() -> None:
    a = np.ones((2, 3, 4), np.float32)
    b = a.copy()
    b[1, 0, 2] = 1.5
    found = distance(a, b)
    assert (found.index, found.left, found.right) == ((2, 0, 1), 1.0, 1.5)
    assert found.error == pytest.approx(0.5 / 1.5) and not found.equal_bits
    assert distance(a, a).error == 0.0 and distance(a, a).equal_bits


def test_errors_are_relative_to_the_row() -> None:
    b = np.array([[1e-3, 1e-3], [100.0, 100.0]], np.float32)
    a = b + np.float32(1e-4)
    found = distance(a, b)
    assert found.index[1] == 0 and found.error == pytest.approx(1e-3, rel=0.1), "a row of nothing counts as a thousandth of the largest"


def test_nan_and_infinity() -> None:
    b = np.array([[0.0, -np.inf, 1.0]], np.float32)
    assert distance(b, b).error == 0.0
    for wrong in ([0.0, np.nan, 1.0], [0.0, 0.0, 1.0], [np.inf, -np.inf, 1.0]):
        assert distance(np.array([wrong], np.float32), b).error == np.inf
    nan = np.array([[np.nan, 1.0]], np.float32)
    assert distance(nan, nan).error == np.inf, "a NaN is wrong on both sides, too"


def test_choices_are_sets() -> None:
    a = np.array([[3, 1, 2], [7, -1, -1]], np.int32)
    b = np.array([[1, 2, 3], [7, 9, 8]], np.int32)
    assert distance(a, b, choice=True).error == 0.0, "the order does not matter, nor what nobody sees"
    b[0, 0] = 5
    found = distance(a, b, choice=True)
    assert found.error == pytest.approx(1 / 6) and found.index == (1, 0)


def test_rules_override_by_name_and_operator() -> None:
    g = parse_graph(
        'graph @g(T) {\n  %0 = input "x" {kind = "embd", window = 0} : f32[64, T]\n  %1 = weight "w" {derived = ""} : q8_0[64, 8]\n'
        '  %2 = rms_norm(%0) {name = "norm", eps = 1e-05} : f32[64, T]\n  %3 = mul_mat(%1, %2) {name = "y"} : f32[8, T]\n'
        '  output "y" = %3\n}\n'
    )
    norm, y = g.nodes[2], g.nodes[3]
    plain = Tolerances()
    assert plain.of(norm, [], lambda n: True) == 1e-5 == plain.of(y, [], lambda n: True)
    assert plain.of(y, [norm], lambda n: False) == pytest.approx(0.1 / 8), "its operand was rounded where nobody sees it"
    assert Tolerances(following=False, free=0.5).of(y, [], lambda n: True) == 0.5
    rules = parse_rules(["mul_mat=1e-3", "1e-2", "blk.*=1"])
    assert rules[0] == ("*", 1e-2)
    assert Tolerances(rules=rules).of(y, [], lambda n: True) == 1e-3 and Tolerances(rules=rules).of(norm, [], lambda n: True) == 1e-2


def test_names_of_other_engines() -> None:
    names = {"attn_norm-{il}": "blk.{il}.attn_norm", "result_norm": "output_norm"}
    assert translate("attn_norm-12", names) == "blk.12.attn_norm"
    assert translate("result_norm", names) == "output_norm"
    assert translate("attn_norm-x", names) == "attn_norm-x"
