"""Mixture-of-experts feed-forward: a router chooses ``n_expert_used`` of the experts per token and weighs their results.

    p = softmax(router x) or sigmoid(router x);  choose the largest p + selection bias
    w_e = p_e / (sum of the chosen p) * scale;   y = sum_e w_e * down_e(act(gate_e x) * (up_e x)) + shared(x)

``LayerParams.routing`` says which of these steps a family has. The selection bias only chooses, it never weighs. Old files hold one
tensor per expert and projection; their concatenation along dimension 2 is a weight-only subgraph, which the hoisting pass evaluates
at compile time.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from ggufc.ir import Node
from ggufc.models.blocks import LINEAR_NODES, Builder
from ggufc.models.ffn import FFN_NODES, GATE_NODES, Activation, ffn, gated
from ggufc.models.hparams import HParams, LayerParams
from ggufc.models.weights import TensorSpec

PROJECTIONS = ("ffn_gate", "ffn_up", "ffn_down")
GATE_UP = "ffn_gate_up"
"""One tensor of gate and up: the rows of the gate first."""
SHARED = "_shexp"
SELECTION_BIAS = "exp_probs_b.bias"

_ROUTER_NODES = LINEAR_NODES + 2 + 3 + 1
"""Router, scores, their biased form for the choice (bias, its cast, sum), choice."""
_WEIGHT_NODES = 3 + 2 + 1 + 1
"""Gather with its two reshapes, sum and quotient, scale, reshape."""
_PRODUCT_NODES = 1 + 4
"""mul_mat_id; the chosen rows of a bias (weight, gather, reshape) and their sum."""


def moe_nodes(layer: LayerParams) -> int:
    """The most nodes ``moe`` adds for a layer: per expert where the file splits them, and per expert used for the weighted sum."""
    experts = 3 * 2 * layer.n_expert + 3 * _PRODUCT_NODES + 1
    shared = FFN_NODES + 1 if layer.n_ff_shared else 0
    return _ROUTER_NODES + _WEIGHT_NODES + 1 + experts + GATE_NODES + 2 + 2 * layer.n_expert_used + shared


def moe_tensors(
    hp: HParams, i: int, present: Container[str], *, biases: bool = False, selection_bias: bool = False
) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``'s experts: merged ones, or one per expert where ``present`` (names in the file) has those instead, or one
    for gate and up. ``biases`` asks for biases of router and experts, ``selection_bias`` allows one for the choice."""
    layer, e, name = hp.layers[i], hp.n_embd, f"blk.{i}"
    yield TensorSpec(f"{name}.ffn_gate_inp.weight", (e, layer.n_expert))
    if biases:
        yield TensorSpec(f"{name}.ffn_gate_inp.bias", (layer.n_expert,))
    if selection_bias:
        yield TensorSpec(f"{name}.{SELECTION_BIAS}", (layer.n_expert,), optional=True)
    packed = f"{name}.{GATE_UP}_exps.weight" in present
    shapes = {GATE_UP: (e, 2 * layer.n_ff)} if packed else {"ffn_gate": (e, layer.n_ff), "ffn_up": (e, layer.n_ff)}
    for projection, ne in (shapes | {"ffn_down": (layer.n_ff, e)}).items():
        if f"{name}.{projection}_exps.weight" not in present and f"{name}.{projection}.0.weight" in present:
            for x in range(layer.n_expert):
                yield TensorSpec(f"{name}.{projection}.{x}.weight", ne)
        else:
            yield TensorSpec(f"{name}.{projection}_exps.weight", (*ne, layer.n_expert))
        if biases:
            yield TensorSpec(f"{name}.{projection}_exps.bias", (ne[1], layer.n_expert))
    if layer.n_ff_shared:
        for projection in PROJECTIONS:
            ne = (layer.n_ff_shared, e) if projection == "ffn_down" else (e, layer.n_ff_shared)
            yield TensorSpec(f"{name}.{projection}{SHARED}.weight", ne)


