"""Tensor types: a ggml dtype name and an ``ne`` shape, fastest dimension first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ggufc.formats import ggml_types
from ggufc.formats.ggml_types import TYPES
from ggufc.ir.dims import IntDim, divide, evaluate, parse_dim, product, symbols
from ggufc.ir.errors import IRError

FLOATS = frozenset({"f32", "f16", "bf16", "f64"})
INTS = frozenset({"i8", "i16", "i32", "i64"})

_TEXT = re.compile(r"\s*([a-z][a-z0-9_]*)\s*\[([^\]]*)\]\s*\Z")
_DTYPE = re.compile(r"[a-z][a-z0-9_]*\Z")


def is_quantised(dtype: str) -> bool:
    """Whether values of ``dtype`` are stored in blocks (everything that is neither a plain float nor an integer)."""
    return dtype not in FLOATS and dtype not in INTS


@dataclass(frozen=True, slots=True)
class TensorType:
    """``dtype`` is ggml's lower-case name, ``ne`` has one to four entries (ints or dims)."""

    dtype: str
    ne: tuple[IntDim, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ne", tuple(self.ne))
        if not _DTYPE.match(self.dtype):
            raise IRError(f"{self.dtype!r} is not a dtype name; ggml's lower-case names are meant, such as f32 or q4_k.")
        if not 1 <= len(self.ne) <= 4:
            raise IRError(f"A tensor has one to four dimensions, not {len(self.ne)}: {list(map(str, self.ne))}.")
        for d in self.ne:
            if isinstance(d, int) and d < 1:
                raise IRError(f"Every dimension must be at least 1: {list(map(str, self.ne))}.")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.ne))}]"

    @property
    def rank(self) -> int:
        return len(self.ne)

    @property
    def ne4(self) -> tuple[IntDim, IntDim, IntDim, IntDim]:
        """Shape padded with ones to four entries."""
        a, b, c, d = (*self.ne, 1, 1, 1)[:4]
        return a, b, c, d

    @property
    def numel(self) -> IntDim:
        return product(self.ne)

    @property
    def nbytes(self) -> IntDim:
        """Bytes of a contiguous tensor of this type, as rows of ``ne[0]`` values."""
        row = self.ne[0]
        rest = product(self.ne[1:])
        if isinstance(row, int):
            return rest * row_bytes(self.dtype, row)
        values, size = block_of(self.dtype)
        return divide(row * size, values) * rest

    @property
    def quantised(self) -> bool:
        return is_quantised(self.dtype)

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(s for d in self.ne for s in symbols(d))

    def shape(self, env: dict[str, int]) -> tuple[int, ...]:
        """Numpy shape (slowest dimension first) for the given values of the symbols."""
        return tuple(evaluate(d, env) for d in reversed(self.ne))

    def with_ne(self, *ne: IntDim) -> TensorType:
        return TensorType(self.dtype, ne)

    def with_dtype(self, dtype: str) -> TensorType:
        return TensorType(dtype, self.ne)


def row_bytes(dtype: str, n: int) -> int:
    """Bytes of one row of ``n`` values, row header included."""
    require_dtype(dtype)
    return ggml_types.row_bytes(dtype, n)


def block_of(dtype: str) -> tuple[int, int]:
    """(values, bytes) of one block of a type without row header."""
    require_dtype(dtype)
    t = TYPES[dtype]
    return t.block, t.bytes


def require_dtype(dtype: str) -> None:
    """Raises ``IRError`` for a dtype that ``formats.ggml_types`` does not describe."""
    if dtype not in TYPES:
        raise IRError(f"Dtype {dtype!r} is unknown; known dtypes: {', '.join(sorted(TYPES))}.")


def parse_type(text: str) -> TensorType:
    """Parses ``f32[576, T]``."""
    m = _TEXT.match(text)
    if m is None:
        raise IRError(f"{text!r} is not a tensor type; write for example f32[576, T].")
    return TensorType(m[1], tuple(parse_dim(part) for part in m[2].split(",")))
