"""Products with chosen experts on the GPU form: few tokens a choice at a time, many in tiles per expert, with the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.nvptx import describe
from ggufc.codegen.weights import activation_mode
from gpu_harness import run
from products import packed, product, records, weight_rows
from test_gpu_products import activations, close, findings_without_each_wait

K, N, EXPERTS, USED = 256, 24, 5, 2
"""24 rows fill no tile and no group."""


class Experts:
    """Weights of one type (with ``glu`` gates and ups), and what their product must be."""

    def __init__(self, name: str, n: int, epilogue: str = "none", *, k: int = K, broadcast: bool = True) -> None:
        self.spec = MatMulId(name, k, n, EXPERTS, USED, broadcast, epilogue=epilogue)
        self.raw = [[weight_rows(name, k, n, 9 * part + i) for i in range(EXPERTS)] for part in range(self.spec.unit)]
        self.weights = [np.concatenate([packed(name, rows, k) for rows in part]) for part in self.raw]

    def inputs(self, tokens: int) -> np.ndarray:
        return activations(tokens if self.spec.broadcast_x else tokens * USED, self.spec.k)

    def multiply(self, x: np.ndarray, ids: np.ndarray, **options) -> np.ndarray:
        y = np.full((ids.size, self.spec.n), np.nan, np.float32)
        args = [self.weights[0], records(x, activation_mode(self.spec.format)), y, ids, 0, self.weights[-1]]
        spec = options.pop("spec", self.spec)
        got = run(spec, args, [2], 1, T=len(ids), **options)[2]
        assert got is not None
        return got

    def want(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        rows = []
        for i, expert in enumerate(ids.reshape(-1)):
            mine = x[i // USED if self.spec.broadcast_x else i][None]
            parts = [product(self.spec.format, raw[expert], self.spec.k, mine) for raw in self.raw]
            rows.append(parts[0] / (1 + np.exp(-parts[0])) * parts[1] if self.spec.is_glu else parts[0])
        return np.concatenate(rows)


FURTHER = [("q2_k", 16, "none", True), ("bf16", 72, "none", False), ("f32", 40, "silu_glu", True)]


def choices(tokens: int) -> np.ndarray:
    """Most tokens want expert 1, which takes more than one batch; nobody wants expert 3."""
    ids = np.random.default_rng(4).choice([0, 2, 4], (tokens, USED)).astype(np.int32)
    ids[: tokens - 4, 0] = 1
    return ids


@pytest.mark.parametrize("name", ["q4_k", "f16", "f32", *(pytest.param(t, marks=pytest.mark.full) for t in ("q5_0", "mxfp4"))])
@pytest.mark.parametrize("broadcast", [True, False])
def test_a_few_choices(name, broadcast):
    experts = Experts(name, N, broadcast=broadcast)
    x, ids = experts.inputs(3), np.array([[4, 0], [2, 2], [1, 3]], np.int32)
    assert close(experts.multiply(x, ids), experts.want(x, ids))


@pytest.mark.parametrize(
    "name, n, epilogue, broadcast",
    [
        ("q4_k", 72, "silu_glu", True),
        ("q8_0", 72, "none", False),
        ("f16", 40, "gelu_glu", True),
        ("f32", 40, "none", False),
        *(pytest.param(*row, marks=pytest.mark.full) for row in FURTHER),
    ],
)
def test_tiles_have_the_bits_of_single_choices(name, n, epilogue, broadcast):
    """S65: 70 tokens in tiles, of which some alone; an expert with two batches, one that nobody chose, rows that fill no tile."""
    k = {"f16": 90, "f32": 90, "bf16": 64}.get(name, K)
    experts, tokens = Experts(name, n, epilogue, k=k, broadcast=broadcast), 70
    x, ids = experts.inputs(tokens), choices(tokens)
    whole = experts.multiply(x, ids)
    assert np.isfinite(whole).all()
    few = slice(62, 70)
    mine = x[few] if broadcast else x.reshape(tokens, USED, -1)[few].reshape(-1, k)
    alone = experts.multiply(mine, ids[few])
    assert alone.tobytes() == whole.reshape(tokens, USED, -1)[few].tobytes()
    if "gelu" not in epilogue:
        assert close(alone, experts.want(mine, ids[few]))


def test_a_small_grid_and_a_fixed_number_of_tokens():
    """S73: blocks share the batches, however many there are of either; a number in place of a symbol chooses the same kernel."""
    experts, tokens = Experts("q4_0", 80), 40
    x, ids = experts.inputs(tokens), choices(tokens)
    whole = experts.multiply(x, ids)
    for options in ({"max_blocks": 1}, {"max_blocks": 3}, {"spec": replace(experts.spec, rows=str(tokens))}):
        assert experts.multiply(x, ids, **options).tobytes() == whole.tobytes()


def test_one_expert_for_all():
    """Batches of one expert only, the last of them short, and no more experts than one."""
    spec = MatMulId("q8_0", 64, 16, 1, 1, True)
    raw, x = weight_rows("q8_0", 64, 16), activations(140, 64)
    ids, y = np.zeros((140, 1), np.int32), np.full((140, 16), np.nan, np.float32)
    got = run(spec, [packed("q8_0", raw, 64), records(x, activation_mode("q8_0")), y, ids], [2], 1, T=140)[2]
    assert close(got, product("q8_0", raw, 64, x))


@pytest.mark.parametrize("tokens, entry", [(1, "_1"), (63, "_1"), (64, "_tile"), (512, "_tile")])
def test_tiles_where_experts_get_several_tokens(tokens, entry):
    """128 experts, eight per token: four tokens for each expert need 64."""
    kernel = describe(MatMulId("q4_k", 2048, 768, 128, 8, True))
    (chosen,) = [e for e in kernel.entries if e.low <= tokens and (not e.high or tokens <= e.high)]
    assert chosen.symbol.endswith(entry)


@pytest.mark.full
def test_counting_and_listing_need_their_barriers():
    """A test of the tester as well: a barrier or wait less is a race or an early read. Four are for what does not happen here: a second
    round of more than 256 experts (three), and sums that are followed by others at once.
    """
    experts, tokens = Experts("q8_0", 80, "silu_glu", k=128), 20
    x, ids = experts.inputs(tokens), choices(tokens)
    found, missed = findings_without_each_wait(experts.spec, "_tile", lambda text: experts.multiply(x, ids, text=text, max_blocks=2))
    assert found >= 10 and missed == ["bar.sync \t0;"] * 4
