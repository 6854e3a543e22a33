"""Attention over cell lists: values against float64, and equal bits whatever shares the batch or where the cells lie."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.attention_cpu import LANE, SPLIT, FlashAttn, FlashAttnSplits, window_lanes
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.cache import row_bytes
from ggufc.codegen.kernels.cache_blocks import BLOCKS
from ggufc.formats.abi import PARAMS
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from harness import build, run, runnable_targets

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
SPECS = [
    FlashAttn(64, 64, 9, 3, "f16", "f16", 0.125),
    FlashAttn(24, 16, 2, 1, "bf16", "f32", 0.2, softcap=5.0),
    FlashAttn(32, 96, 4, 4, "q8_0", "q8_0", 0.15),
    FlashAttn(256, 256, 4, 1, "f16", "f16", 1 / 16),
    FlashAttn(80, 20, 5, 1, "f32", "f16", 0.1),
    FlashAttn(64, 32, 4, 2, "q5_1", "q4_0", 0.125, sinks=True),
    FlashAttn(32, 64, 2, 2, "q4_1", "iq4_nl", 0.2),
    FlashAttn(96, 64, 40, 1, "f16", "f16", 0.1, sinks=True, shared=True),
    FlashAttn(64, 32, 3, 1, "q5_0", "q5_0", 0.15, shared=True),
    FlashAttn(64, 64, 9, 3, "q8_0", "q5_1", 0.125),
    FlashAttn(160, 64, 16, 2, "q4_0", "q4_1", 0.1),
]
LONG = [SPECS[0], SPECS[2], SPECS[7], SPECS[9]]
"""Those whose lists are also cut into splits."""


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*SPECS, *map(FlashAttnSplits, LONG)], request.param)


def encode(values, dtype):
    """Cache rows as bytes, and the values they hold."""
    raw = quantize(dtype, values.astype(np.float32))
    return raw, dequantize(dtype, raw, values.shape[1])


def rounded(q):
    """Scaled queries as keys of block types meet them: 8 bits and a scale per 32 values."""
    x = q.reshape(-1, 32)
    top = np.abs(x).max(axis=1, keepdims=True)
    codes = np.rint(x * np.divide(np.float32(127), top, where=top > 0, out=np.zeros_like(top)))
    return (codes.astype(np.float64) * (top / np.float32(127))).reshape(q.shape)


class Case:
    """Random queries and cache contents; ``attend`` runs some tokens given as (query row, cell list, lo, hi)."""

    def __init__(self, spec, target, image, seed, n_cells=120):
        self.spec, self.target, self.image = spec, target, image
        rng = np.random.default_rng(seed)
        self.q = rng.normal(size=(64, spec.n_head * spec.d)).astype(np.float32) * 2
        self.k_raw, self.k = encode(rng.normal(size=(n_cells, spec.n_head_kv * spec.d)), spec.type_k)
        if spec.shared:
            self.v_raw, self.v = self.k_raw, self.k[:, : spec.dv]
        else:
            self.v_raw, self.v = encode(rng.normal(size=(n_cells, spec.n_head_kv * spec.dv)), spec.type_v)
        self.sinks = rng.normal(size=spec.n_head).astype(np.float32) * 3
        assert self.k_raw.shape[1] == row_bytes(spec.type_k, spec.n_head_kv * spec.d)

    def attend(self, tokens, move=None, lanes=0):
        """``move`` permutes the physical cells; ``lanes`` are those of the launch of splits, which comes first if there is one."""
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
        splits = -(-len(cells) // SPLIT)
        args = [q, ldq, k, v, used, visible, out, ldo, self.sinks, np.full(spec.partials_bytes * splits // 4, np.nan, np.float32)]
        sizes = {"T": n, "R": len(cells)}
        if spec in LONG:
            apart = FlashAttnSplits(spec)
            tiles = apart.units * (lanes or -(-len(cells) // LANE))
            args[9] = run(apart, self.target, [*args, lanes], tiles, loaded=self.image, **sizes)[9]
        tiles = spec.units * -(-n // spec.token_block)
        got = run(spec, self.target, args, tiles, loaded=self.image, **sizes)[6]
        assert (got[:, spec.n_head * spec.dv :] == 7).all()
        return got[:, : spec.n_head * spec.dv].copy()

    def reference(self, token):
        spec = self.spec
        row, cell_list, lo, hi = token
        cells = np.array(cell_list[lo:hi], int)
        q = self.q[row].reshape(spec.n_head, spec.d)
        q = rounded(q * np.float32(spec.scale)) if spec.type_k in BLOCKS and not spec.shared else q.astype(np.float64) * spec.scale
        out = np.zeros((spec.n_head, spec.dv))
        if hi <= lo:
            return out.ravel()
        for h in range(spec.n_head):
            g = h // (spec.n_head // spec.n_head_kv)
            s = self.k[cells, g * spec.d : (g + 1) * spec.d].astype(np.float64) @ q[h]
            if spec.softcap:
                s = spec.softcap * np.tanh(s / spec.softcap)
            top = max(s.max(), self.sinks[h]) if spec.sinks else s.max()
            p = np.exp(s - top)
            out[h] = p / (p.sum() + (np.exp(self.sinks[h] - top) if spec.sinks else 0)) @ self.v[cells, g * spec.dv : (g + 1) * spec.dv]
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
    for spec in (SPECS[0], SPECS[3], SPECS[7]):
        case = Case(spec, target, image, 7)
        whole = case.attend(tokens)
        parts = [case.attend(part, move=rng.permutation(120)) for part in (tokens[:cut], tokens[cut:]) if part]
        assert (bits(np.concatenate(parts)) == bits(whole)).all()
        np.testing.assert_allclose(whole[-1], case.reference(tokens[-1]), rtol=1e-4, atol=2e-5)


@st.composite
def long_batches(draw):
    """Up to four lists of up to four splits, tokens anywhere in them, and where the batch is cut."""
    lengths = draw(st.lists(st.integers(30, 1700), min_size=1, max_size=4))
    tokens = []
    for i in range(draw(st.integers(1, 12))):
        which = draw(st.integers(0, len(lengths) - 1))
        hi = draw(st.integers(0, lengths[which]))
        tokens.append((i, which, draw(st.sampled_from([0, max(0, hi - 400), hi // 2, hi])), hi))
    return lengths, tokens, draw(st.integers(1, 12)), draw(st.integers(0, 1 << 30))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=long_batches())
def test_splits_computed_apart_give_equal_bits(loaded, batch):
    target, image = loaded
    lengths, tokens, size, seed = batch
    rng = np.random.default_rng(seed)
    lists = [list(map(int, rng.permutation(1700)[:n])) for n in lengths]
    tokens = [(row, lists[which], lo, hi) for row, which, lo, hi in tokens]
    # More tokens than are ever computed apart: the splits are walked one after the other.
    many = tokens + [(i, [0], 0, 1) for i in range(12, 12 + 9)]
    for spec in LONG:
        case = Case(spec, target, image, 8, n_cells=1700)
        whole = case.attend(many)[: len(tokens)]
        parts = [case.attend(tokens[i : i + size], lanes=2 * (i % 2)) for i in range(0, len(tokens), size)]
        assert (bits(np.concatenate(parts)) == bits(whole)).all()
        alone = case.attend(tokens[-1:], move=rng.permutation(1700))
        assert (bits(alone[0]) == bits(whole[-1])).all()
        np.testing.assert_allclose(whole[-1], case.reference(tokens[-1]), rtol=2e-4, atol=3e-5)


BORDERS = [1, 15, 16, 17, 63, 64, 65, 80, 255, 256, 257, 319, 320, 321, 511, 512, 513, 577]


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], SPECS[9]], ids=str)
@pytest.mark.parametrize("placement", ["consecutive", "one apart", "runs"])
def test_borders_of_steps_groups_and_splits(loaded, spec, placement):
    """A lone token over cells in order, which are fetched ahead, has the bits it has in company and over scattered cells."""
    target, image = loaded
    case = Case(spec, target, image, 11, n_cells=700)
    cells = list(range(20, 20 + max(BORDERS)))
    if placement == "one apart":
        cells[130] = 650
    elif placement == "runs":
        cells = [*range(400, 500), *range(40, 240), *range(260, 400), *range(500, 650)][: max(BORDERS)]
    tokens = [(i, cells, lo, hi) for i, hi in enumerate(BORDERS) for lo in {0, max(0, hi - 70)}]
    # Nine other tokens: too many for splits to be computed apart.
    company = case.attend([*tokens, *((i, [0], 0, 1) for i in range(9))])[: len(tokens)]
    scattered = np.random.default_rng(12).permutation(700)
    for token, want in zip(tokens, company):
        alone = (token[0], cells[: token[3]], *token[2:])
        assert (bits(case.attend([alone])[0]) == bits(want)).all()
        assert (bits(case.attend([alone], move=scattered)[0]) == bits(want)).all()
    np.testing.assert_allclose(company[-1], case.reference(tokens[-1]), rtol=2e-4, atol=3e-5)


def test_lanes_of_a_window():
    assert [window_lanes(w) for w in (0, 1, 513, 8192)] == [0, 8, 8, 33]


def test_reads_and_cost_depend_on_the_window(loaded):
    """Entries outside the window are never looked at, and a list of 131072 costs what a list of 64 does."""
    target, image = loaded
    spec = SPECS[0]
    case = Case(spec, target, image, 10)
    used = np.full(1 << 17, 0x7FFFFFFF, np.int32)
    out = np.zeros((1, spec.n_head * spec.dv), np.float32)
    partials = np.zeros(spec.partials_bytes * len(used) // SPLIT // 4, np.float32)
    scratch = np.zeros(spec.scratch_bytes(target) + 64, np.uint8)
    best = {}
    for before in (0, len(used) - 70):
        used[before : before + 64] = np.arange(64)
        visible = np.array([[0, before, before + 64]], np.int32)
        arrays = [case.q, case.k_raw, case.v_raw, used, visible, out, partials]
        q, k, v, cells, vis, to, records = (a.ctypes.data for a in arrays)
        words = np.array([q, spec.n_head * spec.d, k, v, cells, vis, to, 0, 0, records, 2], np.int64)
        sizes = np.array([{"T": 1, "R": len(used)}.get(name, 0) for name in PARAMS], np.int64)
        calls = [(FlashAttnSplits(spec), 2 * FlashAttnSplits(spec).units), (spec, spec.units)]
        functions = [(KERNEL(image.address(symbol(s))), tiles) for s, tiles in calls]
        times = []
        for _ in range(20):
            started = time.perf_counter()
            for function, tiles in functions:
                for tile in range(tiles):
                    function(words.ctypes.data, sizes.ctypes.data, tile, scratch.ctypes.data + -scratch.ctypes.data % 64)
            times.append(time.perf_counter() - started)
        best[before] = min(times)
        np.testing.assert_allclose(out[0], case.reference((0, list(range(64)), 0, 64)), rtol=1e-4, atol=2e-5)
        used[before : before + 64] = 0x7FFFFFFF
    assert max(best.values()) < 20 * min(best.values())


@pytest.mark.parametrize("sink", [-200.0, 0.0, 90.0, 3e4])
def test_extreme_sinks(loaded, sink):
    target, image = loaded
    case = Case(SPECS[5], target, image, 9)
    case.sinks[:] = sink
    token = (0, list(range(50)), 0, 50)
    np.testing.assert_allclose(case.attend([token])[0], case.reference(token), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[9], SPECS[10]], ids=str)
def test_cells_that_only_others_see_may_hold_anything(loaded, spec):
    target, image = loaded
    case = Case(spec, target, image, 13)
    cells = list(range(60))
    want = case.attend([(0, cells, 0, 21)])
    case.k_raw, case.v_raw = case.k_raw.copy(), case.v_raw.copy()
    for raw in (case.k_raw, case.v_raw):
        raw.view(np.float16)[21:60] = np.nan
    got = case.attend([(0, cells, 0, 21), (1, cells, 0, 60)])
    assert (bits(got[:1]) == bits(want)).all() and np.isnan(got[1]).all()


@pytest.mark.parametrize("spec", [SPECS[9], SPECS[10]], ids=str)
def test_levels_with_fused_operations_give_equal_bits(spec):
    """Scores against blocks are integer sums, unlike those against floats, whose chains are as many as a vector has lanes."""
    tokens = [(i, list(range(100)), i, 60 + 4 * i) for i in range(10)]
    found = []
    for target in runnable_targets():
        if target.has_fma:
            case = Case(spec, target, build([spec, FlashAttnSplits(spec)], target), 14)
            if spec.type_k == "q8_0":  # the quantiser never writes a code of -128; a file may
                blocks = case.k_raw.view(np.int8).reshape(-1, 34)
                blocks[:, 2:][blocks[:, 2:] == -127] = -128
                assert (blocks[:, 2:] == -128).any()
            alone = [case.attend([token])[0] for token in tokens]
            assert (bits(np.stack(alone)) == bits(case.attend(tokens))).all()
            found.append(np.stack(alone))
    for other in found[1:]:
        assert (bits(other) == bits(found[0])).all()


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


@pytest.mark.parametrize("spec", [s for s in LONG if s.type_k == "f16"], ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_no_number_is_seen_wherever_it_lies(loaded, spec, poison):  # S72
    """A key or value of any split that is NaN or infinite never vanishes from the results of those who see it, and reaches nobody else."""
    target, image = loaded
    case = Case(spec, target, image, 13, n_cells=700)
    tokens = [(i, list(range(600)), lo, hi) for i, (lo, hi) in enumerate([(0, 600), (0, 200), (290, 520), (520, 600)])]
    clean = [case.attend(tokens), *(case.attend([t]) for t in tokens)]
    for cell in (30, 300, 599):
        for part in ("k_raw", "v_raw"):
            kept = getattr(case, part)
            if part == "v_raw" and spec.shared:
                continue
            spoilt = kept.copy()
            spoilt.view(np.float16).reshape(700, -1)[cell] = poison
            setattr(case, part, spoilt)
            found = [case.attend(tokens), *(case.attend([t]) for t in tokens)]
            setattr(case, part, kept)
            for t, (_, _, lo, hi) in enumerate(tokens):
                for got, want in ((found[0][t], clean[0][t]), (found[t + 1][0], clean[t + 1][0])):
                    if lo <= cell < hi:
                        assert not np.isfinite(got).any(), (cell, part, t)
                    else:
                        assert (bits(got) == bits(want)).all(), (cell, part, t)


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
    with pytest.raises(CodegenError, match="cannot be part of 3 rows"):
        replace(SPECS[0], shared=True)


def test_tiles_stay_within_the_cache_and_the_registers():
    blocks = {group: (s.head_block, s.token_block) for group in (1, 3, 4, 8, 16, 40, 128) for s in [replace(SPECS[7], n_head=group)]}
    assert blocks == {1: (1, 16), 3: (3, 16), 4: (4, 16), 8: (8, 8), 16: (16, 4), 40: (20, 3), 128: (32, 2)}
    wide = FlashAttn(576, 512, 128, 1, "f16", "f16", 0.1, shared=True)
    assert wide.decode_tokens == 1 and SPECS[0].decode_tokens == 8
