"""Small graphs for the pass tests: a transformer in the spelling of the builders, and what is needed to evaluate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ggufc.ir import Graph, Node, Sym, TensorType, interpret
from ggufc.passes import PassManager

T, O, C, KV, R = (Sym(s) for s in ("T", "O", "C", "KV", "R"))
SYMBOLS = ("T", "O", "C", "KV", "R")
CELLS = 24


def f32(*ne: Any) -> TensorType:
    return TensorType("f32", ne)


def graph(name: str = "main") -> Graph:
    return Graph(name, "test", SYMBOLS)


@dataclass(frozen=True)
class Tiny:
    """Options of a tiny transformer; every field is something a pass has to cope with."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ff: int = 32
    dtype: str = "f32"
    v_dtype: str = ""
    cache: str = "f16"
    act: str = "silu"
    bias: bool = False
    head_norms: bool = False
    softcap: str = ""
    factors: bool = False
    window: int = 0
    rope: str = "neox"
    tied: bool = False

    @property
    def embd(self) -> int:
        return 32


def tiny_model(m: Tiny) -> Graph:
    """The unfused graph in the builders' spelling (docs/architecture.md section 4)."""
    g = graph("decode")
    d, h, kv = m.head_dim, m.heads, m.kv_heads
    g.input("tokens", "tokens", TensorType("i32", (T,)))
    positions = g.input("positions", "positions", TensorType("i32", (T,)))
    out_ids = g.input("out_ids", "out_ids", TensorType("i32", (O,)))
    slots = g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
    cells = g.input("kv_cells", "kv_cells", TensorType("i32", (R,)))
    visible = g.input("visible", "visible", TensorType("i32", (3, T)), window=m.window)
    mask = g.add("kq_mask", cells, visible, name="kq_mask", ne0=KV)
    embd = g.weight("token_embd.weight", TensorType(m.dtype, (m.embd, 48)))
    factors = [g.weight("rope_freqs.weight", f32(d // 2))] if m.factors else []
    x = g.add("get_rows", embd, g.nodes[0], name="embd")

    def norm(x: Node, name: str, width: int) -> Node:
        normed = g.add("rms_norm", x, name=f"{name}.rms", eps=1e-5)
        return g.add("mul", normed, g.weight(f"{name}.weight", f32(width)), name=name)

    def linear(x: Node, name: str, n_in: int, n_out: int, dtype: str = "", bias: bool = False) -> Node:
        y = g.add("mul_mat", g.weight(f"{name}.weight", TensorType(dtype or m.dtype, (n_in, n_out))), x, name=name)
        return g.add("add", y, g.weight(f"{name}.bias", f32(n_out)), name=f"{name}.biased") if bias else y

    def heads(y: Node, name: str, n: int) -> Node:
        y = g.add("reshape", y, name=f"{name}.heads", ne=(d, n, T))
        if m.head_norms:
            y = norm(y, f"{name}_norm", d)
        return g.add("rope", y, positions, *factors, name=f"{name}.rope", mode=m.rope, n_dims=d, base=10000.0)

    for i in range(m.layers):
        p = f"blk.{i}"
        a = norm(x, f"{p}.attn_norm", m.embd)
        q = heads(linear(a, f"{p}.attn_q", m.embd, d * h, bias=m.bias), f"{p}.attn_q", h)
        k = heads(linear(a, f"{p}.attn_k", m.embd, d * kv, bias=m.bias), f"{p}.attn_k", kv)
        v = linear(a, f"{p}.attn_v", m.embd, d * kv, m.v_dtype, bias=m.bias)
        k_rows = g.add("reshape", k, name=f"{p}.attn_k.rows", ne=(d * kv, T))
        kc = g.add("set_rows", g.cache(f"{p}.k", TensorType(m.cache, (d * kv, C))), k_rows, slots, name=f"{p}.k.store")
        vc = g.add("set_rows", g.cache(f"{p}.v", TensorType(m.cache, (d * kv, C))), v, slots, name=f"{p}.v.store")
        if vc.type.quantised:
            vc = g.add("cast", vc, name=f"{p}.v.f32", dtype="f32")
        kk = g.add("view", kc, name=f"{p}.k.view", ne=(d, KV, kv), nb=(1, d * kv, d))
        vv = g.add("view", vc, name=f"{p}.v.view", ne=(KV, d, kv), nb=(d * kv, 1, d))
        scores = g.add("mul_mat", kk, g.add("permute", q, name=f"{p}.q.permuted", axes=(0, 2, 1, 3)), name=f"{p}.kq")
        scale = d**-0.5
        if m.softcap:
            if m.softcap == "scaled":
                scores, scale = g.add("scale", scores, name=f"{p}.kq.scaled", s=scale), 1.0
            else:
                scale = 1.0
            scores = g.add("softcap", scores, name=f"{p}.kq.capped", cap=2.0)
        probabilities = g.add("soft_max", scores, mask, name=f"{p}.kq_soft_max", scale=scale)
        o = g.add("permute", g.add("mul_mat", vv, probabilities, name=f"{p}.kqv"), name=f"{p}.kqv.permuted", axes=(0, 2, 1, 3))
        o = g.add("reshape", g.add("cont", o, name=f"{p}.kqv.cont"), name=f"{p}.kqv_out", ne=(d * h, T))
        if i == m.layers - 1:
            o = g.add("get_rows", o, out_ids, name=f"{p}.attn_rows")
            x = g.add("get_rows", x, out_ids, name=f"{p}.rows")
        x = g.add("add", linear(o, f"{p}.attn_output", d * h, m.embd), x, name=f"{p}.attn_residual")
        f = norm(x, f"{p}.ffn_norm", m.embd)
        gate = g.add(m.act, linear(f, f"{p}.ffn_gate", m.embd, m.ff, bias=m.bias), name=f"{p}.ffn_act")
        hidden = g.add("mul", gate, linear(f, f"{p}.ffn_up", m.embd, m.ff, bias=m.bias), name=f"{p}.ffn_hidden")
        x = g.add("add", linear(hidden, f"{p}.ffn_down", m.ff, m.embd), x, name=f"{p}.ffn_residual")
    x = norm(x, "output_norm", m.embd)
    matrix = embd if m.tied else g.weight("output.weight", TensorType(m.dtype, (m.embd, 48)))
    g.outputs["logits"] = g.add("mul_mat", matrix, x, name="logits")
    return g


@st.composite
def tiny_models(draw: st.DrawFn) -> Tiny:
    """Transformers over the whole range of options."""
    # D*H is a multiple of 32, so that the output projection may be quantised
    heads, kv_heads, head_dim = draw(st.sampled_from([(1, 1, 32), (2, 1, 32), (2, 1, 16), (2, 2, 16), (4, 2, 8), (4, 1, 8), (8, 2, 4)]))
    return Tiny(
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=draw(st.sampled_from(["f32", "f16", "q8_0", "q4_0"])),
        v_dtype=draw(st.sampled_from(["", "f16"])),
        cache=draw(st.sampled_from(["f16", "f32"] if head_dim < 32 else ["f16", "f32", "q8_0"])),
        act=draw(st.sampled_from(["silu", "gelu"])),
        bias=draw(st.booleans()),
        head_norms=draw(st.booleans()),
        softcap=draw(st.sampled_from(["", "plain", "scaled"])),
        factors=draw(st.booleans()),
        rope=draw(st.sampled_from(["norm", "neox"])),
        tied=draw(st.booleans()),
    )


class Weights(dict[str, np.ndarray]):
    """Random values by tensor name; the graph's weight leaves say the shapes."""

    def __init__(self, g: Graph, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        for node in g.nodes:
            if node.op.name == "weight" and node.attrs["tensor"] not in self:
                shape = tuple(reversed(node.type.ne))
                values = rng.normal(0, 0.4, shape) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
                self[node.attrs["tensor"]] = values.astype(np.float32)


def step_inputs(g: Graph, n_tokens: int, past: int, n_out: int, seed: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Inputs of one micro-batch of a sequence of which ``past`` tokens are stored, cells in scrambled order; and the symbols."""
    rng = np.random.default_rng(seed)
    scramble = np.random.default_rng(99).permutation(CELLS).astype(np.int32)
    total = past + n_tokens
    arrays: dict[str, np.ndarray] = {}
    for node in g.nodes:
        if node.op.name != "input":
            continue
        window = node.attrs["window"]
        arrays[node.attrs["name"]] = {
            "tokens": lambda: rng.integers(0, 48, n_tokens),
            "positions": lambda: np.arange(past, total),
            "out_ids": lambda: np.arange(n_tokens - n_out, n_tokens),
            "kv_slots": lambda: scramble[past:total],
            "kv_cells": lambda: scramble[:total],
            "visible": lambda w=window: np.array([[0, max(0, p + 1 - w) if w else 0, p + 1] for p in range(past, total)]),
        }[node.attrs["kind"]]().astype(np.int32)
    return arrays, {"T": n_tokens, "O": n_out, "C": CELLS, "KV": CELLS, "R": total}


def evaluate(g: Graph, steps: list[int], seed: int = 1, weights: Weights | None = None) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Logits of each micro-batch of the given sizes, and the caches at the end."""
    caches: dict[str, np.ndarray] = {}
    past, logits = 0, []
    for index, n in enumerate(steps):
        arrays, env = step_inputs(g, n, past, min(n, 1 + index % 2), seed + index)
        logits.append(interpret(g, weights if weights is not None else Weights(g, seed), arrays, caches, env)["logits"])
        past += n
    return logits, caches


def rules_fired(g: Graph, pipeline: str) -> dict[str, int]:
    """Counts of all rules that fired, by rule name."""
    counts: dict[str, int] = {}
    for record in PassManager.parse(pipeline).run(g):
        for rule, n in record.counts.items():
            counts[rule] = counts.get(rule, 0) + n
    return {rule: n for rule, n in counts.items() if n}
