"""Hyper-connections: which gates fuse, which must not, and that the numbers stay what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.ir import Graph, verify
from ggufc.passes import PassManager
from stream_graphs import Streams, evaluate

PIPELINE = "canonicalize,fuse-sum-rows-ext,fuse-hyper-connections,cse,dce"
RULES = ("sinkhorn-start", "sinkhorn-step", "hc-mix", "hc-post")


def fuse(g: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in PassManager.parse(PIPELINE).run(g):
        counts |= {rule: n for rule, n in record.counts.items() if n and rule in RULES}
    verify(g)
    return counts


FORMS = st.fixed_dictionaries(
    {
        "e": st.sampled_from([1, 8, 33]),
        "s": st.integers(2, 8),
        "iterations": st.integers(1, 5),
        "eps": st.sampled_from([0.0, 1e-6, 1e-3]),
        "chosen": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None)
@given(FORMS, st.integers(0, 1000))
def test_fused_equals_unfused(form: dict[str, Any], seed: int) -> None:  # S47, S61
    built = Streams(**form).g
    final = built.clone()
    counts = fuse(final)
    assert counts == {"sinkhorn-start": 1, "hc-mix": 1, "hc-post": 1} | (
        {"sinkhorn-step": form["iterations"] - 1} if form["iterations"] > 1 else {}
    )
    assert [len(final.find(name)) for name in ("hc_pre", "hc_mix", "hc_post", "sinkhorn", "sigmoid", "div")] == [1, 1, 1, 0, 0, 0]
    np.testing.assert_allclose(evaluate(final, seed)["y"], evaluate(built, seed)["y"], rtol=2e-5, atol=2e-5)


BROKEN = {
    # What is wrong, and which operators must not appear because of it.
    "doubled": ("hc_post",),
    "offset": (),
    "scale": ("hc_pre", "hc_post"),
    "rows": ("hc_post",),
    "softmax": ("hc_pre", "hc_post", "sinkhorn"),
    "between": (),
    "others": ("hc_post",),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_only_looks_like_a_site_keeps_its_meaning(broken: str) -> None:
    built = Streams(iterations=3, eps=1e-3, chosen=broken == "others", broken=broken).g
    final = built.clone()
    fuse(final)
    assert not [name for name in BROKEN[broken] if final.find(name)]
    for name, want in evaluate(built, 5).items():
        np.testing.assert_allclose(evaluate(final, 5)[name], want, rtol=2e-5, atol=2e-5)


def test_read_gates_with_another_epsilon_stay_apart() -> None:
    site = Streams(eps=1e-3)
    (read,) = [n for n in site.g.nodes if n.op.name == "scale" and n.operands[0].name == "site.read"]
    read.attrs["b"] = 1e-2
    built = site.g
    final = built.clone()
    assert fuse(final)["hc-mix"] == 1
    assert len(final.find("hc_pre")) == 1 and final.find("hc_mix")[0].operands[1].op.name == "scale"
    np.testing.assert_allclose(evaluate(final, 6)["y"], evaluate(built, 6)["y"], rtol=2e-5, atol=2e-5)


def test_a_read_gate_alone_is_read_as_it_is() -> None:
    """The merge after the last layer: no matrix, no ``hc_pre``."""
    built = Streams().g
    built.outputs = {"y": next(n for n in built.nodes if n.name == "site.in")}
    built.remove_dead()
    final = built.clone()
    assert fuse(final) == {"hc-mix": 1}
    np.testing.assert_allclose(evaluate(final, 7)["y"], evaluate(built, 7)["y"], rtol=2e-5, atol=2e-5)
