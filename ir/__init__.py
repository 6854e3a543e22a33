"""The graph: types, operators, text, verifier, reference interpreter.

``dims`` symbolic dimensions; ``types`` tensor types; ``ops`` declared operators; ``graph`` nodes and graphs; ``layout`` resolved views;
``order`` topological order; ``text`` and ``parse`` the printed form; ``verify`` the rules; ``storage`` and ``interp`` the numpy
reference; ``export`` other output formats.
"""

from ggufc.ir.dims import Dim, IntDim, Sym
from ggufc.ir.errors import IRError
from ggufc.ir.graph import Graph, Node
from ggufc.ir.layout import Layout, layout
from ggufc.ir.ops import OPS
from ggufc.ir.text import print_graph
from ggufc.ir.types import TensorType

__all__ = ["OPS", "Dim", "Graph", "IRError", "IntDim", "Layout", "Node", "Sym", "TensorType", "layout", "print_graph"]
