"""The interpreter: weights in every stored form, activation rounding, caches, derived weights, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.formats.activations import activation_mode, round_activations
from ggufc.formats.quants import dequantize, quantize
from ggufc.ir import Graph, IRError, Sym, evaluate_derived, interpret
from ggufc.ir.storage import Stored, decode, encode
from ir_cases import ENV, SYMBOLS, C, T, fused_attention, input_values, inputs, layer_graph, tt, weights_for

RNG = np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def product_graph(dtype: str, k: int = 256) -> Graph:
    g = Graph("g", symbols=("T",))
    x = g.input("x", "embd", tt("f32", k, T))
    g.outputs["y"] = g.add("mul_mat", g.weight("w", tt(dtype, k, 3)), x)
    return g


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["f32", "f16", "bf16"]), st.sampled_from([0.0, 3.0]))
def test_fused_attention_equals_the_unfused_layer(seed, cache, softcap):
    """With scattered cells, grouped heads and the cache's own rounding; soft-capping is inserted by hand on the unfused side."""
    g = layer_graph(cache=cache)
    if softcap:
        scores = next(n for n in g.nodes if n.name == "blk.0.kq")
        with g.insert_after(scores):
            scaled = g.add("scale", scores, s=8**-0.5)
            capped = g.add("softcap", scaled, cap=softcap)
            back = g.add("scale", capped, s=8**0.5)
        g.replace_all_uses(scores, back, keep=[scaled])
    g.outputs["fused"] = fused_attention(g, softcap=softcap)
    out = interpret(g, weights_for(g, seed), input_values(), {}, ENV)
    np.testing.assert_allclose(out["fused"], out["plain"], atol=2e-5, rtol=2e-5)
    assert np.array_equal(out["out"], out["plain"][[2, 0]])


def test_tokens_one_by_one_give_what_a_batch_gives():
    g = layer_graph()
    weights, values = weights_for(g), input_values()
    caches: dict[str, np.ndarray] = {}
    whole = interpret(g, weights, values, caches, ENV)["plain"]
    single: dict[str, np.ndarray] = {}
    rows = []
    for t in range(3):
        part = {k: v[t : t + 1] for k, v in values.items() if k not in ("kv_cells", "out_ids")}
        part |= {"kv_cells": values["kv_cells"], "out_ids": np.array([0])}
        rows.append(interpret(g, weights, part, single, ENV | {"T": 1, "O": 1})["plain"])
    # Token 1 of the batch sees the cells the later tokens have not written yet only where its range says so.
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=1e-6)
    assert all(np.array_equal(caches[k], single[k]) for k in caches)


@pytest.mark.parametrize("dtype", ["q4_0", "q8_0", "q4_k", "q6_k", "mxfp4"])
def test_quantised_weights_are_dequantised_and_activations_kept_or_rounded(dtype):
    g = product_graph(dtype)
    raw, x = quantize(dtype, normal(3, 256)), normal(2, 256)
    w = dequantize(dtype, raw, 256).astype(np.float64)
    env = {"T": 2}
    exact = interpret(g, {"w": raw}, {"x": x}, {}, env)["y"]
    np.testing.assert_allclose(exact, x @ w.T, rtol=1e-6, atol=1e-6)
    rounded = interpret(g, {"w": raw}, {"x": x}, {}, env, activations="rounded")["y"]
    np.testing.assert_allclose(rounded, round_activations(x, activation_mode(dtype)) @ w.T, rtol=1e-6, atol=1e-6)
    assert not np.array_equal(exact, rounded)


