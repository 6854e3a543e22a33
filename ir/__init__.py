"""The graph: types, operators, text, verifier, reference interpreter.

``dims`` symbolic dimensions; ``types`` tensor types; ``ops`` declared operators; ``graph`` nodes and graphs; ``layout`` resolved views;
``order`` topological order; ``text`` and ``parse`` the printed form; ``verify`` the rules; ``storage`` and ``interp`` the numpy
reference; ``equality`` compares graphs; ``export`` other output formats, drawn by ``folding`` and ``drawing``.
"""

from ggufc.ir.dims import Dim, IntDim, Sym
from ggufc.ir.equality import structural_equal
from ggufc.ir.errors import IRError
from ggufc.ir.graph import Graph, Node
from ggufc.ir.interp import evaluate_derived, interpret
from ggufc.ir.layout import Layout, layout
from ggufc.ir.ops import OPS
from ggufc.ir.parse import parse_graph
from ggufc.ir.text import print_graph
from ggufc.ir.types import TensorType
from ggufc.ir.verify import verify

__all__ = [
    "OPS", "Dim", "Graph", "IRError", "IntDim", "Layout", "Node", "Sym", "TensorType",
    "evaluate_derived", "interpret", "layout", "parse_graph", "print_graph", "structural_equal", "verify",
]  # fmt: skip
