"""The ggml block types: names, ids, block lengths and bytes.

A row of ``n`` values is an optional row header followed by ``n / block`` blocks of ``bytes`` bytes; a tensor is its rows, one after the
other.
Two dialects share the id space: ``ggml`` (what llama.cpp writes) and ``ik`` (ik_llama.cpp: everything ggml has, and its own types above).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ggufc.formats.errors import GGUFError

MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """One block type. ``block`` values take ``bytes`` bytes; each row starts with ``row_header`` bytes of its own."""

    name: str
    id: int
    block: int
    bytes: int
    row_header: int = 0
    dialect: str = "ggml"

    @property
    def is_quantized(self) -> bool:
        return self.block > 1


_GGML = (
    TypeInfo("f32", 0, 1, 4),
    TypeInfo("f16", 1, 1, 2),
    TypeInfo("q4_0", 2, 32, 18),
    TypeInfo("q4_1", 3, 32, 20),
    TypeInfo("q5_0", 6, 32, 22),
    TypeInfo("q5_1", 7, 32, 24),
    TypeInfo("q8_0", 8, 32, 34),
    TypeInfo("q2_k", 10, 256, 84),
    TypeInfo("q3_k", 11, 256, 110),
    TypeInfo("q4_k", 12, 256, 144),
    TypeInfo("q5_k", 13, 256, 176),
    TypeInfo("q6_k", 14, 256, 210),
    TypeInfo("iq2_xxs", 16, 256, 66),
    TypeInfo("iq2_xs", 17, 256, 74),
    TypeInfo("iq3_xxs", 18, 256, 98),
    TypeInfo("iq1_s", 19, 256, 50),
    TypeInfo("iq4_nl", 20, 32, 18),
    TypeInfo("iq3_s", 21, 256, 110),
    TypeInfo("iq2_s", 22, 256, 82),
    TypeInfo("iq4_xs", 23, 256, 136),
    TypeInfo("i8", 24, 1, 1),
    TypeInfo("i16", 25, 1, 2),
    TypeInfo("i32", 26, 1, 4),
    TypeInfo("i64", 27, 1, 8),
    TypeInfo("f64", 28, 1, 8),
    TypeInfo("iq1_m", 29, 256, 56),
    TypeInfo("bf16", 30, 1, 2),
    TypeInfo("mxfp4", 39, 32, 17),
)

_IK_ONLY = (
    TypeInfo("q6_0", 133, 32, 26, 0, "ik"),
    TypeInfo("iq2_k", 137, 256, 76, 0, "ik"),
    TypeInfo("iq3_k", 138, 256, 110, 0, "ik"),
    TypeInfo("iq4_k", 139, 256, 144, 0, "ik"),
    TypeInfo("iq5_k", 140, 256, 176, 0, "ik"),
    TypeInfo("iq6_k", 141, 256, 212, 0, "ik"),
    TypeInfo("iq4_ks", 144, 256, 136, 4, "ik"),
    TypeInfo("iq2_ks", 145, 256, 70, 2, "ik"),
    TypeInfo("iq4_kss", 146, 256, 128, 4, "ik"),
    TypeInfo("iq5_ks", 152, 256, 168, 4, "ik"),
    TypeInfo("iq3_ks", 156, 256, 102, 2, "ik"),
    TypeInfo("iq2_kl", 157, 256, 86, 2, "ik"),
)

DIALECTS: dict[str, dict[int, TypeInfo]] = {
    "ggml": {t.id: t for t in _GGML},
    "ik": {t.id: t for t in (*_GGML, *_IK_ONLY)},
}
"""One table per dialect, by id; ``ik`` contains ``ggml``."""

TYPES: dict[str, TypeInfo] = {t.name: t for t in (*_GGML, *_IK_ONLY)}
"""Every type by its lower-case ggml name."""

_REMOVED = frozenset((4, 5, 31, 32, 33, 36, 37, 38))
_UNSUPPORTED = {
    9: "q8_1",
    15: "q8_k",
    34: "tq1_0",
    35: "tq2_0",
    40: "nvfp4",
    134: "iq1_bn",
    135: "iq2_bn",
    153: "iq2_kt",
    154: "iq3_kt",
    155: "iq4_kt",
    158: "iq1_kt",
}


def type_by_id(type_id: int, dialect: str = "ik") -> TypeInfo:
    """The type with this id in a dialect; ``GGUFError`` says why an id is not usable (removed, unsupported, other dialect, unknown)."""
    info = DIALECTS[dialect].get(type_id)
    if info is not None:
        return info
    if type_id in _REMOVED:
        raise GGUFError(f"tensor type {type_id} was removed from ggml; convert the model again with a current converter")
    if type_id in _UNSUPPORTED:
        raise GGUFError(f"tensor type {type_id} ({_UNSUPPORTED[type_id]}) is not supported; requantise the model to another type")
    if type_id in DIALECTS["ik"]:
        raise GGUFError(f"tensor type {type_id} ({DIALECTS['ik'][type_id].name}) belongs to the ik dialect, not to {dialect}")
    if 202 <= type_id < 400:
        raise GGUFError(f"tensor type {type_id} is a row-interleaved (run-time repacked) type; use the model as it was before repacking")
    raise GGUFError(f"tensor type {type_id} is unknown")


def type_by_name(name: str) -> TypeInfo:
    """The type with this name (any case); ``GGUFError`` lists the known ones."""
    info = TYPES.get(name.lower())
    if info is None:
        raise GGUFError(f"tensor type {name!r} is unknown; known are {', '.join(TYPES)}")
    return info


def row_bytes(name: str, n: int) -> int:
    """Bytes of a row of ``n`` values, header included; ``GGUFError`` where ``n`` is not a positive multiple of the block."""
    info = type_by_name(name)
    if n <= 0 or n % info.block:
        raise GGUFError(f"a row of {n} values cannot be {info.name}: its blocks hold {info.block} values")
    return info.row_header + n // info.block * info.bytes


def tensor_bytes(name: str, ne: Sequence[int]) -> int:
    """Bytes of a tensor of shape ``ne`` (ggml order: row length first)."""
    if not 1 <= len(ne) <= MAX_DIMS:
        raise GGUFError(f"a tensor has 1 to {MAX_DIMS} dimensions, not {len(ne)}")
    if any(d <= 0 for d in ne):
        raise GGUFError(f"the dimensions {list(ne)} are not all positive")
    return row_bytes(name, ne[0]) * prod(ne[1:])