def test_rounding_follows_the_type_of_the_weight():
    x, w = normal(1, 256), normal(3, 256)
    for dtype, changes in (("f32", False), ("f16", False), ("bf16", True)):
        g = product_graph(dtype)
        a, b = (interpret(g, {"w": w}, {"x": x}, {}, {"T": 1}, activations=m)["y"] for m in ("exact", "rounded"))
        assert np.array_equal(a, b) is not changes
    with pytest.raises(IRError, match="activations = 'fast' is unknown"):
        interpret(product_graph("f32"), {"w": w}, {"x": x}, {}, {"T": 1}, activations="fast")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_weights_may_be_given_as_bytes_or_values_or_a_function(dtype):
    g = product_graph(dtype)
    values, x = normal(3, 256), normal(1, 256)
    stored = encode(values, dtype)
    raw = np.ascontiguousarray(stored.data if isinstance(stored, Stored) else stored).view(np.uint8).reshape(-1)
    results = [interpret(g, weights, {"x": x}, {}, {"T": 1})["y"] for weights in ({"w": values}, {"w": raw}, lambda name: {"w": raw}[name])]
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[1], results[2])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_set_rows_converts_rows_and_leaves_the_others_alone(dtype):  # S65
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    new = g.add("set_rows", g.cache("k", tt(dtype, 32, C)), i["embd"], i["kv_slots"])
    g.outputs["k"] = new
    values = input_values()
    before = encode(normal(8, 32), dtype)
    before = before.data if isinstance(before, Stored) else before
    caches = {"k": before.copy()}
    out = interpret(g, {}, values, caches, ENV)["k"]
    after = caches["k"]
    assert after.dtype == before.dtype and after.shape == before.shape
    untouched = [c for c in range(8) if c not in values["kv_slots"]]
    assert after[untouched].tobytes() == before[untouched].tobytes()
    expected = encode(values["embd"], dtype)
    expected = decode(expected.data if isinstance(expected, Stored) else expected, dtype)
    assert np.array_equal(out[values["kv_slots"]], expected)
    assert np.abs(out[values["kv_slots"]] - values["embd"]).max() < 0.05


def test_the_last_of_equal_slots_wins():
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    g.outputs["k"] = g.add("set_rows", g.cache("k", tt("f32", 32, C)), i["embd"], i["kv_slots"])
    values = input_values() | {"kv_slots": np.array([4, 4, 4])}
    assert np.array_equal(interpret(g, {}, values, {}, ENV)["k"][4], values["embd"][2])


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_cpy_writes_at_a_moving_offset(dtype):
    g = Graph("g", symbols=("T", "C", "HEAD"))
    x = g.input("x", "embd", tt("f32", 32, T))
    cache = g.cache("k", tt(dtype, 32, C))
    g.outputs["k"] = g.add("cpy", x, g.add("view", cache, ne=(32, T), nb=(1, 32), offset=32 * Sym("HEAD")))
    values, caches = normal(2, 32), {}
    out = interpret(g, {}, {"x": values}, caches, {"T": 2, "C": 8, "HEAD": 5})["k"]
    assert np.flatnonzero(out.any(axis=1)).tolist() == [5, 6]
    assert np.abs(out[5:7] - values).max() < 0.05
    with pytest.raises(IRError):
        interpret(g, {}, {"x": values}, {}, {"T": 2, "C": 8, "HEAD": 7})


def test_cpy_into_a_strided_window():
    """A transposed value cache: each token is a column."""
    g = Graph("g", symbols=("T", "C"))
    x = g.input("x", "embd", tt("f32", 4, T))
    cache = g.cache("v", tt("f32", C, 4))
    g.outputs["v"] = g.add("cpy", x, g.add("view", cache, ne=(4, T), nb=(C, 1), offset=2))
    values = normal(2, 4)
    out = interpret(g, {}, {"x": values}, {}, {"T": 2, "C": 8})["v"]
    assert np.array_equal(out[:, 2:4], values.T)
    assert not out[:, :2].any() and not out[:, 4:].any()


def test_old_versions_keep_their_values():
    """Value semantics: a read placed before the write sees the old rows."""
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    cache = g.cache("k", tt("f32", 32, C))
    g.outputs["old"] = g.add("get_rows", cache, i["kv_slots"])
    g.outputs["new"] = g.add("get_rows", g.add("set_rows", cache, i["embd"], i["kv_slots"]), i["kv_slots"])
    out = interpret(g, {}, input_values(), {}, ENV)
    assert not out["old"].any()
    assert np.array_equal(out["new"], input_values()["embd"])


