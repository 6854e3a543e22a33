"""ggufc: a graph compiler for GGUF language models.

    import ggufc

    ggufc.compile("model.gguf", "model.ggufc")          # native code, repacked weights and tokenizer in one file
    with ggufc.load("model.ggufc") as session:          # also a .gguf file or an alias: compiled to the cache first
        for piece in session.generate("Why is the sky blue?"):
            print(piece, end="")

Names are imported on first use, so that importing a sub-package (``ggufc.formats``, ``ggufc.ir``) does not load the rest. Every error a
caller can act on derives from ``GgufcError``.

The room holds ``api`` (compile, load), ``resolve`` (model names to files) over ``registry`` (aliases), ``pull`` and ``download`` (getting
model files), ``cache`` (compiled artifacts kept between runs), ``devices`` (where a session runs), ``inspection`` (with
``gpu_inspection``, ``reuse_trial``, ``verification``), ``benchmark``, ``profile``, ``machine``, ``files``, and ``cli`` (the command line).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggufc.api import compile, load
    from ggufc.formats.errors import GgufcError
    from ggufc.runtime import Session

__version__ = "0.1.0"

__all__ = ["GgufcError", "Session", "__version__", "compile", "load"]

_HOMES = {
    "GgufcError": "ggufc.formats.errors",
    "Session": "ggufc.runtime",
    "compile": "ggufc.api",
    "load": "ggufc.api",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ggufc' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
