"""The pre-norm layer most families share: ``x + attention(norm x)``, then ``x + feed_forward(norm x)``."""

from __future__ import annotations

from collections.abc import Callable

from ggufc.ir import Graph, Node
from ggufc.models.architecture import RESIDUAL_NODES, decoder, residual
from ggufc.models.attention import ATTENTION_NODES, attention
from ggufc.models.blocks import NORM_NODES, Builder
from ggufc.models.ffn import FFN_NODES, ffn
from ggufc.models.hparams import LayerParams
from ggufc.models.moe import moe, moe_nodes


def feed_forward(b: Builder, x: Node, i: int, act: str) -> Node:
    """Layer ``i``'s experts, or its dense feed-forward where it has none."""
    return (moe if b.hp.layers[i].n_expert else ffn)(b, x, i, act)


def feed_forward_nodes(layer: LayerParams) -> int:
    return moe_nodes(layer) if layer.n_expert else FFN_NODES


def pre_norm_decoder(b: Builder, *, act: str = "silu", ffn_norm: str = "ffn_norm", attend: Callable[..., Node] = attention) -> Graph:
    """The whole graph of a family whose layers are all of this kind. ``ffn_norm`` names the norm before the feed-forward, ``attend``
    is the attention block."""

    def layer(b: Builder, x: Node, i: int, rows: Node | None) -> Node:
        branch = attend(b, b.rms_norm(x, f"blk.{i}.attn_norm"), i, rows=rows)
        x = residual(b, x, branch, f"blk.{i}.attn_residual", rows)
        branch = feed_forward(b, b.rms_norm(x, f"blk.{i}.{ffn_norm}"), i, act)
        return residual(b, x, branch, f"blk.{i}.ffn_residual")

    return decoder(b, layer)


def pre_norm_nodes(layer: LayerParams) -> int:
    """The most nodes of one such layer with ordinary attention."""
    return 2 * (NORM_NODES + RESIDUAL_NODES) + ATTENTION_NODES + feed_forward_nodes(layer)
