"""Attention sinks, and values that share the rows of the keys: the unfused sequence and ``flash_attn`` mean the same."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.ir import Graph, IRError, interpret, parse_graph, print_graph, verify
from ir_cases import ENV, KV, SYMBOLS, C, T, input_values, inputs, tt

RANK, ROW, HEADS = 6, 8, 4
SINKS = np.array([-3.0, 0.0, 0.5, 4.0], np.float32)


def attention_graph(with_sinks: bool) -> Graph:
    """Queries against whole rows of one cache whose first RANK numbers are the values: unfused, and fused."""
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    q = g.add("reshape", i["embd"], ne=(ROW, HEADS, T))
    rows = g.cache("blk.0.k", tt("f16", ROW, C))
    sinks = g.weight("sinks", tt("f32", HEADS)) if with_sinks else None
    kk = g.add("view", rows, ne=(ROW, KV, 1), nb=(1, ROW, ROW))
    vv = g.add("view", rows, ne=(KV, RANK, 1), nb=(ROW, 1, ROW))
    mask = g.add("kq_mask", i["kv_cells"], i["visible"], ne0=KV)
    p = g.add("soft_max", g.add("mul_mat", kk, g.add("permute", q, axes=(0, 2, 1, 3))), mask, sinks, scale=0.4)
    g.outputs["unfused"] = g.add("cont", g.add("permute", g.add("mul_mat", vv, p), axes=(0, 2, 1, 3)))
    v = g.add("view", rows, ne=(RANK, C), nb=(1, ROW))
    g.outputs["fused"] = g.add("flash_attn", q, rows, v, i["kv_cells"], i["visible"], sinks, scale=0.4, n_head_kv=1)
    verify(g)
    return g


def run(g: Graph) -> dict[str, np.ndarray]:
    rows = np.random.default_rng(3).standard_normal((ENV["C"], ROW)).astype(np.float16)
    return interpret(g, {"sinks": SINKS}, input_values(), {"blk.0.k": rows}, ENV)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_fused_equals_unfused(with_sinks: bool) -> None:
    g = attention_graph(with_sinks)
    out = run(g)
    assert out["fused"].shape == (ENV["T"], HEADS, RANK)
    np.testing.assert_allclose(out["fused"], out["unfused"], rtol=1e-5, atol=1e-6)
    text = print_graph(g)
    back = parse_graph(text)
    assert print_graph(back) == text and np.array_equal(run(back)["fused"], out["fused"])


def test_a_sink_takes_its_share_of_every_head() -> None:
    """Visible cells share what the sink leaves: ``e^s / (e^sink + sum of e^s)`` per head and token."""
    g = Graph("g", symbols=SYMBOLS)
    scores = np.random.default_rng(1).standard_normal((HEADS, 2, 5)).astype(np.float32)
    mask = np.array([[0, 0, -np.inf, 0, -np.inf], [-np.inf] * 5], np.float32)
    a, m, s = g.weight("a", tt("f32", 5, 2, HEADS)), g.weight("m", tt("f32", 5, 2)), g.weight("s", tt("f32", HEADS))
    g.outputs["p"] = g.add("soft_max", a, m, s, scale=0.5)
    p = interpret(g, {"a": scores, "m": mask, "s": SINKS}, {}, {}, {"T": 1, "O": 1, "C": 1, "KV": 1, "R": 1})["p"]
    e = np.exp(scores[:, 0, [0, 1, 3]] * 0.5)
    np.testing.assert_allclose(p[:, 0, [0, 1, 3]], e / (e.sum(-1) + np.exp(SINKS))[:, None], rtol=1e-5)
    # A token that sees nothing gives everything to the sink.
    assert not p[:, 1].any() and not p[:, 0, [2, 4]].any()


def test_huge_sinks_do_not_overflow() -> None:
    g = attention_graph(True)
    rows = np.zeros((ENV["C"], ROW), np.float16)
    out = interpret(g, {"sinks": np.float32([1e30, -1e30, 0, 0])}, input_values(), {"blk.0.k": rows}, ENV)
    assert np.isfinite(out["fused"]).all() and not out["fused"][:, 0].any()


def test_sinks_need_one_logit_per_head() -> None:
    g = attention_graph(False)
    soft_max, flash = g.find("soft_max")[0], g.find("flash_attn")[0]
    wrong = g.weight("w", tt("f32", HEADS - 1))
    with pytest.raises(IRError, match=r"soft_max: sinks f32\[3\] must hold one logit for each of the 4 heads"):
        g.add("soft_max", *soft_max.operands, wrong)
    with pytest.raises(IRError, match=r"flash_attn: sinks f32\[3\] must hold one logit for each of the 4 heads"):
        g.add("flash_attn", *flash.operands, wrong, scale=1.0, n_head_kv=1)
