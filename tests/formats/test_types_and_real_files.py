"""The type table against the gguf package, and files that other programs wrote."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import DIALECTS, TYPES, row_bytes, tensor_bytes, type_by_id, type_by_name
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.quants import dequantize
from support import golden_dirs

MODELS = sorted(path for root in golden_dirs() for path in root.glob("*/*.gguf"))


def test_sizes_equal_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for info in DIALECTS["ggml"].values():
        kind = gguf.GGMLQuantizationType[info.name.upper()]
        assert int(kind) == info.id
        assert gguf.GGML_QUANT_SIZES[kind] == (info.block, info.bytes)
        assert info.row_header == 0


def test_the_ik_dialect_extends_ggml():
    assert DIALECTS["ggml"].items() < DIALECTS["ik"].items()
    assert set(TYPES.values()) == set(DIALECTS["ik"].values())
    assert all(info.dialect == "ik" and info.id > 100 for i, info in DIALECTS["ik"].items() if i not in DIALECTS["ggml"])
    assert all(type_by_id(info.id) is info and type_by_name(name.upper()) is info for name, info in TYPES.items())


def test_sizes_of_rows_and_tensors():
    assert row_bytes("q4_k", 512) == 288
    assert row_bytes("iq4_ks", 512) == 4 + 2 * 136
    assert tensor_bytes("f16", (3, 5, 7)) == 2 * 105
    assert TYPES["q4_k"].is_quantized and not TYPES["i8"].is_quantized
    for name, n in (("q4_k", 128), ("q8_0", 0), ("f32", -1)):
        with pytest.raises(GGUFError, match="a row of"):
            row_bytes(name, n)


@pytest.mark.skipif(not MODELS, reason="no golden models here")
def test_files_of_other_programs_open():
    for path in MODELS:
        with GGUFFile.open(path) as f:
            assert f.require("general.architecture", str)
            assert f.tensors
            for name, t in f.tensors.items():
                assert len(f.data(name)) == tensor_bytes(t.type.name, t.ne)
            small = min(f.tensors.values(), key=lambda t: t.nbytes)
            assert np.isfinite(dequantize(small.type.name, f.data(small.name), small.ne[0])).all()
