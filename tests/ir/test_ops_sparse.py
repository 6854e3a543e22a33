"""Operators of the sparse-attention families: selection, integer tables, turning back, hyper-connections, index lists."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ggufc.ir import Graph, IRError, Sym, parse_graph, print_graph
from ggufc.ir.dims import divide
from ggufc.ir.ops.inputs import INPUT_KINDS
from ir_cases import SYMBOLS, inputs, tt
from test_ops import apply, close, normal, run


def test_ties_of_the_largest_elements_go_either_way():
    a = np.float32([[1, 3, 2, 3], [5, 5, 5, 5]])
    assert apply("top_k", a, k=3).tolist() == [[1, 3, 2], [0, 1, 2]]
    assert apply("top_k", a, k=3, ties="highest").tolist() == [[3, 1, 2], [3, 2, 1]]


def test_rows_shorter_than_k_end_in_minus_one_and_blend_passes_over_them():
    """A graph for every number of cells cannot know whether it has k of them."""
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    rows = g.add("cont", g.add("permute", i["embd"], axes=(1, 0)))
    top = g.add("top_k", rows, k=5)
    values = run(g, top)
    assert values.shape == (32, 5) and (values[:, 3:] == -1).all() and (np.sort(values[:, :3]) == [0, 1, 2]).all()
    blended = run(g, g.add("blend", g.add("fill", rows, value=-1.0), top, value=2.0))
    assert (blended == 2.0).all()


def test_integer_tables_give_integers():
    table = np.array([[1, 2], [3, 2**31 - 1]], np.int32)
    out = apply("get_rows", table, np.array([1, 0, 1]))
    assert out.dtype == np.int32 and out.tolist() == table[[1, 0, 1]].tolist()


@pytest.mark.parametrize("mode", ["norm", "neox"])
def test_turning_back_undoes_a_rotation(mode):  # S50
    a, pos = normal(3, 2, 16), np.array([0, 7, 4000])
    attrs = {"mode": mode, "n_dims": 12, "base": 1e4}
    turned = apply("rope", a, pos, **attrs)
    assert np.abs(turned - a).max() > 0.1
    close(apply("rope", turned, pos, inverse=True, **attrs), a, 1e-5)
    close(apply("rope", a, -pos, **attrs), apply("rope", a, pos, inverse=True, **attrs))


def test_quiet_attributes_print_only_where_they_differ():
    g = Graph("g", symbols=SYMBOLS)
    a = g.weight("a", tt("f32", 8, 3))
    g.outputs["x"] = g.add("top_k", a, k=2)
    g.outputs["y"] = g.add("top_k", a, k=2, ties="highest")
    text = print_graph(g)
    assert text.count("ties") == 1
    back = parse_graph(text)
    assert [n.attrs["ties"] for n in back.find("top_k")] == ["lowest", "highest"]


@pytest.mark.parametrize("kind", sorted(INPUT_KINDS))
def test_every_input_kind_checks_its_type_and_settings(kind):
    k = INPUT_KINDS[kind]
    ne = (k.ne0 or 5, 3)[: k.rank]
    settings = {"ratio": 4} if k.ratio else {}
    Graph("g").add("input", name="x", kind=kind, type=tt(k.dtype, *ne), **settings)
    wrong = [
        (tt("f32" if k.dtype == "i32" else "i32", *ne), settings, "must be"),
        (tt(k.dtype, *ne, 2), settings, "dimension"),
        (tt(k.dtype, *ne), {} if k.ratio else {"ratio": 4}, "ratio"),
    ]
    if k.ne0:
        wrong.append((tt(k.dtype, k.ne0 + 1, 3), settings, "ne"))
    if not k.window:
        wrong.append((tt(k.dtype, *ne), settings | {"window": 8}, "window"))
    if not k.region:
        wrong.append((tt(k.dtype, *ne), settings | {"region": "window"}, "region"))
    for t, extra, message in wrong:
        with pytest.raises(IRError, match=message):
            Graph("g").add("input", name="x", kind=kind, type=t, **extra)


def test_a_mask_may_begin_behind_the_first_cell():
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    whole = g.add("kq_mask", i["kv_cells"], i["visible"], ne0=8)
    part = g.add("kq_mask", i["kv_cells"], i["visible"], ne0=7, first=1)
    values = {"visible": np.array([[0, 0, 1], [0, 2, 3], [0, 2, 5]])}  # cells 5, 6 and 6, 1, 3
    assert np.array_equal(run(g, part, **values), run(g, whole, **values)[:, 1:])
    with pytest.raises(IRError, match="begins at cell 1"):
        run(g, part)


def test_dimensions_with_several_terms_divide_their_multiples():
    """The last block of a long batch has T - 256n tokens."""
    rest = Sym("T") - 256
    assert divide(rest, rest) == 1 and divide(rest * 64, rest) == 64 and divide(rest * Sym("KV"), rest) == Sym("KV")
    for d, by in ((rest + 1, rest), (64, rest), (rest * 3, rest * 2), (Sym("T"), rest)):
        with pytest.raises(IRError, match=r"not a multiple|cannot be divided"):
            divide(d, by)


def composed_gates(m, scale, base, s, iterations, eps):
    """The gates of one token, written out."""
    x = [float(v) for v in m]
    sig = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    read = [sig(scale[0] * x[i] + base[i]) + eps for i in range(s)]
    write = [2 * sig(scale[1] * x[s + i] + base[s + i]) for i in range(s)]
    logits = [[scale[2] * x[2 * s + u * s + c] + base[2 * s + u * s + c] for c in range(s)] for u in range(s)]
    c = [[math.exp(v) / sum(math.exp(w) for w in row) + eps for v in row] for row in logits]
    for step in range(iterations):
        if step:
            c = [[v / (sum(row) + eps) for v in row] for row in c]
        c = [[c[u][j] / (sum(c[w][j] for w in range(s)) + eps) for j in range(s)] for u in range(s)]
    return read, write, c


@pytest.mark.parametrize("tokens", [1, 14, 257])
@pytest.mark.parametrize(("s", "iterations", "eps"), [(4, 20, 0.0), (2, 2, 1e-2)])
def test_gates_of_hyper_connections(tokens, s, iterations, eps):  # S61, S86
    m, scale, base = normal(tokens, s * s + 2 * s), normal(3), normal(s * s + 2 * s)
    gates = apply("hc_pre", m, scale, base, streams=s, iterations=iterations, eps=eps)
    for t in {0, tokens // 2, tokens - 1}:
        read, write, c = composed_gates(m[t], scale, base, s, iterations, eps)
        close(gates[t], [*read, *write, *np.ravel(c)], 1e-5)
    matrix = gates[:, 2 * s :].reshape(-1, s, s)
    if iterations == 20:
        close(matrix.sum(axis=1), np.ones((tokens, s)), 1e-5)
        assert np.abs(matrix.sum(axis=2) - 1).max() < 1e-2
    x, y = normal(tokens, s, 6), normal(tokens, 6)
    close(apply("hc_mix", x, gates), sum(gates[:, i, None] * x[:, i] for i in range(s)), 1e-5)
    after = apply("hc_post", x, y, gates)
    for c in range(s):
        expected = gates[:, s + c, None] * y + sum(matrix[:, u, c, None] * x[:, u] for u in range(s))
        close(after[:, c], expected, 1e-5)


def test_sinkhorn_ends_on_columns_of_the_destination():
    logits = normal(2, 3, 3)
    m = apply("sinkhorn", logits, iterations=1)
    close(m.sum(axis=1), np.ones((2, 3)))
    assert np.abs(m.sum(axis=2) - 1).max() > 1e-2
    assert np.abs(m - apply("sinkhorn", logits.swapaxes(1, 2), iterations=1).swapaxes(1, 2)).max() > 1e-2


CELLS = np.array([4, 0, 6, 1, 3, 7, 2, 5, 2, 5, 6])
VIS = np.array([[0, 0, 8], [0, 2, 5], [8, 0, 3], [8, 1, 1]])
ASCENDING = np.array([0, 1, 2, 3, 4, 5, 6, 7, 2, 5, 6])


@pytest.mark.parametrize("ties", ["lowest", "highest"])
def test_choosing_rows_in_one_operator_equals_scores_mask_and_top_k(ties):  # S63
    """Also among equal scores: closed heads make zeros common."""
    q, w, keys = normal(4, 3, 8), normal(4, 3), normal(8, 8)
    keys[5] = keys[2]
    q[0] = -np.abs(q[0])
    keys[[1, 4]] = np.abs(keys[[1, 4]])
    chosen = apply("indexer_topk", q, w, keys, ASCENDING, VIS, k=4, ties=ties)
    g = Graph("g")
    nodes = {name: g.weight(name, tt("i32" if a.dtype.kind == "i" else "f32", *a.shape[::-1])) for name, a in
             (("q", q), ("w", w), ("k", keys), ("cells", ASCENDING), ("vis", VIS))}  # fmt: skip
    s = g.add("relu", g.add("mul_mat", nodes["k"], g.add("permute", nodes["q"], axes=(0, 2, 1))))
    s = g.add("mul", s, g.add("permute", g.add("reshape", nodes["w"], ne=(1, 3, 4)), axes=(0, 2, 1)))
    s = g.add("sum_rows_ext", s, dim=2)
    mask = g.add("kq_mask", nodes["cells"], nodes["vis"], ne0=8)
    top = g.add("top_k", g.add("add", g.add("reshape", s, ne=(8, 4)), mask), k=4, ties=ties)
    composed = run(g, top, {"q": q, "w": w, "k": keys, "cells": ASCENDING, "vis": VIS})
    for t, (base, lo, hi) in enumerate(VIS):
        n = min(4, hi - lo)
        assert chosen[t, :n].tolist() == sorted(composed[t, :n].tolist())
        assert (chosen[t, n:] == -1).all() and set(chosen[t, :n]) <= set(ASCENDING[base + lo : base + hi])


def test_first_entries_of_a_list_win_where_they_are_seen():  # S143
    """Also where the token's stretch begins behind them, and where all their scores are the worst."""
    q, keys = np.abs(normal(4, 3, 8)), np.abs(normal(8, 8))
    chosen = apply("indexer_topk", q, np.full((4, 3), -1, np.float32), keys, ASCENDING, VIS, k=2, sinks=1)
    assert chosen[0, 0] == 0 and 0 not in chosen[1] and chosen[2, 0] == 2 and chosen[3].tolist() == [-1, -1]
    with pytest.raises(IRError, match="sinks = 3"):
        apply("indexer_topk", q, q[:, :, 0], keys, ASCENDING, VIS, k=2, sinks=3)


