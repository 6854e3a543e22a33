"""Settings of operators that no kernel knows are refused by the node's name instead of being lost."""

from __future__ import annotations

import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.lower import lower
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym

SYMBOLS = ("T", "O", "C", "KV", "R")
T, R = Sym("T"), Sym("R")


def masked(first):
    g = Graph("g", symbols=SYMBOLS)
    cells = g.input("kv_cells", "kv_cells", TensorType("i32", (R,)))
    vis = g.input("visible", "visible", TensorType("i32", (3, T)))
    g.outputs["o"] = g.add("kq_mask", cells, vis, ne0=64, first=first, name="mask")
    return g


def summed(symbol):
    g = Graph("g", symbols=tuple(dict.fromkeys((*SYMBOLS, symbol))))
    x = g.input("embd", "embd", TensorType("f32", (64, Sym(symbol))))
    g.outputs["o"] = g.add("neg", x, name="minus")
    return g


@pytest.mark.parametrize(
    ("make", "known", "unknown", "message"),
    [
        (masked, 0, 32, "'mask'.*begins at cell 32"),
        (summed, "T", "P", "'minus'.*symbol P"),
    ],
    ids=["kq_mask", "symbol"],
)
def test_refused_by_name(make, known, unknown, message):
    assert lower(make(known))[0].steps
    with pytest.raises(CodegenError, match=message):
        lower(make(unknown))


def test_every_attribute_of_an_operator_with_a_kernel_is_known_or_refused() -> None:
    """A new attribute is refused until lowering says that kernels read it; what it says must exist."""
    from ggufc.codegen.lower_attributes import HONOURED
    from ggufc.ir.ops.base import OPS

    for name, attributes in HONOURED.items():
        assert attributes <= {attr.name for attr in OPS[name].attrs}, name


@pytest.mark.parametrize(("name", "value", "good"), [("scale", 0.5, False), ("scale", 1.0, True)])
def test_an_attribute_that_no_kernel_reads_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: float, good: bool) -> None:
    from ggufc.codegen import lower_attributes

    monkeypatch.setitem(lower_attributes.HONOURED, "soft_max", frozenset())
    g = Graph("t", symbols=SYMBOLS)
    a = g.input("embd", "embd", TensorType("f32", (64, T)))
    g.outputs["y"] = g.add("soft_max", a, name="probabilities", **{name: value})
    if good:
        lower(g)
        return
    with pytest.raises(CodegenError, match=r"node 'probabilities': the kernels of soft_max do not know its attribute scale = 0\.5"):
        lower(g)
