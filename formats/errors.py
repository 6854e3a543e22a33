"""Error types shared by all rooms; each room derives its own from ``GgufcError``."""

from __future__ import annotations


class GgufcError(Exception):
    """Something the user can act on. The message is a sentence: what is wrong, where, what to do."""


class GGUFError(GgufcError):
    """A malformed or unsupported GGUF file.

    ``offset`` is the byte at which the file stops making sense, ``path`` the file; both are part of the message.
    """

    def __init__(self, message: str, *, offset: int | None = None, path: object = None) -> None:
        self.offset = offset
        self.path = path
        where = "" if path is None else f"{path}: "
        at = "" if offset is None else f" (byte {offset})"
        super().__init__(f"{where}{message}{at}")


class ArtifactError(GgufcError):
    """An artifact that cannot be used here: damaged, of another format version, or for other CPU features."""