@pytest.mark.parametrize("k", [8, 20])
def test_a_choice_of_everything_is_the_list(k):
    q, w, keys = normal(4, 3, 8), normal(4, 3), normal(8, 8)
    chosen = apply("indexer_topk", q, w, keys, CELLS, VIS, k=k)
    for row, (base, lo, hi) in zip(chosen, VIS):
        assert row[: hi - lo].tolist() == CELLS[base + lo : base + hi].tolist() and (row[hi - lo :] == -1).all()


def test_choice_follows_the_list_not_the_place_of_a_row():
    """Moving rows and renaming them in the list moves the choice along: placement cannot matter."""
    q, w, keys = normal(4, 3, 8), normal(4, 3), normal(8, 8)
    keys[5] = keys[2]
    where = np.array([3, 7, 0, 6, 1, 2, 5, 4])
    moved = np.empty_like(keys)
    moved[where] = keys
    a = apply("indexer_topk", q, w, keys, CELLS, VIS, k=3)
    b = apply("indexer_topk", q, w, moved, where[CELLS], VIS, k=3)
    assert np.array_equal(np.where(a < 0, -1, where[a]), b)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_attention_over_listed_rows_equals_masked_attention(dtype):  # S56: rows with 0, 1 and all columns visible
    d, h, n = 32, 3, 8
    q, rows, more, sinks = normal(4, h, d), normal(n, d), normal(3, d), normal(h)
    g = Graph("g", symbols=SYMBOLS)
    weight = lambda name, a, kind="f32": g.weight(name, tt(kind, *a.shape[::-1]))  # noqa: E731
    qn, kn, mn, sn = weight("q", q), weight("k", rows, dtype), weight("more", more), weight("sinks", sinks)
    cells, vis = weight("cells", CELLS, "i32"), weight("vis", VIS, "i32")
    all_of, spans = np.arange(3, dtype=np.int32), np.array([[0, 0, 3]] * 4, np.int32)
    second = weight("all", all_of, "i32"), weight("spans", spans, "i32"), sn
    values = {"q": q, "k": rows, "more": more, "sinks": sinks, "cells": CELLS, "vis": VIS, "all": all_of, "spans": spans}
    fused = run(g, g.add("sparse_attn", qn, kn, cells, vis, mn, *second, scale=0.25, n_value=24), values)
    kf = g.add("cast", kn, dtype="f32")
    both = g.add("concat", kf, mn, dim=1)
    s = g.add("mul_mat", both, g.add("permute", qn, axes=(0, 2, 1)))
    mask = g.add("kq_mask", cells, vis, ne0=n)
    free = g.add("fill", g.add("view", mask, ne=(3, 4), nb=(1, 3)), value=0.0)
    p = g.add("soft_max", s, g.add("concat", mask, free, dim=0), sn, scale=0.25)
    v = g.add("view", both, ne=(n + 3, 24), nb=(d, 1))
    masked = run(g, g.add("mul_mat", v, p), values).transpose(1, 0, 2)
    close(fused, masked, 1e-5)
    index = g.add("mask_to_index", mask, k=n)
    lists = g.add("reshape", index, ne=(n * 4,))
    by_index = g.add("sparse_attn", qn, kn, lists, g.add("list_spans", index), mn, *second, scale=0.25, n_value=24)
    close(run(g, by_index, values), masked, 1e-5)
    whole, listed = (g.add("sparse_attn", qn, kn, cells, vis, mn, *lists, scale=0.25, n_value=24) for lists in ((), second[:2]))
    assert np.array_equal(run(g, whole, values), run(g, listed, values))
    nothing = g.add("sparse_attn", qn, kn, cells, vis, mn, cells, vis, scale=0.25, n_value=24)
    values["cells"] = np.minimum(CELLS, 2)
    assert (run(g, nothing, values)[3] == 0).all()


