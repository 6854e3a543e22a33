"""Numpy reference interpreter: the meaning of a graph, in float64 with one rounding per operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np

from ggufc.ir.dims import evaluate, product
from ggufc.ir.errors import IRError
from ggufc.ir.graph import Graph, Node
from ggufc.ir.layout import layout
from ggufc.ir.ops.base import Call
from ggufc.ir.ops.cache import is_version, resource
from ggufc.ir.storage import Stored, Target, encode, strided
from ggufc.ir.types import TensorType

Weights: TypeAlias = Callable[[str], Any] | Mapping[str, Any]
"""Tensor name -> array: raw bytes (uint8), or values."""

Trace: TypeAlias = Callable[[Node, Any], Any]
"""Called after each node with its value, an array in numpy order (``Stored`` for weights, caches and their versions). What it returns,
if not None, takes the value's place in the rest of the evaluation."""


def interpret(
    g: Graph,
    weights: Weights,
    inputs: Mapping[str, Any],
    caches: MutableMapping[str, np.ndarray],
    env: Mapping[str, int],
    *,
    trace: Trace | None = None,
    activations: str = "exact",
) -> dict[str, np.ndarray]:
    """Evaluates ``g`` and returns its outputs as arrays in numpy order (shape is ``ne`` reversed).

    ``inputs`` maps input names to arrays; ``env`` gives every symbol a value. ``caches`` maps resource names to arrays ``[C, row]`` in the
    cache's dtype (bf16 as uint16, quantised types as uint8 rows); missing ones start as zeros, and the final versions are stored back.
    With ``activations="rounded"`` products with quantised and bf16 weights round their activations as native kernels do; ``"exact"``
    multiplies the dequantised weights with unrounded activations. Raises ``IRError`` naming what is missing or does not fit.
    """
    if activations not in ("exact", "rounded"):
        raise IRError(f"activations = {activations!r} is unknown; use exact or rounded.")
    run = _Run(g, weights, inputs, caches, dict(env), activations == "rounded")
    last_use = _last_uses(g)
    for i, node in enumerate(g.nodes):
        try:
            value = run.evaluate(node)
        except IRError as e:
            raise e if e.node is not None else IRError(e.message, graph=g, node=node) from None
        run.values[node] = value
        if trace is not None:
            run.substitute(node, trace(node, value))
        for dead in last_use.get(i, ()):
            run.drop(dead)
    out = {name: np.array(run.read(node)) for name, node in g.outputs.items()}
    caches.update({name: stored.data for name, stored in run.versions.items()})
    return out


def evaluate_derived(g: Graph, key: str, weights: Weights) -> np.ndarray:
    """The derived weight ``key`` in stored form (bf16 as uint16, quantised types as uint8 rows): what is written into an artifact."""
    sub = g.derived[key]
    run = _Run(sub, weights, {}, {}, {}, False)
    for node in sub.nodes:
        run.values[node] = run.evaluate(node)
    node = sub.outputs["value"]
    value = run.values[node]
    stored = value if isinstance(value, Stored) else encode(value, node.type.dtype)
    return stored.data if isinstance(stored, Stored) else np.ascontiguousarray(stored)


def _last_uses(g: Graph) -> dict[int, list[Node]]:
    """Nodes whose value is not needed after the node at each position; a view keeps the storage it looks at alive."""
    last: dict[Node, int] = {}
    for i, n in enumerate(g.nodes):
        for o in n.operands:
            while True:
                last[o] = i
                if not o.is_view:
                    break
                o = o.operands[0]
    kept = set(g.outputs.values())
    out: dict[int, list[Node]] = {}
    for n, i in last.items():
        if n not in kept:
            out.setdefault(i, []).append(n)
    return out


def _label(weight: Node) -> tuple[str, str]:
    """What tells one weight from another: its derived key, or its tensor."""
    return weight.attrs["derived"], "" if weight.attrs["derived"] else weight.attrs["tensor"]


