"""Layouts of view chains against numpy's own views."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.ir import Graph, IRError, layout
from ggufc.ir.layout import is_contiguous, root
from ir_cases import T, tt


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chains_of_views_address_what_numpy_does(data):
    """Random permutes, transposes and reshapes of a numbered tensor: the layout must find the same numbers."""
    ne = tuple(data.draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(data.draw(st.integers(1, 4))))
    g = Graph("g")
    node = g.weight("w", tt("f32", *ne))
    numbers = np.arange(int(np.prod(ne))).reshape(ne[::-1])
    expected = numbers
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["permute", "transpose", "reshape"]))
        if kind == "permute":
            axes = data.draw(st.permutations(range(node.type.rank)))
            node = g.add("permute", node, axes=axes)
            rank = len(axes)
            expected = expected.transpose([rank - 1 - axes.index(rank - 1 - i) for i in range(rank)])
        elif kind == "transpose" and node.type.rank > 1:
            node = g.add("transpose", node)
            expected = expected.swapaxes(-1, -2)
        elif kind == "reshape":
            new = data.draw(st.permutations(node.type.ne))
            try:
                node = g.add("reshape", node, ne=tuple(new))
            except IRError:
                assert not is_contiguous(node)
                continue
            expected = expected.reshape(node.type.shape({}))
    found = layout(node)
    assert found.root is root(node)
    assert expected.shape == node.type.shape({})
    for index in np.ndindex(*found.ne):
        assert found.offset + sum(i * s for i, s in zip(index, found.nb)) == expected[index[::-1]]


def test_views_compose_from_the_views_own_start():
    g = Graph("g")
    w = g.weight("w", tt("f32", 10, 10))
    inner = g.add("view", g.add("view", w, ne=(5, 5), nb=(1, 10), offset=22), ne=(2, 2), nb=(1, 10), offset=11)
    found = layout(inner)
    assert (found.root, found.offset, found.nb) == (w, 33, (1, 10))


def test_rows_of_a_merged_product_split_into_heads_without_a_copy():
    g = Graph("g", symbols=("T",))
    merged = g.input("x", "embd", tt("f32", 96, T))
    rows = g.add("view", merged, ne=(32, T), nb=(1, 96), offset=64)
    heads = g.add("reshape", rows, ne=(8, 4, T))
    assert layout(heads) == type(layout(heads))(merged, 64, (8, 4, T), (1, 8, 96))
    assert not is_contiguous(heads)
    with pytest.raises(IRError, match=r"cannot become .* without a copy; insert cont"):
        g.add("reshape", rows, ne=(32 * T,))


def test_symbolic_contiguity():
    g = Graph("g", symbols=("T",))
    x = g.input("x", "embd", tt("f32", 8, T))
    assert is_contiguous(g.add("reshape", x, ne=(4, 2, T)))
    assert is_contiguous(g.add("reshape", x, ne=(8 * T,)))
    assert is_contiguous(g.add("view", x, ne=(8, 1), nb=(1, 96)))
    assert not is_contiguous(g.add("transpose", x))
    assert is_contiguous(g.add("transpose", g.add("transpose", x)))


def test_permute_pads_and_drops_trailing_ones():
    g = Graph("g", symbols=("T",))
    x = g.input("x", "embd", tt("f32", 8, T))
    assert g.add("permute", x, axes=(0, 2, 1, 3)).type.ne == (8, 1, T)
    assert g.add("permute", x, axes=(1, 0, 2, 3)).type.ne == (T, 8)


@pytest.mark.parametrize(
    ("op", "attrs", "message"),
    [
        ("reshape", {"ne": (3, 3)}, "has 8 elements, the new shape"),
        ("view", {"ne": (4, 3), "nb": (1, 4)}, "element 11 is read, but weight 'w' has only 8"),
        ("view", {"ne": (1,), "nb": (1,), "offset": 8}, "element 8 is read"),
        ("view", {"ne": (4,), "nb": (1, 4)}, "2 strides are given for 1 dimensions"),
        ("view", {"ne": (4,), "nb": (-1,)}, "cannot be negative"),
        ("permute", {"axes": (0, 0)}, "is no permutation"),
        ("permute", {"axes": (0,)}, "is no permutation"),
    ],
)
def test_views_that_cannot_be(op, attrs, message):
    g = Graph("g")
    w = g.weight("w", tt("f32", 4, 2))
    with pytest.raises(IRError, match=message):
        g.add(op, w, **attrs)


def test_rows_of_quantised_types_cannot_be_strided():
    g = Graph("g")
    w = g.weight("w", tt("q8_0", 32, 32))
    g.add("view", w, ne=(32, 2), nb=(1, 32), offset=64)
    with pytest.raises(IRError, match="rows of the quantised type q8_0 cannot be strided"):
        g.add("transpose", w)