@pytest.mark.parametrize("gate", ["none", "softmax", "sigmoid", "sqrt_softplus"])
def test_experts_and_their_weights(gate):
    scores, bias = normal(5, 7), normal(7)
    x = scores.astype(np.float64)
    p = {
        "none": x,
        "softmax": np.exp(x) / np.exp(x).sum(1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-x)),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(x))),
    }[gate]
    ids = apply("expert_choice", scores, bias, k=3, gate=gate)
    assert np.array_equal(ids, np.argsort(-(p + bias), axis=1)[:, :3])
    assert np.array_equal(apply("expert_choice", scores, k=7, gate=gate), np.argsort(-p, axis=1))
    w = np.take_along_axis(p, ids.astype(int), axis=1)
    close(apply("expert_weights", scores, ids, gate=gate, scale=2.5), 2.5 * w, 1e-5)
    close(apply("expert_weights", scores, ids, gate=gate, normalise="sum"), w / w.sum(1, keepdims=True), 1e-4)
    close(apply("expert_weights", scores, ids, gate=gate, normalise="softmax"), np.exp(w) / np.exp(w).sum(1, keepdims=True), 1e-5)


def test_equal_experts_are_chosen_in_order():
    assert apply("expert_choice", np.zeros((2, 5)), k=3, gate="softmax").tolist() == [[0, 1, 2]] * 2


