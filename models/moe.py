"""Mixture-of-experts feed-forward with softmax routing, renormalised over the chosen experts.

    p = softmax(router x);  choose the n_expert_used largest;  y = sum_e p_e / (sum of chosen p) * down_e(act(gate_e x) * (up_e x))

Old files hold one tensor per expert and projection; their concatenation along dimension 2 is a weight-only subgraph, which the
hoisting pass evaluates at compile time.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from ggufc.ir import Node
from ggufc.models.blocks import Builder
from ggufc.models.hparams import HParams, LayerParams
from ggufc.models.weights import TensorSpec

PROJECTIONS = ("ffn_gate", "ffn_up", "ffn_down")

_ROUTER_NODES = 2 + 1 + 1 + 5
"""Router, probabilities, choice; their gather (two reshapes), sum and quotient."""


def moe_nodes(layer: LayerParams) -> int:
    """The most nodes ``moe`` adds for a layer: per expert where the file splits them, and per expert used for the weighted sum."""
    experts = 3 * 2 * layer.n_expert
    return _ROUTER_NODES + experts + 3 + 5 + 2 * layer.n_expert_used


def moe_tensors(hp: HParams, i: int, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``'s experts: merged ones, or one per expert where ``present`` (names in the file) has those instead."""
    layer, e = hp.layers[i], hp.n_embd
    yield TensorSpec(f"blk.{i}.ffn_gate_inp.weight", (e, layer.n_expert))
    for name in PROJECTIONS:
        ne = (layer.n_ff, e) if name == "ffn_down" else (e, layer.n_ff)
        if f"blk.{i}.{name}_exps.weight" not in present and f"blk.{i}.{name}.0.weight" in present:
            for x in range(layer.n_expert):
                yield TensorSpec(f"blk.{i}.{name}.{x}.weight", ne)
        else:
            yield TensorSpec(f"blk.{i}.{name}_exps.weight", (*ne, layer.n_expert))


def moe(b: Builder, x: Node, i: int, act: str) -> Node:
    """Experts of layer ``i`` on the normed input x [E, N] -> [E, N]; ``act`` is ``silu`` or ``gelu``."""
    layer, name, e = b.hp.layers[i], f"blk.{i}", b.hp.n_embd
    used, n_tokens = layer.n_expert_used, x.type.ne[1]
    with b.block(f"{name}.moe", moe_nodes(layer)):
        ids, weights = _route(b, x, i)
        rows = b.add("reshape", x, name=f"{name}.ffn_moe_in", ne=(e, 1, n_tokens))
        gate = b.add("mul_mat_id", _experts(b, i, "ffn_gate"), rows, ids, name=f"{name}.ffn_gate")
        up = b.add("mul_mat_id", _experts(b, i, "ffn_up"), rows, ids, name=f"{name}.ffn_up")
        hidden = b.add("mul", b.add(act, gate, name=f"{name}.ffn_gate.{act}"), up, name=f"{name}.ffn_hidden")
        down = b.add("mul_mat_id", _experts(b, i, "ffn_down"), hidden, ids, name=f"{name}.ffn_down")
        weighted = b.add("mul", down, weights, name=f"{name}.ffn_moe_weighted")
        parts = [
            b.add("view", weighted, name=f"{name}.ffn_moe_part.{u}", ne=(e, n_tokens), nb=(1, e * used), offset=u * e) for u in range(used)
        ]
        total = parts[0]
        for u, part in enumerate(parts[1:], 1):
            total = b.add("add", total, part, name=f"{name}.ffn_moe_sum.{u}")
        # One expert alone leaves a strided view, which later blocks may not take for a whole tensor.
        return total if used > 1 else b.add("cont", total, name=f"{name}.ffn_moe_sum.0")


def _route(b: Builder, x: Node, i: int) -> tuple[Node, Node]:
    """Chosen experts i32 [U, N] and their weights f32 [1, U, N], which sum to 1 per token."""
    layer, name, n_tokens = b.hp.layers[i], f"blk.{i}", x.type.ne[1]
    logits = b.linear(x, f"{name}.ffn_gate_inp")
    p = b.add("soft_max", logits, name=f"{name}.ffn_moe_probs", scale=1.0)
    ids = b.add("top_k", p, name=f"{name}.ffn_moe_ids", k=layer.n_expert_used)
    p = b.add("reshape", p, name=f"{name}.ffn_moe_probs.rows", ne=(1, layer.n_expert, n_tokens))
    chosen = b.add("get_rows", p, ids, name=f"{name}.ffn_moe_chosen")
    chosen = b.add("reshape", chosen, name=f"{name}.ffn_moe_chosen.rows", ne=(layer.n_expert_used, n_tokens))
    total = b.add("sum_rows", chosen, name=f"{name}.ffn_moe_chosen.sum")
    weights = b.add("div", chosen, total, name=f"{name}.ffn_moe_weights")
    return ids, b.add("reshape", weights, name=f"{name}.ffn_moe_weights.rows", ne=(1, layer.n_expert_used, n_tokens))


def _experts(b: Builder, i: int, projection: str) -> Node:
    """The experts' matrices of one projection as one tensor [n_in, n_out, X]."""
    name = f"blk.{i}.{projection}"
    if b.has(f"{name}_exps.weight"):
        return b.weight(f"{name}_exps.weight")
    merged = b.weight(f"{name}.0.weight")
    for x in range(1, b.hp.layers[i].n_expert):
        merged = b.add("concat", merged, b.weight(f"{name}.{x}.weight"), name=f"{name}_exps.upto.{x}", dim=2)
    return merged
