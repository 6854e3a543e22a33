"""Compiled artifacts kept between runs.

An artifact's name holds the digest of everything it depends on: the model file's identity (path, size, modification time, of every shard),
the compile options, the CPU features ``native`` stands for, and the compiler itself (version, formats, and the newest source file, so that
an edited checkout never runs yesterday's code). Beside it lies a note for people (``.json``). Writing is rename-only, and a lock file lets
one process compile while others wait for its result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ggufc import __version__
from ggufc.errors import DriverError
from ggufc.files import write_text
from ggufc.formats.abi import ABI_VERSION
from ggufc.formats.artifact import FORMAT_VERSION
from ggufc.formats.errors import ArtifactError, GGUFError
from ggufc.runtime.paths import artifacts_dir, cache_dir, models_dir

SUFFIX = ".ggufc"
STALE_SECONDS = 3600
_COMPILER_ROOMS = ("formats", "ir", "models", "passes", "codegen")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def shards(source: Path) -> list[Path]:
    """All files of a split model (``NAME-00001-of-00003.gguf``), or just the file."""
    match = _SHARD.search(source.name)
    if not match:
        return [source]
    count = int(match[2])
    stem = source.name[: match.start()]
    return [source.with_name(f"{stem}-{i:05d}-of-{match[2]}.gguf") for i in range(1, min(count, 9999) + 1)]


def artifact_path(source: Path, options: Mapping[str, str]) -> Path:
    """Where the artifact of ``source`` under ``options`` belongs. Raises ``OSError`` when a file of the model is missing."""
    identity: list[object] = [__version__, FORMAT_VERSION, ABI_VERSION, _compiler_stamp(), sorted(options.items())]
    for file in shards(source.resolve()):
        status = file.stat()
        identity.append([str(file), status.st_size, status.st_mtime_ns])
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return artifacts_dir() / f"{_stem(source)}-{digest[:16]}{SUFFIX}"


def _stem(source: Path) -> str:
    stem = _SHARD.sub("", source.name).removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", stem)[:80].lstrip(".") or "model"


def _compiler_stamp() -> list[int]:
    """Number and newest modification time of the compiler's source files."""
    count, newest = 0, 0
    for room in _COMPILER_ROOMS:
        spec = importlib.util.find_spec(f"ggufc.{room}")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for where, _, names in os.walk(folder):
                for name in names:
                    if name.endswith(".py"):
                        count += 1
                        newest = max(newest, os.stat(os.path.join(where, name)).st_mtime_ns)
    return [count, newest]


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the exclusive lock of ``path``; ``waiting()`` is called once if another process has it."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise
        inside = cache_dir() in path.parents
        way_out = "set GGUFC_CACHE to a folder that does, or compile to a file (ggufc compile -o)" if inside else "choose another one"
        raise DriverError(f"the folder {path.parent} takes no files ({error.strerror}); {way_out}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # A process that waited on this inode finds the finished artifact; one that comes later makes a new lock file.
            lock.unlink(missing_ok=True)
    finally:
        os.close(handle)


def is_whole(artifact: Path) -> bool:
    """Whether a cached artifact is there with the size it was written with; what a full or failing disk cut short is made anew."""
    try:
        size = artifact.stat().st_size
        return bool(json.loads(artifact.with_suffix(".json").read_text(encoding="utf-8"))["size"] == size)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def explaining(artifact: Path) -> Iterator[None]:
    """An artifact that turns out damaged while it is opened: if it is the cache's, nothing is lost, and the error says so."""
    try:
        yield
    except (ArtifactError, GGUFError) as error:
        if artifact.parent != artifacts_dir():
            raise
        raise DriverError(f"{error}; it is a copy in the cache: `ggufc cache rm {artifact.name}` lets it be made anew") from error


def fetch(source: Path, options: Mapping[str, str], build: Callable[[Path], object], waiting: Callable[[], None] = lambda: None) -> Path:
    """The cached artifact of ``source``, made by ``build(output)`` if it is not there yet.

    ``build`` must produce ``output`` whole or not at all (write to a temporary name, rename).
    """
    artifact = artifact_path(source, options)
    if is_whole(artifact):
        return artifact
    with locked(artifact, waiting):
        if not is_whole(artifact):
            build(artifact)
            size = artifact.stat().st_size
            note = {"source": str(source.resolve()), "options": dict(options), "version": __version__, "size": size}
            write_text(artifact.with_suffix(".json"), json.dumps(note, indent=1))
    return artifact


@dataclass(frozen=True)
class Entry:
    """A file of the cache. ``kind`` is ``model``, ``artifact`` or ``partial``; ``source`` is the model an artifact was compiled from."""

    kind: str
    path: Path
    size: int
    modified: float
    source: str = ""
    state: str = ""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def stale(self) -> bool:
        """True for what no later run will use. Something partial counts after an hour: before, another process may be writing it."""
        if self.kind == "partial":
            return time.time() - self.modified > STALE_SECONDS
        return self.state in {"outdated", "orphan"}


def entries() -> list[Entry]:
    """Everything in the cache, models first."""
    found = []
    for kind, folder in (("model", models_dir()), ("artifact", artifacts_dir())):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.suffix in {".json", ".lock"} or not (path.is_file() or path.is_dir()):
                continue
            complete = path.suffix == (".gguf" if kind == "model" else SUFFIX) and not path.name.startswith(".")
            size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            source, state = _origin(path) if kind == "artifact" and complete else ("", "")
            found.append(Entry(kind if complete else "partial", path, size, path.stat().st_mtime, source, state))
    return found


def _origin(artifact: Path) -> tuple[str, str]:
    """The model an artifact was compiled from, and ``current``, ``outdated`` or ``orphan`` (the model is gone)."""
    try:
        note = json.loads(artifact.with_suffix(".json").read_text(encoding="utf-8"))
        source = Path(note["source"])
        options = {str(k): str(v) for k, v in note["options"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", "unknown"
    try:
        current = artifact_path(source, options)
    except OSError:
        return str(source), "orphan"
    return str(source), "current" if current == artifact else "outdated"


def remove(entry: Entry) -> None:
    """Delete an entry with its notes; only paths inside the cache are accepted."""
    path = entry.path
    if path.parent not in {models_dir(), artifacts_dir()}:
        raise DriverError(f"{path} is not inside the cache {cache_dir()}")
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    for note in (path.with_suffix(".json"), path.with_name(path.name + ".json"), path.with_name(path.name + ".lock")):
        note.unlink(missing_ok=True)


def age_words(entry: Entry) -> str:
    """``3 days ago``."""
    seconds = max(0.0, time.time() - entry.modified)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