def test_derived_weights_are_computed_from_the_files_tensors():
    g = Graph("g", symbols=("T",))
    x = g.input("x", "embd", tt("f32", 32, T))
    sub = g.derived["both"] = Graph("both")
    sub.outputs["value"] = sub.add("concat", *(sub.weight(n, tt("q4_0", 32, 2)) for n in "ab"), dim=1)
    g.outputs["y"] = g.add("mul_mat", g.weight("", tt("q4_0", 32, 4), derived="both"), x)
    raw = {n: quantize("q4_0", normal(2, 32)) for n in "ab"}
    assert np.array_equal(evaluate_derived(g, "both", raw), np.concatenate([raw["a"], raw["b"]]))
    values = normal(1, 32)
    expected = values @ np.concatenate([dequantize("q4_0", raw[n], 32) for n in "ab"]).T
    np.testing.assert_allclose(interpret(g, raw, {"x": values}, {}, {"T": 1})["y"], expected, rtol=1e-5, atol=1e-5)


def test_a_weight_that_two_nodes_stand_for_is_looked_up_again_only_after_its_last_use():
    g = Graph("g", symbols=("T",))
    x = g.input("x", "embd", tt("f32", 32, T))
    first = g.add("mul_mat", g.weight("w", tt("q8_0", 32, 32)), x)
    g.outputs["y"] = g.add("mul_mat", g.weight("w", tt("q8_0", 32, 32)), first)
    raw, asked, values = quantize("q8_0", normal(32, 32)), [], normal(1, 32)
    out = interpret(g, lambda name: asked.append(name) or raw, {"x": values}, {}, {"T": 1})["y"]
    w = dequantize("q8_0", raw, 32).astype(np.float64)
    np.testing.assert_allclose(out, values @ w.T @ w.T, rtol=1e-4, atol=1e-4)
    assert asked == ["w", "w"]


def test_trace_sees_every_node_in_order():
    g = layer_graph()
    seen = []
    interpret(g, weights_for(g), input_values(), {}, ENV, trace=lambda node, value: seen.append((node, value)))
    assert [n for n, _ in seen] == g.nodes
    for node, value in seen:
        array = value.array if isinstance(value, Stored) else value
        assert array.shape == node.type.shape(ENV), node


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    x = np.float32([1.0, 1.00390625, 1.01171875, -0.0, np.inf, np.nan, 3.4e38])
    got = decode(encode(x, "bf16").data, "bf16")
    assert got[:5].tolist() == [1.0, 1.0, 1.015625, -0.0, np.inf]
    assert np.isnan(got[5]) and np.isinf(got[6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "Input 'x' is not given; given are none"),
        ({"x": np.zeros((3, 256))}, r"Input 'x' has shape \(3, 256\); f32\[256, T\] means \(2, 256\) here"),
        ({"w": None}, "Weight 'w' is not given"),
        ({"w": np.zeros(7, np.uint8)}, r"Weight 'w': 7 bytes are given where f32\[256, 3\] takes 3072"),
        ({"w": np.zeros(7, np.float32)}, "does not fit"),
        ({"w": np.array(["a"])}, "cannot become f32"),
        ({"env": {}}, "needs a value for symbol T; known symbols: none"),
    ],
)
def test_what_is_missing_is_named_with_the_node(change, message):
    g = product_graph("f32")
    weights = {"w": change.get("w", normal(3, 256))}
    values = {"x": change.get("x", normal(2, 256))}
    weights, values = ({k: v for k, v in d.items() if v is not None} for d in (weights, values))
    with pytest.raises(IRError, match=message) as caught:
        interpret(g, weights, values, {}, change.get("env", {"T": 2}))
    assert "  > %" in str(caught.value)


def test_indices_outside_are_refused():
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    g.outputs["k"] = g.add("set_rows", g.cache("k", tt("f32", 32, C)), i["embd"], i["kv_slots"])
    with pytest.raises(IRError, match="set_rows: cell 8 does not exist; there are 8"):
        interpret(g, {}, input_values() | {"kv_slots": np.array([0, 8, 1])}, {}, ENV)
    with pytest.raises(IRError, match="Input 'tokens' holds float64; integers are needed"):
        interpret(g, {}, input_values() | {"tokens": np.array([0.5, 1, 2])}, {}, ENV)


def test_token_ranges_outside_the_cell_list_are_refused():
    g = layer_graph()
    with pytest.raises(IRError, match=r"token 2 sees entries 0..6 of a cell list with 5 entries"):
        interpret(g, weights_for(g), input_values() | {"visible": np.array([[0, 0, 3], [0, 1, 4], [0, 0, 6]])}, {}, ENV)
