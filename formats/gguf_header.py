"""Bounded parser of one GGUF header: every length is checked against the bytes that remain before anything is allocated or looped over.

Nothing is decoded that the parser itself does not need: a ``Value`` remembers where its bytes lie and decodes on first access, so that a
vocabulary of hundreds of thousands of strings costs one walk over its lengths.
"""

from __future__ import annotations

import codecs
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np

from ggufc.formats import gguf_values as gv
from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import MAX_DIMS, TypeInfo, tensor_bytes, type_by_id

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_STRING_CHUNK = 1 << 15
_UTF8_CHUNK = 1 << 20


class Cursor:
    """A position in the mapped file. Every read is bounded; ``fail`` raises with a byte offset."""

    def __init__(self, buf: mmap.mmap, path: object) -> None:
        self.buf = buf
        self.path = path
        self.pos = 0
        self.end = len(buf)

    def fail(self, message: str, offset: int | None = None) -> NoReturn:
        raise GGUFError(message, offset=self.pos if offset is None else offset, path=self.path)

    def need(self, n: int, what: str) -> None:
        """Refuse unless ``n`` more bytes exist within the header limit."""
        if n > self.end - self.pos:
            self.fail(f"{what} needs {n} bytes but only {self.end - self.pos} remain; the file is truncated or damaged")
        if self.pos + n > gv.MAX_HEADER_BYTES:
            self.fail(f"{what} lies beyond the largest header accepted ({gv.MAX_HEADER_BYTES} bytes)")

    def u32(self, what: str) -> int:
        self.need(4, what)
        self.pos += 4
        return int(_U32(self.buf, self.pos - 4)[0])

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.pos += 8
        return int(_U64(self.buf, self.pos - 8)[0])

    def name(self, what: str, limit: int) -> str:
        """A key or tensor name: 1 to ``limit`` bytes of UTF-8 without control characters."""
        start = self.pos
        n = self.u64(f"the length of {what}")
        if n == 0:
            self.fail(f"{what} is empty", start)
        if n > limit:
            self.fail(f"{what} has {n} bytes; at most {limit} are allowed", start)
        self.need(n, what)
        raw = self.buf[self.pos : self.pos + n]
        self.pos += n
        try:
            text = raw.decode()
        except UnicodeDecodeError as e:
            self.fail(f"{what} is not valid UTF-8", start + 8 + e.start)
        if not text.isprintable():
            self.fail(f"{what} {text!r} contains unprintable characters", start)
        return text


class Value:
    """One metadata value: type, where its bytes lie, and its decoded form once somebody asked for it.

    ``start`` is the byte of the type id, ``body`` the first byte of the scalar or of the first array element, ``end`` one past the last.
    """

    __slots__ = ("_buf", "_cache", "_path", "_starts", "body", "count", "element", "end", "key", "start", "type")

    def __init__(self, cursor: Cursor, key: str, start: int, vtype: gv.ValueType, element: gv.ValueType | None, count: int) -> None:
        self.key, self.start, self.type, self.element, self.count = key, start, vtype, element, count
        self.body = self.end = cursor.pos
        self._buf: mmap.mmap = cursor.buf
        self._path = cursor.path
        self._cache: object = None
        self._starts: np.ndarray | None = None

    @property
    def type_name(self) -> str:
        """``uint32``, ``string``, ... or ``array[string]``."""
        return f"array[{self.element.name}]" if self.element else self.type.name

    @property
    def raw(self) -> bytes:
        """Type id and value as they stand in the file."""
        return self._buf[self.start : self.end]

    def get(self) -> object:
        """Python scalar, str, numpy array, or list[str]; the same object at every call."""
        if self._cache is None:
            if self._buf.closed:
                raise GGUFError(f"cannot read {self.key}: the file is closed", offset=self.start, path=self._path)
            self._cache = self._decode()
        return self._cache

    def _decode(self) -> object:
        kind = self.element or self.type
        raw = self._buf[self.body : self.end]
        if kind is gv.STRING:
            if self.element is None:
                return raw.decode()
            assert self._starts is not None
            base = self.body
            bounds = (self._starts - base).tolist()
            bounds.append(len(raw))
            # Vocabularies of byte-level models hold pieces of characters: surrogates keep such bytes recoverable.
            return [raw[a + 8 : b].decode("utf-8", "surrogateescape") for a, b in pairwise(bounds)]
        if self.element is None:
            return struct.unpack("<" + kind.code, raw)[0]
        return np.frombuffer(raw, kind.dtype)

    def walk_strings(self, cursor: Cursor) -> None:
        """Find the start of every string of an array and move the cursor past them."""
        starts = np.empty(self.count, np.uint32)
        done = 0
        while done < self.count:
            done += _walk_short(cursor, starts[done : done + _STRING_CHUNK])
            if done < self.count:
                done += _walk_any(cursor, starts[done : done + _STRING_CHUNK], self.key, done)
        self._starts = starts


