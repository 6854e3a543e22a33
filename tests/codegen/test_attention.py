"""Attention over cell lists: values against float64, and equal bits whatever shares the batch or where the cells lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.attention_cpu import TOKEN_BLOCK, FlashAttn
from ggufc.codegen.kernels.cache import row_bytes
from harness import build, run, runnable_targets

SPECS = [
    FlashAttn(64, 64, 9, 3, "f16", "f16", 0.125),
    FlashAttn(24, 16, 2, 1, "bf16", "f32", 0.2, softcap=5.0),
    FlashAttn(32, 96, 4, 4, "q8_0", "q8_0", 0.15),
    FlashAttn(256, 256, 4, 1, "f16", "f16", 1 / 16),
    FlashAttn(80, 20, 5, 1, "f32", "f16", 0.1),
]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build(SPECS, request.param)


def encode(values, dtype):
    """Cache rows as bytes, and the values they hold."""
    values = values.astype(np.float32)
    if dtype == "f32":
        return values.view(np.uint8), values
    if dtype == "f16":
        half = values.astype(np.float16)
        return half.view(np.uint8), half.astype(np.float32)
    if dtype == "bf16":
        bits = ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32)
    blocks = values.reshape(len(values), -1, 32)
    d = (np.abs(blocks).max(2, keepdims=True) / 127).astype(np.float16)
    q = np.clip(np.rint(blocks / d.astype(np.float32)), -127, 127).astype(np.int8)
    raw = np.concatenate([d.view(np.uint8), q.view(np.uint8)], 2).reshape(len(values), -1)
    return raw, (q * d.astype(np.float32)).reshape(values.shape)


class Case:
    """Random queries and cache contents; ``attend`` runs some tokens given as (query row, cell list, lo, hi)."""

    def __init__(self, spec, target, image, seed, n_cells=120):
        self.spec, self.target, self.image = spec, target, image
        rng = np.random.default_rng(seed)
        self.q = rng.normal(size=(64, spec.n_head * spec.d)).astype(np.float32) * 2
        self.k_raw, self.k = encode(rng.normal(size=(n_cells, spec.n_head_kv * spec.d)), spec.type_k)
        self.v_raw, self.v = encode(rng.normal(size=(n_cells, spec.n_head_kv * spec.dv)), spec.type_v)
        assert self.k_raw.shape[1] == row_bytes(spec.type_k, spec.n_head_kv * spec.d)

    def attend(self, tokens, move=None):
        """``move`` permutes the physical cells."""
        spec, n = self.spec, len(tokens)
        ldq, ldo = spec.n_head * spec.d + 4, spec.n_head * spec.dv + 2
        q = np.zeros((n, ldq), np.float32)
        lists: list[tuple[int, ...]] = []
        cells: list[int] = []
        visible = np.zeros((n, 3), np.int32)
        where = {}
        for t, (row, cell_list, lo, hi) in enumerate(tokens):
            q[t, : spec.n_head * spec.d] = self.q[row]
            key = tuple(cell_list)
            if key not in where:
                where[key] = len(cells)
                lists.append(key)
                cells += key
            visible[t] = where[key], lo, hi
        k, v, used = self.k_raw, self.v_raw, np.array(cells, np.int32)
        if move is not None:
            k, v = np.empty_like(k), np.empty_like(v)
            k[move], v[move] = self.k_raw, self.v_raw
            used = move[used].astype(np.int32)
        out = np.full((n, ldo), 7, np.float32)
        tiles = spec.n_head_kv * -(-n // TOKEN_BLOCK)
        got = run(spec, self.target, [q, ldq, k, v, used, visible, out, ldo], tiles, loaded=self.image, T=n, R=len(cells))[6]
        assert (got[:, spec.n_head * spec.dv :] == 7).all()
        return got[:, : spec.n_head * spec.dv].copy()

    def reference(self, token):
        spec = self.spec
        row, cell_list, lo, hi = token
        cells = np.array(cell_list[lo:hi], int)
        q = self.q[row].reshape(spec.n_head, spec.d).astype(np.float64)
        out = np.zeros((spec.n_head, spec.dv))
        if hi <= lo:
            return out.ravel()
        for h in range(spec.n_head):
            g = h // (spec.n_head // spec.n_head_kv)
            s = self.k[cells, g * spec.d : (g + 1) * spec.d].astype(np.float64) @ q[h] * spec.scale
            if spec.softcap:
                s = spec.softcap * np.tanh(s / spec.softcap)
            p = np.exp(s - s.max())
            out[h] = p / p.sum() @ self.v[cells, g * spec.dv : (g + 1) * spec.dv]
        return out.ravel()


def bits(a):
    return a.view(np.uint32)


def mixed_batch(rng, n_cells=120):
    """Three sequences with causal tokens, windows, an empty token and a list longer than anything visible."""
    order = rng.permutation(n_cells)
    first, second, third = (list(map(int, part)) for part in (order[:75], order[75:95], order[95:]))
    tokens = [(i, first, 0, 41 + i) for i in range(20)]
    tokens += [(20 + i, second, max(0, i + 1 - 5), i + 1) for i in range(15)]
    tokens += [(35, third, 0, 0), (36, third, 7, 8), (37, third, 0, 25), (38, first, 30, 75)]
    return tokens


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_values(loaded, spec):
    target, image = loaded
    case = Case(spec, target, image, 1)
    tokens = mixed_batch(np.random.default_rng(2))
    got = case.attend(tokens)
    want = np.stack([case.reference(t) for t in tokens])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    assert (got[35] == 0).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bits_depend_on_visible_entries_only(loaded, spec):
    target, image = loaded
    case = Case(spec, target, image, 3)
    rng = np.random.default_rng(4)
    tokens = mixed_batch(rng)
    want = case.attend(tokens)
    # Alone, with the list cut off after the last visible entry.
    for t in (0, 7, 19, 24, 34, 36, 37, 38):
        row, cell_list, lo, hi = tokens[t]
        assert (bits(case.attend([(row, cell_list[:hi], lo, hi)])[0]) == bits(want[t])).all()
    # Other chunks of the batch, other physical cells.
    for size in (3, 16, 17):
        parts = [case.attend(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        assert (bits(np.concatenate(parts)) == bits(want)).all()
    assert (bits(case.attend(tokens, move=rng.permutation(120))) == bits(want)).all()


@st.composite
def batches(draw):
    """Tokens (query row, list number, lo, hi) over up to three cell lists, and where the batch is cut."""
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    tokens = []
    for i in range(draw(st.integers(1, 24))):
        which = draw(st.integers(0, len(lengths) - 1))
        lo = draw(st.integers(0, lengths[which]))
        tokens.append((i, which, lo, draw(st.integers(lo, lengths[which]))))
    return lengths, tokens, draw(st.integers(0, len(tokens))), draw(st.integers(0, 1 << 30))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_any_cut_of_any_batch_gives_equal_bits(loaded, batch):
    target, image = loaded
    lengths, tokens, cut, seed = batch
    rng = np.random.default_rng(seed)
    lists = [list(map(int, rng.permutation(120)[:n])) for n in lengths]
    tokens = [(row, lists[which], lo, hi) for row, which, lo, hi in tokens]
    for spec in (SPECS[0], SPECS[3]):
        case = Case(spec, target, image, 7)
        whole = case.attend(tokens)
        parts = [case.attend(part, move=rng.permutation(120)) for part in (tokens[:cut], tokens[cut:]) if part]
        assert (bits(np.concatenate(parts)) == bits(whole)).all()
        np.testing.assert_allclose(whole[-1], case.reference(tokens[-1]), rtol=1e-4, atol=2e-5)


def test_invisible_cells_may_hold_anything(loaded):
    target, image = loaded
    spec = SPECS[0]
    case = Case(spec, target, image, 5)
    tokens = [(i, list(range(60)), 3 + i, 37 + i) for i in range(18)]
    want = case.attend(tokens)
    hidden = [*range(3), *range(54, 60)]
    case.k_raw, case.v_raw = case.k_raw.copy(), case.v_raw.copy()
    case.k_raw.view(np.float16)[hidden] = np.nan
    case.v_raw.view(np.float16)[hidden] = np.inf
    assert (bits(case.attend(tokens)) == bits(want)).all()


def test_scores_far_apart_stay_finite(loaded):
    target, image = loaded
    spec = SPECS[0]
    case = Case(spec, target, image, 6)
    case.q *= 1000
    tokens = [(i, list(range(100)), 0, 100) for i in range(3)]
    got = case.attend(tokens)
    np.testing.assert_allclose(got, np.stack([case.reference(t) for t in tokens]), rtol=1e-3, atol=1e-3)


def test_refusals():
    with pytest.raises(CodegenError, match="multiple of 32 values, not 80"):
        replace(SPECS[4], type_k="q8_0")
    with pytest.raises(CodegenError, match="9 query heads"):
        replace(SPECS[0], n_head_kv=2)
