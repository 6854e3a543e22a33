"""The values of one micro-batch by node, whichever way they were computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ggufc.ir import Graph, Node
from ggufc.ir.layout import layout
from ggufc.ir.ops.cache import is_version, resource
from ggufc.ir.storage import decode, strided


@dataclass
class CacheRows:
    """Stored rows u8 [rows, row bytes] of one cache after a micro-batch, as far as it is in use."""

    dtype: str
    raw: np.ndarray

    def decoded(self) -> np.ndarray:
        """f32 [rows, values]."""
        plain = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}.get(self.dtype)
        raw = np.ascontiguousarray(self.raw)
        return np.asarray(decode(raw.view(plain) if plain else raw, self.dtype), np.float32)


class Names:
    """The results of a graph by name, and the last version of each cache."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rank = {node: i for i, node in enumerate(graph.nodes)}
        self.by_name: dict[str, list[Node]] = {}
        self.last_writes: dict[str, Node] = {}
        self._users: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            if node.name and not node.is_leaf:
                self.by_name.setdefault(node.name, []).append(node)
            if node.op.writes_cache:
                self.last_writes[resource(node)] = node

    def readers(self, node: Node) -> set[Node]:
        """Nodes that compute with the values of ``node``, directly or through views."""
        if not self._users:
            self._users = self.graph.users()
        found: set[Node] = set()
        for user in self._users[node]:
            found |= self.readers(user) if user.is_view else {user}
        return found

    def results(self) -> Iterator[Node]:
        """Named results in program order, without the views of caches, weights and inputs."""
        for node in self.graph.nodes:
            source = layout(node).root if node.is_view else node
            if node.name and not node.is_leaf and not source.is_leaf and not (node.is_view and is_version(source)):
                yield node

    def same(self, node: Node) -> Node | None:
        """The node of this graph that has the name and shape of another graph's ``node``."""
        if node.op.writes_cache:
            return self.last_writes.get(resource(node))
        return next((own for own in self.by_name.get(node.name, ()) if own.ne == node.ne), None)


@dataclass
class Recording:
    """What one side computed in one micro-batch. ``values`` holds arrays in numpy order (``ne`` reversed) of nodes of ``names.graph``."""

    names: Names
    env: Mapping[str, int]
    values: dict[Node, np.ndarray]
    caches: dict[str, CacheRows]

    def value(self, node: Node) -> np.ndarray | None:
        """The values of a node; None where they never left a launch. Of a cache only its last version is known."""
        if node.op.writes_cache:
            name = resource(node)
            return self.caches[name].decoded() if self.names.last_writes[name] is node and name in self.caches else None
        if node in self.values:
            return self.values[node]
        if not node.is_view:
            return None
        where = layout(node)
        base = self.values.get(where.root)
        if base is None:
            return None
        return strided(np.ascontiguousarray(base).reshape(-1), *where.concrete(self.env))

    def like(self, node: Node) -> np.ndarray | None:
        """The values of the node that ``Names.same`` finds for another graph's node."""
        own = self.names.same(node)
        return None if own is None else self.value(own)