def _walk_short(cursor: Cursor, starts: np.ndarray) -> int:
    """Walk strings as if every length were below 256; return how many of ``starts`` are filled with verified positions.

    Reading one byte per string is several times faster than unpacking eight; the other seven are checked together afterwards.
    """
    buf, pos = cursor.buf, cursor.pos
    limit = min(cursor.end, gv.MAX_HEADER_BYTES) - 264
    found: list[int] = []
    append = found.append
    for _ in range(len(starts)):
        if pos > limit:
            break
        append(pos)
        pos += 8 + buf[pos]
    if not found:
        return 0
    at = np.array(found, np.int64)
    window = np.frombuffer(buf[cursor.pos : found[-1] + 8], np.uint8)
    rel = at - cursor.pos
    long = np.zeros(len(found), np.uint8)
    for k in range(1, 8):
        long |= window[rel + k]
    good = int(np.argmax(long != 0)) if long.any() else len(found)
    starts[:good] = at[:good]
    cursor.pos = pos if good == len(found) else found[good]
    return good


def _walk_any(cursor: Cursor, starts: np.ndarray, key: str, first: int) -> int:
    """Walk strings of any length, checking each; the errors are raised here."""
    buf, end, pos = cursor.buf, min(cursor.end, gv.MAX_HEADER_BYTES), cursor.pos
    for i in range(len(starts)):
        cursor.pos = pos
        if pos + 8 > end:
            cursor.need(8, f"the length of string {first + i} of {key!r}")
        n = _U64(buf, pos)[0]
        if n > gv.MAX_STRING_BYTES:
            cursor.fail(f"string {first + i} of {key!r} claims {n} bytes; at most {gv.MAX_STRING_BYTES} are accepted")
        if n > end - pos - 8:
            cursor.pos += 8
            cursor.need(n, f"string {first + i} of {key!r}")
        starts[i] = pos
        pos += 8 + n
    cursor.pos = pos
    return len(starts)


class Metadata(Mapping[str, object]):
    """Read-only mapping of keys to decoded values."""

    def __init__(self, values: dict[str, Value]) -> None:
        self.values_by_key = values

    def __getitem__(self, key: str) -> object:
        return self.values_by_key[key].get()

    def __contains__(self, key: object) -> bool:
        return key in self.values_by_key

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file: shape in ggml order, type, absolute byte ``offset`` in file number ``shard``, ``nbytes``."""

    name: str
    ne: tuple[int, ...]
    type: TypeInfo
    offset: int
    nbytes: int
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What one file declares. ``end`` is the first byte after the header, ``data`` the first byte of the tensor section."""

    version: int
    values: dict[str, Value]
    tensors: dict[str, TensorInfo]
    alignment: int
    end: int
    data: int


