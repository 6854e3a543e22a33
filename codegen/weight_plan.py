"""Which weights the artifact stores, and in which form.

A weight may be needed *packed* (interleaved rows for products and row look-ups) or *plain* (f32 vectors and anything a generic kernel
reads). Derived weights are byte concatenations of file tensors where possible, else evaluated once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from ggufc.codegen.errors import CodegenError
from ggufc.formats.gguf_values import MAX_NAME_BYTES
from ggufc.ir.graph import Graph, Node


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of the artifact.

    ``form``: ``packed``, ``glu`` (packed, groups of two sources alternating) or ``plain`` (f32, or i32 as in the file). ``sources`` are
    file tensors whose rows follow each other (``glu``: gate, up; several experts: one per slab); empty when the value comes from evaluating
    ``derived``. ``below`` of a table of integers: they are indices and must lie in 0..below-1, since kernels trust them.
    """

    name: str
    form: str
    dtype: str
    ne: tuple[int, ...]
    sources: tuple[str, ...] = ()
    derived: str = ""
    below: int = 0


@dataclass
class WeightPlan:
    """The weights a graph's launches ask for, each stored once per form."""

    graph: Graph
    stored: dict[tuple[str, str], StoredWeight] = field(default_factory=dict)

    def request(self, node: Node, form: str, below: int = 0, shape: tuple[int, ...] = ()) -> StoredWeight:
        """The stored form of a ``weight`` node; equal requests share one tensor. Tables of integers need the bound ``below``; ``shape``
        packs the rows as those of a stack of matrices.
        """
        name = node.attrs["tensor"] or node.attrs["derived"]
        stack = "." + "x".join(map(str, shape)) if shape and shape != node.ne else ""
        key = (name + stack, form)
        if key not in self.stored:
            if form == "plain" and node.dtype not in ("f32", "f16", "bf16") and not (node.dtype == "i32" and below > 0):
                raise CodegenError(f"tensor {name}: a {node.dtype} weight cannot be used outside products and row look-ups")
            sources, derived = self._sources(node)
            ne = tuple(int(d) for d in (shape or node.ne))
            suffix = stack or ".i32" if stack or below else ".f32" if form == "plain" and node.type.rank > 1 else ""
            self.stored[key] = StoredWeight(_tensor_name(name, suffix), form, node.dtype, ne, sources, derived, below)
        return self.stored[key]

    def _sources(self, node: Node) -> tuple[tuple[str, ...], str]:
        key = node.attrs["derived"]
        if not key:
            return (node.attrs["tensor"],), ""
        names = self._concatenated(self.graph.derived[key].outputs["value"])
        return (names, "") if names else ((), key)

    def _concatenated(self, node: Node) -> tuple[str, ...]:
        """Tensor names if ``node`` is a concatenation of whole file tensors along the slowest dimension, else empty."""
        if node.op.name == "weight" and not node.attrs["derived"]:
            return (node.attrs["tensor"],)
        if node.op.name in ("concat", "reshape") and (node.op.name == "reshape" or node.attrs["dim"] == node.type.rank - 1):
            parts = [self._concatenated(o) for o in node.operands]
            return tuple(name for part in parts for name in part) if all(parts) else ()
        return ()

    def two_sources(self, node: Node) -> bool:
        """Whether a derived weight is exactly two tensors of equal shape, one after the other (gate and up)."""
        key = node.attrs["derived"]
        if not key:
            return False
        value = self.graph.derived[key].outputs["value"]
        if value.op.name != "concat" or len(value.operands) != 2 or value.attrs["dim"] != 1:
            return False
        a, b = value.operands
        return a.type == b.type and all(len(self._concatenated(o)) == 1 for o in (a, b))


def _tensor_name(name: str, suffix: str) -> str:
    """The name in the artifact; one too long for a GGUF file, as of many merged weights, keeps its beginning and gets a digest."""
    if len((name + suffix).encode()) <= MAX_NAME_BYTES:
        return name + suffix
    tail = f"~{hashlib.sha256(name.encode()).hexdigest()[:12]}{suffix}"
    return name.encode()[: MAX_NAME_BYTES - len(tail)].decode("utf-8", "ignore") + tail


def as_f32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Plain floats of a tensor as f32, flat."""
    if dtype == "f32":
        return raw.view(np.float32)
    if dtype == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
