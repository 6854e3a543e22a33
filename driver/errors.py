"""The driver's error type."""

from __future__ import annotations

from ggufc.formats.errors import GgufcError


class DriverError(GgufcError):
    """A request the driver cannot carry out: an unknown model name, a failed download, a bad combination of options."""
