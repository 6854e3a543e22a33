"""Attention over two kinds of listed rows: values against float64, and equal bits whatever shares the batch or computes the splits."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.attention_cpu import LANE, SPLIT
from ggufc.codegen.kernels.attention_sparse import SparseAttn, SparseAttnSplits
from ggufc.codegen.lower import lower
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym
from harness import build, run, runnable_targets

T, C, R = Sym("T"), Sym("C"), Sym("R")
CELLS = 1400
SPECS = [
    SparseAttn(96, 64, 40, "f16", "f32", 0.1, 19),
    SparseAttn(64, 64, 3, "q8_0", "f32", 0.15, 600),
    SparseAttn(64, 64, 4, "f16", "f16", 0.125, "E4", sinks=True),
    SparseAttn(64, 32, 2, "q8_0", "q8_0", 0.125, "E128"),
    SparseAttn(64, 64, 5, "bf16", "bf16", 0.2, "", 530, sinks=True),
]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*SPECS, *map(SparseAttnSplits, SPECS)], request.param)


def bits(a):
    return np.ascontiguousarray(a).view(np.uint32)


def encoded(dtype, rows):
    raw = quantize(dtype, rows.astype(np.float32))
    return raw, dequantize(dtype, raw, rows.shape[1])


class Case:
    """Random rows; a token is (query row, first list, (lo, hi), second list, (lo, hi))."""

    def __init__(self, spec, target, image, seed):
        self.spec, self.target, self.image = spec, target, image
        rng = np.random.default_rng(seed)
        n = spec.entries if isinstance(spec.entries, int) else CELLS
        self.q = rng.normal(size=(64, spec.n_head * spec.d)).astype(np.float32) * 2
        self.k_raw, self.k = encoded(spec.type_k, rng.normal(size=(CELLS, spec.d)))
        self.more_raw, self.more = encoded(spec.type_more, rng.normal(size=(n, spec.d)))
        self.sinks = rng.normal(size=spec.n_head).astype(np.float32) * 3

    def attend(self, tokens, lanes=0, splits=True):
        spec, n = self.spec, len(tokens)
        q = np.stack([self.q[token[0]] for token in tokens])
        first, seen = joined([(token[1], token[2]) for token in tokens])
        second, more_seen = joined([(token[3], token[4]) for token in tokens])
        out = np.full((n, spec.n_head * spec.n_value), 7, np.float32)
        listed = spec.most or (spec.entries if isinstance(spec.entries, int) else len(second))
        records = -(-len(first) // SPLIT) + -(-listed // SPLIT)
        partials = np.full(spec.first.partials_bytes * records // 4, np.nan, np.float32)
        args = [q, q.shape[1], self.k_raw, self.k_raw, first, seen, out, out.shape[1], self.sinks, partials]
        args += [self.more_raw, second, more_seen]
        sizes = {"T": n, "R": len(first), "E4": len(second), "E128": len(second)}
        if splits:
            tiles = spec.first.units * (lanes or -(-len(first) // LANE))
            args[9] = run(SparseAttnSplits(spec), self.target, [*args, lanes], tiles, loaded=self.image, **sizes)[9]
        return run(spec, self.target, args, spec.first.units * -(-n // spec.first.token_block), loaded=self.image, **sizes)[6]

    def reference(self, token):
        spec = self.spec
        row, first, (lo, hi), second, (more_lo, more_hi) = token
        others = self.more if isinstance(spec.entries, int) else self.more[second[more_lo:more_hi]]
        rows = np.concatenate([self.k[first[lo:hi]], others]).astype(np.float64)
        s = spec.scale * self.q[row].reshape(spec.n_head, spec.d).astype(np.float64) @ rows.T
        if spec.sinks:
            s = np.concatenate([s, self.sinks[:, None].astype(np.float64)], axis=1)
        if not s.shape[1]:
            return np.zeros(spec.n_head * spec.n_value)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return (p[:, : len(rows)] @ rows[:, : spec.n_value]).ravel()


def joined(lists):
    """Lists one after another, equal ones once, and each token's (base, lo, hi)."""
    where, cells, seen = {}, [], []
    for entries, (lo, hi) in lists:
        key = entries.tobytes()
        if key not in where:
            where[key] = len(cells)
            cells += entries.tolist()
        seen.append((where[key], lo, hi))
    return np.array(cells, np.int32), np.array(seen, np.int32)


def batch(rng, spec, n=9):
    """Two sequences of causal tokens with windows, and tokens that see nothing of one kind or of both."""
    order = rng.permutation(CELLS)
    lists = order[:700], order[700:]
    others = [np.sort(rng.permutation(CELLS)[: int(rng.integers(1, spec.most + 1))]) if spec.most else lists[1 - t % 2] for t in range(n)]
    tokens = []
    for t in range(n):
        hi = int(rng.integers(1, len(lists[t % 2])))
        most = len(others[t])
        spans = (max(0, hi - 40), hi) if t % 3 == 0 else (0, hi), (0, int(rng.integers(0, most + 1)) if not spec.most else most)
        tokens.append((t, lists[t % 2].astype(np.int32), spans[0], others[t].astype(np.int32), spans[1]))
    tokens[3] = (*tokens[3][:2], (5, 5), *tokens[3][3:])
    tokens[4] = (*tokens[4][:4], (0, 0))
    tokens[5] = (*tokens[5][:2], (0, 0), tokens[5][3], (0, 0))
    return tokens


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_values(loaded, spec):  # S56, S91
    case = Case(spec, *loaded, 1)
    for n in (9, 30):
        tokens = batch(np.random.default_rng(n), spec, n)
        got = case.attend(tokens)
        want = np.stack([case.reference(t) for t in tokens])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=3e-5)
        assert bool((got[5] == 0).all()) is not isinstance(spec.entries, int)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.type_k == "f16"], ids=str)
