"""Expert routing: every gate and what is done with the weights; what only looks like it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.ir import Graph, Node, Sym, TensorType, interpret, verify
from ggufc.passes import PassManager

T = Sym("T")
RULES = ("expert-choice", "expert-weights", "weights-normalised", "weights-softmax", "weights-scaled")


def routed(gate: str, bias: bool, after: str, scale: float, given_ids: bool = False, broken: str = "") -> Graph:
    g = Graph("g", symbols=("T",))
    x = g.input("embd", "embd", TensorType("f32", (9, T)))
    scores = g.add("scale", x, s=2.0, name="scores")
    p: Node = scores
    if gate == "softmax":
        p = g.add("soft_max", scores, scale=0.5 if broken == "temperature" else 1.0)
    elif gate == "sigmoid":
        p = g.add("sigmoid", scores)
    elif gate == "sqrt_softplus":
        p = g.add("sqrt", g.add("softplus", scores))
    choice = g.add("add", p, g.weight("bias", TensorType("f32", (9,)))) if bias else p
    if given_ids:
        table = g.weight("table", TensorType("i32", (3, 20)))
        ids = g.add("get_rows", table, g.input("tokens", "tokens", TensorType("i32", (T,))))
    else:
        ids = g.add("top_k", choice, k=3)
    looked_up = g.add("tanh", p) if broken == "other" else p
    w = g.add("reshape", g.add("get_rows", g.add("reshape", looked_up, ne=(1, 9, T)), ids), ne=(3, T))
    if broken == "read":
        g.outputs["read"] = g.add("neg", w)
    if after == "sum":
        w = g.add("div", w, g.add("sum_rows", w))
    elif after == "softmax":
        w = g.add("soft_max", w, scale=1.0)
    g.outputs["w"] = g.add("scale", w, s=scale) if scale != 1.0 else w
    if not given_ids:
        g.outputs["ids"] = ids
    verify(g)
    return g


def fuse(g: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in PassManager.parse("canonicalize,fuse-routing,cse,dce").run(g):
        counts |= {rule: n for rule, n in record.counts.items() if n and rule in RULES}
    verify(g)
    return counts


def arguments(built: Graph, seed: int) -> Any:
    """Random weights and inputs, no caches, and the symbols."""
    rng = np.random.default_rng(seed)
    inputs = {"embd": rng.normal(size=(5, 9)).astype(np.float32), "tokens": rng.integers(0, 20, 5).astype(np.int32)}
    inputs = {n.attrs["name"]: inputs[n.attrs["name"]] for n in built.inputs()}
    weights = {"bias": rng.normal(size=9).astype(np.float32), "table": rng.integers(0, 9, (20, 3)).astype(np.int32)}
    return weights, inputs, {}, {"T": 5, "O": 1}


def check(built: Graph, final: Graph, seed: int) -> None:
    want, got = (interpret(g, *arguments(built, seed)) for g in (built, final))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["none", "softmax", "sigmoid", "sqrt_softplus"]), st.booleans(), st.sampled_from(["", "sum", "softmax"]),
    st.sampled_from([1.0, 2.5]), st.integers(0, 99),
)  # fmt: skip
def test_fused_equals_unfused(gate: str, bias: bool, after: str, scale: float, seed: int) -> None:
    built = routed(gate, bias, after, scale)
    final = built.clone()
    rules = {"expert-choice": 1, "expert-weights": 1}
    rules |= {"weights-normalised": 1} if after == "sum" else {"weights-softmax": 1} if after else {}
    assert fuse(final) == rules | ({"weights-scaled": 1} if scale != 1.0 else {})
    assert {n.op.name for n in final.nodes if not n.is_leaf and not n.is_view} == {"scale", "expert_choice", "expert_weights"}
    check(built, final, seed)


def test_experts_chosen_by_a_table_keep_their_ids() -> None:
    built = routed("sqrt_softplus", False, "sum", 1.5, given_ids=True)
    final = built.clone()
    assert fuse(final) == {"expert-weights": 1, "weights-normalised": 1, "weights-scaled": 1}
    check(built, final, 1)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("temperature", {"expert-choice": 1, "expert-weights": 1, "weights-normalised": 1}),  # its own gate: the softmax stays apart
        ("other", {}),
        ("read", {"expert-choice": 1, "expert-weights": 1}),
    ],
)
def test_what_only_looks_like_it_keeps_its_meaning(broken: str, expected: dict[str, int]) -> None:
    built = routed("softmax", False, "sum", 1.0, broken=broken)
    final = built.clone()
    assert fuse(final) == expected
    check(built, final, 2)


def test_a_lookup_of_ungated_numbers_is_left_alone() -> None:
    final = routed("none", False, "", 1.0, given_ids=True)
    assert fuse(final) == {}
