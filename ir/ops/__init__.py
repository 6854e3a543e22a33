"""Declared operators, one family per file.

``base`` says what a declaration is; ``leaves`` inputs, weights, caches; ``views`` shapes without copies; ``copies`` data movement;
``elementwise``, ``norms``, ``matmul``, ``attention``, ``rope``, ``select`` (by index), ``recurrent``; ``hyper``, ``routing`` and
``sparse`` hold fused operators; ``inputs`` the kinds of runtime inputs; ``cache`` writes. ``OPS`` maps every name to its operator.
"""

from ggufc.ir.ops import (
    attention,
    cache,
    copies,
    elementwise,
    hyper,
    leaves,
    matmul,
    norms,
    recurrent,
    rope,
    routing,
    select,
    sparse,
    views,
)
from ggufc.ir.ops.base import OPS, Attr, Call, Op, Operand

__all__ = [
    "OPS", "Attr", "Call", "Op", "Operand",
    "attention", "cache", "copies", "elementwise", "hyper", "leaves", "matmul", "norms", "recurrent", "rope", "routing", "select",
    "sparse", "views",
]  # fmt: skip
