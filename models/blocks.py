"""The builder and the small shared blocks: inputs, weights, norms, linear maps, embedding and output head.

Blocks emit plain unfused operators with hierarchical unique names (``blk.3.attn_q``); fusing them is the passes' business. Every
block states the most nodes it may add through a ``*_NODES`` constant or ``*_nodes`` function next to it. The builder holds blocks
to that statement and the estimator adds the same statements up, so neither can drift from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from ggufc.ir import Graph, Node, TensorType
from ggufc.ir.dims import IntDim
from ggufc.ir.layout import contiguous_nb
from ggufc.models.errors import ModelError
from ggufc.models.hparams import HParams
from ggufc.models.step import SYMBOLS, Step
from ggufc.models.weights import Weights

INPUT_NODES = 5
"""tokens or embd, positions, out_ids, kv_slots, kv_cells."""
MASK_NODES = 2
"""visible, kq_mask: per distinct window."""
NORM_NODES = 4
"""weight, its cast to f32, rms_norm, mul."""
LINEAR_NODES = 5
"""weight, mul_mat, bias, its cast, add."""
EMBEDDING_NODES = 3
"""weight, get_rows, scale."""
HEAD_NODES = NORM_NODES + 3
"""final norm, weight, mul_mat, softcap."""


class Builder:
    """Adds nodes of one model to one graph; inputs and weights are created on first use and shared afterwards.

    ``hp``, ``weights`` and ``step`` are read-only. Shapes below are ggml ``ne``; E is ``hp.n_embd``.
    """

    def __init__(self, hp: HParams, weights: Weights, step: Step, name: str = "decode") -> None:
        self.hp = hp
        self.weights = weights
        self.step = step
        self.graph = Graph(name, hp.arch, SYMBOLS)
        self._shared: dict[str, Node] = {}
        self._frame_nodes = 0

    def add(self, op: str, *operands: Node, name: str, **attrs: Any) -> Node:
        """One operator node."""
        return self.graph.add(op, *operands, name=name, **attrs)

    @contextmanager
    def block(self, name: str, limit: int) -> Iterator[None]:
        """Holds what is built inside to ``limit`` nodes, the number its estimator promises."""
        before = len(self.graph.nodes) - self._frame_nodes
        yield
        added = len(self.graph.nodes) - self._frame_nodes - before
        if added > limit:
            raise ModelError(
                f"block {name!r} added {added} nodes to the graph but its node estimate promises at most {limit}; correct the estimate"
            )

    def _once(self, key: str, make: Callable[[], Node]) -> Node:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def shared(self, name: str, make: Callable[[str], Node]) -> Node:
        """The node ``name``, made by ``make(name)`` when first asked for."""
        return self._once(name, lambda: make(name))

    def _frame(self, key: str, make: Callable[[], Node]) -> Node:
        """A node all blocks share: whichever block asks first creates it, but none has to answer for it in its node count."""

        def make_and_count() -> Node:
            self._frame_nodes += 1
            return make()

        return self._once(key, make_and_count)

    def weight(self, name: str) -> Node:
        """The tensor ``name`` as a leaf of its type in the file."""
        if name not in self.weights:
            raise ModelError(
                f"the builder of architecture {self.hp.arch!r} asks for tensor {name!r}, which its tensor table does not declare"
            )
        info = self.weights[name]
        return self._once(name, lambda: self.graph.weight(name, TensorType(info.dtype, info.ne)))

    def vector(self, name: str) -> Node:
        """A one-dimensional weight as f32: norms and biases may be stored in half precision, arithmetic is single."""
        weight = self.weight(name)
        if self.weights[name].dtype == "f32":
            return weight
        return self._once(f"{name}.f32", lambda: self.add("cast", weight, name=f"{name}.f32", dtype="f32"))

    def has(self, name: str) -> bool:
        """Whether the file has the optional tensor ``name``."""
        return name in self.weights

    def _input(self, name: str, dtype: str, ne: tuple[IntDim, ...], kind: str, window: int = 0) -> Node:
        return self._frame(f"input {name}", lambda: self.graph.input(name, kind, TensorType(dtype, ne), window=window))

    def input(self, name: str, kind: str, ne: tuple[IntDim, ...], *, dtype: str = "i32", **attrs: Any) -> Node:
        """A runtime input of any kind (``ggufc.ir.ops.inputs``), one node per name; ``attrs`` are those of the operator."""
        make = lambda: self.graph.add("input", name=name, kind=kind, type=TensorType(dtype, ne), **attrs)  # noqa: E731
        return self._frame(f"input {name}", make)

    @property
    def positions(self) -> Node:
        """i32 [T]: position of each token."""
        return self._input("positions", "i32", (self.step.T,), "positions")

    @property
    def out_ids(self) -> Node:
        """i32 [O]: rows whose logits are wanted."""
        return self._input("out_ids", "i32", (self.step.O,), "out_ids")

    @property
    def kv_slots(self) -> Node:
        """i32 [T]: cell each token's key and value go to."""
        return self._input("kv_slots", "i32", (self.step.T,), "kv_slots")

    @property
    def kv_cells(self) -> Node:
        """i32 [R]: cell lists of the batch's sequences, each sorted by position."""
        return self._input("kv_cells", "i32", (self.step.R,), "kv_cells")

    def kq_mask(self, window: int) -> Node:
        """f32 [KV, T]: 0 where a token sees a cell within ``window`` (0: all of its past), else minus infinity. One node per window."""
        suffix = f"_w{window}" if window else ""
        visible = self._input(f"visible{suffix}", "i32", (3, self.step.T), "visible", window=window)
        make = lambda: self.add("kq_mask", self.kv_cells, visible, name=f"kq_mask{suffix}", ne0=self.step.KV)  # noqa: E731
        return self._frame(f"kq_mask{suffix}", make)

    def embedding(self, *, scale: float = 1.0) -> Node:
        """f32 [E, T]: rows of the token embedding times ``scale``, or the embeddings given from outside as they are."""
        with self.block("embd", EMBEDDING_NODES):
            if self.step.observe("embd_input"):
                return self._input("embd", "f32", (self.hp.n_embd, self.step.T), "embd")
            tokens = self._input("tokens", "i32", (self.step.T,), "tokens")
            rows = self.add("get_rows", self.weight("token_embd.weight"), tokens, name="embd")
            return rows if scale == 1.0 else self.add("scale", rows, name="embd_scaled", s=scale)

    def rms_norm(self, x: Node, name: str) -> Node:
        """``x / sqrt(mean(x^2) + eps) * w`` over the first dimension with the weight ``<name>.weight``."""
        with self.block(name, NORM_NODES):
            normed = self.add("rms_norm", x, name=f"{name}.rms", eps=self.hp.norm_eps)
            return self.add("mul", normed, self.vector(f"{name}.weight"), name=name)

    def linear(self, x: Node, name: str) -> Node:
        """``W x``, plus the bias where the file has one: x [n_in, T] -> [n_out, T] with ``<name>.weight`` [n_in, n_out]."""
        with self.block(name, LINEAR_NODES):
            y = self.add("mul_mat", self.weight(f"{name}.weight"), x, name=name)
            if not self.has(f"{name}.bias"):
                return y
            return self.add("add", y, self.vector(f"{name}.bias"), name=f"{name}.biased")

    def parts(self, x: Node, widths: Sequence[int], names: Sequence[str]) -> list[Node]:
        """Dimension 0 of the contiguous x cut into parts of ``widths``, as views over all of its columns."""
        ne, nb = x.type.ne, contiguous_nb(x.type.ne)
        offsets = accumulate(widths, initial=0)
        return [
            self.add("view", x, name=name, ne=(width, *ne[1:]), nb=nb, offset=offset) for width, name, offset in zip(widths, names, offsets)
        ]

    def head(self, x: Node) -> Graph:
        """Final norm and logits f32 [n_vocab, O], which finish the graph; without an output matrix the token embedding serves as one."""
        with self.block("output", HEAD_NODES):
            x = self.rms_norm(x, "output_norm")
            matrix = "output.weight" if self.has("output.weight") else "token_embd.weight"
            logits = self.add("mul_mat", self.weight(matrix), x, name="logits")
            if self.hp.logit_softcap:
                logits = self.add("softcap", logits, name="logits_capped", cap=self.hp.logit_softcap)
            self.graph.outputs["logits"] = logits
        return self.graph
