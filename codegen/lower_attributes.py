"""Attributes that lowering knows. A kernel that knows nothing of an attribute would compute something else without a word."""

from __future__ import annotations

from ggufc.codegen.errors import CodegenError
from ggufc.ir.graph import Node

_ROPE = "base freq_scale ext_factor attn_factor beta_fast beta_slow n_ctx_orig inverse"
_WORDS = {
    "soft_max": "scale",
    "kq_mask": "ne0 first",
    "flash_attn": "scale softcap n_head_kv",
    "sparse_attn": "scale n_value",
    "cast": "dtype",
    "concat": "dim",
    "repeat": "ne",
    "fill": "value",
    "blend": "value",
    "scale": "s b",
    "softcap": "cap",
    "clamp": "min max",
    "glu": "fn",
    "sinkhorn": "iterations eps",
    "hc_pre": "streams iterations eps",
    "rms_norm": "eps",
    "norm": "eps",
    "rms_norm_mul": "eps",
    "sum_rows_ext": "dim",
    "hadamard": "n",
    "rope": f"mode n_dims {_ROPE}",
    "rope_table": f"n_dims {_ROPE}",
    "rope_apply": "mode n_dims",
    "argsort": "order",
    "top_k": "k ties",
    "expert_choice": "k gate",
    "expert_weights": "gate normalise scale",
    "indexer_topk": "k sinks ties",
    "mask_to_index": "k",
}
HONOURED: dict[str, frozenset[str]] = {op: frozenset(words.split()) for op, words in _WORDS.items()}
"""Operator -> attributes that its rules and fusions read. Views are resolved by ``ir.layout``, leaves by name."""


def refuse_unknown_attributes(node: Node) -> None:
    """Raise ``CodegenError`` for an attribute that no kernel of the operator reads, unless it has its default, which means nothing."""
    if node.is_leaf or node.is_view:
        return
    honoured = HONOURED.get(node.op.name, frozenset())
    for attr in node.op.attrs:
        value = node.attrs.get(attr.name, attr.default)
        if attr.name not in honoured and value != attr.default:
            raise CodegenError(
                f"node {node.name!r}: the kernels of {node.op.name} do not know its attribute {attr.name} = {value!r}; the graph can be "
                "dumped and evaluated by the reference interpreter (ggufc.ir.interpret)"
            )