def test_what_is_no_number_is_seen_in_either_kind_of_rows(loaded, spec):  # S72
    """A NaN among the rows of one kind does not make that kind vanish beside the other."""
    case = Case(spec, *loaded, 4)
    tokens = batch(np.random.default_rng(5), spec)
    clean = case.attend(tokens)
    case.k_raw = case.k_raw.copy()
    spoilt = tokens[1][1][tokens[1][2][0]]
    case.k_raw.view(np.float16).reshape(CELLS, -1)[spoilt] = np.nan
    found = case.attend(tokens)
    for t, (_, cells, (lo, hi), _, _) in enumerate(tokens):
        if spoilt in cells[lo:hi]:
            assert np.isnan(found[t]).all() and np.isnan(case.attend([tokens[t]])).all()
        else:
            assert (bits(found[t]) == bits(clean[t])).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(loaded, spec):
    """Alone its splits are computed apart, in a long batch one after the other."""
    case = Case(spec, *loaded, 2)
    tokens = batch(np.random.default_rng(3), spec, 30)
    together = case.attend(tokens)
    for t in (0, 1, 3, 4, 5, 17):
        for lanes in (0, 3, 8):
            assert (bits(case.attend([tokens[t]], lanes)[0]) == bits(together[t])).all()
    pair = case.attend([tokens[7], tokens[8]], 4)
    assert (bits(pair) == bits(together[7:9])).all()


def graph(more_of="weight", chosen=0, window=0, sinks=False):
    """One ``sparse_attn``: learned rows, listed entries, or a choice among them."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R", "E4"))
    q = g.add("reshape", g.input("embd", "embd", TensorType("f32", (96 * 4, T))), ne=(96, 4, T))
    cells, vis = (
        g.input("kv_cells", "kv_cells", TensorType("i32", (R,))),
        g.input("visible", "visible", TensorType("i32", (3, T)), window=window),
    )
    k = g.cache("blk.0.k", TensorType("f16", (96, C)))
    if more_of == "weight":
        second = [g.weight("rows", TensorType("f32", (96, 128)))]
    else:
        entries = g.cache("blk.0.entries", TensorType("f16", (96, C)))
        lists = g.add("input", name="entry_cells", kind="entry_cells", ratio=4, type=TensorType("i32", (Sym("E4"),)))
        seen = g.add("input", name="entry_visible", kind="entry_visible", ratio=4, type=TensorType("i32", (3, T)))
        second = [entries, lists, seen]
        if chosen:
            x = g.input("weights", "embd", TensorType("f32", (96 * 4 + 4, T)))
            w = g.add("cont", g.add("view", x, ne=(4, T), nb=(1, 388), offset=384))
            best = g.add("indexer_topk", q, w, entries, lists, seen, k=chosen)
            second = [entries, g.add("reshape", best, ne=(chosen * T,)), g.add("list_spans", best)]
        if sinks:
            second.append(g.weight("sinks", TensorType("f32", (4,))))
    g.outputs["o"] = g.add("sparse_attn", q, k, cells, vis, *second, scale=0.1, n_value=64, name="attn")
    return g


def steps(g):
    schedule = lower(g)[0]
    return [s for s in schedule.steps if isinstance(s.spec, SparseAttn | SparseAttnSplits)]


def test_learned_rows():
    apart, whole = steps(graph(window=512))
    assert whole.spec == SparseAttn(96, 64, 4, "f16", "f32", 0.1, 128) and apart.spec.attention == whole.spec
    assert (apart.sym, apart.mult) == ("", 9) and apart.args[13].value == 9
    assert whole.bytes == {"T": 512 * 192, "": 128 * 384}


def test_listed_entries():
    apart, whole = steps(graph("cache", sinks=True))
    assert whole.spec == SparseAttn(96, 64, 4, "f16", "f16", 0.1, "E4", sinks=True)
    assert (apart.sym, apart.div) == ("R", LANE)
    assert whole.bytes == {"R": 192, "E4": 192}


def test_chosen_entries_cost_what_is_chosen():  # S154
    _, whole = steps(graph("cache", chosen=2048, window=128))
    assert whole.spec.most == 2048 and not whole.spec.entries
    assert whole.bytes == {"T": (128 + 2048) * 192}


def test_a_kind_without_rows_is_refused():
    with pytest.raises(CodegenError, match="needs a number, a symbol"):
        SparseAttn(96, 64, 4, "f16", "f16", 0.1, "")
