"""Attention over two kinds of rows: what fuses, what must not, and that the numbers stay what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.formats.quants.quantize import quantize
from ggufc.ir import Graph, Node, Sym, TensorType, interpret, verify
from ggufc.passes import PassManager

T, C, KV, R, E4, V4 = (Sym(s) for s in ("T", "C", "KV", "R", "E4", "V4"))
PIPELINE = "canonicalize,fuse-sum-rows-ext,fuse-indexer-topk,fuse-sparse-attention,fuse-attention,cse,dce"
ROW = 32


class TwoKinds:
    """Rows of a cache and rows of another kind: learned ones that all tokens see, or listed ones of a second cache."""

    def __init__(self, learned: bool, dtype: str, n_value: int, chosen: int = 0, sinks: bool = False, broken: str = "") -> None:
        self.n_value, self.chosen, self.broken, self.dtype = n_value, chosen, broken, dtype
        g = self.g = Graph("g", symbols=("T", "O", "C", "KV", "R", "C4", "E4", "V4"))
        self.x = g.input("embd", "embd", TensorType("f32", (5 * ROW, T)))
        self.q = g.add("concat", self.heads(20, 0), self.heads(12, 60), dim=0) if learned else self.heads(ROW, 0)
        first = self.cached("blk.0.k", C, KV, g.input("kv_cells", "kv_cells", TensorType("i32", (R,))), "visible")
        second = self.learned() if learned else self.listed()
        kinds = [second, first] if learned else [first, second]
        s = g.add("concat", *(k[0] for k in kinds), dim=0)
        masks = g.add("concat", *(k[1] for k in kinds), dim=0)
        logits = [g.weight("sinks", TensorType("f32", (3,)))] if sinks else []
        p = g.add("soft_max", s, masks, *logits, scale=0.3)
        total, parts, offset = p.type.ne[0], [], 0
        for n in (k[0].type.ne[0] for k in kinds):
            parts.append(g.add("view", p, ne=(n, T, 3), nb=(1, total, total * T), offset=offset))
            offset = n
        if broken == "probabilities":
            g.outputs["p"] = g.add("cont", parts[0])
        products = [g.add("mul_mat", k[2], part) for k, part in zip(kinds, parts)]
        g.outputs["y"] = g.add("add", *products, name="kqv")
        verify(g)

    def heads(self, width: int, start: int) -> Node:
        return self.g.add("view", self.x, ne=(width, T, 3), nb=(1, 5 * ROW, width), offset=start)

    def cached(self, name: str, rows: Any, visible: Any, cells: Node, spans: str) -> tuple[Node, Node, Node]:
        """Scores, mask and values over a cache."""
        g = self.g
        vis = g.add("input", name=spans, kind=spans, ratio=4 if spans != "visible" else 0, type=TensorType("i32", (3, T)))
        cache = g.cache(name, TensorType(self.dtype, (ROW, rows)))
        keys = g.add("view", cache, ne=(ROW, visible), nb=(1, ROW), offset=0)
        if self.broken == "superseded" and spans == "visible":
            slots = g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
            scores = self.scores(keys)
            new = g.add("set_rows", cache, g.add("cont", g.add("view", self.x, ne=(ROW, T), nb=(1, 5 * ROW))), slots)
            values = g.add("view", new, ne=(visible, self.n_value), nb=(ROW, 1), offset=0)
            return scores, g.add("kq_mask", cells, vis, ne0=visible), values
        keys = g.add("cast", keys, dtype="f32") if keys.type.quantised else keys
        start = 1 if self.broken == "values" else 0
        values = g.add("view", keys, ne=(visible, self.n_value), nb=(ROW, 1), offset=start)
        mask = g.add("kq_mask", cells, vis, ne0=visible)
        if self.chosen and spans != "visible":
            mask = self.choice(mask, visible)
        return self.scores(keys), mask, values

    def scores(self, keys: Node) -> Node:
        return self.g.add("mul_mat", keys, self.q)

    def listed(self) -> tuple[Node, Node, Node]:
        cells = self.g.add("input", name="entry_cells", kind="entry_cells", ratio=4, type=TensorType("i32", (E4,)))
        return self.cached("blk.0.entries", Sym("C4"), V4, cells, "entry_visible")

    def choice(self, mask: Node, visible: Any) -> Node:
        g = self.g
        keys = g.add("view", g.cache("blk.0.indexer_k", TensorType("f16", (8, Sym("C4")))), ne=(8, visible), nb=(1, 8), offset=0)
        q = g.add("view", self.x, ne=(8, T, 2), nb=(1, 5 * ROW, 8), offset=100)
        w = g.add("cont", g.add("view", self.x, ne=(2, T), nb=(1, 5 * ROW), offset=120))
        w = g.add("permute", g.add("reshape", w, ne=(1, 2, T)), axes=(0, 2, 1))
        s = g.add("mul", g.add("relu", g.add("mul_mat", keys, q)), w)
        s = g.add("sum_rows", g.add("cont", g.add("permute", s, axes=(1, 2, 0))))
        top = g.add("top_k", g.add("add", g.add("reshape", s, ne=(visible, T)), mask), k=self.chosen)
        hidden = g.add("fill", mask, value=-1e30)
        return g.add("add", mask, g.add("blend", hidden, top, value=0.0))

    def learned(self) -> tuple[Node, Node, Node]:
        g = self.g
        latents, rest = (
            g.weight("latents", TensorType("f32", (self.n_value, 8))),
            g.weight("rest", TensorType("f32", (ROW - self.n_value, 8))),
        )
        rows = g.add("concat", latents, rest, dim=0)
        other = g.weight("other", latents.type) if self.broken == "other values" else latents
        values = g.add("cont", g.add("transpose", other))
        s = self.scores(rows)
        head = g.add("view", s, ne=(8, T), nb=(1, 8), offset=0)
        return s, g.add("fill", head, value=-1.0 if self.broken == "bias" else 0.0), values


def arguments(g: Graph, seed: int) -> Any:
    """Random weights, inputs and caches, and the symbols."""
    rng = np.random.default_rng(seed)
    env = {"T": 4, "O": 1, "C": 48, "KV": 32, "R": 25, "C4": 40, "E4": 18, "V4": 24}
    inputs = {
        "embd": rng.normal(size=(4, 5 * ROW)).astype(np.float32),
        "kv_cells": np.concatenate([np.sort(rng.permutation(32)[:15]), np.sort(rng.permutation(32)[:10])]).astype(np.int32),
        "visible": np.array([[0, 0, 15], [15, 2, 9], [0, 4, 4], [15, 0, 1]], np.int32),
        "entry_cells": np.concatenate([np.sort(rng.permutation(24)[:8]), np.sort(rng.permutation(24)[:10])]).astype(np.int32),
        "entry_visible": np.array([[0, 0, 8], [8, 0, 10], [0, 0, 3], [8, 0, 0]], np.int32),
        "kv_slots": np.arange(4, dtype=np.int32),
    }
    names = {n.attrs["name"] for n in g.inputs()}
    weights = {n.attrs["tensor"]: rng.normal(size=tuple(reversed(n.type.ne))).astype(np.float32) for n in g.find("weight")}
    caches: dict[str, np.ndarray] = {}
    for node in g.find("cache"):
        rows = rng.normal(size=(48 if node.ne[1] == C else 40, int(node.ne[0]))).astype(np.float32)
        caches[node.attrs["name"]] = quantize(node.dtype, rows) if node.type.quantised else rows
    return weights, {k: v for k, v in inputs.items() if k in names}, caches, env


def evaluate(g: Graph, seed: int) -> dict[str, np.ndarray]:
    return interpret(g, *arguments(g, seed))


def fuse(g: Graph, pipeline: str = PIPELINE) -> int:
    fired = sum(record.counts.get("sparse-attention", 0) for record in PassManager.parse(pipeline).run(g))
    verify(g)
    return fired


FORMS = st.one_of(
    st.fixed_dictionaries({"learned": st.just(True), "dtype": st.sampled_from(["f32", "f16"]), "n_value": st.sampled_from([1, 20, 31])}),
    st.fixed_dictionaries(
        {
            "learned": st.just(False),
            "dtype": st.sampled_from(["f32", "f16", "q8_0"]),
            "n_value": st.sampled_from([20, 32]),
            "chosen": st.sampled_from([0, 3, 23]),
            "sinks": st.booleans(),
        }
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FORMS, st.integers(0, 1000))
def test_fused_equals_unfused(form: dict[str, Any], seed: int) -> None:  # S56, S91
    built = TwoKinds(**form).g
    final = built.clone()
    assert fuse(final) == 1 and not final.find("soft_max")
    assert not [n for n in final.nodes if n.type.symbols & {"KV", "V4"}]
    assert bool(final.find("indexer_topk")) is bool(form.get("chosen"))
    np.testing.assert_allclose(evaluate(final, seed)["y"], evaluate(built, seed)["y"], rtol=1e-5, atol=1e-5)


def test_a_choice_made_elsewhere_is_read_off_the_mask() -> None:
    built = TwoKinds(False, "f16", 32, chosen=5).g
    final = built.clone()
    assert fuse(final, PIPELINE.replace("fuse-indexer-topk,", "")) == 1
    assert len(final.find("mask_to_index")) == 1
    np.testing.assert_allclose(evaluate(final, 1)["y"], evaluate(built, 1)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("broken", "learned"),
    [("bias", True), ("other values", True), ("values", False), ("probabilities", False), ("superseded", False), ("superseded", True)],
)
def test_what_only_looks_like_it_is_left_alone(broken: str, learned: bool) -> None:
    built = TwoKinds(learned, "f32", 20, broken=broken).g
    final = built.clone()
    assert fuse(final) == 0 and final.find("soft_max")
    for name, want in evaluate(built, 2).items():
        np.testing.assert_allclose(evaluate(final, 2)[name], want, rtol=1e-5, atol=1e-5)


def test_learned_rows_beside_sinks_are_left_alone() -> None:
    """The operator has no place for both."""
    final = TwoKinds(True, "f32", 20, sinks=True).g
    assert fuse(final) == 0
