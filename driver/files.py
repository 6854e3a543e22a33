"""Writing files so that a reader never sees half of one, and saying sizes in words."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ggufc.errors import DriverError

if TYPE_CHECKING:
    import numpy as np

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``; ``total`` is 0 when unknown."""

CHUNK = 1 << 20


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that becomes ``path`` when the block ends well and is removed when it does not.

    What is there and is no regular file (``/dev/null``, a named pipe) is written to, never replaced.
    """
    if path.exists() and not path.is_file():
        with tempfile.TemporaryDirectory(prefix="ggufc-") as folder:
            yield (temporary := Path(folder) / "output")
            with temporary.open("rb") as source, path.open("wb") as stream:
                shutil.copyfileobj(source, stream)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; the result gets the permissions that open() would have given it.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def refuse_to_overwrite(output: Path | None, *inputs: Path) -> None:
    """An output that is one of the files the command reads is a slip that costs the user that file; one that cannot be written (as
    ``require_writable``) would cost the time of all that comes before writing it.
    """
    if output is None:
        return
    for file in inputs:
        if output.exists() and output.samefile(file):
            raise DriverError(f"{output} is a file this command reads; choose another -o")
    require_writable(output)


def require_writable(output: Path) -> None:
    """Refuse, before any work, an output that could not be written at its end: a missing folder, or one that takes no files."""
    if output.exists() and not output.is_file():
        return  # a device or a pipe
    folder = output.absolute().parent
    if not folder.is_dir():
        raise DriverError(f"there is no folder {folder}; create it, or choose another -o")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{output.name[:64]}.", suffix=".tmp", dir=folder)
    except OSError as error:
        raise DriverError(f"{folder} takes no files ({error.strerror}); choose another -o") from None
    os.close(handle)
    Path(name).unlink()


def read_text(path: Path) -> str:
    """A text file. Raises ``DriverError`` with the file's name where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DriverError(f"{path} is not UTF-8 text (byte {error.start}: {error.reason})") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An .npz file, whole or not at all. ``numpy.savez`` cannot store a step called ``file``, so the archive is written here."""
    import numpy as np

    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK):
            digest.update(piece)
            done += len(piece)
            if progress:
                progress("checking", done, total)
    return digest.hexdigest()


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse before a long transfer what the disk cannot hold; raises ``DriverError``."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DriverError(
            f"{what} needs {size_words(needed)}, but only {size_words(free)} are free in {folder}; free space or choose another folder"
        )


def size_words(size: float) -> str:
    """``98362432`` -> ``93.8 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
