"""Memory-mapped GGUF v2/v3 files, single or split, for models and for our own artifacts.

with GGUFFile.open("model.gguf") as f:
    f.metadata["general.architecture"]
    f.tensors["blk.0.attn_q.weight"].ne
    f.data("blk.0.attn_q.weight")        # uint8 view of the map, no copy
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import stat
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

import numpy as np

from ggufc.formats import gguf_values as gv
from ggufc.formats.errors import GGUFError
from ggufc.formats.gguf_checks import check_metadata
from ggufc.formats.gguf_header import Header, Metadata, TensorInfo, Value, parse_header

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_HASH_CHUNK = 1 << 24
_KINDS = {
    int: "an integer",
    float: "a float",
    str: "a string",
    bool: "a bool",
    list: "an array of strings",
    np.ndarray: "an array of numbers",
}
_T = TypeVar("_T")


class GGUFFile:
    """An open GGUF file; a split model is one object whose tensors know their shard.

    ``metadata`` maps keys to Python scalars, str, numpy arrays or list[str] (bytes that are not UTF-8 appear as surrogate escapes);
    ``tensors`` maps names to ``TensorInfo`` in file order; ``paths`` are the shards.
    """

    def __init__(self, paths: list[Path], maps: list[mmap.mmap], headers: list[Header]) -> None:
        self.paths = paths
        self.version = headers[0].version
        self.alignment = headers[0].alignment
        self.metadata = Metadata(headers[0].values)
        self.tensors: dict[str, TensorInfo] = {name: t for h in headers for name, t in h.tensors.items()}
        self._maps = maps
        self._values_end = max((v.end for v in headers[0].values.values()), default=24)
        self._sha256 = ""
        self._bytes = [np.frombuffer(m, np.uint8) for m in maps]

    @classmethod
    def open(cls, path: str | os.PathLike[str], dialect: str = "ik") -> GGUFFile:
        """Map and check a file (the first of a split model opens all); ``GGUFError`` names what is wrong and its byte.

        ``dialect`` chooses the table of tensor types, ``ggml`` or ``ik`` (a superset).
        """
        first = Path(path)
        with contextlib.ExitStack() as stack:
            maps = [_map(first, stack)]
            headers = [parse_header(maps[0], first, 0, dialect)]
            paths = _shard_paths(first, headers[0])
            for no, shard in enumerate(paths[1:], 1):
                maps.append(_map(shard, stack))
                headers.append(parse_header(maps[no], shard, no, dialect))
            _check_shards(paths, headers)
            check_metadata(headers[0].values, first)
            opened = cls(paths, maps, headers)
            stack.pop_all()
            return opened

    @property
    def path(self) -> Path:
        """The file, or the first shard."""
        return self.paths[0]

    @property
    def size(self) -> int:
        """Bytes of all shards together."""
        return sum(len(b) for b in self._bytes)

    def value(self, key: str) -> Value:
        """The undecoded metadata value: type, byte offsets, raw bytes."""
        return self.metadata.values_by_key[key]

    def kv_type(self, key: str) -> str:
        """GGUF type of a key: ``uint32``, ``string``, ..., or ``array[string]``; KeyError where the key is missing."""
        return self.value(key).type_name

    def require(self, key: str, kind: type[_T]) -> _T:
        """The value of a key that must exist as ``kind`` (int, float, str, bool, list, np.ndarray); bool does not pass for int.

        ``GGUFError`` names the key and the byte: of the value, or where the metadata ends if the key is missing.
        """
        if key not in self.metadata:
            raise GGUFError(f"the required key {key} is missing", offset=self._values_end, path=self.path)
        got = self.metadata[key]
        if not isinstance(got, kind) or (isinstance(got, bool) and kind is not bool):
            value = self.value(key)
            raise GGUFError(f"{key} must be {_KINDS.get(kind, kind.__name__)}, not {value.type_name}", offset=value.start, path=self.path)
        return got

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes as a read-only uint8 view of the map; valid as long as the view lives."""
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"there is no tensor {name!r} in this file", path=self.path)
        if not self._bytes:
            raise GGUFError(f"cannot read {name!r}: the file is closed", offset=info.offset, path=self.path)
        return self._bytes[info.shard][info.offset : info.offset + info.nbytes]

    def sha256(self) -> str:
        """Hex digest of the file's bytes (of all shards one after the other), computed once."""
        if not self._sha256:
            digest = hashlib.sha256()
            for data in self._bytes:
                for at in range(0, len(data), _HASH_CHUNK):
                    digest.update(data[at : at + _HASH_CHUNK].data)
            self._sha256 = digest.hexdigest()
        return self._sha256

    def close(self) -> None:
        """Unmap. Views that are still alive keep their pages until they are gone."""
        self._bytes = []
        for m in self._maps:
            with contextlib.suppress(BufferError):
                m.close()
        self._maps = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _map(path: Path, stack: contextlib.ExitStack) -> mmap.mmap:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise GGUFError(f"cannot open the file: {e.strerror}", path=path) from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise GGUFError("this is not a regular file", path=path)
        if status.st_size == 0:
            raise GGUFError("the file is empty", offset=0, path=path)
        return stack.enter_context(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    except OSError as e:
        raise GGUFError(f"cannot map the file: {e.strerror}", path=path) from e
    finally:
        os.close(fd)


def _split_value(header: Header, key: str, path: Path, default: int) -> int:
    value = header.values.get(key)
    if value is None:
        return default
    n = value.get()
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise GGUFError(f"{key} must be a non-negative integer, not {value.type_name}", offset=value.start, path=path)
    return n


def _shard_paths(first: Path, header: Header) -> list[Path]:
    """The files of a split model, all beside the first and named by its pattern; the name must say what the header says."""
    count = _split_value(header, "split.count", first, 1)
    if count <= 1:
        return [first]
    at = header.values["split.count"].body

    def refuse(message: str) -> NoReturn:
        raise GGUFError(message, offset=at, path=first)

    if count > gv.MAX_SHARDS:
        refuse(f"the model claims {count} files; at most {gv.MAX_SHARDS} are accepted")
    match = _SHARD_NAME.fullmatch(first.name)
    if match is None:
        refuse(f"this is one of {count} files of a split model, but its name does not end in -00001-of-{count:05d}.gguf; restore the names")
    if int(match["count"]) != count:
        refuse(f"the name says {int(match['count'])} files and split.count says {count}; restore the names")
    if int(match["no"]) != 1:
        refuse(f"this is file {int(match['no'])} of a split model; open {match['stem']}-00001-of-{match['count']}.gguf instead")
    return [first.with_name(f"{match['stem']}-{no:05d}-of-{count:05d}.gguf") for no in range(1, count + 1)]


def _check_shards(paths: list[Path], headers: list[Header]) -> None:
    """Numbers, counts, alignment and names must agree over all shards."""
    if len(paths) == 1:
        return
    seen: dict[str, Path] = {}
    for no, (path, header) in enumerate(zip(paths, headers)):
        for key, want in (("split.no", no), ("split.count", len(paths))):
            got = _split_value(header, key, path, -1)
            if got != want:
                said = "is missing" if got < 0 else f"is {got}"
                offset = header.values[key].body if key in header.values else header.end
                raise GGUFError(f"{key} {said} where {want} is expected; the files do not belong together", offset=offset, path=path)
        if header.alignment != headers[0].alignment:
            raise GGUFError("its alignment differs from the first file's", offset=header.end, path=path)
        for name in header.tensors:
            if name in seen:
                raise GGUFError(f"tensor {name!r} is also in {seen[name].name}", offset=header.end, path=path)
            seen[name] = path
    total = _split_value(headers[0], "split.tensors.count", paths[0], len(seen))
    if total != len(seen):
        offset = headers[0].values["split.tensors.count"].body
        raise GGUFError(f"the files hold {len(seen)} tensors together and split.tensors.count says {total}", offset=offset, path=paths[0])
