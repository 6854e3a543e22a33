"""ggufc: a graph compiler for GGUF language models.

``ggufc.compile`` turns a model file into an artifact, ``ggufc.load`` opens one as a ``Session``. Names are imported on first use, so that
importing a sub-package (``ggufc.formats``, ``ggufc.ir``) does not load the rest.
"""

from __future__ import annotations

__version__ = "0.1.0"
