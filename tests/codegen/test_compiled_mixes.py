"""Sums and joined tensors of mixed types in native code: whole graphs are lowered and evaluated, and numpy says what is right."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from compiled_graph import compile_graphs, run
from ggufc.formats.activations import round_bf16
from ggufc.ir import Graph, Node, Sym, TensorType

T, N = Sym("T"), 5
TYPES = ("f32", "f16", "bf16")


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """f32 numbers after a round trip through ``dtype``."""
    return values if dtype == "f32" else values.astype(np.float16).astype(np.float32) if dtype == "f16" else round_bf16(values)


def typed(g: Graph, node: Node, dtype: str) -> Node:
    return node if dtype == "f32" else g.add("cast", node, name=f"{node.name}.{dtype}", dtype=dtype)


def evaluated(g: Graph, embd: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Outputs on one thread and on two, which have the same bits."""
    artifact = compile_graphs({"eval": g}, {}, folder)
    one, two = (run(artifact, "eval", ({}, {"embd": embd}, {}, {"T": N, "O": 1}), n) for n in (1, 2))
    assert all(np.array_equal(one[name].view(np.uint32), two[name].view(np.uint32)) for name in one)
    return one


def test_sums_of_all_mixes_of_float_types_are_f32_sums(tmp_path: Path) -> None:  # S66
    g = Graph("g", symbols=("T", "O"))
    both = g.input("embd", "embd", TensorType("f32", (74, T)))
    x, y = (g.add("cont", g.add("view", both, name=f"{n}.v", ne=(37, T), nb=(1, 74), offset=at), name=n) for n, at in (("x", 0), ("y", 37)))
    for a, b in product(TYPES, TYPES):
        total = g.add("add", typed(g, x, a), typed(g, y, b), name=f"{a}+{b}")
        assert total.dtype == "f32"
        g.outputs[total.name] = total
    embd = np.random.default_rng(0).normal(size=(N, 74)).astype(np.float32) * np.float32(3)
    found = evaluated(g, embd, tmp_path)
    assert len(found) == 9
    for a, b in product(TYPES, TYPES):
        want = stored(embd[:, :37], a) + stored(embd[:, 37:], b)
        assert np.array_equal(found[f"{a}+{b}"].reshape(N, 37), want), (a, b)
    assert len({values.tobytes() for values in found.values()}) == 9, "every mix rounds something else"


@pytest.mark.parametrize("dtype", TYPES)
def test_joined_tensors_equal_numpy_along_every_dimension(dtype: str, tmp_path: Path) -> None:  # S67
    ne, numbers = (6, 2, 3, N), 36
    g = Graph("g", symbols=("T", "O"))
    both = g.input("embd", "embd", TensorType("f32", (2 * numbers, T)))
    parts = []
    for name, at in (("x", 0), ("y", numbers)):
        part = g.add("cont", g.add("view", both, name=f"{name}.v", ne=(numbers, T), nb=(1, 2 * numbers), offset=at), name=name)
        parts.append(typed(g, g.add("reshape", part, name=f"{name}.4", ne=(6, 2, 3, T)), dtype))
    for dim in range(4):
        joined = g.add("concat", *parts, name=f"joined.{dim}", dim=dim)
        assert joined.dtype == dtype
        g.outputs[f"{dim}"] = joined if dtype == "f32" else g.add("cast", joined, name=f"out.{dim}", dtype="f32")
    embd = np.random.default_rng(1).normal(size=(N, 2 * numbers)).astype(np.float32)
    found = evaluated(g, embd, tmp_path)
    x, y = (stored(embd[:, at : at + numbers], dtype).reshape(tuple(reversed(ne))) for at in (0, numbers))
    for dim in range(4):
        want = np.concatenate([x, y], axis=3 - dim)
        assert np.array_equal(found[f"{dim}"].reshape(want.shape), want), dim
