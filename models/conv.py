"""Causal convolution over tokens with carried history: ``y[t] = x[t] + w0 x[t-2] + w1 x[t-1] + w2 x[t]`` per channel.

What a batch needs of the tokens before it, the last ``taps - 1`` inputs of every channel, is persistent state: one row per sequence of the
resource ``[(taps-1) * channels, S+1]``, channel-contiguous, oldest input first. Row S is always zero; a batch that starts at position 0
reads that row instead of its sequence's (input kind ``state_reads``). So whatever an earlier use of the sequence left behind cannot leak
in, and graphs for first and later positions are the same graph.
"""

from __future__ import annotations

from ggufc.ir import Node, Sym, TensorType
from ggufc.models.blocks import Builder

SEQUENCES = Sym("S")
"""Sequences a context can hold."""

CONV_NODES = 14
"""Taps and their cast, cache, carried inputs and reshape, transpose, cont, concat, convolution, sum, tail, cont, reshape, store."""


def causal_conv(b: Builder, x: Node, weight: str, state: str) -> Node:
    """x [channels, T] plus its convolution with the taps ``weight`` [taps, channels]; history in the resource ``state``."""
    channels, n = x.type.ne
    with b.block(state, CONV_NODES):
        taps = b.weight(weight)
        if taps.type.dtype != "f32":
            taps = b.add("cast", taps, name=f"{weight}.f32", dtype="f32")
        kept = taps.type.ne[0] - 1
        cache = b.graph.cache(state, TensorType("f32", (kept * channels, SEQUENCES + 1)))
        carried = b.add("get_rows", cache, b.input("state_reads", "state_reads", (1,)), name=f"{state}.read")
        carried = b.add("reshape", carried, name=f"{state}.carried", ne=(kept, channels))
        new = b.add("cont", b.add("transpose", x, name=f"{state}.transposed"), name=f"{state}.new")
        both = b.add("concat", carried, new, name=f"{state}.inputs", dim=0)
        y = b.add("add", x, b.add("ssm_conv", both, taps, name=f"{state}.conv"), name=f"{state}.out")
        tail = b.add("view", both, name=f"{state}.tail", ne=(kept, channels), nb=(1, kept + n), offset=n)
        tail = b.add("reshape", b.add("cont", tail, name=f"{state}.kept"), name=f"{state}.row", ne=(kept * channels, 1))
        b.add("set_rows", cache, tail, b.input("state_slots", "state_slots", (1,)), name=f"{state}.store")
        return y
