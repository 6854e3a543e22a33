"""Streaming GGUF v3 writer: declare keys and tensors, then write once; tensor data never has to fit into memory.

    with GGUFWriter("out.gguf") as w:
        w.copy_metadata(source, except_keys={"general.alignment"})
        w.add("general.name", "tiny")
        w.add_tensor("a", (64, 8), "f32", array)
        w.add_tensor("b", (1 << 30,), "i8", lambda: chunks_of_b())

The file appears under its name only when it is complete: it is written to a temporary name beside it, synchronised and renamed; on any
exception, an interrupt included, the temporary is removed.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from ggufc.formats import gguf_values as gv
from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import TypeInfo, tensor_bytes, type_by_name
from ggufc.formats.gguf_reader import GGUFFile

Chunk = bytes | bytearray | memoryview | np.ndarray
Data = np.ndarray | Iterable[Chunk] | Callable[[], Iterable[Chunk]]
"""An array, an iterable of chunks, or a function that is called when the tensor's turn comes and returns one."""

_ARRAY_CHUNK = 1 << 24


@dataclass
class _Tensor:
    name: str
    ne: tuple[int, ...]
    type: TypeInfo
    nbytes: int
    data: Data | None


class GGUFWriter:
    """Collects keys and tensor declarations; ``finish`` (or leaving the ``with`` block) writes the file."""

    def __init__(self, path: str | os.PathLike[str], alignment: int = gv.DEFAULT_ALIGNMENT) -> None:
        self.path = Path(path)
        if alignment <= 0 or alignment & (alignment - 1) or alignment > gv.MAX_ALIGNMENT:
            raise GGUFError(f"alignment {alignment} is not a power of two up to {gv.MAX_ALIGNMENT}", path=path)
        self.alignment = alignment
        self.finished = False
        self._values: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        if alignment != gv.DEFAULT_ALIGNMENT:
            self.add("general.alignment", alignment, "uint32")

    def add(self, key: str, value: object, type: str | None = None) -> None:
        """Set a key. ``type`` is a GGUF type name (``uint32``, ``float32``, ``array[int32]``, short ``u32`` ...); by default it follows
        from the value: bool, uint32 or the next integer type that holds it, float32, string, arrays of these, numpy arrays by dtype."""
        _check_name(key, "metadata key", gv.MAX_KEY_BYTES)
        if key in self._values:
            raise GGUFError(f"metadata key {key!r} is set twice", path=self.path)
        try:
            self._values[key] = encode_value(value, type)
        except (GGUFError, struct.error, OverflowError, ValueError, TypeError, UnicodeError) as e:
            raise GGUFError(f"metadata key {key!r} cannot hold its value: {e}", path=self.path) from e

    def copy_metadata(self, source: GGUFFile, except_keys: Collection[str] = ()) -> None:
        """Copy keys byte for byte, but not ``general.alignment``, ``split.*``, those in ``except_keys`` and those already set."""
        for key in source.metadata:
            if key in self._values or key in except_keys or key == "general.alignment" or key.startswith("split."):
                continue
            self._values[key] = source.value(key).raw

    def add_tensor(self, name: str, ne: Sequence[int], type_name: str, data: Data | None = None) -> None:
        """Declare a tensor (``ne`` in ggml order). Without ``data`` now, ``set_data`` must follow before ``finish``."""
        _check_name(name, "tensor name", gv.MAX_NAME_BYTES)
        if name in self._tensors:
            raise GGUFError(f"tensor {name!r} is declared twice", path=self.path)
        info = type_by_name(type_name)
        shape = tuple(int(d) for d in ne)
        try:
            nbytes = tensor_bytes(info.name, shape)
        except GGUFError as e:
            raise GGUFError(f"tensor {name!r}: {e}", path=self.path) from e
        self._tensors[name] = _Tensor(name, shape, info, nbytes, None)
        if data is not None:
            self.set_data(name, data)

    def set_data(self, name: str, data: Data) -> None:
        """Give a declared tensor its data; an array must have the tensor's number of bytes."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise GGUFError(f"tensor {name!r} is not declared; call add_tensor first", path=self.path)
        if isinstance(data, np.ndarray) and data.nbytes != tensor.nbytes:
            raise GGUFError(f"tensor {name!r} takes {tensor.nbytes} bytes but its array has {data.nbytes}", path=self.path)
        tensor.data = data

    def finish(self) -> None:
        """Write everything and rename to the final name. A second call does nothing."""
        if self.finished:
            return
        missing = [t.name for t in self._tensors.values() if t.data is None]
        if missing:
            raise GGUFError(f"tensor {missing[0]!r} has no data; call set_data", path=self.path)
        if self.path.exists() and not self.path.is_file():
            raise GGUFError("cannot write the file: it exists and is no regular file, which renaming would replace", path=self.path)
        header = self._header()
        temporary = self.path.with_name(f".{self.path.name[:64]}.{secrets.token_hex(6)}.tmp")
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            with os.fdopen(fd, "wb") as out:
                out.write(header)
                for tensor in self._tensors.values():
                    _pad(out, self.alignment)
                    self._write_tensor(out, tensor)
                _pad(out, self.alignment)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, self.path)
        except BaseException as e:
            temporary.unlink(missing_ok=True)
            if isinstance(e, OSError):
                raise GGUFError(f"cannot write the file: {e.strerror}", path=self.path) from e
            raise
        _sync_folder(self.path.parent)
        self.finished = True

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()

    def _header(self) -> bytes:
        if len(self._tensors) > gv.MAX_TENSORS or len(self._values) > gv.MAX_KEYS:
            raise GGUFError(f"more than {gv.MAX_TENSORS} tensors or {gv.MAX_KEYS} keys cannot be read back", path=self.path)
        parts = [gv.MAGIC, struct.pack("<IQQ", 3, len(self._tensors), len(self._values))]
        for key, value in self._values.items():
            parts += (_string(key), value)
        offset = 0
        for t in self._tensors.values():
            parts += (_string(t.name), struct.pack(f"<I{len(t.ne)}QIQ", len(t.ne), *t.ne, t.type.id, offset))
            offset += -(-t.nbytes // self.alignment) * self.alignment
        header = b"".join(parts)
        if len(header) > gv.MAX_HEADER_BYTES:
            raise GGUFError(f"the metadata takes {len(header)} bytes; at most {gv.MAX_HEADER_BYTES} can be read back", path=self.path)
        return header

    def _write_tensor(self, out: BinaryIO, tensor: _Tensor) -> None:
        data = tensor.data
        tensor.data = None
        assert data is not None
        chunks = _array_chunks(data) if isinstance(data, np.ndarray) else data() if callable(data) else data
        left = tensor.nbytes
        for chunk in chunks:
            raw = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data if isinstance(chunk, np.ndarray) else chunk
            view = memoryview(raw).cast("B")
            left -= len(view)
            if left < 0:
                break
            out.write(view)
        if left:
            said = f"{-left} bytes too many" if left < 0 else f"{left} bytes too few"
            raise GGUFError(f"the data of tensor {tensor.name!r} is {said}; it takes {tensor.nbytes}", path=self.path)


def encode_value(value: object, type: str | None = None) -> bytes:
    """Type id and bytes of a metadata value as they stand in a file."""
    if type is not None and type.startswith("array["):
        return _encode_array(value, _named(type[6:-1]))
    if type is not None and not isinstance(value, (list, tuple, np.ndarray)):
        return _encode_scalar(value, _named(type))
    if isinstance(value, (list, tuple, np.ndarray)):
        return _encode_array(value, _named(type) if type else _element_type(value))
    return _encode_scalar(value, _scalar_type(value))


def _named(name: str) -> gv.ValueType:
    kind = gv.BY_NAME.get(name)
    if kind is None or kind is gv.ARRAY:
        raise GGUFError(f"{name!r} is not a GGUF value type; known are {', '.join(gv.BY_NAME)}")
    return kind


def _scalar_type(value: object) -> gv.ValueType:
    if isinstance(value, (bool, np.bool_)):
        return gv.BOOL
    if isinstance(value, np.generic):
        return gv.BY_NAME[str(value.dtype)]
    if isinstance(value, int):
        for name, low, high in (("uint32", 0, 1 << 32), ("int32", -(1 << 31), 0), ("uint64", 0, 1 << 64), ("int64", -(1 << 63), 0)):
            if low <= value < high:
                return gv.BY_NAME[name]
        raise GGUFError(f"{value} needs more than 64 bits")
    if isinstance(value, float):
        return gv.BY_NAME["float32"]
    if isinstance(value, (str, bytes)):
        return gv.STRING
    raise GGUFError(f"a {value.__class__.__name__} has no GGUF type")


def _element_type(values: Sequence[object] | np.ndarray) -> gv.ValueType:
    if isinstance(values, np.ndarray):
        kind = gv.BY_NAME.get(str(values.dtype))
        if kind is None:
            raise GGUFError(f"an array of {values.dtype} has no GGUF type")
        return kind
    if not values:
        raise GGUFError("an empty list needs an explicit type")
    first = values[0]
    if isinstance(first, int) and not isinstance(first, bool):
        wide = any(not -(1 << 31) <= v < 1 << 31 for v in values if isinstance(v, int))
        return gv.BY_NAME["int64" if wide else "int32"]
    return _scalar_type(first)


def _encode_scalar(value: object, kind: gv.ValueType) -> bytes:
    if kind is gv.STRING:
        return struct.pack("<I", kind.id) + _string(value)
    if kind is gv.BOOL and not isinstance(value, (bool, np.bool_)):
        raise GGUFError(f"{value!r} is not a bool")
    return struct.pack("<I" + kind.code, kind.id, value)


def _encode_array(values: object, kind: gv.ValueType) -> bytes:
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise GGUFError(f"a {values.__class__.__name__} is not an array")
    head = struct.pack("<IIQ", gv.ARRAY.id, kind.id, len(values))
    if kind is gv.STRING:
        return head + b"".join(map(_string, values))
    array = np.asarray(values)
    if array.ndim != 1:
        raise GGUFError("arrays of arrays are not supported")
    if array.size and array.dtype.kind not in {"f": "iuf", "b": "b"}.get(np.dtype(kind.dtype).kind, "iu"):
        raise GGUFError(f"values of dtype {array.dtype} are not {kind.name}")
    cast = array.astype(kind.dtype)
    if array.dtype.kind in "iu" and not np.array_equal(cast, array):
        raise GGUFError(f"some values do not fit into {kind.name}")
    return head + cast.tobytes()


def _string(value: object) -> bytes:
    raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
    if len(raw) > gv.MAX_STRING_BYTES:
        raise GGUFError(f"a string of {len(raw)} bytes is too long; at most {gv.MAX_STRING_BYTES} can be read back")
    return struct.pack("<Q", len(raw)) + raw


def _check_name(name: str, what: str, limit: int) -> None:
    if not name or not name.isprintable() or len(name.encode("utf-8", "replace")) > limit:
        raise GGUFError(f"{what} {name[:80]!r} must be 1 to {limit} bytes of printable text")


def _array_chunks(array: np.ndarray) -> Iterable[np.ndarray]:
    """Pieces of a few megabytes, so that a strided or memory-mapped array is never copied whole."""
    if not array.flags.c_contiguous and array.ndim > 1:
        for row in array:
            yield from _array_chunks(row)
        return
    flat = array.reshape(-1)
    step = max(1, _ARRAY_CHUNK // max(1, array.itemsize))
    for at in range(0, len(flat), step):
        yield flat[at : at + step]


def _pad(out: BinaryIO, alignment: int) -> None:
    out.write(bytes(-out.tell() % alignment))


def _sync_folder(folder: Path) -> None:
    """Make the rename durable where the file system allows to synchronise folders."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        return
    finally:
        os.close(fd)