def test_index_lists_are_ascending_and_padded():
    hidden = np.float32([[0, -np.inf, -1e30, 0, -np.inf], [-1e30] * 5, [0] * 5])
    assert apply("mask_to_index", hidden, k=5).tolist() == [[0, 3, -1, -1, -1], [-1] * 5, [0, 1, 2, 3, 4]]
    with pytest.raises(IRError, match="sees 5 columns, more than the k = 4"):
        apply("mask_to_index", hidden, k=4)
    assert apply("list_spans", np.zeros((3, 4), np.int32)).tolist() == [[0, 0, 4], [4, 0, 4], [8, 0, 4]]
    assert apply("list_spans", np.array([[3, 1, -1], [-1, -1, -1]])).tolist() == [[0, 0, 2], [3, 0, 0]]


REFUSED = {
    "expert_choice": ([(4, 2)], {"k": 5}, "between 1 and the experts"),
    "expert_choice bias": ([(4, 2), (3,)], {"k": 2}, "one number for each expert"),
    "expert_weights": ([(4, 2), (2, 3, "i")], {}, "one list for each token"),
    "sinkhorn": ([(3, 2, 1)], {"iterations": 1}, "square"),
    "sinkhorn none": ([(2, 2, 1)], {"iterations": 0}, "at least 1"),
    "hc_pre": ([(24, 2), (3,), (23,)], {"streams": 4, "iterations": 1}, "base"),
    "hc_pre streams": ([(24, 2), (3,), (24,)], {"streams": 3, "iterations": 1}, r"S\*S \+ 2S = 15"),
    "hc_mix": ([(8, 4, 2), (3, 2)], {}, "at least 4 numbers"),
    "hc_post": ([(8, 4, 2), (8, 3), (24, 2)], {}, "elements and tokens"),
    "hc_post gates": ([(8, 4, 2), (8, 2), (24, 3)], {}, "one column"),
    "indexer_topk": ([(8, 3, 2), (3, 2), (7, 5), (4, "i"), (3, 2, "i")], {"k": 2}, "do not fit"),
    "indexer_topk k": ([(8, 3, 2), (3, 2), (8, 5), (4, "i"), (3, 2, "i")], {"k": 0}, "at least 1"),
    "mask_to_index": ([(8, 3)], {"k": 0}, "at least 1"),
    "sparse_attn": ([(8, 3, 2), (7, 5), (4, "i"), (3, 2, "i"), (8, 1)], {"scale": 1.0, "n_value": 8}, "numbers of the queries"),
    "sparse_attn more": ([(8, 3, 2), (8, 5), (4, "i"), (3, 2, "i"), (7, 1)], {"scale": 1.0, "n_value": 8}, "numbers of the queries"),
    "sparse_attn value": ([(8, 3, 2), (8, 5), (4, "i"), (3, 2, "i"), (8, 1)], {"scale": 1.0, "n_value": 9}, "n_value = 9"),
    "sparse_attn sinks": (
        [(8, 3, 2), (8, 5), (4, "i"), (3, 2, "i"), (8, 1), (4, "i"), (3, 2, "i"), (2,)], {"scale": 1.0, "n_value": 8},
        "each of the 3 heads",
    ),
    "sparse_attn lists": (
        [(8, 3, 2), (8, 5), (4, "i"), (3, 2, "i"), (8, 2), (4, "i")], {"scale": 1.0, "n_value": 8}, "needs more_vis"
    ),
    "sparse_attn vis": ([(8, 3, 2), (8, 5), (4, "i"), (3, 3, "i"), (8, 1)], {"scale": 1.0, "n_value": 8}, "each of the 2 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_shapes_that_do_not_fit_are_refused(case):
    shapes, attrs, message = REFUSED[case]
    g = Graph("g")
    nodes = [g.weight(f"w{i}", tt("i32" if "i" in s else "f32", *(d for d in s if d != "i"))) for i, s in enumerate(shapes)]
    with pytest.raises(IRError, match=message):
        g.add(case.split()[0], *nodes, **attrs)


def test_rows_that_do_not_exist_are_refused():
    q, keys, w = normal(4, 3, 8), normal(7, 8), normal(4, 3)
    with pytest.raises(IRError, match=r"row 7, but there are rows 0\.\.6"):
        apply("sparse_attn", q, keys, CELLS, VIS, keys, scale=1.0, n_value=8)
    with pytest.raises(IRError, match=r"row -2, but"):
        apply("indexer_topk", q, w, keys, np.where(CELLS == 7, -2, CELLS), VIS, k=2)
    with pytest.raises(IRError, match=r"entries 8\.\.12 of a list with 11"):
        apply("sparse_attn", q, normal(8, 8), CELLS, np.array([[8, 0, 4]] * 4), keys, scale=1.0, n_value=8)