class _Run:
    """One evaluation: the values computed so far."""

    def __init__(
        self, g: Graph, weights: Weights, inputs: Mapping[str, Any], caches: Mapping[str, np.ndarray], env: dict[str, int], rounded: bool
    ) -> None:
        self.graph, self.weights, self.inputs, self.caches, self.env, self.rounded = g, weights, inputs, caches, env, rounded
        self.values: dict[Node, Any] = {}
        self.versions: dict[str, Stored] = {}
        self.tensors: dict[tuple[str, str], Stored] = {}

    def evaluate(self, node: Node) -> Any:
        leaf = getattr(self, f"_{node.op.name}", None) if node.is_leaf else None
        if leaf is not None:
            return leaf(node)
        if node.is_view:
            return self._view(node)
        ne = self.ne(node.type)
        args = [self._stored(o) if declared.stored else self.read(o) for declared, o in zip(node.op.operands, node.operands)]
        attrs = {a.name: self._concrete(a.kind, node.attrs[a.name]) for a in node.op.attrs}
        call = Call(args, [o.type for o in node.operands], attrs, ne, node.type, self.env, self.rounded)
        value = node.op.evaluate(call)
        shape = value.ne[::-1] if isinstance(value, Stored) else value.shape
        if tuple(shape) != call.shape:
            raise IRError(f"{node.op.name}: the reference gives shape {tuple(shape)} where {node.type} means {call.shape}.")
        if node.op.writes_cache:
            self.versions[resource(node)] = value
        return value

    def substitute(self, node: Node, value: Any) -> None:
        """Goes on with another value of a node, and of what it is a whole view of; None leaves it as it is."""
        if value is None:
            return
        self.values[node] = value
        if node.is_view:
            where = layout(node)
            if where.contiguous and where.offset == 0 and product(where.ne) == where.root.type.numel:
                self.values[where.root] = np.reshape(value, np.shape(self.values[where.root]))
        if node.op.writes_cache:
            self.versions[resource(node)] = value

    def drop(self, node: Node) -> None:
        """Forgets a value; the decoded form of a weight goes with the last node that stands for it."""
        value = self.values.pop(node)
        if node.op.name == "weight" and not any(v is value for v in self.values.values()):
            self.tensors.pop(_label(node), None)

    def ne(self, t: TensorType) -> tuple[int, ...]:
        return tuple(evaluate(d, self.env) for d in t.ne)

    def read(self, node: Node) -> np.ndarray:
        """Values of a node in numpy order."""
        value = self.values[node]
        return value.array if isinstance(value, Stored) else value

    def _stored(self, node: Node) -> Any:
        """The stored form where there is one: weights, cache versions, and windows into versions for ``cpy``."""
        if not node.is_view:
            return self.values[node]
        found = layout(node)
        base = self.values[found.root]
        if isinstance(base, Stored) and is_version(found.root):
            return Target(base, *found.concrete(self.env))
        return self.read(node)

    def _view(self, node: Node) -> np.ndarray:
        found = layout(node)
        flat = np.ascontiguousarray(self.read(found.root)).reshape(-1)
        return strided(flat, *found.concrete(self.env))

    def _concrete(self, kind: str, value: Any) -> Any:
        if kind == "dim":
            return evaluate(value, self.env)
        return tuple(evaluate(d, self.env) for d in value) if kind == "dims" else value

    def _input(self, node: Node) -> np.ndarray:
        name, ne = node.attrs["name"], self.ne(node.type)
        if name not in self.inputs:
            raise IRError(f"Input {name!r} is not given; given are {', '.join(self.inputs) or 'none'}.")
        array = np.asarray(self.inputs[name])
        if array.shape != tuple(reversed(ne)):
            raise IRError(f"Input {name!r} has shape {array.shape}; {node.type} means {tuple(reversed(ne))} here.")
        if node.type.dtype == "i32" and array.dtype.kind not in "iu":
            raise IRError(f"Input {name!r} holds {array.dtype}; integers are needed.")
        return np.ascontiguousarray(array, dtype=np.int32 if node.type.dtype == "i32" else np.float32)

    def _weight(self, node: Node) -> Stored:
        key, tensor = node.attrs["derived"], node.attrs["tensor"]
        label = _label(node)
        if label not in self.tensors:
            if key and key not in self.graph.derived:
                raise IRError(f"Derived weight {key!r} has no entry in graph.derived.")
            data = evaluate_derived(self.graph, key, self.weights) if key else self._lookup(tensor)
            self.tensors[label] = Stored.wrap(f"Weight {key or tensor!r}", node.type.dtype, self.ne(node.type), data)
        return self.tensors[label]

    def _lookup(self, tensor: str) -> Any:
        if callable(self.weights):
            return self.weights(tensor)
        if tensor not in self.weights:
            raise IRError(f"Weight {tensor!r} is not given.")
        return self.weights[tensor]

    def _cache(self, node: Node) -> Stored:
        name, ne = node.attrs["name"], self.ne(node.type)
        data = self.caches.get(name)
        if data is None:
            from ggufc.ir.types import row_bytes

            data = np.zeros(ne[1] * row_bytes(node.type.dtype, ne[0]), np.uint8)
        self.versions[name] = Stored.wrap(f"Cache {name!r}", node.type.dtype, ne, data)
        return self.versions[name]
