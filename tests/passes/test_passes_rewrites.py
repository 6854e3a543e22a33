"""Each rewrite: what it turns into what, and the near misses it must leave alone."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.ir import Graph, Node, TensorType, interpret, parse_graph, verify
from ggufc.passes import PassManager, fusion_counts, opt
from passes_graphs import SYMBOLS, C, T, Tiny, Weights, f32, graph, rules_fired, tiny_model


def ops(g: Graph) -> list[str]:
    """Operators that are not leaves, in program order."""
    return [n.op.name for n in g.nodes if not n.is_leaf]


def activation(g: Graph, *ne: object) -> Node:
    """A computed f32 value of the given shape (a product, so that nothing folds it)."""
    tokens = g.nodes[0] if g.nodes else g.input("embd", "embd", f32(16, T))
    weight = g.weight(f"w{len(g.nodes)}", f32(16, int(np.prod([n for n in ne if isinstance(n, int)]))))
    flat = g.add("mul_mat", weight, tokens)
    return flat if tuple(ne) == flat.type.ne else g.add("reshape", flat, ne=ne)


# canonicalize


def one_op(build: object, *ne: object) -> Graph:
    g = graph()
    x = activation(g, *ne)
    y = build(g, x)  # type: ignore[operator]
    g.outputs["y"] = g.add("scale", y, s=2.0)
    return g


@pytest.mark.parametrize(
    ("build", "ne", "left"),
    [
        (lambda g, x: g.add("reshape", x, ne=(8, T)), (8, T), []),
        (lambda g, x: g.add("reshape", g.add("reshape", x, ne=(4, 2, T)), ne=(8, T)), (8, T), []),
        (lambda g, x: g.add("reshape", g.add("reshape", x, ne=(4, 2, T)), ne=(2, 4, T)), (8, T), ["reshape"]),
        (lambda g, x: g.add("permute", x, axes=(0, 1)), (8, T), []),
        (lambda g, x: g.add("permute", g.add("permute", x, axes=(0, 2, 1)), axes=(0, 2, 1)), (4, 2, T), ["reshape"]),
        (lambda g, x: g.add("permute", g.add("permute", x, axes=(1, 2, 0)), axes=(1, 2, 0)), (4, 2, T), ["reshape", "permute"]),
        (lambda g, x: g.add("transpose", g.add("transpose", x)), (8, T), []),
        (lambda g, x: g.add("transpose", x), (8, T), ["permute"]),
        (lambda g, x: g.add("cont", x), (8, T), []),
        (lambda g, x: g.add("cont", g.add("transpose", x)), (8, T), ["permute", "cont"]),
        (lambda g, x: g.add("view", x, ne=(8, T), nb=(1, 8)), (8, T), []),
        (lambda g, x: g.add("view", g.add("view", x, ne=(6, T), nb=(1, 8), offset=2), ne=(2, T), nb=(1, 8), offset=1), (8, T), ["view"]),
        (lambda g, x: g.add("scale", x, s=1.0), (8, T), []),
        (lambda g, x: g.add("scale", x, s=1.0, b=0.5), (8, T), ["scale"]),
        (lambda g, x: g.add("scale", g.add("transpose", x), s=1.0), (8, T), ["permute", "cont"]),
        (lambda g, x: g.add("add", x, g.const(0.0)), (8, T), []),
        (lambda g, x: g.add("sub", x, g.const(0.0)), (8, T), []),
        (lambda g, x: g.add("mul", x, g.const(1.0)), (8, T), []),
        (lambda g, x: g.add("div", x, g.const(1.0)), (8, T), []),
        (lambda g, x: g.add("mul", x, g.const(0.0)), (8, T), ["mul"]),
        (lambda g, x: g.add("add", x, g.const(1.0)), (8, T), ["add"]),
        (lambda g, x: g.add("cast", x, dtype="f32"), (8, T), []),
        (lambda g, x: g.add("cast", x, dtype="f16"), (8, T), ["cast"]),
        (lambda g, x: g.add("repeat", x, ne=(8, T)), (8, T), []),
        (lambda g, x: g.add("repeat", x, ne=(16, T)), (8, T), ["repeat"]),
    ],
)
def test_canonicalize(build: object, ne: tuple[object, ...], left: list[str]) -> None:
    g = one_op(build, *ne)
    before = interpret(g, Weights(g, 1), {"embd": np.ones((3, 16), np.float32)}, {}, {s: 3 for s in SYMBOLS})
    rules_fired(g, "canonicalize")
    after = interpret(g, Weights(g, 1), {"embd": np.ones((3, 16), np.float32)}, {}, {s: 3 for s in SYMBOLS})
    assert ops(g) == ["mul_mat", *left, "scale"]
    assert np.array_equal(before["y"], after["y"])


def test_a_merged_view_starts_where_both_views_together_started() -> None:
    g = one_op(lambda g, x: g.add("view", g.add("view", x, ne=(6, T), nb=(1, 8), offset=2), ne=(2, T), nb=(1, 8), offset=1), 8, T)
    rules_fired(g, "canonicalize")
    assert g.find("view")[0].attrs["offset"] == 3


def test_a_view_through_a_permutation_keeps_its_meaning() -> None:
    g = one_op(lambda g, x: g.add("view", g.add("permute", x, axes=(1, 0)), ne=(4, T), nb=(1, 8), offset=4), 8, T)
    rules_fired(g, "canonicalize")
    assert ops(g) == ["mul_mat", "view", "scale"]
    verify(g)


def test_a_copy_out_of_a_cache_is_kept() -> None:
    # the copy is what later reads see after the next write; without it they would name a version that is gone
    g = graph()
    slots = g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
    cache = g.cache("blk.0.k", f32(8, C))
    copy = g.add("cont", g.add("view", cache, ne=(8, 1), nb=(1, 8)))
    g.add("set_rows", cache, activation_of(g), slots)
    g.outputs["old"] = g.add("scale", copy, s=2.0)
    rules_fired(g, "canonicalize,cse,dce")
    assert "cont" in ops(g)


def activation_of(g: Graph) -> Node:
    return g.add("mul_mat", g.weight("w", f32(16, 8)), g.input("embd", "embd", f32(16, T)))


@pytest.mark.parametrize("neutral", ["scale", "add", "repeat", "cast"])
def test_arithmetic_that_copies_out_of_a_cache_becomes_a_copy(neutral: str) -> None:
    g = graph()
    slots = g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
    cache = g.cache("blk.0.k", f32(8, C))
    if neutral == "scale":
        old = g.add("scale", cache, s=1.0)
    elif neutral == "add":
        old = g.add("add", cache, g.const(0.0))
    elif neutral == "repeat":
        old = g.add("repeat", cache, ne=(8, C))
    else:
        old = g.add("cast", cache, dtype="f32")
    g.add("set_rows", cache, activation_of(g), slots)
    g.outputs["old"] = g.add("silu", old)
    rules_fired(g, "canonicalize")
    assert ops(g) == ["cont", "mul_mat", "set_rows", "silu"]


# cse, dce


def test_cse_merges_leaves_and_chains_once() -> None:
    g = graph()
    x = g.input("embd", "embd", f32(16, T))
    a = g.add("silu", g.add("mul", x, g.weight("w", f32(16))))
    b = g.add("silu", g.add("mul", x, g.weight("w", f32(16))))
    g.outputs["y"] = g.add("add", a, b)
    assert rules_fired(g, "cse") == {"merged": 3}
    assert g.outputs["y"].operands[0] is g.outputs["y"].operands[1]


def test_cse_swaps_operands_only_where_neither_is_broadcast() -> None:
    g = graph()
    x = g.input("embd", "embd", f32(16, T))
    y = g.add("silu", x)
    g.outputs["same"] = g.add("add", g.add("add", x, y), g.add("add", y, x))
    g.outputs["other"] = g.add("add", g.add("sub", x, y), g.add("sub", y, x))
    assert rules_fired(g, "cse") == {"merged": 1}


def test_cse_keeps_differing_attributes_apart() -> None:
    g = graph()
    x = g.input("embd", "embd", f32(16, T))
    g.outputs["y"] = g.add("add", g.add("scale", x, s=0.0), g.add("scale", x, s=-0.0))
    assert rules_fired(g, "cse") == {}


def test_cse_never_merges_cache_writes() -> None:
    g = graph()
    slots = g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
    rows = activation_of(g)
    first = g.add("set_rows", g.cache("blk.0.k", f32(8, C)), rows, slots)
    g.add("set_rows", first, rows, slots)
    rules_fired(g, "cse,dce")
    assert len(g.find("set_rows")) == 2


def test_dce_keeps_writes_and_drops_the_rest() -> None:
    g = graph()
    slots = g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
    g.input("positions", "positions", TensorType("i32", (T,)))
    g.add("set_rows", g.cache("blk.0.k", f32(8, C)), activation_of(g), slots)
    g.add("scale", g.weight("unused", f32(4)), s=2.0)
    assert rules_fired(g, "dce") == {"removed": 3}
    assert {n.name for n in g.inputs()} == {"kv_slots", "embd"}


# fuse-norm, fuse-glu


def test_fuse_norm() -> None:
    g = graph()
    x = g.input("embd", "embd", f32(16, T))
    g.outputs["y"] = g.add("mul", g.add("rms_norm", x, eps=1e-6), g.weight("w", f32(16)), name="attn_norm")
    assert rules_fired(g, "fuse-norm") == {"rms-norm-mul": 1}
    fused = g.outputs["y"]
    assert (fused.op.name, fused.name, fused.attrs["eps"]) == ("rms_norm_mul", "attn_norm", 1e-6)


@pytest.mark.parametrize("miss", ["second reader", "output", "per-row factor", "mean removed", "full tensor"])
def test_fuse_norm_near_misses(miss: str) -> None:
    g = graph()
    x = g.input("embd", "embd", f32(16, T))
    normed = g.add("norm" if miss == "mean removed" else "rms_norm", x, eps=1e-6)
    factor = g.weight("w", f32(1) if miss == "per-row factor" else f32(16))
    if miss == "full tensor":
        factor = g.add("silu", x)
    g.outputs["y"] = g.add("mul", normed, factor)
    if miss == "second reader":
        g.outputs["z"] = g.add("silu", normed)
    if miss == "output":
        g.outputs["z"] = normed
    assert rules_fired(g, "fuse-norm") == {}


@pytest.mark.parametrize("fn", ["silu", "gelu"])
@pytest.mark.parametrize("swapped", [False, True])
def test_fuse_glu(fn: str, swapped: bool) -> None:
    g = graph()
    gate, up = activation(g, 8, T), activation(g, 8, T)
    active = g.add(fn, gate)
    g.outputs["y"] = g.add("mul", up, active) if swapped else g.add("mul", active, up)
    assert rules_fired(g, "fuse-glu") == {f"glu-{fn}": 1}
    assert g.outputs["y"].operands == (gate, up)


@pytest.mark.parametrize("miss", ["second reader", "broadcast", "other function"])
def test_fuse_glu_near_misses(miss: str) -> None:
    g = graph()
    gate = activation(g, 8, T)
    up = g.weight("w", f32(8)) if miss == "broadcast" else activation(g, 8, T)
    active = g.add("relu" if miss == "other function" else "silu", gate)
    g.outputs["y"] = g.add("mul", active, up)
    if miss == "second reader":
        g.outputs["z"] = active
    assert rules_fired(g, "fuse-glu") == {}


# fuse-attention


def attention_counts(text: str) -> dict[str, int]:
    g = parse_graph(text)
    return {k: n for k, n in rules_fired(g, "fuse-attention").items() if k.startswith("flash")}


ATTENTION = """graph @main(T, C, KV, R) {
  %cells = input "kv_cells" {kind = "kv_cells"} : i32[R]
  %vis = input "visible" {kind = "visible"} : i32[3, T]
  %x = input "embd" {kind = "embd"} : f32[32, T]
  %q = reshape(%x) {ne = [8, 4, T]} : f32[8, 4, T]
  %k = cache "blk.0.k" : f16[16, C]
  %v = cache "blk.0.v" : f16[16, C]
  %mask = kq_mask(%cells, %vis) {ne0 = KV} : f32[KV, T]
  %kk = view(%k) {ne = [8, KV, 2], nb = [1, 16, 8]} : f16[8, KV, 2]
  %vv = view(%v) {ne = [KV, 8, 2], nb = [16, 1, 8]} : f16[KV, 8, 2]
  %qp = permute(%q) {axes = [0, 2, 1]} : f32[8, T, 4]
  %s = mul_mat(%kk, %qp) {name = "kq"} : f32[KV, T, 4]
  %p = soft_max(%s, %mask) {scale = 0.5} : f32[KV, T, 4]
  %o = mul_mat(%vv, %p) : f32[8, T, 4]
  %op = permute(%o) {axes = [0, 2, 1]} : f32[8, 4, T]
  %oc = cont(%op) : f32[8, 4, T]
  output "o" = %oc
}
"""


def test_fuse_attention() -> None:
    g = parse_graph(ATTENTION)
    assert rules_fired(g, "fuse-attention")["flash-attention"] == 1
    assert ops(g) == ["reshape", "flash_attn"]
    fused = g.find("flash_attn")[0]
    assert fused.operands[0] is g.find("reshape")[0]
    assert [n.name for n in fused.operands[1:]] == ["blk.0.k", "blk.0.v", "kv_cells", "visible"]
    assert (fused.attrs["scale"], fused.attrs["softcap"], fused.attrs["n_head_kv"]) == (0.5, 0.0, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('output "o" = %oc', 'output "o" = %oc\n  output "p" = %p', id="probabilities are read"),
        pytest.param('output "o" = %oc', 'output "o" = %oc\n  output "s" = %s', id="scores are read"),
        pytest.param("soft_max(%s, %mask)", "soft_max(%s)", id="no mask"),
        pytest.param("nb = [1, 16, 8]", "nb = [1, 16, 8], offset = 16", id="keys from the second cell on"),
        pytest.param("nb = [1, 16, 8]", "nb = [1, 16, 0]", id="every head sees the first keys"),
        pytest.param("nb = [1, 16, 8]", "nb = [1, 32, 8]", id="every other cell"),
        pytest.param("nb = [16, 1, 8]", "nb = [16, 2, 8]", id="values strided"),
        pytest.param(
            "ne = [KV, 8, 2], nb = [16, 1, 8]} : f16[KV, 8, 2]",
            "ne = [KV, 8, 1], nb = [16, 1, 8]} : f16[KV, 8, 1]",
            id="values of one head only",
        ),
    ],
)
def test_fuse_attention_near_misses(old: str, new: str) -> None:
    assert old in ATTENTION
    assert attention_counts(ATTENTION) == {"flash-attention": 1}
    assert attention_counts(ATTENTION.replace(old, new)) == {}


def test_fuse_attention_needs_a_cache() -> None:
    text = ATTENTION.replace('%k = cache "blk.0.k" : f16[16, C]', '%k = weight "k" : f16[16, 64]').replace("KV", "64")
    text = text.replace("graph @main(T, C, 64, R)", "graph @main(T, C, R)")
    assert attention_counts(text) == {}


CAPPED = ATTENTION.replace("soft_max(%s, %mask)", "soft_max(%t, %mask)").replace("{scale = 0.5}", "{scale = 1.0}")


@pytest.mark.parametrize(
    ("between", "scale", "softcap"),
    [
        ("  %t = softcap(%s) {cap = 30.0} : f32[KV, T, 4]\n", 1.0, 30.0),
        ("  %u = scale(%s) {s = 0.25} : f32[KV, T, 4]\n  %t = softcap(%u) {cap = 30.0} : f32[KV, T, 4]\n", 0.25, 30.0),
    ],
)
def test_fuse_attention_with_softcap(between: str, scale: float, softcap: float) -> None:
    text = CAPPED.replace("  %p =", f"{between}  %p =")
    g = parse_graph(text)
    rules_fired(g, "fuse-attention")
    fused = g.find("flash_attn")[0]
    assert (fused.attrs["scale"], fused.attrs["softcap"]) == (scale, softcap)
    # a scale after the bound is other arithmetic: cap * tanh(s / cap) * 0.5
    assert attention_counts(text.replace("{scale = 1.0}", "{scale = 0.5}")) == {}
    # and so is a shift before it
    assert attention_counts(text.replace("{s = 0.25}", "{s = 0.25, b = 1.0}")) == ({} if "0.25" in text else {"flash-attention-softcap": 1})


def test_fuse_attention_does_not_move_a_read_behind_a_write() -> None:
    write = """  %slots = input "kv_slots" {kind = "kv_slots"} : i32[T]
  %rows = reshape(%x) {ne = [32, T]} : f32[32, T]
  %half = view(%rows) {ne = [16, T], nb = [1, 32]} : f32[16, T]
  %k1 = set_rows(%k, %half, %slots) {name = "later"} : f16[16, C]
