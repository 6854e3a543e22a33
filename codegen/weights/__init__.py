"""Interleaved weight layouts: what a tensor becomes at compile time and how kernels unpack it.

``base`` defines a format; ``floats``, ``blocks32``, ``kquants``, ``twins`` (ik_llama.cpp's own types) and ``grids`` (the types with
codebooks) hold them. ``tables`` looks codes up in tables of values, ``codebooks`` and ``codebooks_bytes`` indices in codebooks, ``staged``
cuts long ones into two tables; ``activations`` is the record an activation row is rounded to. ``weight_format(name)`` finds a format.
"""

from __future__ import annotations

from functools import cache

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.weights.activations import Q8Record, q8_record
from ggufc.codegen.weights.base import WeightFormat
from ggufc.codegen.weights.blocks32 import IQ4_NL, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0
from ggufc.codegen.weights.floats import BF16Format, F16Format, F32Format, FloatFormat
from ggufc.codegen.weights.grids import BOOKS, Signed, Ternary
from ggufc.codegen.weights.kquants import IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from ggufc.codegen.weights.twins import IQ2_KL, TWINS, Twins

_OWN = (Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, IQ2_KL, F32Format, F16Format, BF16Format)
_BY_NAME = {cls.type_name: cls for cls in _OWN}

__all__ = ["FloatFormat", "Q8Record", "WeightFormat", "activation_mode", "known_formats", "q8_record", "weight_format"]


def known_formats() -> tuple[str, ...]:
    """Names of all types that can be the weight of a product or look-up."""
    return (*_BY_NAME, *TWINS, *BOOKS)


@cache
def weight_format(type_name: str) -> WeightFormat:
    """The format of a ggml type (lower case); CodegenError lists the known ones."""
    if type_name in _BY_NAME:
        return _BY_NAME[type_name]()
    if type_name in TWINS:
        return Twins(type_name)
    if type_name in BOOKS:
        return Ternary(type_name) if type_name.startswith("iq1") else Signed(type_name)
    raise CodegenError(f"weights of type {type_name!r} cannot be multiplied; known are {', '.join(known_formats())}")


def activation_mode(type_name: str) -> str:
    """``q8_2``, ``q8_k`` or ``f32``: how activations meet weights of this type."""
    return weight_format(type_name).mode
