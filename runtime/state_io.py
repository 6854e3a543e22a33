"""Sinks and sources of state blobs: little-endian words and rows, counted, checked, never read past the end."""

from __future__ import annotations

import io
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from .errors import RuntimeRefusal
from .rows import Part, chunks

Target = str | os.PathLike[str] | IO[bytes]
BlobSource = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]


class Sink(Protocol):
    """Where a writer's words and rows go; ``size`` is the number of bytes so far."""

    size: int

    def put(self, data: bytes) -> None: ...

    def rows(self, part: Part, cells: np.ndarray) -> None: ...


class CountingSink:
    """Counts what a writer writes without reading any row."""

    def __init__(self) -> None:
        self.size = 0

    def put(self, data: bytes) -> None:
        self.size += len(data)

    def rows(self, part: Part, cells: np.ndarray) -> None:
        self.size += part.row_bytes * len(cells)


class FileSink:
    """Writes to a binary file; rows are gathered a few MiB at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0

    def put(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        self.size += len(left)
        while len(left):
            taken = self._file.write(left)
            if not isinstance(self._file, io.RawIOBase):
                return
            # A file without a buffer may take less than it is given; one that would have to wait takes None.
            if taken is None:
                raise RuntimeRefusal("the file for the state takes no bytes just now; give one that waits, or one with a buffer")
            left = left[taken:]

    def rows(self, part: Part, cells: np.ndarray) -> None:
        for a, b in chunks(len(cells), part.row_bytes):
            self.put(np.ascontiguousarray(part.read(cells[a:b])).data.cast("B"))


@contextmanager
def open_target(target: Target) -> Iterator[IO[bytes]]:
    """The binary file to write to. A path appears whole or not at all: it is written beside its place and renamed. What is there and is
    no regular file (a pipe, ``/dev/null``) is written to, never replaced, and a link goes on pointing to its file.
    """
    if not isinstance(target, (str, os.PathLike)):
        if not hasattr(target, "write") or isinstance(target, io.TextIOBase):
            raise RuntimeRefusal(f"the state is to go to {target!r}; give a path, or a file opened for writing bytes")
        yield target
        return
    path = Path(target).resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        if path.exists() and not path.is_file():
            with open(path, "wb") as file:
                yield file
            return
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise RuntimeRefusal(f"the state cannot be written to {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


class Source:
    """A blob of known size, read in order (``u32`` ... ) or at a place (``rows_at``). A blob that ends early is refused with the offset."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self.name = file, name
        self.size = file.seek(0, io.SEEK_END)
        self.at = 0
        file.seek(0)

    def _need(self, n: int, what: str) -> None:
        if n > self.size - self.at:
            raise RuntimeRefusal(f"{self.name} is truncated: {what} needs {n} bytes at byte {self.at} of {self.size}; save the state again")

    def take(self, n: int, what: str) -> bytes:
        self._need(n, what)
        data = self._file.read(n)
        if len(data) != n:
            raise RuntimeRefusal(f"{self.name} became shorter while it was read; save the state again")
        self.at += n
        return data

    def skip(self, n: int, what: str) -> int:
        """Pass over ``n`` bytes; returns where they begin."""
        self._need(n, what)
        begin = self.at
        self.at += n
        self._file.seek(self.at)
        return begin

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def i32(self, what: str) -> int:
        return int(struct.unpack("<i", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def i32s(self, n: int, what: str) -> np.ndarray:
        return np.frombuffer(self.take(4 * n, what), "<i4").astype(np.int32)

    def rows_at(self, offset: int, n: int, row: int) -> np.ndarray:
        """u8 [n, row] at a byte offset that has been checked."""
        self._file.seek(offset)
        data = self._file.read(n * row)
        if len(data) != n * row:
            raise RuntimeRefusal(f"{self.name} became shorter while it was read; save the state again")
        return np.frombuffer(data, np.uint8).reshape(n, row)


@contextmanager
def open_source(source: BlobSource) -> Iterator[Source]:
    """A blob from a path, from bytes, or from a binary file (read to its end if it cannot seek)."""
    if isinstance(source, (str, os.PathLike)):
        try:
            file = open(source, "rb")  # noqa: SIM115
        except OSError as error:
            raise RuntimeRefusal(f"the state {os.fspath(source)} cannot be read: {error.strerror or error}") from None
        with file:
            yield Source(file, os.fspath(source))
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield Source(io.BytesIO(source), "the state")
    elif not hasattr(source, "read") or isinstance(source, io.TextIOBase):
        raise RuntimeRefusal(f"the state is {source!r}; give a path, bytes, or a file opened for reading bytes")
    else:
        name = str(getattr(source, "name", "the state"))
        yield Source(source if source.seekable() and source.tell() == 0 else io.BytesIO(source.read()), name)
