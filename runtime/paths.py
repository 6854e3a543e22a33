"""Where ggufc keeps downloaded models and compiled artifacts."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``GGUFC_CACHE`` if set, else ``$XDG_CACHE_HOME/ggufc``, else ``~/.cache/ggufc``. The folder need not exist."""
    own = os.environ.get("GGUFC_CACHE")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The base-directory specification tells programs to ignore a relative XDG_CACHE_HOME.
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "ggufc"


def models_dir() -> Path:
    """Folder of downloaded ``.gguf`` files."""
    return cache_dir() / "models"


def artifacts_dir() -> Path:
    """Folder of compiled artifacts."""
    return cache_dir() / "artifacts"
