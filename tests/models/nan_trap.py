"""A trace for the reference interpreter that stops at the first node with a NaN: a hidden score times zero, most of all."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggufc.ir import Node


def no_nan(node: Node, value: Any) -> None:
    """AssertionError naming the node whose value holds a NaN; ``-inf`` in masks is as it should be. Stored rows are bytes, not numbers."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and np.isnan(value).any():
        raise AssertionError(f"node {node.name or node.op.name!r} ({node.op.name}) has NaN in {int(np.isnan(value).sum())} places")
