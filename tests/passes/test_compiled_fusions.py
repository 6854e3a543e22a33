"""What each sparse-family pass makes of a graph computes the same in native code as the unfused graph does: random dimensions and
attributes, both forms compiled into one artifact, and both with the same bits on one thread and on three.

The interpreter's half of these properties is in the files of the passes. Tolerances are those of the roundings a fusion may move; indices
of what was chosen are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stream_graphs
import test_fuse_routing
import test_fuse_sparse_attention
import test_passes_sparse
from compiled_graph import Arguments, compile_graphs, run
from ggufc.ir import Graph, Sym, TensorType
from ggufc.passes import PassManager

T = Sym("T")
Rng = np.random.Generator
Built = tuple[Graph, Callable[[Graph, int], Arguments]]


def pick(rng: Rng, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def indexer(rng: Rng) -> Built:
    graph = test_passes_sparse.Sparse(
        d=pick(rng, 8, 32, 64), heads=int(rng.integers(1, 6)), k=int(rng.integers(1, 32)), sinks=pick(rng, True, False), ext=True,
        swap=pick(rng, True, False), dtype=pick(rng, "f32", "f16", "bf16"), ties=pick(rng, "lowest", "highest"), row=32,
        rank=pick(rng, 16, 32),
    ).g  # fmt: skip
    return graph, test_passes_sparse.arguments


def sums(rng: Rng) -> Built:
    """Sums over a dimension that a permuted copy brings to the front."""
    g = Graph("g", symbols=("T", "O"))
    ne = tuple(int(n) for n in rng.integers(1, 40, 3))
    x = g.add("relu", g.add("reshape", g.input("embd", "embd", TensorType("f32", (int(np.prod(ne)), T))), ne=(*ne, T)), name="x")
    axes = pick(rng, (1, 0, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3), (2, 0, 1, 3), (3, 1, 2, 0))
    total = g.add("sum_rows", g.add("cont", g.add("permute", x, axes=axes)), name="total")
    g.outputs["y"] = g.add("scale", total, s=1.0, b=0.5, name="y")

    def arguments(graph: Graph, seed: int) -> Arguments:
        width = int(np.prod(ne))
        return {}, {"embd": np.random.default_rng(seed).normal(size=(5, width)).astype(np.float32)}, {}, {"T": 5, "O": 1}

    return g, arguments


def streams(rng: Rng) -> Built:
    s = pick(rng, 2, 8, 4)  # four of them with the first seed
    graph = stream_graphs.Streams(
        e=pick(rng, 32, 64), s=s, iterations=int(rng.integers(1, 5)), eps=pick(rng, 0.0, 1e-6, 1e-3), chosen=pick(rng, True, False)
    ).g
    return graph, stream_graphs.arguments


def routing(rng: Rng) -> Built:
    gate, after = pick(rng, "none", "softmax", "sigmoid", "sqrt_softplus"), pick(rng, "", "sum", "softmax")
    return test_fuse_routing.routed(gate, pick(rng, True, False), after, pick(rng, 1.0, 2.5)), test_fuse_routing.arguments


def attention(rng: Rng) -> Built:
    if rng.integers(2):
        form = {"learned": True, "dtype": pick(rng, "f32", "f16"), "n_value": pick(rng, 16, 20, 31)}
    else:
        dtype, n_value = pick(rng, ("f32", 20), ("f16", 20), ("f16", 32), ("q8_0", 32))  # quantised values are whole blocks
        form = {"learned": False, "dtype": dtype, "n_value": n_value, "chosen": pick(rng, 0, 3, 23), "sinks": pick(rng, True, False)}
    return test_fuse_sparse_attention.TwoKinds(**form).g, test_fuse_sparse_attention.arguments


FUSIONS: dict[str, tuple[Callable[[Rng], Built], str, str, float]] = {
    "fuse-indexer-topk": (indexer, "fuse-sum-rows-ext,fuse-indexer-topk,fuse-attention", "indexer_topk", 1e-5),
    "fuse-sum-rows-ext": (sums, "fuse-sum-rows-ext", "sum_rows_ext", 1e-6),
    "fuse-hyper-connections": (streams, "fuse-sum-rows-ext,fuse-hyper-connections", "hc_post", 1e-5),
    "fuse-routing": (routing, "fuse-routing", "expert_weights", 1e-5),
    "fuse-sparse-attention": (attention, "fuse-sum-rows-ext,fuse-indexer-topk,fuse-sparse-attention", "sparse_attn", 1e-5),
}
"""Pass -> what builds a graph for it, the passes that run (with those it needs), the operator it makes, and the tolerance."""

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FUSIONS)
def test_fused_code_equals_unfused_code(name: str, seed: int, tmp_path: Path) -> None:  # S47, S55, S56, S60, S61, S63, S153
    build, passes, operator, tolerance = FUSIONS[name]
    graph, arguments_of = build(np.random.default_rng([seed, list(FUSIONS).index(name)]))
    forms = {"unfused": graph.clone(), "fused": graph.clone()}
    PassManager.parse("hoist,dce").run(forms["unfused"])
    PassManager.parse(f"canonicalize,{passes},cse,hoist,cse,dce").run(forms["fused"])
    assert forms["fused"].find(operator) and not forms["unfused"].find(operator)
    arguments = arguments_of(graph, seed)
    artifact = compile_graphs(forms, arguments[0], tmp_path)
    found = {form: run(artifact, form, arguments) for form in forms}
    for form, outputs in found.items():
        again = run(artifact, form, arguments, n_threads=3)
        assert all(np.array_equal(outputs[key].view(np.uint32), again[key].view(np.uint32)) for key in outputs), form
    want = found["unfused"]
    assert want.keys() == found["fused"].keys()
    for key, values in found["fused"].items():
        if graph.outputs[key].dtype == "i32":
            assert np.array_equal(values.view(np.int32), want[key].view(np.int32)) and values.view(np.int32).max() > 0
            continue
        assert np.isfinite(values).all() and np.abs(values).max() > 1e-3
        np.testing.assert_allclose(values, want[key], rtol=tolerance, atol=tolerance * float(np.abs(want[key]).max()))


def test_equal_scores_fall_to_the_first_or_the_last_rows(tmp_path: Path) -> None:  # S63, S64
    """Without weights of heads all scores are zero: the graph's rule of ties alone chooses, and compiled choices obey it."""
    forms, arguments = {}, {}
    for ties in ("lowest", "highest"):
        graph = test_passes_sparse.Sparse(d=32, heads=3, k=4, sinks=False, ties=ties, row=32, rank=16).g
        weights, inputs, caches, env = test_passes_sparse.arguments(graph, 6)
        inputs["embd"][:, 96:99] = 0
        arguments[ties] = weights, inputs, caches, env
        forms[ties] = graph.clone()
        PassManager.parse("canonicalize,fuse-sum-rows-ext,fuse-indexer-topk,fuse-attention,cse,hoist,cse,dce").run(forms[ties])
        (choice,) = forms[ties].find("indexer_topk")
        forms[ties].outputs["chosen"] = choice
    artifact = compile_graphs(forms, {}, tmp_path)
    found = {ties: run(artifact, ties, arguments[ties]) for ties in forms}
    _, inputs, _, _ = arguments["lowest"]
    for t, (base, lo, hi) in enumerate(inputs["visible"]):
        seen = np.sort(inputs["kv_cells"][base + lo : base + hi]).tolist()
        for ties, best in (("lowest", seen[:4]), ("highest", seen[-4:])):
            row = found[ties]["chosen"].view(np.int32).reshape(-1, 4)[t]
            assert sorted(c for c in row.tolist() if c >= 0) == best, (ties, t)
    assert not np.array_equal(found["lowest"]["y"], found["highest"]["y"])


