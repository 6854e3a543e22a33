"""Operators of the sparse-attention families: selection, integer tables, turning back, hyper-connections, index lists."""

from __future__ import annotations

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