"""
    # the scores are computed from the old keys, the weighted sum comes after the new ones
    between = ATTENTION.replace("  %p = soft_max", f"{write}  %p = soft_max")
    assert attention_counts(between) == {}
    after = ATTENTION.replace("  output", f"{write}  output")
    assert attention_counts(after) == {"flash-attention": 1}


def test_fuse_attention_sees_through_the_decoding_of_quantised_values() -> None:
    text = ATTENTION.replace(
        '%v = cache "blk.0.v" : f16[16, C]', '%w = cache "blk.0.v" : q8_0[16, C]\n  %v = cast(%w) {dtype = "f32"} : f32[16, C]'
    )
    text = text.replace("f16[KV, 8, 2]", "f32[KV, 8, 2]").replace("16, C]", "64, C]").replace("[16, 1, 8]", "[64, 1, 32]")
    text = text.replace("[1, 16, 8]", "[1, 64, 32]").replace("[8, 4, T]", "[32, 1, T]").replace("[8, KV, 2]", "[32, KV, 2]")
    text = text.replace("[KV, 8, 2]", "[KV, 32, 2]").replace("[8, T, 4]", "[32, T, 4]")
    text = text.replace("[32, 1, T]", "[32, 4, T]").replace("f32[32, T]", "f32[128, T]")
    assert attention_counts(text) == {"flash-attention": 1}
    # a cast that rounds is not a decoding
    rounded = text.replace('{dtype = "f32"} : f32[64, C]', '{dtype = "f16"} : f16[64, C]').replace("f32[KV, 32, 2]", "f16[KV, 32, 2]")
    assert attention_counts(rounded) == {}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_fuse_attention_does_not_look_at_the_cache_type(dtype: str) -> None:
    assert attention_counts(ATTENTION.replace("f16", dtype)) == {"flash-attention": 1}


# fuse-rope


def test_layers_share_one_rope_table() -> None:
    g = tiny_model(Tiny(layers=2, factors=True))
    assert rules_fired(g, "fuse-rope,cse")["rope-split"] == 4
    assert len(g.find("rope_table")) == 1
    assert len(g.find("rope_apply")) == 4


def test_different_bases_need_different_tables() -> None:
    g = graph()
    pos = g.input("positions", "positions", TensorType("i32", (T,)))
    q = activation_heads(g)
    attrs = {"mode": "neox", "n_dims": 8}
    g.outputs["y"] = g.add("add", g.add("rope", q, pos, base=1e4, **attrs), g.add("rope", q, pos, base=1e6, **attrs))
    rules_fired(g, "fuse-rope,cse")
    assert len(g.find("rope_table")) == 2


def activation_heads(g: Graph) -> Node:
    return g.add("reshape", activation_of(g), ne=(8, 1, T))


# merges


def test_hoist_takes_whole_computations_and_leaves_views() -> None:
    g = graph()
    x = g.input("embd", "embd", f32(8, T))
    w = g.weight("w", TensorType("f16", (8, 8)))
    sunk = g.add("add", g.add("cast", w, dtype="f32"), g.const(0.5))
    y = g.add("mul_mat", g.add("transpose", sunk), x)
    g.outputs["y"] = g.add("add", y, g.add("mul_mat", g.add("transpose", w), x))
    assert rules_fired(g, "hoist") == {"hoisted": 1}
    assert ops(g) == ["transpose", "mul_mat", "transpose", "mul_mat", "add"]
    (sub,) = g.derived.values()
    assert ops(sub) == ["cast", "add"]


def test_hoist_computes_equal_things_once_and_inlines_what_it_hoisted_before() -> None:
    g = graph()
    x = g.input("embd", "embd", f32(8, T))
    a, b = (g.add("scale", g.weight("w", f32(8)), s=2.0, name=f"n{i}") for i in range(2))
    g.outputs["y"] = g.add("add", g.add("mul", x, a), b)
    rules_fired(g, "hoist")
    assert list(g.derived) == ["n0"]
    first = g.find("weight")[0]
    user = g.users()[first][0]
    with g.insert_before(user):
        again = g.add("neg", first, name="again")
    g.set_operands(user, [again if o is first else o for o in user.operands])
    rules_fired(g, "cse,hoist")
    sub = g.derived["again"]
    assert ops(sub) == ["scale", "neg"]
    assert not sub.derived
    want = 2.0 * np.arange(8, dtype=np.float32)
    got = interpret(g, {"w": np.arange(8, dtype=np.float32)}, {"embd": np.ones((1, 8), np.float32)}, {}, {s: 1 for s in SYMBOLS})["y"]
    assert np.array_equal(got[0], -want + want)


def test_hoist_serves_a_value_that_is_read_inside_and_outside() -> None:
    g = graph()
    x = g.input("embd", "embd", f32(8, T))
    inner = g.add("neg", g.weight("w", f32(8)), name="inner")
    outer = g.add("scale", inner, s=2.0, name="outer")
    g.outputs["y"] = g.add("add", g.add("mul", x, inner), outer)
    assert rules_fired(g, "hoist") == {"hoisted": 2}
    assert {key: ops(sub) for key, sub in g.derived.items()} == {"inner": ["neg"], "outer": ["neg", "scale"]}


def test_hoist_leaves_run_time_values_alone() -> None:
    g = tiny_model(Tiny(layers=1))
    assert rules_fired(g, "hoist") == {}


# opt


def test_opt_is_text_to_text() -> None:
    text = opt(ATTENTION, "fuse-attention,dce")
    assert "flash_attn" in text and "soft_max" not in text
    assert opt(text, "") == text


def test_opt_prints_between_passes() -> None:
    text = opt(ATTENTION, "canonicalize,fuse-attention", ["canonicalize"])
    assert text.startswith("# after canonicalize\ngraph @main")
    assert text.index("soft_max") < text.index("# final\n") < text.index("flash_attn")


def test_fusion_counts_leave_out_layout_rules() -> None:
    g = parse_graph(ATTENTION)
    records = PassManager.parse("fuse-attention").run(g)
    assert fusion_counts(records) == {"fuse-attention/flash-attention": 1}
