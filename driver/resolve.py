"""From what the user names to a file: path, artifact, alias or address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ggufc.errors import DriverError
from ggufc.files import Progress
from ggufc.pull import describe, is_remote, local_path, pull
from ggufc.registry import ALIASES


def is_artifact(path: Path) -> bool:
    """True when the file is a compiled artifact rather than a model. Raises ``GGUFError`` for what is neither."""
    from ggufc.formats.gguf_reader import GGUFFile
    from ggufc.runtime.artifact import is_artifact as has_artifact_keys

    with GGUFFile.open(path) as file:
        return has_artifact_keys(file)


def _expanded(reference: str) -> Path:
    try:
        return Path(reference).expanduser()
    except RuntimeError:  # what pathlib raises for ``~name`` where there is no such user
        raise DriverError(f"{reference}: there is no home folder of that user; write the path out") from None


def model_file(
    reference: str, *, say: Callable[[str], None] = lambda _: None, progress: Progress | None = None, quiet: bool = True
) -> Path:
    """The file behind ``reference``; aliases and addresses that are not here yet are pulled, which ``say`` announces."""
    if not reference:
        raise DriverError("the name of the model is empty; give a path, an alias or an address")
    path = _expanded(reference)
    try:
        if path.is_file():
            return path
    except OSError as error:  # a name longer than file names can be
        raise DriverError(f"{reference:.80}: {error.strerror}; give a path, an alias or an address") from None
    if path.is_dir():
        raise DriverError(f"{reference} is a folder; name the .gguf file or artifact in it")
    if not is_remote(reference):
        known = ", ".join(sorted(ALIASES))
        raise DriverError(f"there is no file {reference!r}, and it is no known alias ({known}), hf:ORG/REPO[:FILE] or http(s) address")
    here = local_path(reference)
    if here:
        return here
    detail = describe(reference)
    say(f"{reference} is not here yet, pulling it" + (f": {detail}" if detail else ""))
    return pull(reference, progress=progress, quiet=quiet)
