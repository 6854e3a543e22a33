"""Products with chosen experts: the bits of a dense product with each expert, however tokens meet in a tile.

Systems: S30 S31 S65.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import TOKENS, MatMulId, tiles
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.weights import weight_format
from harness import run, runnable_targets
from products import NATIVE, loaded, multiply, packed, records, weight_rows

LEVELS = [pytest.param(t, id=t.level) for t in runnable_targets()]
K, N, EXPERTS, USED = 256, 24, 5, 2


@cache
def experts(name: str, n: int = N) -> list[np.ndarray]:
    return [packed(name, weight_rows(name, K, n, seed=10 + i), K) for i in range(EXPERTS)]


def choices(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Different experts per token, some of them rarely: i32 [tokens, USED]."""
    popular = rng.permutation(EXPERTS)
    handicap = np.array([0, 0, 0.3, 0.5, 0.9])
    return np.stack([popular[np.argsort(rng.random(EXPERTS) + handicap)[:USED]] for _ in range(tokens)]).astype(np.int32)


def choose(name: str, x: np.ndarray, ids: np.ndarray, target=NATIVE, broadcast: bool = True, rows: str = "T", n: int = N) -> np.ndarray:
    """f32 [tokens, USED, n]; what the kernel does not write stays NaN."""
    spec = MatMulId(name, K, n, EXPERTS, USED, broadcast, rows)
    y = np.full((len(ids), USED, n), np.nan, np.float32)
    args = [np.concatenate(experts(name, n)), records(x, weight_format(name).mode), y, ids, rows_argument(rows)]
    count = tiles(spec) * -(-len(ids) // TOKENS)
    result = run(spec, target, args, count, loaded=loaded(spec, target), **({} if rows.isdigit() else {rows: len(ids)}))[2]
    assert result is not None
    return result


def dense(name: str, x: np.ndarray, ids: np.ndarray, target, broadcast: bool, n: int = N) -> np.ndarray:
    """The same from one dense product per expert."""
    spec = MatMul(name, K, n, "none", False, "T")
    rows = np.repeat(x, USED, axis=0) if broadcast else x
    every = np.stack([multiply(spec, target, w, rows) for w in experts(name, n)])
    return every[ids.reshape(-1), np.arange(len(rows))].reshape(len(ids), USED, n)


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize(("name", "broadcast"), [("q6_k", True), ("iq4_nl", False), ("f16", False)])
def test_bits_are_those_of_a_dense_product(name, broadcast, target):
    rng = np.random.default_rng(9)
    for tokens in (1, 2, 11, 29):
        ids = choices(tokens, rng)
        x = rng.standard_normal((tokens if broadcast else tokens * USED, K)).astype(np.float32)
        assert choose(name, x, ids, target, broadcast).tobytes() == dense(name, x, ids, target, broadcast).tobytes()


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize(("name", "merged"), [("q5_k", False), ("iq4_nl", True), ("f16", True)])
def test_gate_and_up_in_one_launch(name, merged, target):
    """Two tensors, or one whose matrices hold the rows of both: the bits are those of a dense gated product."""
    rng = np.random.default_rng(6)
    n, tokens = 32, 21
    gate, up = ([weight_rows(name, K, n, seed=seed + i) for i in range(EXPERTS)] for seed in (30, 40))
    both = [np.concatenate(pair) for pair in zip(gate, up)]
    first = np.concatenate([packed(name, w, K) for w in (both if merged else gate)])
    second = first[packed(name, gate[0], K).size :] if merged else np.concatenate([packed(name, w, K) for w in up])
    x, ids = rng.standard_normal((tokens, K)).astype(np.float32), choices(tokens, rng)
    spec = MatMulId(name, K, n, EXPERTS, USED, True, epilogue="silu_glu", pitch=2 * n if merged else 0)
    y = np.full((tokens, USED, n), np.nan, np.float32)
    args = [first, records(x, weight_format(name).mode), y, ids, rows_argument("T"), second]
    y = run(spec, target, args, tiles(spec) * -(-tokens // TOKENS), loaded=loaded(spec, target), T=tokens)[2]
    dense = MatMul(name, K, 2 * n, "silu_glu", False, "T")
    pairs = [np.stack([g.reshape(-1, 16, g.shape[1]), u.reshape(-1, 16, u.shape[1])], 1).reshape(2 * n, -1) for g, u in zip(gate, up)]
    every = np.stack([multiply(dense, target, packed(name, pair, K), x) for pair in pairs])
    assert y.tobytes() == every[ids, np.arange(tokens)[:, None]].tobytes()


@pytest.mark.parametrize("cut", [1, 3, 8, 17])
def test_bits_do_not_depend_on_how_a_batch_is_cut(cut):
    """Many tokens per expert (weights are unpacked to scratch, and gathered in several batches) against pieces of the batch."""
    rng = np.random.default_rng(cut)
    tokens = 620
    ids = choices(tokens, rng)
    x = rng.standard_normal((tokens, K)).astype(np.float32)
    whole = choose("q4_k", x, ids)
    start = int(rng.integers(0, tokens - 2 * cut))
    for at in (start, start + cut):
        piece = slice(at, at + cut)
        assert choose("q4_k", x[piece], ids[piece]).tobytes() == whole[piece].tobytes()
    assert not np.isnan(whole).any()


def test_all_tokens_may_choose_one_expert_twice():
    x = np.random.default_rng(1).standard_normal((9, K)).astype(np.float32)
    ids = np.full((9, USED), 3, np.int32)
    assert choose("q8_0", x, ids).tobytes() == dense("q8_0", x, ids, NATIVE, True).tobytes()


def test_rows_of_outputs_and_a_fixed_number_of_rows():
    rng = np.random.default_rng(4)
    x, ids = rng.standard_normal((6, K)).astype(np.float32), choices(6, rng)
    want = dense("q8_0", x, ids, NATIVE, True).tobytes()
    assert choose("q8_0", x, ids, rows="O").tobytes() == want
    assert choose("q8_0", x, ids, rows="6").tobytes() == want


def test_tiles_are_large_and_enough_for_threads():
    one = MatMulId("q4_k", 2048, 768, 128, 8, True)
    assert 8 * 8 <= tiles(one) <= 8 * 48