def parse_header(buf: mmap.mmap, path: object, shard: int = 0, dialect: str = "ik") -> Header:
    """Parse and check one header; every defect is a ``GGUFError`` that names its byte."""
    cursor = Cursor(buf, path)
    cursor.need(4, "the magic")
    if buf[:4] != gv.MAGIC:
        cursor.fail(f"this is not a GGUF file: it starts with {buf[:4]!r} instead of {gv.MAGIC!r}")
    cursor.pos = 4
    version = cursor.u32("the version")
    if version not in gv.VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = "; it is big-endian" if swapped in gv.VERSIONS else ""
        cursor.fail(f"GGUF version {version} is not supported{hint}; convert the model again (versions 2 and 3 are read)", 4)
    n_tensors = cursor.u64("the number of tensors")
    n_kv = cursor.u64("the number of keys")
    # Smallest records: a tensor is name length + 1 byte + n_dims + 1 dim + type + offset, a key is its length + 1 byte + type + 1 byte.
    for count, least, most, what, at in ((n_tensors, 33, gv.MAX_TENSORS, "tensors", 8), (n_kv, 14, gv.MAX_KEYS, "keys", 16)):
        if count > most:
            cursor.fail(f"the file claims {count} {what}; at most {most} are accepted", at)
        if count * least > cursor.end - cursor.pos:
            cursor.fail(f"the file claims {count} {what}, which do not fit into the {cursor.end - cursor.pos} bytes that remain", at)
    values = _parse_values(cursor, n_kv)
    alignment = _alignment(cursor, values)
    records = _parse_tensor_records(cursor, n_tensors, dialect)
    end = cursor.pos
    data = -(-end // alignment) * alignment
    return Header(version, values, _place_tensors(cursor, records, alignment, data, shard), alignment, end, data)


def _parse_values(cursor: Cursor, n_kv: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    strings_left = gv.MAX_STRINGS
    for i in range(n_kv):
        at = cursor.pos
        key = cursor.name(f"metadata key {i}", gv.MAX_KEY_BYTES)
        if key in values:
            cursor.fail(f"metadata key {key!r} appears twice", at)
        start = cursor.pos
        vtype = _value_type(cursor, key)
        element, count = None, 0
        if vtype is gv.ARRAY:
            element = _value_type(cursor, key)
            if element is gv.ARRAY:
                cursor.fail(f"metadata key {key!r} is an array of arrays, which is not supported", cursor.pos - 4)
            count = cursor.u64(f"the array length of {key!r}")
            cursor.pos -= 8
            least = element.size or 8
            if count * least > cursor.end - cursor.pos - 8:
                left = cursor.end - cursor.pos - 8
                cursor.fail(f"the array {key!r} claims {count} elements, which do not fit into the {left} bytes that remain")
            if element is gv.STRING:
                strings_left -= count
                if strings_left < 0:
                    cursor.fail(f"with {key!r} the file holds more than {gv.MAX_STRINGS} strings")
            cursor.pos += 8
        value = Value(cursor, key, start, vtype, element, count)
        if element is gv.STRING:
            value.walk_strings(cursor)
        elif element is not None:
            cursor.need(count * element.size, f"the array {key!r}")
            cursor.pos += count * element.size
        elif vtype is gv.STRING:
            n = cursor.u64(f"the string length of {key!r}")
            if n > gv.MAX_STRING_BYTES:
                cursor.fail(f"the string {key!r} claims {n} bytes; at most {gv.MAX_STRING_BYTES} are accepted", cursor.pos - 8)
            cursor.need(n, f"the string {key!r}")
            value.body = cursor.pos
            cursor.pos += n
            _check_utf8(cursor, key, value.body)
        else:
            cursor.need(vtype.size, f"the value of {key!r}")
            cursor.pos += vtype.size
        if (element or vtype) is gv.BOOL:
            _check_bools(cursor, key, value.body)
        value.end = cursor.pos
        values[key] = value
    return values


def _value_type(cursor: Cursor, key: str) -> gv.ValueType:
    type_id = cursor.u32(f"the type of {key!r}")
    if type_id >= len(gv.VALUE_TYPES):
        cursor.fail(f"metadata key {key!r} has the unknown value type {type_id}", cursor.pos - 4)
    return gv.VALUE_TYPES[type_id]


def _check_utf8(cursor: Cursor, key: str, start: int) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(start, cursor.pos, _UTF8_CHUNK):
        stop = min(at + _UTF8_CHUNK, cursor.pos)
        try:
            decoder.decode(cursor.buf[at:stop], final=stop == cursor.pos)
        except UnicodeDecodeError:
            cursor.fail(f"the string {key!r} is not valid UTF-8", at)


def _check_bools(cursor: Cursor, key: str, start: int) -> None:
    for at in range(start, cursor.pos, _UTF8_CHUNK):
        chunk = np.frombuffer(cursor.buf[at : min(at + _UTF8_CHUNK, cursor.pos)], np.uint8)
        bad = np.flatnonzero(chunk > 1)
        if len(bad):
            cursor.fail(f"metadata key {key!r} holds a bool that is {chunk[bad[0]]}, not 0 or 1", at + int(bad[0]))


def _alignment(cursor: Cursor, values: dict[str, Value]) -> int:
    value = values.get("general.alignment")
    if value is None:
        return gv.DEFAULT_ALIGNMENT
    if value.type is not gv.UINT32:
        cursor.fail(f"general.alignment must be uint32, not {value.type_name}", value.start)
    n = value.get()
    assert isinstance(n, int)
    if n <= 0 or n & (n - 1) or n > gv.MAX_ALIGNMENT:
        cursor.fail(f"general.alignment is {n}; it must be a power of two up to {gv.MAX_ALIGNMENT}", value.body)
    return n


_Record = tuple[str, tuple[int, ...], TypeInfo, int, int, int]


def _parse_tensor_records(cursor: Cursor, n_tensors: int, dialect: str) -> list[_Record]:
    """(name, ne, type, relative offset, nbytes, byte of the record) of every tensor."""
    records: list[_Record] = []
    names: set[str] = set()
    for i in range(n_tensors):
        at = cursor.pos
        name = cursor.name(f"the name of tensor {i}", gv.MAX_NAME_BYTES)
        if name in names:
            cursor.fail(f"tensor {name!r} appears twice", at)
        names.add(name)
        n_dims = cursor.u32(f"the number of dimensions of {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            cursor.fail(f"tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed", cursor.pos - 4)
        ne = tuple(cursor.u64(f"dimension {d} of {name!r}") for d in range(n_dims))
        dims_at = cursor.pos - 8 * n_dims
        if 0 in ne:
            cursor.fail(f"tensor {name!r} has a dimension of 0 in {list(ne)}", dims_at)
        type_id = cursor.u32(f"the type of {name!r}")
        try:
            info = type_by_id(type_id, dialect)
        except GGUFError as e:
            cursor.fail(f"tensor {name!r}: {e}", cursor.pos - 4)
        try:
            nbytes = tensor_bytes(info.name, ne)
        except GGUFError as e:
            cursor.fail(f"tensor {name!r}: {e}", dims_at)
        if nbytes > cursor.end:
            cursor.fail(f"tensor {name!r} with dimensions {list(ne)} needs {nbytes} bytes, more than the file has ({cursor.end})", dims_at)
        records.append((name, ne, info, cursor.u64(f"the offset of {name!r}"), nbytes, cursor.pos - 8))
    return records


def _place_tensors(cursor: Cursor, records: list[_Record], alignment: int, data: int, shard: int) -> dict[str, TensorInfo]:
    """Check offsets against the file and each other."""
    if records and data > cursor.end:
        cursor.fail(f"the tensor data starts at byte {data}, beyond the end of the file ({cursor.end} bytes)")
    tensors: dict[str, TensorInfo] = {}
    for name, ne, info, offset, nbytes, at in records:
        if offset % alignment:
            cursor.fail(f"the offset {offset} of tensor {name!r} is not a multiple of the alignment {alignment}", at)
        if offset + nbytes > cursor.end - data:
            cursor.fail(f"tensor {name!r} ends {data + offset + nbytes - cursor.end} bytes beyond the end of the file", at)
        tensors[name] = TensorInfo(name, ne, info, data + offset, nbytes, shard)
    by_offset = sorted(records, key=lambda r: r[3])
    for a, b in pairwise(by_offset):
        if a[3] + a[4] > b[3]:
            cursor.fail(f"tensors {a[0]!r} and {b[0]!r} overlap", b[5])
    return tensors
