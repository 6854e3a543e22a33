"""Sums and joined tensors of mixed types in native code: whole graphs are lowered and evaluated, and numpy says what is right."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from compiled_graph import compile_graphs, run
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.lower import lower
from ggufc.formats.activations import round_bf16
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from ggufc.ir import Graph, IRError, Node, Sym, TensorType, verify
from harness import runnable_targets

T, C, N = Sym("T"), Sym("C"), 5
TYPES = ("f32", "f16", "bf16")


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """f32 numbers after a round trip through ``dtype``."""
    return values if dtype == "f32" else values.astype(np.float16).astype(np.float32) if dtype == "f16" else round_bf16(values)


def typed(g: Graph, node: Node, dtype: str) -> Node:
    return node if dtype == "f32" else g.add("cast", node, name=f"{node.name}.{dtype}", dtype=dtype)


def evaluated(
    g: Graph, inputs: dict[str, np.ndarray], folder: Path, caches: dict[str, np.ndarray] | None = None, target: str = "native"
) -> dict[str, np.ndarray]:
    """Outputs on one thread and on two, which have the same bits."""
    artifact = compile_graphs({"eval": g}, {}, folder, target)
    one, two = (run(artifact, "eval", ({}, inputs, caches or {}, {"T": N, "O": 1}), n) for n in (1, 2))
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
    found = evaluated(g, {"embd": embd}, tmp_path)
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
    found = evaluated(g, {"embd": embd}, tmp_path)
    x, y = (stored(embd[:, at : at + numbers], dtype).reshape(tuple(reversed(ne))) for at in (0, numbers))
    for dim in range(4):
        want = np.concatenate([x, y], axis=3 - dim)
        assert np.array_equal(found[f"{dim}"].reshape(want.shape), want), dim


def of_blocks(dtype: str) -> Graph:
    """Two caches of blocks, the first with new rows, joined along each dimension; then stacks of both joined along each dimension."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    x = g.input("embd", "embd", TensorType("f32", (64, T)))
    a, b = (g.cache(f"blk.0.{part}", TensorType(dtype, (64, C))) for part in "kv")
    a = g.add("set_rows", a, x, g.input("kv_slots", "kv_slots", TensorType("i32", (T,))), name="stored")
    pairs = {"flat": (a, b), "stacked": tuple(g.add("concat", *pair, name=f"stack.{i}", dim=2) for i, pair in enumerate(((a, b), (b, a))))}
    for name, pair in pairs.items():
        for dim in range(4):
            joined = g.add("concat", *pair, name=f"{name}.{dim}.joined", dim=dim)
            assert joined.dtype == dtype
            g.outputs[f"{name}.{dim}"] = g.add("cast", joined, name=f"{name}.{dim}", dtype="f32")
    return g


BLOCKS = [(target.level, "q8_0") for target in runnable_targets()] + [("native", "q4_0"), ("native", "q5_1")]


@pytest.mark.parametrize("target, dtype", BLOCKS)
def test_joined_blocks_equal_numpy_along_every_dimension(target: str, dtype: str, tmp_path: Path) -> None:  # S67
    rng = np.random.default_rng(2)
    k, v, embd = (rng.normal(size=(n, 64)).astype(np.float32) for n in (256, 256, N))
    slots = np.array([3, 250, 0, 7, 8], np.int32)
    found = evaluated(of_blocks(dtype), {"embd": embd, "kv_slots": slots}, tmp_path, {"blk.0.k": k, "blk.0.v": v}, target)
    k[slots] = embd
    a, b = (dequantize(dtype, quantize(dtype, rows), 64).reshape(1, 1, 256, 64) for rows in (k, v))
    assert not np.array_equal(a, k.reshape(a.shape)), "blocks round"
    for name, pair in {"flat": (a, b), "stacked": (np.concatenate([a, b], axis=1), np.concatenate([b, a], axis=1))}.items():
        for dim in range(4):
            want = np.concatenate(pair, axis=3 - dim)
            assert np.array_equal(found[f"{name}.{dim}"].reshape(want.shape).view(np.uint32), want.view(np.uint32)), (name, dim)


def joined_blocks(dim: int, *parts: tuple[str, TensorType]) -> Graph:
    """Two leaves (operator, type) joined and decoded."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    leaves = [getattr(g, op)(f"blk.0.{name}", kind) for name, (op, kind) in zip("ab", parts)]
    g.outputs["o"] = g.add("cast", g.add("concat", *leaves, name="joined", dim=dim), name="o", dtype="f32")
    return g


def test_blocks_that_cannot_be_joined_are_refused_while_compiling() -> None:  # S67
    cache = ("cache", TensorType("q8_0", (64, C)))
    lower(joined_blocks(0, cache, cache))
    half = ("cache", TensorType("q8_0", (48, C)))
    with pytest.raises(IRError, match=r"q8_0\[48, C\]: rows of q8_0 must be multiples of 32"):
        verify(joined_blocks(0, half, half))  # two halves of a block would make a whole row
    scaled = ("weight", TensorType("iq4_ks", (256, 4)))
    verify(joined_blocks(1, scaled, scaled))
    with pytest.raises(IRError, match="a row of iq4_ks begins with a scale of its own"):
        joined_blocks(0, scaled, scaled)
    with pytest.raises(CodegenError, match=r"tensor blk.0.b: a q8_0 weight .* cannot be joined .* store it as f16"):
        lower(joined_blocks(1, cache, ("weight", TensorType("q8_0", (64, 5)))))
    with pytest.raises(CodegenError, match="'joined': C\\+T rows of q8_0 have no kernel that decodes them"):
        lower(joined_blocks(1, cache, ("cache", TensorType("q8_0", (64, T)))))
    odd = ("cache", TensorType("mxfp4", (64, C)))
    with pytest.raises(CodegenError, match="mxfp4 data has no kernel that moves its blocks; known are q8_0"):
        lower(joined_blocks(0, odd, odd))


def test_an_output_of_another_type_is_converted(tmp_path: Path) -> None:
    """Outputs are f32 in memory, whatever their node computes in."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    x = g.input("embd", "embd", TensorType("f32", (64, T)))
    for dtype in ("f16", "bf16"):
        g.outputs[dtype] = g.add("cast", x, name=dtype, dtype=dtype)
    g.outputs["q8_0"] = g.add("concat", *[g.cache(f"blk.0.{part}", TensorType("q8_0", (64, C))) for part in "kv"], name="blocks", dim=0)
    rng = np.random.default_rng(3)
    embd, k, v = (rng.normal(size=(n, 64)).astype(np.float32) for n in (N, 256, 256))
    found = evaluated(g, {"embd": embd}, tmp_path, {"blk.0.k": k, "blk.0.v": v})
    for dtype in ("f16", "bf16"):
        assert np.array_equal(found[dtype], stored(embd, dtype))
    assert np.array_equal(found["q8_0"], np.concatenate([dequantize("q8_0", quantize("q8_0", rows), 64) for rows in (k, v)], axis=1))
