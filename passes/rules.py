"""Named rewrite rules, patterns and the worklist that applies them.

A rule is a pattern and a function: the function receives what the pattern matched and returns the node that replaces the root, or None
to decline. Rule lists are tuples, so they add with ``+``. The worklist tries every rule on every node in program order; new nodes and
the users of replaced ones are tried again until nothing matches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ggufc.ir import Graph, Node, TensorType
from ggufc.passes.base import PassResult
from ggufc.passes.errors import PassError

Match: TypeAlias = dict[str, Node]
Body: TypeAlias = "Callable[[Rewriter, Node, Match], Node | None]"


@dataclass(frozen=True)
class Pattern:
    """A tree of operator names.

    ``ops``: accepted operators, empty for any node. ``operands``: patterns of the operands, None for "whatever they are". ``bind``: key
    of the node in the match; a second occurrence of a key must be the same node. ``once``: the node has exactly one user and is no
    output, so that it can disappear. ``swap``: the two operands may come in either order.
    """

    ops: tuple[str, ...] = ()
    operands: tuple[Pattern, ...] | None = None
    bind: str = ""
    once: bool = False
    swap: bool = False

    def match(self, rw: Rewriter, node: Node, found: Match | None = None) -> Match | None:
        """The bound nodes, or None. ``once`` is not asked of the root."""
        return self._match(rw, node, {} if found is None else found, root=True)

    def _match(self, rw: Rewriter, node: Node, found: Match, root: bool = False) -> Match | None:
        if self.ops and node.op.name not in self.ops:
            return None
        if self.once and not root and not rw.used_once(node):
            return None
        if self.bind:
            if found.get(self.bind, node) is not node:
                return None
            found = {**found, self.bind: node}
        if self.operands is None:
            return found
        if len(self.operands) != len(node.operands):
            return None
        orders: list[Sequence[Node]] = [node.operands]
        if self.swap:
            orders.append(node.operands[::-1])
        for order in orders:
            result: Match | None = found
            for pattern, operand in zip(self.operands, order):
                result = None if result is None else pattern._match(rw, operand, result)
            if result is not None:
                return result
        return None


def any_node(bind: str = "") -> Pattern:
    """Matches every node."""
    return Pattern(bind=bind)


def op(names: str, *operands: Pattern, bind: str = "", once: bool = False, swap: bool = False) -> Pattern:
    """Matches operators by name (alternatives separated by blanks); without operand patterns the operands do not matter."""
    return Pattern(tuple(names.split()), operands or None, bind, once, swap)


@dataclass(frozen=True)
class Rule:
    """``name`` is the key under which its applications are counted."""

    name: str
    pattern: Pattern
    body: Body = field(compare=False)


def rule(name: str, pattern: Pattern) -> Callable[[Body], Rule]:
    """Decorator that makes a ``Rule`` of a function."""

    def wrap(body: Body) -> Rule:
        return Rule(name, pattern, body)

    return wrap


class Rewriter:
    """Edits a graph while keeping users up to date; ``commit`` writes the new node list.

    New nodes are placed just before the node being rewritten (``at``), so operands precede users without sorting.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._users: dict[Node, dict[Node, None]] = {n: {} for n in graph.nodes}
        for n in graph.nodes:
            for operand in n.operands:
                self._users[operand][n] = None
        self._outputs = set(graph.outputs.values())
        self._rank = {n: i for i, n in enumerate(graph.nodes)}
        self._before: dict[Node, list[Node]] = {}
        self._gone: set[Node] = set()
        self._fresh: list[Node] = []
        self.at: Node | None = None

    def users(self, node: Node) -> list[Node]:
        """Nodes that take ``node`` as an operand."""
        return list(self._users[node])

    def is_output(self, node: Node) -> bool:
        return node in self._outputs

    def used_once(self, node: Node) -> bool:
        """Exactly one user, and no output: if that user goes, so may the node."""
        return len(self._users[node]) == 1 and node not in self._outputs

    def stands_before(self, a: Node, b: Node) -> bool:
        """Program order; a new node stands where the node it was made for stood."""
        return self._rank[a] < self._rank[b]

    def in_order(self, nodes: Iterable[Node]) -> list[Node]:
        """Nodes in program order."""
        return sorted(nodes, key=self._rank.__getitem__)

    def is_gone(self, node: Node) -> bool:
        return node in self._gone

    def add(
        self, op_name: str, *operands: Node | None, name: str = "", loc: str = "", type: TensorType | None = None, **attrs: Any
    ) -> Node:
        """A new node just before ``at``; name and location default to those of ``at``."""
        if self.at is None:
            raise PassError("Rewriter.add needs an anchor; set 'at' to the node being rewritten.")
        node = self.graph.add(op_name, *operands, name=name or self.at.name, loc=loc or self.at.loc, type=type, **attrs)
        self.graph.nodes.pop()
        self._users[node] = {}
        self._rank[node] = self._rank[self.at]
        for operand in node.operands:
            self._users[operand][node] = None
        self._before.setdefault(self.at, []).append(node)
        self._fresh.append(node)
        return node

    def replace(self, old: Node, new: Node) -> list[Node]:
        """Let the users of ``old`` use ``new`` (of equal type) and drop what nothing needs any more; returns the users."""
        if old.type != new.type:
            raise PassError(f"A rewrite would replace {old!r} by {new!r}, which has another type.")
        touched = [user for user in self._users[old] if user is not new]
        for user in touched:
            user.operands = tuple(new if operand is old else operand for operand in user.operands)
            self._users[new][user] = None
            del self._users[old][user]
        for key, node in self.graph.outputs.items():
            if node is old:
                self.graph.outputs[key] = new
        if old in self._outputs:
            self._outputs.discard(old)
            self._outputs.add(new)
        self._drop_unused(old)
        return touched

    def substitute(self, user: Node, old: Node, new: Node) -> None:
        """Let one user take ``new`` (of equal type) instead of ``old``."""
        user.operands = tuple(new if operand is old else operand for operand in user.operands)
        del self._users[old][user]
        self._users[new][user] = None

    def take_fresh(self) -> list[Node]:
        """Nodes added since the last call."""
        fresh, self._fresh = self._fresh, []
        return [n for n in fresh if n not in self._gone]

    def _drop_unused(self, node: Node) -> None:
        stack = [node]
        while stack:
            n = stack.pop()
            if n in self._gone or n.is_leaf or n.op.writes_cache or self._users[n] or n in self._outputs:
                continue
            self._gone.add(n)
            for operand in dict.fromkeys(n.operands):
                del self._users[operand][n]
                stack.append(operand)

    def commit(self) -> None:
        """Write the edited node list back: old order, new nodes at their anchors, operands that these need earlier moved before them."""
        done: set[Node] = set()
        order: list[Node] = []
        for old in self.graph.nodes:
            for node in self._expand(old):
                self._emit(node, done, order)
        self.graph.nodes = order
        self._before.clear()

    def _expand(self, node: Node) -> Iterator[Node]:
        for new in self._before.get(node, ()):
            yield from self._expand(new)
        if node not in self._gone:
            yield node

    @staticmethod
    def _emit(node: Node, done: set[Node], order: list[Node]) -> None:
        stack = [node]
        while stack:
            n = stack[-1]
            missing = [operand for operand in n.operands if operand not in done] if n not in done else []
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if n not in done:
                done.add(n)
                order.append(n)


