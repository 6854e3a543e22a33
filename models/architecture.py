"""What a model family declares, and the frame all decoder-only families share."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ggufc.ir import Graph, Node
from ggufc.models.blocks import EMBEDDING_NODES, HEAD_NODES, INPUT_NODES, MASK_NODES, Builder
from ggufc.models.caches import CacheInfo
from ggufc.models.hparams import HParams, LayerParams
from ggufc.models.step import Step
from ggufc.models.weights import TensorSpec, Weights

RESIDUAL_NODES = 2
"""The sum with the residual stream and, once in the last layer, the choice of its wanted rows."""


@dataclass(frozen=True)
class Architecture:
    """One entry of the registry: four functions of a family.

    ``read`` turns metadata into hyperparameters; ``tensors`` lists what a file must or may hold (``present`` tells which names it
    has, for formats with alternatives); ``build`` emits the graph; ``layer_nodes`` bounds the nodes of one layer.
    """

    name: str
    read: Callable[[Mapping[str, Any]], HParams]
    tensors: Callable[[HParams, Container[str]], Iterator[TensorSpec]]
    build: Callable[[Builder], Graph]
    layer_nodes: Callable[[LayerParams], int]
    caches: Callable[[HParams, Weights, Step], Iterable[CacheInfo]] | None = None
    """The persistent resources where they are not the ordinary ones of ``caches.layer_caches``."""
    nodes: Callable[[HParams, Weights, Step], int] | None = None
    """The node estimate of families whose graphs depend on the step."""
    remarks: Callable[[HParams], Iterable[str]] | None = None
    """What the file asks for and does not get, a sentence each."""

    def node_estimate(self, hp: HParams, weights: Weights, step: Step) -> int:
        """Upper bound of the nodes of a built graph: the sum of what the blocks promise."""
        if self.nodes is not None:
            return self.nodes(hp, weights, step)
        frame = INPUT_NODES + MASK_NODES * len(hp.windows()) + EMBEDDING_NODES + HEAD_NODES
        return frame + sum(self.layer_nodes(layer) for layer in hp.layers)


def common_tensors(hp: HParams, *, tied: bool | None = None) -> Iterator[TensorSpec]:
    """Embedding, final norm and output matrix: by default optional (absent: the embedding serves as one), required unless ``tied``,
    and never read where the family is always ``tied``."""
    yield TensorSpec("token_embd.weight", (hp.n_embd, hp.n_vocab))
    yield TensorSpec("output_norm.weight", (hp.n_embd,))
    if tied is not True:
        yield TensorSpec("output.weight", (hp.n_embd, hp.n_vocab), optional=tied is None)


def norm_tensors(hp: HParams, i: int, *names: str) -> Iterator[TensorSpec]:
    """Norm weights ``blk.<i>.<name>.weight`` over the embedding."""
    for name in names:
        yield TensorSpec(f"blk.{i}.{name}.weight", (hp.n_embd,))


def decoder(b: Builder, layer: Callable[[Builder, Node, int, Node | None], Node], *, embd_scale: float = 1.0) -> Graph:
    """Embedding, all layers, head. ``layer(b, x, i, rows)`` maps the residual stream through layer ``i``.

    ``rows`` is None except in the last layer, where it selects the tokens whose logits are wanted: only they go through the last
    feed-forward and the head.
    """
    x = b.embedding(scale=embd_scale)
    for i in range(b.hp.n_layer):
        x = layer(b, x, i, b.out_ids if i == b.hp.n_layer - 1 else None)
    return b.head(x)


def residual(b: Builder, x: Node, branch: Node, name: str, rows: Node | None = None) -> Node:
    """``x + branch``; with ``rows`` the branch holds only those columns of the stream."""
    if rows is not None:
        x = b.add("get_rows", x, rows, name=f"{name}.rows")
    return b.add("add", x, branch, name=name)
