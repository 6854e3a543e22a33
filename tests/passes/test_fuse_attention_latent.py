"""``fuse-attention`` on one cache whose rows hold keys and values, and with sinks: what fuses, to what, and that it means the same."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.ir import Graph, TensorType, interpret, verify
from ggufc.ir.dims import Sym
from ggufc.passes import PassManager

T, C, KV = Sym("T"), Sym("C"), Sym("KV")
ROW, RANK, HEADS = 96, 64, 4
ENV = {"T": 3, "O": 3, "C": 40, "KV": 32, "R": 20}


def latent(dtype: str = "f16", offset: int = 0, sinks: bool = False, rank: int = RANK, heads_kv: int = 1) -> Graph:
    """Queries [ROW, HEADS, T] against whole rows of a cache; ``rank`` numbers of each row from ``offset`` on are the values."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    x = g.input("embd", "embd", TensorType("f32", (ROW * HEADS, T)))
    cells = g.input("kv_cells", "kv_cells", TensorType("i32", (Sym("R"),)))
    vis = g.input("visible", "visible", TensorType("i32", (3, T)))
    q = g.add("reshape", x, ne=(ROW, HEADS, T))
    rows = g.cache("blk.0.k", TensorType(dtype, (ROW * heads_kv, C)))
    decoded = g.add("cast", rows, dtype="f32") if rows.type.quantised else rows
    width = ROW * heads_kv
    kk = g.add("view", rows, ne=(ROW, KV, heads_kv), nb=(1, width, ROW))
    vv = g.add("view", decoded, ne=(KV, rank, heads_kv), nb=(width, 1, ROW), offset=offset)
    more = [g.weight("sinks", TensorType("f32", (HEADS,)))] if sinks else []
    scores = g.add("mul_mat", kk, g.add("permute", q, axes=(0, 2, 1, 3)))
    p = g.add("soft_max", scores, g.add("kq_mask", cells, vis, ne0=KV), *more, scale=0.1)
    g.outputs["o"] = g.add("cont", g.add("permute", g.add("mul_mat", vv, p), axes=(0, 2, 1, 3)))
    verify(g)
    return g


def fuse(g: Graph) -> dict[str, int]:
    (record,) = PassManager.parse("fuse-attention").run(g)
    verify(g)
    return {k: n for k, n in record.counts.items() if n and k.startswith("flash")}


def evaluate(g: Graph) -> np.ndarray:
    rng = np.random.default_rng(1)
    inputs = {
        "embd": rng.normal(size=(3, ROW * HEADS)).astype(np.float32),
        "kv_cells": rng.permutation(32)[:20].astype(np.int32),
        "visible": np.array([[0, 0, 9], [0, 3, 10], [10, 0, 10]], np.int32),
    }
    (cache,) = (n for n in g.nodes if n.op.name == "cache")
    rows = rng.normal(size=(ENV["C"], int(cache.ne[0]))).astype(np.float32)
    return interpret(g, {"sinks": np.array([-1, 0, 2, 5], np.float32)}, inputs, {"blk.0.k": rows}, ENV)["o"]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("offset", [0, 32])
def test_values_within_the_rows_of_the_keys(offset: int, sinks: bool) -> None:
    g = latent(offset=offset, sinks=sinks)
    before = evaluate(g)
    assert fuse(g) == {"flash-attention-sinks" if sinks else "flash-attention": 1}
    (fused,) = g.find("flash_attn")
    keys, values = fused.operands[1:3]
    assert keys.op.name == "cache" and values.op.name == "view" and values.operands[0] is keys
    assert values.type.ne == (RANK, C) and values.attrs["offset"] == offset
    assert [n.name for n in fused.operands[5:]] == (["sinks"] if sinks else [])
    np.testing.assert_allclose(evaluate(g), before, rtol=1e-5, atol=1e-6)


def test_quantised_rows_are_decoded_by_the_fused_operator() -> None:
    g = latent("q8_0")
    before = evaluate(g)
    assert fuse(g) == {"flash-attention": 1}
    (fused,) = g.find("flash_attn")
    assert fused.operands[2].dtype == "q8_0" and not g.find("cast")
    np.testing.assert_allclose(evaluate(g), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "near_miss",
    [
        pytest.param({"dtype": "q8_0", "offset": 16}, id="values begin inside a block"),
        pytest.param({"dtype": "q8_0", "rank": 40}, id="values end inside a block"),
        pytest.param({"heads_kv": 2, "rank": 64}, id="parts of several heads"),
    ],
)
def test_near_misses(near_miss: dict[str, object]) -> None:
    assert fuse(latent()) == {"flash-attention": 1}
    assert fuse(latent(**near_miss)) == {}  # type: ignore[arg-type]