def apply_rules(graph: Graph, rules: Iterable[Rule]) -> PassResult:
    """Apply ``rules`` until none matches. ``counts`` lists every rule, also those that never fired."""
    rules = tuple(rules)
    counts = {r.name: 0 for r in rules}
    by_op: dict[str, list[Rule]] = {}
    for r in rules:
        if not r.pattern.ops:
            raise PassError(f"Rule '{r.name}' has a pattern without a root operator; name the operators it starts from.")
        for name in r.pattern.ops:
            by_op.setdefault(name, []).append(r)

    rw = Rewriter(graph)
    work = deque(n for n in graph.nodes if n.op.name in by_op)
    queued = set(work)
    # Every rule shrinks or normalises the graph; a rule that undoes another would otherwise run for ever.
    fuel = 64 * (len(graph.nodes) + 16)
    while work:
        node = work.popleft()
        queued.discard(node)
        if rw.is_gone(node):
            continue
        for r in by_op[node.op.name]:
            found = r.pattern.match(rw, node)
            if found is None:
                continue
            rw.at = node
            new = r.body(rw, node, found)
            if new is None or new is node:
                continue
            fuel -= 1
            if fuel < 0:
                raise PassError(
                    f"Rewriting does not end: rule '{r.name}' still fires at {node!r} after {64 * (len(graph.nodes) + 16)} rewrites."
                )
            counts[r.name] += 1
            touched = rw.replace(node, new)
            for again in (*rw.take_fresh(), new, *touched):
                if again.op.name in by_op and again not in queued:
                    work.append(again)
                    queued.add(again)
            break
    rw.commit()
    return PassResult(any(counts.values()), counts)
