"""Attention on the GPU form: values against float64, and equal bits whatever shares the batch, the slice or the cells."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.kernels.attention_cpu import FlashAttn
from ggufc.codegen.nvptx import describe
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from gpu_harness import run

SPECS = [
    FlashAttn(64, 64, 6, 2, "f16", "f16", 0.125),
    FlashAttn(24, 16, 2, 1, "bf16", "f32", 0.2, softcap=5.0),
    FlashAttn(32, 96, 4, 4, "q8_0", "q8_0", 0.15),
    FlashAttn(64, 32, 4, 2, "q5_1", "q4_0", 0.125, sinks=True),
    FlashAttn(96, 64, 6, 1, "f16", "f16", 0.1, sinks=True, shared=True),
    FlashAttn(20, 20, 2, 2, "f16", "f16", 0.2),
]


class Case:
    """Random queries and cache rows; ``attend`` runs tokens given as (query, lo, hi) over one list of ``n`` cells."""

    def __init__(self, spec: FlashAttn, n: int):
        self.spec, self.n = spec, n
        rng = np.random.default_rng(3)
        self.q = rng.normal(size=(16, spec.n_head * spec.d)).astype(np.float32) * 2
        width_k, width_v = spec.cells_of
        self.k_raw = quantize(spec.type_k, rng.normal(size=(n, width_k)).astype(np.float32))
        self.v_raw = self.k_raw if spec.shared else quantize(spec.type_v, rng.normal(size=(n, width_v)).astype(np.float32))
        self.sinks = rng.normal(size=spec.n_head).astype(np.float32) * 3

    def attend(self, tokens, order=None, bases=None, **options):
        spec, n = self.spec, self.n
        order = np.arange(n) if order is None else order  # list entry -> physical cell
        k, v = np.empty_like(self.k_raw), np.empty_like(self.v_raw)
        k[order], v[order] = self.k_raw, self.v_raw
        q = np.stack([self.q[row] for row, _, _ in tokens])
        visible = np.array([(base, lo, hi) for base, (_, lo, hi) in zip(bases or [2] * len(tokens), tokens)], np.int32)
        cells = np.concatenate([[0, 0], order, [0] * 8]).astype(np.int32)
        ldo = spec.n_head * spec.dv + 3
        out = np.full((len(tokens), ldo), np.nan, np.float32)
        args = [q, q.shape[1], k, v, cells, visible, out, ldo, self.sinks, None]
        got = run(spec, args, [6], 0, T=len(tokens), R=len(cells), **options)[6]
        assert np.isnan(got[:, -3:]).all()
        return got[:, :-3]

    def reference(self, row, lo, hi):
        spec = self.spec
        group = spec.n_head // spec.n_head_kv
        width_k, width_v = spec.cells_of
        k = dequantize(spec.type_k, self.k_raw, width_k).astype(np.float64)[lo:hi]
        v = dequantize(spec.type_v, self.v_raw, width_v).astype(np.float64)[lo:hi, : spec.dv * spec.n_head_kv]
        k, v = k.reshape(hi - lo, spec.n_head_kv, spec.d), v.reshape(hi - lo, spec.n_head_kv, spec.dv)
        out = []
        for h in range(spec.n_head):
            s = spec.scale * (k[:, h // group] @ self.q[row].reshape(spec.n_head, spec.d)[h])
            if spec.softcap:
                s = spec.softcap * np.tanh(s / spec.softcap)
            logits = np.append(s, self.sinks[h]) if spec.sinks else s
            if not len(logits):
                out.append(np.zeros(spec.dv))
                continue
            p = np.exp(s - logits.max())
            out.append(p @ v[:, h // group] / np.exp(logits - logits.max()).sum())
        return np.concatenate(out)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_values(spec):
    """Within a split, over several, in a window, and for a token that sees nothing; a few tokens and more than share a block."""
    case = Case(spec, 300)
    tokens = [(0, 0, 1), (1, 0, 290), (2, 130, 257), (3, 7, 7)]
    tokens += [(i, max(0, i - 9), 240 + i) for i in range(4, 15)]
    for some in (tokens[:4], tokens):
        got = case.attend(some)
        want = np.stack([case.reference(*t) for t in some])
        assert np.abs(got - want).max() < 3e-6


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], *(pytest.param(s, marks=pytest.mark.full) for s in (SPECS[1], *SPECS[3:]))], ids=str)
def test_equal_bits_alone_in_a_batch_and_in_slices(spec):
    """S65: neither other tokens, nor the slices memory forces, nor the places of cells change a bit: blocks of one token, of several whose
    ranges cut pieces differently, and tiles that end in the middle of a block.
    """
    case = Case(spec, 280)
    tokens = [(i, 3 * i, 127 + 9 * i) for i in range(13)]
    whole = case.attend(tokens)
    assert np.concatenate([case.attend([t]) for t in tokens[:5]]).tobytes() == whole[:5].tobytes()
    block = max(describe(spec).slice_tokens, 2)
    assert case.attend(tokens, slice_tokens=block).tobytes() == whole.tobytes()
    assert case.attend(tokens, order=np.random.default_rng(1).permutation(280), max_blocks=3).tobytes() == whole.tobytes()


def test_tokens_of_two_lists_in_one_block():
    """S65: tokens that do not share a list go one after the other and get the bits they get alone."""
    case = Case(SPECS[0], 280)
    tokens = [(i, i, 100 + 9 * i) for i in range(10)]
    bases = [2] * 3 + [7] * 5 + [2] * 2
    mixed = case.attend(tokens, bases=bases)
    for i in (0, 4, 9):
        assert case.attend(tokens[i : i + 1], bases=bases[i : i + 1]).tobytes() == mixed[i : i + 1].tobytes()


def test_what_a_token_does_not_see_cannot_spoil_it():
    """Values of a cell that only a neighbour in the block sees may be infinite or not numbers."""
    case = Case(FlashAttn(32, 32, 2, 1, "f32", "f32", 0.2), 140)
    tokens = [(i, 0, 20 + i) for i in range(9)]
    clean = case.attend(tokens)
    values = case.v_raw.view(np.float32).copy()
    values[22], values[23] = np.inf, np.nan
    case.v_raw = values.view(np.uint8)
    case.k_raw = case.k_raw.copy()
    case.k_raw.view(np.float32)[23] = np.nan
    got = case.attend(tokens)
    assert got[:3].tobytes() == clean[:3].tobytes()
    assert not np.isfinite(got[3:]).any()
