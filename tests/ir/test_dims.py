"""Symbolic dimensions: arithmetic, text, affine forms, division."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggufc.ir import IRError, Sym
from ggufc.ir.dims import Dim, divide, evaluate, is_multiple, parse_dim, product, substitute, symbols, to_form

T, KV = Sym("T"), Sym("KV")
ENV = {"T": 7, "KV": 32}

affine = st.builds(lambda a, b, c: a * T + b * KV + c, *[st.integers(-9, 9)] * 3)
dims = st.one_of(st.integers(-99, 99), affine, st.builds(lambda a, b: a * b, affine, affine))


@given(dims, dims)
def test_arithmetic_means_what_it_does_on_numbers(a, b):
    for result, expected in (
        (a + b, evaluate(a, ENV) + evaluate(b, ENV)),
        (a - b, evaluate(a, ENV) - evaluate(b, ENV)),
        (a * b, evaluate(a, ENV) * evaluate(b, ENV)),
    ):
        assert evaluate(result, ENV) == expected


@given(dims)
def test_text_round_trip(d):
    assert parse_dim(str(d)) == d
    assert type(parse_dim(str(d))) is type(d)


@given(affine)
def test_affine_form_has_the_value(d):
    form = to_form(d)
    assert sum(k * (ENV[s] if s else 1) for s, k in form.items()) == evaluate(d, ENV)


@given(affine, st.integers(1, 12))
def test_division_undoes_multiplication(d, n):
    assert divide(d * n, n) == d
    assert is_multiple(d * n, n)


def test_equal_expressions_are_one_dictionary_key():
    assert {2 * T + 1: "a"}[T + 1 + T] == "a"
    assert T * KV == KV * T
    assert hash(T - T + 3) == hash(3)


def test_plain_ints_stay_ints():
    assert type(T - T) is int
    assert type((T + 5) - T) is int
    assert type(product([2, 3])) is int


def test_text_form():
    assert str(2 * T + 1) == "2*T+1"
    assert str(1 - T) == "-T+1"
    assert str(KV * T * 4 - KV) == "4*KV*T-KV"


def test_a_dim_is_immutable_and_copies_to_itself():
    with pytest.raises(AttributeError):
        T.terms = ()
    assert copy.deepcopy(T) is T
    assert pickle.loads(pickle.dumps(T + 1)) == T + 1


def test_products_of_symbols_have_no_affine_form():
    with pytest.raises(IRError, match="KV\\*T multiplies symbols"):
        to_form(KV * T)


def test_divide_refuses_a_remainder():
    assert divide(4 * T + 2, 2) == 2 * T + 1
    assert divide(6 * KV * T, 3 * T) == 2 * KV
    for d, by in ((2 * T + 1, 2), (T, KV), (7, 2), (T, T + 1), (T, 0)):
        with pytest.raises(IRError):
            divide(d, by)
        assert not is_multiple(d, by)


def test_evaluate_names_the_missing_symbol():
    with pytest.raises(IRError, match="needs a value for symbol KV; known symbols: T"):
        evaluate(T + KV, {"T": 1})


def test_substitute():
    assert substitute(2 * T + KV, {"T": 3}) == KV + 6
    assert substitute(2 * T, {"T": KV + 1}) == 2 * KV + 2
    assert symbols(substitute(T, {})) == {"T"}
    assert isinstance(substitute(T, {}), Dim)


@pytest.mark.parametrize("text", ["", "+", "2*", "T T", "2T", "T**2", "T/2", "(T)", "T-", "*T", "T+*2", "--T", "2*-T"])
def test_parse_refuses_other_text(text):
    with pytest.raises(IRError, match="is not a dimension"):
        parse_dim(text)


def test_symbol_names_are_checked():
    with pytest.raises(IRError, match="cannot name a dimension symbol"):
        Sym("2T")
