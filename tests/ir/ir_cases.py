"""Graphs the tests of this room share: a small attention layer, one random case per operator, and random graphs made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ggufc.ir import OPS, Graph, Node, Sym, TensorType

T, O, C, KV, R = (Sym(s) for s in ("T", "O", "C", "KV", "R"))
SYMBOLS = ("T", "O", "C", "KV", "R")
ENV = {"T": 3, "O": 2, "C": 8, "KV": 8, "R": 5}

Draw = Callable[[Any], Any]


def tt(dtype: str, *ne: Any) -> TensorType:
    return TensorType(dtype, ne)


def inputs(g: Graph) -> dict[str, Node]:
    """The standard inputs, each made once."""
    types = {
        "tokens": tt("i32", T), "positions": tt("i32", T), "out_ids": tt("i32", O), "kv_slots": tt("i32", T),
        "kv_cells": tt("i32", R), "visible": tt("i32", 3, T), "embd": tt("f32", 32, T),
    }  # fmt: skip
    have = {n.name: n for n in g.inputs()}
    return {kind: have.get(kind) or g.input(kind, kind, t) for kind, t in types.items()}


def input_values() -> dict[str, np.ndarray]:
    """Values of ``inputs`` for ``ENV``: three tokens of one sequence whose five cells lie scattered."""
    return {
        "tokens": np.array([1, 0, 2]), "positions": np.array([2, 3, 4]), "out_ids": np.array([2, 0]),
        "kv_slots": np.array([6, 1, 3]), "kv_cells": np.array([5, 0, 6, 1, 3]),
        "visible": np.array([[0, 0, 3], [0, 1, 4], [0, 0, 5]]),
        "embd": np.random.default_rng(7).standard_normal((3, 32)).astype(np.float32),
    }  # fmt: skip


def layer_graph(dtype: str = "f32", cache: str = "f16", d: int = 8, heads: int = 4, kv: int = 2) -> Graph:
    """One unfused attention layer as the builders emit it, with outputs for the result and for both cache rows."""
    g = Graph("layer", "llama", SYMBOLS)
    i = inputs(g)
    x = g.add("rms_norm", i["embd"], eps=1e-5, name="blk.0.attn_norm")
    q, k, v = (
        g.add("mul_mat", g.weight(f"blk.0.attn_{p}.weight", tt(dtype, 32, d * n)), x, name=f"blk.0.attn_{p}")
        for p, n in (("q", heads), ("k", kv), ("v", kv))
    )
    rope = {"mode": "neox", "n_dims": d, "base": 10000.0}
    q = g.add("rope", g.add("reshape", q, ne=(d, heads, T)), i["positions"], **rope)
    k = g.add("rope", g.add("reshape", k, ne=(d, kv, T)), i["positions"], **rope)
    kc = g.add("set_rows", g.cache("blk.0.k", tt(cache, d * kv, C)), g.add("reshape", k, ne=(d * kv, T)), i["kv_slots"])
    vc = g.add("set_rows", g.cache("blk.0.v", tt(cache, d * kv, C)), v, i["kv_slots"])
    kk = g.add("view", kc, ne=(d, KV, kv), nb=(1, d * kv, d))
    scores = g.add("mul_mat", kk, g.add("permute", q, axes=(0, 2, 1, 3)), name="blk.0.kq")
    p = g.add("soft_max", scores, g.add("kq_mask", i["kv_cells"], i["visible"], ne0=KV), scale=d**-0.5)
    vv = g.add("view", vc, ne=(KV, d, kv), nb=(d * kv, 1, d))
    o = g.add("cont", g.add("permute", g.add("mul_mat", vv, p), axes=(0, 2, 1, 3)))
    o = g.add("reshape", o, ne=(d * heads, T), name="blk.0.kqv_out")
    g.outputs["out"] = g.add("get_rows", o, i["out_ids"], name="out")
    g.outputs["plain"] = o
    return g


def fused_attention(g: Graph, d: int = 8, heads: int = 4, kv: int = 2, **attrs: Any) -> Node:
    """Adds the fused form of ``layer_graph``'s attention; the result is ``[d*heads, T]``."""
    i = inputs(g)
    kc, vc = g.find("set_rows")
    q = g.find("rope")[0]
    fa = g.add("flash_attn", q, kc, vc, i["kv_cells"], i["visible"], scale=d**-0.5, n_head_kv=kv, **attrs)
    return g.add("reshape", fa, ne=(d * heads, T))


