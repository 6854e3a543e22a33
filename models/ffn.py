"""The gated feed-forward of plain transformers: ``down(act(gate x) * (up x))``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ggufc.ir import Node
from ggufc.models.blocks import LINEAR_NODES, Builder
from ggufc.models.hparams import HParams
from ggufc.models.weights import TensorSpec

CLAMPED_SWIGLU = "clamped_swiglu"
"""The gate of gpt-oss: ``g sigmoid(1.702 g) (u + 1)`` with ``g`` at most 7 and ``u`` within -7 .. 7."""
_LIMIT = 7.0
_SHARPNESS = 1.702

Activation = str | Callable[[Builder, Node, Node, str, str], Node]
"""A name that ``gated`` knows, or a function of (builder, gate, up, name, suffix)."""

GATE_NODES = 7
"""The longest gate, CLAMPED_SWIGLU."""
FFN_NODES = 3 * LINEAR_NODES + GATE_NODES
"""Gate, up and down (or the views of a packed gate and up); activation and product."""


def ffn_tensors(hp: HParams, i: int, *, optional_biases: bool = False) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``'s feed-forward; ``optional_biases`` allows each its bias."""
    e, f = hp.n_embd, hp.layers[i].n_ff
    for name, n_in, n_out in (("ffn_gate", e, f), ("ffn_up", e, f), ("ffn_down", f, e)):
        yield TensorSpec(f"blk.{i}.{name}.weight", (n_in, n_out))
        if optional_biases:
            yield TensorSpec(f"blk.{i}.{name}.bias", (n_out,), optional=True)


def packed_ffn_tensors(hp: HParams, i: int) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``'s feed-forward where ``ffn_up`` holds the rows of the gate, then those of up."""
    e, f = hp.n_embd, hp.layers[i].n_ff
    yield TensorSpec(f"blk.{i}.ffn_up.weight", (e, 2 * f))
    yield TensorSpec(f"blk.{i}.ffn_down.weight", (f, e))


def ffn(b: Builder, x: Node, i: int, act: Activation, suffix: str = "") -> Node:
    """Feed-forward of layer ``i`` on the normed input x [E, N] -> [E, N]; ``act`` as in ``gated``.

    ``suffix`` ends the names of its tensors: ``_shexp`` for a shared expert.
    """
    name = f"blk.{i}.ffn"
    with b.block(f"{name}{suffix}", FFN_NODES):
        if b.has(f"{name}_gate{suffix}.weight"):
            gate, up = (b.linear(x, f"{name}_{part}{suffix}") for part in ("gate", "up"))
        else:
            both = b.linear(x, f"{name}_up{suffix}")
            width = b.hp.layers[i].n_ff
            gate, up = b.parts(both, (width, width), (f"{name}_gate{suffix}.part", f"{name}_up{suffix}.part"))
        return b.linear(gated(b, gate, up, act, f"{name}_", suffix), f"{name}_down{suffix}")


def gated(b: Builder, gate: Node, up: Node, act: Activation, name: str, suffix: str = "") -> Node:
    """``act(gate) * up`` for ``act`` ``silu`` or ``gelu``, or ``CLAMPED_SWIGLU``; node names begin with ``name``.

    A family with a gate of its own passes a function of the same arguments, ``act`` left out, that adds at most ``GATE_NODES`` nodes.
    """
    if not isinstance(act, str):
        return act(b, gate, up, name, suffix)
    hidden, gate_name = f"{name}hidden{suffix}", f"{name}gate{suffix}"
    if act != CLAMPED_SWIGLU:
        return b.add("mul", b.add(act, gate, name=f"{gate_name}.{act}"), up, name=hidden)
    gate = b.add("clamp", gate, name=f"{gate_name}.clamped", min=-math.inf, max=_LIMIT)
    open_ = b.add("sigmoid", b.add("scale", gate, name=f"{gate_name}.sharpened", s=_SHARPNESS), name=f"{gate_name}.sigmoid")
    up = b.add("clamp", up, name=f"{name}up{suffix}.clamped", min=-_LIMIT, max=_LIMIT)
    up = b.add("scale", up, name=f"{name}up{suffix}.shifted", s=1.0, b=1.0)
    return b.add("mul", b.add("mul", gate, open_, name=f"{gate_name}.swish"), up, name=hidden)
