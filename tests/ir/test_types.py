"""Tensor types."""

from __future__ import annotations

import pytest

from ggufc.ir import IRError, Sym, TensorType
from ggufc.ir.types import is_quantised, parse_type, require_dtype, row_bytes

T = Sym("T")


def test_text_form_and_back():
    t = TensorType("f32", (576, T))
    assert str(t) == "f32[576, T]"
    assert parse_type(str(t)) == t


def test_sizes_follow_the_block_type():
    assert TensorType("f32", (576, T)).nbytes == 2304 * T
    assert TensorType("q4_1", (576, 10)).nbytes == 10 * 576 // 32 * 20
    assert TensorType("f16", (T, 3)).nbytes == 6 * T
    assert TensorType("iq4_ks", (256, 2)).nbytes == 2 * (4 + 136)
    assert TensorType("f32", (4, T, 2)).numel == 8 * T


def test_a_row_that_is_not_whole_blocks_has_no_size():
    with pytest.raises(Exception, match="33 values cannot be q4_0"):
        row_bytes("q4_0", 33)


def test_numpy_shape_is_reversed():
    assert TensorType("f32", (2, T, 5)).shape({"T": 3}) == (5, 3, 2)


def test_quantised_means_blocked():
    assert [is_quantised(d) for d in ("f32", "bf16", "i32", "q8_0", "mxfp4")] == [False, False, False, True, True]


@pytest.mark.parametrize("ne", [(), (1, 2, 3, 4, 5), (2, -1), (2, 0)])
def test_shapes_are_checked(ne):
    with pytest.raises(IRError):
        TensorType("f32", ne)


@pytest.mark.parametrize("text", ["f32", "f32[]", "F32[2]", "f32[2", "f32[2,]", "[2]", "f32[a b]"])
def test_parse_refuses_other_text(text):
    with pytest.raises(IRError):
        parse_type(text)


def test_unknown_dtype_lists_the_known_ones():
    with pytest.raises(IRError, match=r"'q9_9' is unknown; known dtypes: .*q4_0"):
        require_dtype("q9_9")
