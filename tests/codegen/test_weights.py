"""Repacked layouts: size, padding, refusals. S66."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.weights import Q8Record, activation_mode, known_formats, q8_record, weight_format
from ggufc.formats.activations import activation_mode as reference_mode
from ggufc.formats.ggml_types import TYPES, row_bytes
from products import BLOCK_TYPES, packed, weight_rows


def test_every_float_and_block_type_has_a_format():
    assert set(known_formats()) == {t for t in TYPES if t not in ("i8", "i16", "i32", "i64", "f64")}


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_size_stays_within_the_limit(name):
    fmt = weight_format(name)
    for k in (256, 768, 4096, *((64, 576, 640) if fmt.columns == 32 else ())):
        assert fmt.packed_bytes(k, 64) <= 1.12 * 64 * row_bytes(name, k)


@pytest.mark.parametrize("name", known_formats())
def test_packing_pieces_is_packing_the_whole(name):
    """Groups are independent: a compilation may repack any multiple of 16 rows at a time, and a last group is padded with zero rows."""
    k, n = 512, 37
    raw = weight_rows(name, k, n)
    whole = packed(name, raw, k)
    fmt = weight_format(name)
    assert whole.size == fmt.packed_bytes(k, n) == 3 * fmt.group_bytes(k)
    assert (np.concatenate([packed(name, raw[:16], k), packed(name, raw[16:], k)]) == whole).all()
    padded = np.concatenate([raw, np.zeros((11, raw.shape[1]), np.uint8)])
    assert (packed(name, padded, k) == whole).all()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_activation_mode_is_the_reference_one(name):
    assert activation_mode(name) == reference_mode(name)


def test_records_hold_their_fields_without_overlap():
    at = q8_record(576)
    assert at == Q8Record(960, 576, 648, 792, 864)
    assert at.stride % 64 == 0 and at.off_s + 4 * 576 // 32 <= at.stride
    with pytest.raises(CodegenError, match="48 values"):
        q8_record(48)


def test_refusals():
    with pytest.raises(CodegenError, match="q6_k weight cannot have rows of 576"):
        weight_format("q6_k").repack(np.zeros((16, 100), np.uint8), 576)
    with pytest.raises(CodegenError, match="take 36 bytes, not 35"):
        weight_format("q4_0").repack(np.zeros((16, 35), np.uint8), 64)
    with pytest.raises(CodegenError, match="'i32' cannot be multiplied; known are"):
        weight_format("i32")
