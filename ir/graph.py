"""The graph: nodes in SSA order, named outputs, derived weights and analysis results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ggufc.ir.errors import IRError
from ggufc.ir.ops import OPS
from ggufc.ir.ops.base import Op
from ggufc.ir.types import TensorType

UNKNOWN = TensorType("unknown", (1,))
"""Type of a node whose inference failed; it appears in error messages only."""


@dataclass(eq=False, slots=True)
class Node:
    """One operation with exactly one result. Compared by identity.

    ``attrs`` holds every declared attribute in canonical form; ``name`` is hierarchical (``blk.3.attn_q``), ``loc`` says where the node
    was created. Change ``operands`` through ``Graph.replace_all_uses`` or ``Graph.set_operands`` so that types are checked again.
    """

    op: Op
    operands: tuple[Node, ...]
    attrs: dict[str, Any]
    type: TensorType
    name: str = ""
    loc: str = ""

    @property
    def is_view(self) -> bool:
        return self.op.is_view

    @property
    def is_leaf(self) -> bool:
        return self.op.is_leaf

    @property
    def ne(self) -> tuple[Any, ...]:
        return self.type.ne

    @property
    def dtype(self) -> str:
        return self.type.dtype

    def operand(self, name: str) -> Node | None:
        """The operand declared as ``name``; None for an optional one that is absent."""
        for declared, node in zip(self.op.operands, self.operands):
            if declared.name == name:
                return node
        if any(declared.name == name for declared in self.op.operands):
            return None
        raise IRError(f"{self.op.name} has no operand {name!r}; it has {', '.join(o.name for o in self.op.operands) or 'none'}.")

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.name or '-'} : {self.type}>"


@dataclass(eq=False)
class Graph:
    """An ordered list of nodes.

    ``symbols`` are the dimension symbols the graph may use. ``outputs`` maps a name to a node. ``derived`` maps the name of a
    compile-time weight to a weight-only graph with the single output ``value``. ``analysis`` holds plain data (JSON values) that prints
    with the graph.
    """

    name: str = "main"
    arch: str = ""
    symbols: tuple[str, ...] = ()
    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, Node] = field(default_factory=dict)
    derived: dict[str, Graph] = field(default_factory=dict)
    analysis: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.symbols = tuple(self.symbols)
        self._cursor: int | None = None

    def add(
        self, op_name: str, *operands: Node | None, name: str = "", loc: str = "", type: TensorType | None = None, **attrs: Any
    ) -> Node:
        """Appends a node (or inserts it at the cursor) and returns it.

        The type is inferred; leaves with a declared type (``input``, ``weight``, ``cache``) need ``type``. Where an operator has an
        attribute called ``name``, it is the node's name as well. Absent optional operands may be passed as None at the end. Raises
        ``IRError`` with the surrounding nodes when operands or attributes do not fit.
        """
        node = self._make(op_name, operands, name, loc, type, attrs)
        if self._cursor is None:
            self.nodes.append(node)
        else:
            self.nodes.insert(self._cursor, node)
            self._cursor += 1
        return node

    def _make(
        self, op_name: str, given: Iterable[Node | None], name: str, loc: str, type: TensorType | None, attrs: dict[str, Any]
    ) -> Node:
        op = OPS.get(op_name)
        if op is None:
            raise IRError(f"Operator {op_name!r} is unknown; see ggufc.ir.OPS for the {len(OPS)} known ones.")
        operands = list(given)
        while operands and operands[-1] is None:
            operands.pop()
        if None in operands:
            raise IRError(f"{op_name}: operand {operands.index(None)} is missing although a later one is given.")
        if any(a.name == "name" for a in op.attrs):
            attrs = {"name": name, **attrs}
        present = tuple(o for o in operands if o is not None)
        node = Node(op, present, dict(attrs), type or UNKNOWN, name, loc)
        try:
            node.attrs = op.canonical_attrs(attrs)
            infer_type(node, type)
        except IRError as e:
            if e.node is not None:
                raise
            raise IRError(e.message, graph=self, node=node) from None
        if op.declared_type:
            node.name = node.attrs.get("name") or node.name or default_name(node)
        return node

    def input(self, name: str, kind: str, type: TensorType, *, window: int = 0, loc: str = "") -> Node:
        """A runtime input; see the architecture's table of kinds."""
        return self.add("input", name=name, kind=kind, window=window, type=type, loc=loc)

    def weight(self, tensor: str, type: TensorType, *, derived: str = "", name: str = "", loc: str = "") -> Node:
        """A tensor of the model file, or with ``derived`` a key of ``self.derived``."""
        return self.add("weight", tensor=tensor, derived=derived, type=type, name=name, loc=loc)

    def cache(self, name: str, type: TensorType, *, loc: str = "") -> Node:
        """Version 0 of the persistent resource ``name``: ``[row, C]`` in the cache's dtype."""
        return self.add("cache", name=name, type=type, loc=loc)

    def const(self, value: float, *, name: str = "", loc: str = "") -> Node:
        return self.add("const", value=value, name=name, loc=loc)

    @contextmanager
    def insert_before(self, node: Node) -> Iterator[None]:
        """Nodes added inside the block are placed, in order, just before ``node``."""
        with self._insert_at(self.index(node)):
            yield

    @contextmanager
    def insert_after(self, node: Node) -> Iterator[None]:
        """Nodes added inside the block are placed, in order, just after ``node``."""
        with self._insert_at(self.index(node) + 1):
            yield

    @contextmanager
    def _insert_at(self, position: int) -> Iterator[None]:
        saved = self._cursor
        before = len(self.nodes)
        self._cursor = position
        try:
            yield
        finally:
            # An outer cursor lies at or after an inner insertion only if its position did: shift it by what was added before it.
            if saved is not None and position <= saved:
                saved += len(self.nodes) - before
            self._cursor = saved

    @property
    def cursor(self) -> int:
        """The position at which ``add`` inserts: the end, except inside ``insert_before`` and ``insert_after``."""
        return len(self.nodes) if self._cursor is None else self._cursor

    def index(self, node: Node) -> int:
        """Position of ``node``; raises ``IRError`` if it is not in this graph."""
        try:
            return self.nodes.index(node)
        except ValueError:
            raise IRError(f"Node {node!r} is not part of graph {self.name!r}.") from None

    def users(self) -> dict[Node, list[Node]]:
        """For every node the nodes that take it as an operand, in program order, each user once. Outputs are not users."""
        out: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        for n in self.nodes:
            for o in dict.fromkeys(n.operands):
                out.setdefault(o, []).append(n)
        return out

    def replace_all_uses(self, old: Node, new: Node, *, keep: Iterable[Node] = ()) -> int:
        """Makes every user of ``old`` (and every output) use ``new``; returns how many changed.

        ``new`` itself and the nodes in ``keep`` stay as they are, so ``new`` may be computed from ``old``. Types must be equal.
        """
        if old is new:
            return 0
        if old.type != new.type:
            raise IRError(f"{old!r} cannot be replaced by {new!r}: the types differ.", graph=self, node=old)
        spared = {new, *keep}
        changed = 0
        for n in self.nodes:
            if old in n.operands and n not in spared:
                n.operands = tuple(new if o is old else o for o in n.operands)
                changed += 1
        for key, node in self.outputs.items():
            if node is old:
                self.outputs[key] = new
                changed += 1
        return changed

    def set_operands(self, node: Node, operands: Iterable[Node]) -> None:
        """Replaces the operands of one node; its type must stay the same."""
        candidate = Node(node.op, tuple(operands), node.attrs, node.type, node.name, node.loc)
        try:
            infer_type(candidate, node.type)
        except IRError as e:
            raise IRError(e.message, graph=self, node=node) from None
        node.operands = candidate.operands

    def remove(self, nodes: Iterable[Node]) -> None:
        """Takes nodes out of the list; raises ``IRError`` if a remaining node or an output still uses one."""
        gone = set(nodes)
        for n in self.nodes:
            if n not in gone and not gone.isdisjoint(n.operands):
                raise IRError("A node cannot be removed while this one uses it.", graph=self, node=n)
        for key, node in self.outputs.items():
            if node in gone:
                raise IRError(f"A node cannot be removed while output {key!r} names it.", graph=self, node=node)
        self.nodes = [n for n in self.nodes if n not in gone]

    def remove_dead(self) -> int:
        """Removes nodes that neither an output nor a cache write needs; runtime inputs go too. Returns how many were removed."""
        live: set[Node] = set(self.outputs.values())
        kept = []
        for n in reversed(self.nodes):
            if n in live or n.op.writes_cache:
                kept.append(n)
                live.update(n.operands)
                live.add(n)
        removed = len(self.nodes) - len(kept)
        self.nodes = kept[::-1]
        used = {n.attrs["derived"] for n in self.nodes if n.op.name == "weight" and n.attrs["derived"]}
        for key in [k for k in self.derived if k not in used]:
            del self.derived[key]
        return removed

    def sort(self) -> None:
        """Stable topological sort: operands before users, reads of a cache version before the write that supersedes it."""
        from ggufc.ir.order import topological_order

        self.nodes = topological_order(self)

    def clone(self) -> Graph:
        """A deep copy; nodes are new objects, operators, types and dims are shared."""
        return self.clone_with_map()[0]

    def clone_with_map(self) -> tuple[Graph, dict[Node, Node]]:
        """A deep copy and the mapping from old to new nodes."""
        new: dict[Node, Node] = {}
        for n in self.nodes:
            new[n] = Node(n.op, tuple(new[o] for o in n.operands), dict(n.attrs), n.type, n.name, n.loc)
        g = Graph(self.name, self.arch, self.symbols)
        g.nodes = list(new.values())
        g.outputs = {key: new[node] for key, node in self.outputs.items()}
        g.derived = {key: sub.clone() for key, sub in self.derived.items()}
        g.analysis = copy.deepcopy(self.analysis)
        return g, new

    def inputs(self) -> list[Node]:
        return [n for n in self.nodes if n.op.name == "input"]

    def find(self, want: str | Callable[[Node], bool]) -> list[Node]:
        """Nodes of an operator (by its name) or satisfying a predicate, in program order."""
        if isinstance(want, str):
            return [n for n in self.nodes if n.op.name == want]
        return [n for n in self.nodes if want(n)]

    def __str__(self) -> str:
        from ggufc.ir.text import print_graph

        return print_graph(self)


def default_name(node: Node) -> str:
    """The name of a leaf that was not given one: what it stands for."""
    return str(node.attrs.get("name") or node.attrs.get("tensor") or node.attrs.get("derived") or "")


def infer_type(node: Node, declared: TensorType | None = None) -> TensorType:
    """Infers and sets ``node.type`` from its operands and attributes; ``declared`` must agree with it. Raises ``IRError``."""
    op = node.op
    op.check_operands(node.operands)
    if op.declared_type:
        if declared is None:
            raise IRError(f"{op.name}: the result type must be given (type=TensorType(...)).")
        node.type = declared
    else:
        inferred = op.infer(node.operands, node.attrs)
        if declared is not None and declared != inferred:
            raise IRError(f"{op.name}: the type is stated as {declared} but its operands give {inferred}.")
        node.type = inferred
    op.verify(node)
    return node.type
