"""Declared operators, one family per file.

``base`` says what a declaration is; ``leaves`` inputs, weights, caches; ``views`` shapes without copies; ``copies`` data movement;
``elementwise``, ``norms``, ``matmul``, ``attention``, ``rope``, ``select`` (by index), ``recurrent``; ``cache`` writes. ``OPS`` maps
every name to its operator.
"""

from ggufc.ir.ops import attention, cache, copies, elementwise, leaves, matmul, norms, recurrent, rope, select, views
from ggufc.ir.ops.base import OPS, Attr, Call, Op, Operand

__all__ = [
    "OPS", "Attr", "Call", "Op", "Operand",
    "attention", "cache", "copies", "elementwise", "leaves", "matmul", "norms", "recurrent", "rope", "select", "views",
]  # fmt: skip
