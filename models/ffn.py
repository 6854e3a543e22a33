"""The gated feed-forward of plain transformers: ``down(act(gate x) * (up x))``."""

from __future__ import annotations

from collections.abc import Iterator

from ggufc.ir import Node
from ggufc.models.blocks import LINEAR_NODES, Builder
from ggufc.models.hparams import HParams
from ggufc.models.weights import TensorSpec

FFN_NODES = 3 * LINEAR_NODES + 2
"""Gate, up and down; activation and product."""


def ffn_tensors(hp: HParams, i: int, *, optional_biases: bool = False) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``'s feed-forward; ``optional_biases`` allows each its bias."""
    e, f = hp.n_embd, hp.layers[i].n_ff
    for name, n_in, n_out in (("ffn_gate", e, f), ("ffn_up", e, f), ("ffn_down", f, e)):
        yield TensorSpec(f"blk.{i}.{name}.weight", (n_in, n_out))
        if optional_biases:
            yield TensorSpec(f"blk.{i}.{name}.bias", (n_out,), optional=True)


def ffn(b: Builder, x: Node, i: int, act: str) -> Node:
    """Feed-forward of layer ``i`` on the normed input x [E, N] -> [E, N]; ``act`` is ``silu`` or ``gelu``."""
    with b.block(f"blk.{i}.ffn", FFN_NODES):
        gate = b.add(act, b.linear(x, f"blk.{i}.ffn_gate"), name=f"blk.{i}.ffn_gate.{act}")
        hidden = b.add("mul", gate, b.linear(x, f"blk.{i}.ffn_up"), name=f"blk.{i}.ffn_hidden")
        return b.linear(hidden, f"blk.{i}.ffn_down")
