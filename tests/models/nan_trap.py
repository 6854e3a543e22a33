"""Where a NaN appears, most of all from a hidden score times zero: a trace for the reference interpreter, and what compiled code kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggufc.diff.recording import Recording
from ggufc.ir import Node


def no_nan(node: Node, value: Any) -> None:
    """AssertionError naming the node whose value holds a NaN; ``-inf`` in masks is as it should be. Stored rows are bytes, not numbers."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and np.isnan(value).any():
        raise AssertionError(f"node {node.name or node.op.name!r} ({node.op.name}) has NaN in {int(np.isnan(value).sum())} places")


def with_nan(recording: Recording) -> list[str]:
    """Names of the results of one micro-batch that hold a NaN, and of caches that do in the rows in use."""
    found = [node.name for node, values in recording.values.items() if values.dtype.kind == "f" and np.isnan(values).any()]
    return found + [name for name, rows in recording.caches.items() if np.isnan(rows.decoded()).any()]