def weights_for(g: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values for every weight of ``g`` and its derived graphs; integer weights are small valid indices."""
    rng = np.random.default_rng(seed)
    out = {}
    for graph in (g, *g.derived.values()):
        for n in graph.find("weight"):
            shape = n.type.shape({})
            if n.attrs["tensor"] and n.dtype == "i32":
                out[n.attrs["tensor"]] = rng.integers(0, 2, shape)
            elif n.attrs["tensor"]:
                out[n.attrs["tensor"]] = rng.standard_normal(shape).astype(np.float32)
    return out


SIZE = st.integers(1, 5)
NUMBER = st.floats(-4, 4, width=32)
PLAIN = st.sampled_from(["f32", "f16", "bf16"])


def leaf(draw: Draw, g: Graph, rank: int | None = None, *, ne: tuple[int, ...] | None = None, dtype: str | None = None) -> Node:
    """A weight of random or given shape and dtype, sometimes behind a permuting view."""
    shape = ne or tuple(draw(SIZE) for _ in range(rank or draw(st.integers(1, 4))))
    kind = dtype or draw(PLAIN)
    name = f"w{len(g.nodes)}"
    if len(shape) > 1 and kind != "i32" and draw(st.booleans()):
        axes = tuple(draw(st.permutations(range(len(shape)))))
        source = tuple(shape[a] for a in axes)
        return g.add("permute", g.weight(name, tt(kind, *source)), axes=axes)
    return g.weight(name, tt(kind, *shape))


def _unary(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g))


def _binary(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g)
    ne = tuple(n if draw(st.booleans()) else 1 for n in a.type.ne)
    return g.add(op, a, leaf(draw, g, ne=ne))


def _scale(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g), s=draw(NUMBER), b=draw(NUMBER))


def _softcap(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g), cap=draw(st.floats(0.5, 50)))


def _clamp(draw: Draw, g: Graph, op: str) -> Node:
    low, high = sorted((draw(NUMBER), draw(NUMBER)))
    return g.add(op, leaf(draw, g), min=low, max=high)


def _glu(draw: Draw, g: Graph, op: str) -> Node:
    gate = leaf(draw, g)
    return g.add(op, gate, leaf(draw, g, ne=gate.type.ne), fn=draw(st.sampled_from(["silu", "gelu"])))


def _norm(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g), eps=draw(st.floats(0, 1)) + 1e-6)


def _rms_norm_mul(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g)
    return g.add(op, a, leaf(draw, g, ne=a.type.ne[:1]), eps=1e-6)


def _sum_rows_ext(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g)
    return g.add(op, a, dim=draw(st.integers(0, a.type.rank - 1)))


def _hadamard(draw: Draw, g: Graph, op: str) -> Node:
    n = draw(st.sampled_from([1, 2, 4, 8]))
    return g.add(op, leaf(draw, g, ne=(n * draw(SIZE), draw(SIZE))), n=n)


def _mul_mat(draw: Draw, g: Graph, op: str) -> Node:
    k, n, t, b2, b3 = (draw(SIZE) for _ in range(5))
    a = leaf(draw, g, ne=(k, n, b2, b3)[: draw(st.integers(2, 4))])
    b = leaf(draw, g, ne=(k, t, a.type.ne4[2] * draw(SIZE), a.type.ne4[3] * draw(SIZE)))
    return g.add(op, a, b)


def _mul_mat_id(draw: Draw, g: Graph, op: str) -> Node:
    k, n, u, t = (draw(SIZE) for _ in range(4))
    ids = leaf(draw, g, ne=(u, t), dtype="i32")
    return g.add(op, leaf(draw, g, ne=(k, n, 2)), leaf(draw, g, ne=(k, draw(st.sampled_from([1, u])), t)), ids)


def _soft_max(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g, 3)
    mask = leaf(draw, g, ne=a.type.ne[:2]) if draw(st.booleans()) else None
    sinks = leaf(draw, g, ne=a.type.ne[2:], dtype="f32") if mask is not None and draw(st.booleans()) else None
    return g.add(op, a, mask, sinks, scale=draw(NUMBER))


def _kq_mask(draw: Draw, g: Graph, op: str) -> Node:
    i = inputs(g)
    return g.add(op, i["kv_cells"], i["visible"], ne0=draw(st.sampled_from([KV, C, 8, KV + 3])))


def _flash_attn(draw: Draw, g: Graph, op: str) -> Node:
    i = inputs(g)
    d, dv, kv, group = (draw(SIZE) for _ in range(4))
    cache = draw(PLAIN)
    k = g.cache(f"c{len(g.nodes)}", tt(cache, d * kv, C))
    v = g.cache(f"c{len(g.nodes)}", tt(cache, dv * kv, C))
    q = g.add("repeat", leaf(draw, g, ne=(d, kv * group, 1)), ne=(d, kv * group, T))
    return g.add(op, q, k, v, i["kv_cells"], i["visible"], scale=draw(NUMBER), softcap=draw(st.sampled_from([0.0, 5.0])), n_head_kv=kv)


def _angles(draw: Draw, n_dims: int) -> dict[str, Any]:
    return {
        "n_dims": n_dims,
        "base": draw(st.floats(2, 1e6)),
        "freq_scale": draw(st.floats(0.01, 1)),
        "ext_factor": draw(st.sampled_from([0.0, 1.0])),
        "attn_factor": draw(st.floats(0.5, 2)),
        "n_ctx_orig": draw(st.integers(16, 4096)),
    }


def _rope(draw: Draw, g: Graph, op: str) -> Node:
    n = 2 * draw(SIZE)
    a = leaf(draw, g, ne=(n + draw(st.integers(0, 2)), draw(SIZE), 1))
    a = g.add("repeat", a, ne=(*a.type.ne[:2], T))
    ff = leaf(draw, g, ne=(n // 2,), dtype="f32") if draw(st.booleans()) else None
    return g.add(op, a, inputs(g)["positions"], ff, mode=draw(st.sampled_from(["norm", "neox"])), **_angles(draw, n))


def _rope_table(draw: Draw, g: Graph, op: str) -> Node:
    n = 2 * draw(SIZE)
    ff = leaf(draw, g, ne=(n // 2,), dtype="f32") if draw(st.booleans()) else None
    return g.add(op, inputs(g)["positions"], ff, **_angles(draw, n))


def _rope_apply(draw: Draw, g: Graph, op: str) -> Node:
    table = _rope_table(draw, g, "rope_table")
    heads = draw(SIZE)
    a = g.add("repeat", leaf(draw, g, ne=(table.type.ne[0] + 1, heads, 1)), ne=(table.type.ne[0] + 1, heads, T))
    return g.add(op, a, table, mode=draw(st.sampled_from(["norm", "neox"])), n_dims=table.type.ne[0])


def _reshape(draw: Draw, g: Graph, op: str) -> Node:
    a = g.add("cont", leaf(draw, g))
    return g.add(op, a, ne=draw(st.sampled_from([(a.type.numel,), (1, a.type.numel), tuple(reversed(a.type.ne))])))


def _view(draw: Draw, g: Graph, op: str) -> Node:
    a = g.weight(f"w{len(g.nodes)}", tt("f32", 7, 5))
    cols, rows = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    return g.add(op, a, ne=(cols, rows), nb=(1, 7), offset=draw(st.integers(0, 7 - cols)) + 7 * draw(st.integers(0, 5 - rows)))


def _permute(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g)
    return g.add(op, a, axes=draw(st.permutations(range(draw(st.integers(a.type.rank, 4))))))


def _transpose(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g, draw(st.integers(2, 4))))


def _cast(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g, ne=(32, draw(SIZE))), dtype=draw(st.sampled_from(["f32", "f16", "bf16", "q8_0", "q4_0"])))


def _concat(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g)
    dim = draw(st.integers(0, a.type.rank - 1))
    ne = tuple(draw(SIZE) if i == dim else n for i, n in enumerate(a.type.ne))
    return g.add(op, a, leaf(draw, g, ne=ne, dtype=a.dtype), dim=dim)


def _repeat(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g)
    return g.add(op, a, ne=tuple(n * draw(st.integers(1, 3)) for n in a.type.ne))


def _fill(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g), value=draw(st.sampled_from([0.0, -0.0, 1.5, float("-inf")])))


def _set_rows(draw: Draw, g: Graph, op: str) -> Node:
    row = 32
    cache = g.cache(f"c{len(g.nodes)}", tt(draw(st.sampled_from(["f32", "f16", "bf16", "q8_0"])), row, C))
    src = g.add("repeat", leaf(draw, g, ne=(row, 1)), ne=(row, T))
    return g.add(op, cache, src, inputs(g)["kv_slots"])


def _cpy(draw: Draw, g: Graph, op: str) -> Node:
    cache = g.cache(f"c{len(g.nodes)}", tt(draw(st.sampled_from(["f32", "f16", "bf16", "q8_0"])), 32, C))
    at = draw(st.integers(0, 5))
    return g.add(op, leaf(draw, g, ne=(32, 3)), g.add("view", cache, ne=(32, 3), nb=(1, 32), offset=32 * at))


def _get_rows(draw: Draw, g: Graph, op: str) -> Node:
    if draw(st.booleans()):
        return g.add(op, leaf(draw, g, ne=(draw(SIZE), 4)), inputs(g)["tokens"])
    b = draw(SIZE)
    return g.add(op, leaf(draw, g, ne=(draw(SIZE), 2, b)), leaf(draw, g, ne=(draw(SIZE), b), dtype="i32"))


def _argsort(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g), order=draw(st.sampled_from(["asc", "desc"])))


def _top_k(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g)
    return g.add(op, a, k=draw(st.integers(1, a.type.ne[0])))


def _blend(draw: Draw, g: Graph, op: str) -> Node:
    a = leaf(draw, g, ne=(draw(st.integers(2, 5)), draw(SIZE)))
    return g.add(op, a, leaf(draw, g, ne=(2, a.type.ne[1]), dtype="i32"), value=draw(NUMBER))


def _expert_choice(draw: Draw, g: Graph, op: str) -> Node:
    scores = leaf(draw, g, ne=(draw(st.integers(2, 5)), draw(SIZE)))
    bias = [leaf(draw, g, ne=scores.type.ne[:1])] if draw(st.booleans()) else []
    return g.add(op, scores, *bias, k=2, gate=draw(st.sampled_from(["none", "softmax", "sigmoid", "sqrt_softplus"])))


def _expert_weights(draw: Draw, g: Graph, op: str) -> Node:
    scores = leaf(draw, g, ne=(draw(st.integers(2, 5)), draw(SIZE)))
    ids = leaf(draw, g, ne=(2, scores.type.ne[1]), dtype="i32")
    return g.add(op, scores, ids, gate="sigmoid", normalise=draw(st.sampled_from(["none", "sum", "softmax"])), scale=draw(NUMBER))


def _sinkhorn(draw: Draw, g: Graph, op: str) -> Node:
    s = draw(SIZE)
    return g.add(op, leaf(draw, g, ne=(s, s, draw(SIZE))), iterations=draw(st.integers(1, 3)), eps=draw(st.sampled_from([0.0, 1e-3])))


def _gates(draw: Draw, g: Graph, s: int, tokens: int) -> Node:
    return leaf(draw, g, ne=(s * s + 2 * s, tokens))


def _hc_pre(draw: Draw, g: Graph, op: str) -> Node:
    s = draw(SIZE)
    m = _gates(draw, g, s, draw(SIZE))
    return g.add(op, m, leaf(draw, g, ne=(3,)), leaf(draw, g, ne=m.type.ne[:1]), streams=s, iterations=2, eps=1e-3)


def _hc_mix(draw: Draw, g: Graph, op: str) -> Node:
    e, s, t = (draw(SIZE) for _ in range(3))
    return g.add(op, leaf(draw, g, ne=(e, s, t)), leaf(draw, g, ne=(s + draw(st.integers(0, 2)), t)))


def _hc_post(draw: Draw, g: Graph, op: str) -> Node:
    e, s, t = (draw(SIZE) for _ in range(3))
    return g.add(op, leaf(draw, g, ne=(e, s, t)), leaf(draw, g, ne=(e, t)), _gates(draw, g, s, t))


def _tokens_of(g: Graph, a: Node) -> Node:
    """``a`` [.., 1] repeated to T tokens."""
    return g.add("repeat", a, ne=(*a.type.ne[:-1], T))


def _indexer_topk(draw: Draw, g: Graph, op: str) -> Node:
    i = inputs(g)
    d, heads = draw(SIZE), draw(SIZE)
    q, w = _tokens_of(g, leaf(draw, g, ne=(d, heads, 1))), _tokens_of(g, leaf(draw, g, ne=(heads, 1)))
    keys = g.cache(f"c{len(g.nodes)}", tt(draw(PLAIN), d, C))
    ties = draw(st.sampled_from(["lowest", "highest"]))
    return g.add(op, q, w, keys, i["kv_cells"], i["visible"], k=draw(st.integers(1, 6)), ties=ties)


def _mask_to_index(draw: Draw, g: Graph, op: str) -> Node:
    i = inputs(g)
    return g.add(op, g.add("kq_mask", i["kv_cells"], i["visible"], ne0=KV), k=draw(st.integers(5, 9)))


def _list_spans(draw: Draw, g: Graph, op: str) -> Node:
    return g.add(op, leaf(draw, g, ne=(draw(SIZE), draw(SIZE)), dtype="i32"))


def _sparse_attn(draw: Draw, g: Graph, op: str) -> Node:
    i = inputs(g)
    d, heads = draw(SIZE), draw(SIZE)
    q = _tokens_of(g, leaf(draw, g, ne=(d, heads, 1)))
    k = g.cache(f"c{len(g.nodes)}", tt(draw(PLAIN), d, C))
    extra = [leaf(draw, g, ne=(d, 8)), i["kv_cells"], i["visible"], leaf(draw, g, ne=(heads,))][: draw(st.sampled_from([1, 3, 4]))]
    return g.add(op, q, k, i["kv_cells"], i["visible"], *extra, scale=draw(NUMBER), n_value=draw(st.integers(1, d)))


def _ssm_conv(draw: Draw, g: Graph, op: str) -> Node:
    taps, channels, tokens = draw(SIZE), draw(SIZE), draw(SIZE)
    return g.add(op, leaf(draw, g, ne=(taps - 1 + tokens, channels)), leaf(draw, g, ne=(taps, channels)))


CASES: dict[str, Callable[[Draw, Graph, str], Node]] = {
    **dict.fromkeys(("silu", "gelu", "relu", "sigmoid", "tanh", "exp", "neg", "sqrt", "softplus", "cont", "sum_rows"), _unary),
    **dict.fromkeys(("add", "sub", "mul", "div"), _binary),
    **dict.fromkeys(("rms_norm", "norm"), _norm),
    "scale": _scale, "softcap": _softcap, "clamp": _clamp, "glu": _glu, "rms_norm_mul": _rms_norm_mul, "sum_rows_ext": _sum_rows_ext,
    "hadamard": _hadamard, "mul_mat": _mul_mat, "mul_mat_id": _mul_mat_id, "soft_max": _soft_max, "kq_mask": _kq_mask,
    "flash_attn": _flash_attn, "rope": _rope, "rope_table": _rope_table, "rope_apply": _rope_apply, "reshape": _reshape, "view": _view,
    "permute": _permute, "transpose": _transpose, "cast": _cast, "concat": _concat, "repeat": _repeat, "fill": _fill,
    "set_rows": _set_rows, "cpy": _cpy, "get_rows": _get_rows, "argsort": _argsort, "top_k": _top_k, "blend": _blend,
    "ssm_conv": _ssm_conv, "sinkhorn": _sinkhorn, "hc_pre": _hc_pre, "hc_mix": _hc_mix, "hc_post": _hc_post,
    "indexer_topk": _indexer_topk, "mask_to_index": _mask_to_index, "list_spans": _list_spans, "sparse_attn": _sparse_attn,
    "expert_choice": _expert_choice, "expert_weights": _expert_weights,
}  # fmt: skip
"""One random case per operator."""

LEAVES = {name for name, op in OPS.items() if op.is_leaf}

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def graphs(draw: Draw) -> Graph:
    """A random graph: a few operators of any kind, random names, outputs, a derived weight and analysis results."""
    g = Graph(draw(TEXT), draw(TEXT), SYMBOLS)
    for op in draw(st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4)):
        node = CASES[op](draw, g, op)
        node.name, node.loc = draw(TEXT), draw(TEXT)
        if draw(st.booleans()):
            g.outputs[draw(TEXT)] = node
        if node.type.dtype in ("f32", "f16", "bf16"):
            g.add("scale", node, s=draw(st.floats(allow_nan=False)), name=draw(TEXT))
    if draw(st.booleans()):
        key = draw(TEXT) + "x"
        sub = g.derived.setdefault(key, Graph(key))
        a = sub.weight("a", tt("q4_0", 32, 2))
        sub.outputs["value"] = sub.add("concat", a, a, dim=1, name=draw(TEXT))
        g.weight(draw(TEXT), tt("q4_0", 32, 4), derived=key)
    g.analysis.update(draw(st.dictionaries(TEXT, JSON, max_size=2)))
    return g
