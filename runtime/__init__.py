"""Artifacts, execution, caches, tokenizers and sessions.

Map: ``artifact`` opens and checks an artifact, ``image`` maps its code, ``team`` runs worker threads, ``memory`` allocates, ``programs``
chooses among programs, ``executor`` evaluates one (``cuda`` on a device) over what ``binding`` and ``caches`` do for all executors,
as large as ``sizes`` says;
``cpuinfo`` knows the machine. ``kvcells`` keeps the books of cells and sequences, ``rows`` reads and writes the rows of caches wherever
they lie, ``windows`` compacts those of sliding windows, ``kshift`` rotates stored keys, ``batch`` cuts batches into micro-batches,
``inputs`` hands them to an executor, ``state_inputs`` keeps what belongs to sequences and not to cells (``state_rows``: in saved states).
``state`` writes and ``state_load`` reads saved states (``state_io``: files; ``session_state``: of a session). ``tokenizer`` (with
``vocab``, ``spm``, ``bpe``), ``chat``, ``sampling``, ``perplexity`` and ``logits`` sit on ``session`` (with ``history``, ``generation``,
``parallel``, ``statistics``), which adds text to a ``context`` (one thread at a time: ``exclusive``).

Names are imported lazily so that a command line that only needs ``paths`` pays for nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifact import Artifact
    from .errors import RuntimeRefusal
    from .executor import Executor
    from .kvcells import KVCells
    from .sampling import Sampler, SamplingOptions
    from .session import Session
    from .tokenizer import Tokenizer, load_tokenizer

_HOME = {
    "Artifact": "artifact",
    "Executor": "executor",
    "KVCells": "kvcells",
    "RuntimeRefusal": "errors",
    "Sampler": "sampling",
    "SamplingOptions": "sampling",
    "Session": "session",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}

__all__ = [
    "Artifact",
    "Executor",
    "KVCells",
    "RuntimeRefusal",
    "Sampler",
    "SamplingOptions",
    "Session",
    "Tokenizer",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