def moe(b: Builder, x: Node, i: int, act: Activation, ids: Node | None = None) -> Node:
    """Experts of layer ``i`` on the normed input x [E, N] -> [E, N]; ``act`` as in ``ffn.gated``.

    ``ids`` i32 [U, N] names the experts where something else than their scores chooses them.
    """
    layer, name, e = b.hp.layers[i], f"blk.{i}", b.hp.n_embd
    used, n_tokens = layer.n_expert_used, x.type.ne[1]
    with b.block(f"{name}.moe", moe_nodes(layer)):
        ids, weights = _route(b, x, i, ids)
        rows = b.add("reshape", x, name=f"{name}.ffn_moe_in", ne=(e, 1, n_tokens))
        if b.has(f"{name}.{GATE_UP}_exps.weight"):
            both = _product(b, rows, ids, i, GATE_UP)
            gate, up = b.parts(both, (layer.n_ff, layer.n_ff), (f"{name}.ffn_gate", f"{name}.ffn_up"))
        else:
            gate, up = (_product(b, rows, ids, i, projection) for projection in PROJECTIONS[:2])
        down = _product(b, gated(b, gate, up, act, f"{name}.ffn_"), ids, i, "ffn_down")
        weighted = b.add("mul", down, weights, name=f"{name}.ffn_moe_weighted")
        parts = [
            b.add("view", weighted, name=f"{name}.ffn_moe_part.{u}", ne=(e, n_tokens), nb=(1, e * used), offset=u * e) for u in range(used)
        ]
        total = parts[0]
        for u, part in enumerate(parts[1:], 1):
            total = b.add("add", total, part, name=f"{name}.ffn_moe_sum.{u}")
        if layer.n_ff_shared:
            return b.add("add", total, ffn(b, x, i, act, SHARED), name=f"{name}.ffn_moe_out")
        # One expert alone leaves a strided view, which later blocks may not take for a whole tensor.
        return total if used > 1 else b.add("cont", total, name=f"{name}.ffn_moe_sum.0")


def _route(b: Builder, x: Node, i: int, ids: Node | None) -> tuple[Node, Node]:
    """Chosen experts i32 [U, N] and their weights f32 [1, U, N]."""
    layer, name, n_tokens = b.hp.layers[i], f"blk.{i}", x.type.ne[1]
    used, routing = layer.n_expert_used, layer.routing
    p = b.linear(x, f"{name}.ffn_gate_inp")
    if routing.gate == "softmax":
        p = b.add("soft_max", p, name=f"{name}.ffn_moe_probs", scale=1.0)
    elif routing.gate == "sigmoid":
        p = b.add("sigmoid", p, name=f"{name}.ffn_moe_probs")
    elif routing.gate == "sqrt_softplus":
        p = b.add("sqrt", b.add("softplus", p, name=f"{name}.ffn_moe_softplus"), name=f"{name}.ffn_moe_probs")
    if ids is None:
        choice = p
        if b.has(f"{name}.{SELECTION_BIAS}"):
            choice = b.add("add", p, b.vector(f"{name}.{SELECTION_BIAS}"), name=f"{name}.ffn_moe_probs.biased")
        ids = b.add("top_k", choice, name=f"{name}.ffn_moe_ids", k=used)
    p = b.add("reshape", p, name=f"{name}.ffn_moe_probs.rows", ne=(1, layer.n_expert, n_tokens))
    weights = b.add("get_rows", p, ids, name=f"{name}.ffn_moe_chosen")
    weights = b.add("reshape", weights, name=f"{name}.ffn_moe_chosen.rows", ne=(used, n_tokens))
    if routing.gate == "softmax_chosen":
        weights = b.add("soft_max", weights, name=f"{name}.ffn_moe_weights", scale=1.0)
    elif routing.normalise:
        total = b.add("sum_rows", weights, name=f"{name}.ffn_moe_chosen.sum")
        weights = b.add("div", weights, total, name=f"{name}.ffn_moe_weights")
    if routing.scale != 1.0:
        weights = b.add("scale", weights, name=f"{name}.ffn_moe_weights.scaled", s=routing.scale)
    return ids, b.add("reshape", weights, name=f"{name}.ffn_moe_weights.rows", ne=(1, used, n_tokens))


def _product(b: Builder, x: Node, ids: Node, i: int, projection: str) -> Node:
    """Products of x [K, 1 or U, N] with the chosen experts' matrices -> [n_out, U, N], plus the chosen experts' biases."""
    name = f"blk.{i}.{projection}"
    y = b.add("mul_mat_id", _experts(b, i, projection), x, ids, name=name)
    if not b.has(f"{name}_exps.bias"):
        return y
    bias = b.add("get_rows", b.weight(f"{name}_exps.bias"), _flat(b, ids, i), name=f"{name}.bias")
    return b.add("add", y, b.add("reshape", bias, name=f"{name}.bias.rows", ne=y.type.ne), name=f"{name}.biased")


def _flat(b: Builder, ids: Node, i: int) -> Node:
    """The chosen experts [U, N] as one list [U*N], one node for all products of a layer."""
    used, n_tokens = ids.type.ne
    return b.shared(f"blk.{i}.ffn_moe_ids.flat", lambda name: b.add("reshape", ids, name=name, ne=(used * n_tokens,)))


def _experts(b: Builder, i: int, projection: str) -> Node:
    """The experts' matrices of one projection as one tensor [n_in, n_out, X]."""
    name = f"blk.{i}.{projection}"
    if b.has(f"{name}_exps.weight"):
        return b.weight(f"{name}_exps.weight")
    merged = b.weight(f"{name}.0.weight")
    for x in range(1, b.hp.layers[i].n_expert):
        merged = b.add("concat", merged, b.weight(f"{name}.{x}.weight"), name=f"{name}_exps.upto.{x}", dim=2)
    return merged
