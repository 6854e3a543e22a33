"""Values as they are stored: weights and caches in their file or cache dtype, decoded on demand.

f32, f16 and integers are ordinary numpy arrays, bf16 is uint16, quantised types are uint8 rows. Shapes are numpy order (ne reversed);
for quantised types the last axis counts bytes instead of values.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from ggufc.formats import activations
from ggufc.formats.ggml_types import TYPES
from ggufc.ir.errors import IRError
from ggufc.ir.types import is_quantised, row_bytes

PLAIN: dict[str, Any] = {
    "f32": np.float32, "f16": np.float16, "f64": np.float64, "bf16": np.uint16,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
"""Numpy dtype that holds one element of each unblocked type."""


def stored_shape(dtype: str, ne: tuple[int, ...]) -> tuple[int, ...]:
    """Numpy shape of the stored array."""
    last = row_bytes(dtype, ne[0]) if is_quantised(dtype) else ne[0]
    return (*reversed(ne[1:]), last)


class Stored:
    """A tensor in its stored form. Immutable: writes return a new object that copies the data."""

    def __init__(self, dtype: str, ne: tuple[int, ...], data: np.ndarray) -> None:
        self.dtype = dtype
        self.ne = ne
        self.data = data

    @classmethod
    def wrap(cls, what: str, dtype: str, ne: tuple[int, ...], data: np.ndarray) -> Stored:
        """Checks an array given from outside and brings it into stored form.

        Raw bytes of any dtype and float arrays for f32/f16/bf16/quantised types (encoded) are accepted; ``what`` names it in errors.
        """
        shape = stored_shape(dtype, ne)
        want = np.dtype(PLAIN.get(dtype, np.uint8))
        array = np.asarray(data)
        if array.dtype == np.uint8 and want != np.uint8:
            if array.size != int(np.prod(shape)) * want.itemsize:
                raise IRError(f"{what}: {array.size} bytes are given where {dtype}{list(ne)} takes {int(np.prod(shape)) * want.itemsize}.")
            array = np.ascontiguousarray(array).reshape(-1).view(want)
        elif array.dtype != want:
            if array.dtype.kind not in "fi":
                raise IRError(f"{what}: an array of {array.dtype} cannot become {dtype}.")
            if array.size != int(np.prod(ne)):
                raise IRError(f"{what}: {array.size} values are given where {dtype}{list(ne)} has {int(np.prod(ne))}.")
            encoded = encode(array.reshape(tuple(reversed(ne))), dtype)
            array = encoded.data if isinstance(encoded, Stored) else encoded
        if array.size != int(np.prod(shape)):
            raise IRError(f"{what}: an array of shape {array.shape} does not fit {dtype}{list(ne)}, stored as {shape}.")
        return cls(dtype, ne, array.reshape(shape))

    @property
    def quantised(self) -> bool:
        return is_quantised(self.dtype)

    @cached_property
    def array(self) -> np.ndarray:
        """Decoded values in numpy order: f16 and f32 as they are, bf16 and quantised types as f32."""
        return decode(self.data, self.dtype)

    def rows(self, idx: np.ndarray) -> np.ndarray:
        """Decoded rows of a 2-D tensor."""
        return decode(np.ascontiguousarray(self.data[idx]), self.dtype)

    def rank(self, n: int) -> Stored:
        """The same tensor with its shape padded to ``n`` dimensions."""
        more = n - len(self.ne)
        return Stored(self.dtype, (*self.ne, *([1] * more)), self.data.reshape((1,) * more + self.data.shape))

    def with_rows(self, idx: np.ndarray, rows: np.ndarray) -> Stored:
        """A copy in which row ``idx[t]`` is ``rows[t]``, converted."""
        check_indices("set_rows", "cell", idx, self.data.shape[0])
        data = self.data.copy()
        new = encode(np.ascontiguousarray(rows), self.dtype)
        for t, cell in enumerate(idx.tolist()):
            data[cell] = (new.data if isinstance(new, Stored) else new)[t]
        return Stored(self.dtype, self.ne, data)


class Target:
    """A window of a stored tensor that ``cpy`` writes to."""

    def __init__(self, base: Stored, offset: int, ne: tuple[int, ...], nb: tuple[int, ...]) -> None:
        self.base, self.offset, self.ne, self.nb = base, offset, ne, nb

    def assign(self, values: np.ndarray) -> Stored:
        """A copy of the base with the window replaced by ``values`` (same element order), converted."""
        base = self.base
        data = base.data.copy()
        new = encode(np.ascontiguousarray(values).reshape(tuple(reversed(self.ne))), base.dtype)
        if isinstance(new, Stored):
            if self.offset % base.ne[0] or self.ne[0] % base.ne[0]:
                raise IRError(f"cpy: only whole rows of {base.ne[0]} {base.dtype} values can be written, not from element {self.offset}.")
            start = self.offset // base.ne[0] * data.shape[-1]
            data.reshape(-1)[start : start + new.data.size] = new.data.reshape(-1)
        else:
            strided(data.reshape(-1), self.offset, self.ne, self.nb, writeable=True)[...] = new
        return Stored(base.dtype, base.ne, data)


def strided(flat: np.ndarray, offset: int, ne: tuple[int, ...], nb: tuple[int, ...], *, writeable: bool = False) -> np.ndarray:
    """View of a flat array in numpy order; raises ``IRError`` when it would leave the array."""
    last = offset + sum((n - 1) * s for n, s in zip(ne, nb))
    if 0 not in ne and not (offset >= 0 and last < flat.size):
        raise IRError(f"A view (offset {offset}, ne {list(ne)}, nb {list(nb)}) reaches element {last} of a tensor of {flat.size} elements.")
    strides = tuple(s * flat.itemsize for s in reversed(nb))
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(reversed(ne)), strides, writeable=writeable)


def check_indices(op: str, what: str, idx: np.ndarray, limit: int) -> None:
    """Raises ``IRError`` unless all indices lie in 0..limit-1."""
    if idx.size and not 0 <= idx.min() <= idx.max() < limit:
        bad = int(idx.min() if idx.min() < 0 else idx.max())
        raise IRError(f"{op}: {what} {bad} does not exist; there are {limit} (0..{limit - 1}).")


def decode(data: np.ndarray, dtype: str) -> np.ndarray:
    """Stored form to values."""
    if dtype == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    if not is_quantised(dtype):
        return data
    from ggufc.formats.quants import dequantize

    n = _row_values(dtype, data.shape[-1])
    return dequantize(dtype, data, n).reshape(*data.shape[:-1], n)


def _row_values(dtype: str, size: int) -> int:
    t = TYPES[dtype]
    return (size - t.row_header) // t.bytes * t.block


def encode(values: np.ndarray, dtype: str) -> Any:
    """Values in numpy order to the stored form: a numpy array, or ``Stored`` for bf16 and quantised types."""
    ne = tuple(reversed(values.shape))
    if dtype == "bf16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
        # Round to nearest even on the low 16 bits; NaN keeps its payload's top bit so that it stays NaN.
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        nan = np.isnan(values)
        return Stored(dtype, ne, np.where(nan, ((bits >> 16) | 0x40).astype(np.uint16), rounded))
    if not is_quantised(dtype):
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(PLAIN[dtype])
    from ggufc.formats.quants import quantize

    rows = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, values.shape[-1])
    return Stored(dtype, ne, np.asarray(quantize(dtype, rows), dtype=np.uint8).reshape(stored_shape(dtype, ne)))


def round_activations(b: np.ndarray, weight_dtype: str) -> np.ndarray:
    """The activations of a product with weights of ``weight_dtype`` as the engine rounds them; unchanged for plain float weights."""
    mode = activations.activation_mode(weight_dtype)
    return b if mode == "f32" else activations.round_activations(np.ascontiguousarray(b, dtype=np.float32), mode)
