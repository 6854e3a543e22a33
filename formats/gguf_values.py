"""Metadata value types of GGUF, and the limits that keep a header within 64 MiB and two seconds."""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_ALIGNMENT = 1 << 16
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 64
MAX_STRING_BYTES = 1 << 24
MAX_STRINGS = 1 << 22  # over all arrays of strings of a file: 16 times the largest vocabulary in use
MAX_HEADER_BYTES = 1 << 27
MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class ValueType:
    """A scalar type: id in the file, name, struct code and the numpy dtype of arrays of it (both empty for strings and arrays)."""

    id: int
    name: str
    code: str = ""
    dtype: str = ""

    @property
    def size(self) -> int:
        return struct.calcsize("<" + self.code) if self.code else 0


VALUE_TYPES: tuple[ValueType, ...] = (
    ValueType(0, "uint8", "B", "u1"),
    ValueType(1, "int8", "b", "i1"),
    ValueType(2, "uint16", "H", "<u2"),
    ValueType(3, "int16", "h", "<i2"),
    ValueType(4, "uint32", "I", "<u4"),
    ValueType(5, "int32", "i", "<i4"),
    ValueType(6, "float32", "f", "<f4"),
    ValueType(7, "bool", "?", "?"),
    ValueType(8, "string"),
    ValueType(9, "array"),
    ValueType(10, "uint64", "Q", "<u8"),
    ValueType(11, "int64", "q", "<i8"),
    ValueType(12, "float64", "d", "<f8"),
)
"""Indexed by id."""

BY_NAME: dict[str, ValueType] = {t.name: t for t in VALUE_TYPES}
BY_NAME |= {"str": BY_NAME["string"], "f32": BY_NAME["float32"], "f64": BY_NAME["float64"]}
BY_NAME |= {f"{s[0]}{s.lstrip('uint')}": BY_NAME[s] for s in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")}

UINT32 = BY_NAME["uint32"]
STRING = BY_NAME["string"]
ARRAY = BY_NAME["array"]
BOOL = BY_NAME["bool"]
