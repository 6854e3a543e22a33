"""The error type of this room."""

from __future__ import annotations

from ggufc.formats.errors import GgufcError


class ModelError(GgufcError):
    """A model that cannot be built: a hyperparameter, a tensor or a step observation is missing or not what it must be.

    The message names the key or tensor, what was expected and what was found.
    """