FORMULAS = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x)))}


@pytest.mark.parametrize("gate", FORMULAS)
def test_gates_hold_their_formula_from_minus_to_plus_eighty(gate: str, tmp_path: Path) -> None:  # S48, S88
    """Fused and as single operators; gates of single experts, and normalised ones. The graph doubles its input."""
    built = {f"{form} {after}": test_fuse_routing.routed(gate, True, after, 1.0) for form in ("fused", "unfused") for after in ("", "sum")}
    for name, graph in built.items():
        PassManager.parse("canonicalize,fuse-routing,cse,dce" if name.startswith("fused") else "hoist,dce").run(graph)
        assert bool(graph.find("expert_weights")) == name.startswith("fused")
    rng = np.random.default_rng(3)
    scores = np.concatenate([[[-80.0] * 9, [80.0] * 9, np.linspace(-80, 80, 9)], rng.uniform(-80, 80, (5, 9)), rng.normal(size=(8, 9))])
    bias = (0.29 * rng.permutation(9)).astype(np.float32)  # no two gates of 0 or 1 tie with it
    arguments: Arguments = ({"bias": bias}, {"embd": (scores / 2).astype(np.float32)}, {}, {"T": len(scores), "O": 1})
    artifact = compile_graphs(built, arguments[0], tmp_path)
    p = FORMULAS[gate](np.float64(np.float32(scores / 2)) * 2)
    best = np.argsort(-(p + bias), axis=1, kind="stable")[:, :3]
    chosen = np.take_along_axis(p, best, axis=1)
    for name in built:
        found = run(artifact, name, arguments)
        assert np.array_equal(found["ids"].view(np.int32).reshape(-1, 3), best), name
        weights = found["w"].reshape(-1, 3)
        if name.endswith("sum"):
            np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True), rtol=0, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_allclose(weights, chosen, rtol=1e-6, atol=0, err_msg=name)
