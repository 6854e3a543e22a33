"""Pipelines as text, verification after each pass, records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from ggufc.ir import Graph, IRError, Node, print_graph
from ggufc.passes import DEFAULT_PIPELINE, REGISTRY, Pass, PassError, PassManager, PassResult, format_records
from ggufc.passes.rules import Match, Rewriter, any_node, apply_rules, op, rule
from passes_graphs import T, Tiny, f32, graph, tiny_model


@dataclass(frozen=True)
class Breaks(Pass):
    """Leaves an operand behind its user."""

    name: ClassVar[str] = "breaks"

    def apply(self, graph: Graph) -> PassResult:
        graph.nodes.reverse()
        return PassResult(True)


@dataclass(frozen=True)
class Options(Pass):
    """One option of each kind."""

    name: ClassVar[str] = "options"
    flag: bool = True
    max_rows: int = 4
    ratio: float = 0.5
    mode: str = "fast"


@pytest.fixture
def with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "options", Options)


def test_a_pipeline_prints_as_it_parses(with_options: None) -> None:
    text = "canonicalize,options{flag=0,max-rows=8},dce"
    assert str(PassManager.parse(text)) == text
    assert str(PassManager.parse(DEFAULT_PIPELINE)) == DEFAULT_PIPELINE
    assert PassManager.parse("").passes == ()


def test_options_are_fields(with_options: None) -> None:
    (p,) = PassManager.parse(" options { flag=off  max_rows=7, ratio=1e-3, mode=slow } ").passes
    assert p == Options(flag=False, max_rows=7, ratio=1e-3, mode="slow")
    (p,) = PassManager.parse("options{flag}").passes
    assert p == Options(flag=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fuse-nrm", r"There is no pass 'fuse-nrm'; the passes are: cache-fixups, canonicalize, cse, .*node-budget"),
        ("dce{hard=1}", r"Pass 'dce' has no option 'hard'; its options are: none"),
        ("options{hard=1}", r"Pass 'options' has no option 'hard'; its options are: flag, max-rows, ratio, mode"),
        ("options{max-rows=many}", r"Option 'max-rows' of pass 'options' is 'many', which is not of type int"),
        ("options{flag=maybe}", r"Option 'flag' of pass 'options' is 'maybe'; write 1 or 0"),
        ("options{flag=1,flag=0}", r"given twice"),
        ("options{=1}", r"write OPTION=VALUE"),
        ("cse dce", r"column 1: write NAME"),
        ("cse,dce{x=1", r"column 5: (.|\n)*\n  cse,dce\{x=1\n      \^"),
        ("cse,,dce", r"column 5"),
    ],
)
def test_bad_pipelines_are_refused_with_what_is_known(with_options: None, text: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        PassManager.parse(text)


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    with pytest.raises(PassError, match="Pass 'breaks' left an invalid graph") as caught:
        PassManager((Breaks(),)).run(tiny_model(Tiny(layers=1)))
    assert isinstance(caught.value.__cause__, IRError)


def test_a_graph_that_was_invalid_before_is_not_blamed_on_a_pass() -> None:
    g = tiny_model(Tiny(layers=1))
    g.nodes.reverse()
    with pytest.raises(PassError, match="The graph given to the pipeline is invalid"):
        PassManager.parse("cse").run(g)


def test_analysis_results_must_be_plain_data() -> None:
    @dataclass(frozen=True)
    class Odd(Pass):
        name: ClassVar[str] = "odd"

        def apply(self, graph: Graph) -> PassResult:
            graph.analysis["odd"] = {1: (2, 3)}
            return PassResult(True)

    with pytest.raises(PassError, match="Pass 'odd' left an invalid graph"):
        PassManager((Odd(),)).run(tiny_model(Tiny(layers=1)))


def test_records_tell_what_happened() -> None:
    g = tiny_model(Tiny(layers=1))
    before = len(g.nodes)
    seen: list[str] = []
    records = PassManager.parse("cse,fuse-norm,dce").run(g, print_after=lambda name, graph: seen.append(name))
    assert seen == ["cse", "fuse-norm", "dce"]
    assert [r.changed for r in records] == [False, True, False]
    assert records[1].counts == {"rms-norm-mul": 3}
    assert (records[0].nodes_before, records[-1].nodes_after) == (before, before - 3)
    assert all(r.seconds > 0 for r in records)
    table = format_records(records).splitlines()
    assert table[0].split() == ["pass", "ms", "nodes", "counts"]
    assert table[2].split()[0] == "fuse-norm" and table[2].endswith("rms-norm-mul=3")


def test_times_can_be_left_out_so_that_output_is_reproducible() -> None:
    runs = [format_records(PassManager.parse("cse").run(tiny_model(Tiny(layers=1)), time=False)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_printing_after_a_pass_that_does_not_run_is_refused() -> None:
    with pytest.raises(PassError, match=r"Cannot print after 'hoist': the pipeline has no such pass. It runs: cse, dce"):
        PassManager.parse("cse,dce").run(graph(), print_after=["hoist"])


def test_only_the_asked_stages_are_printed() -> None:
    g = tiny_model(Tiny(layers=1))
    records = PassManager.parse("cse,fuse-norm,dce").run(g, print_after=["fuse-norm"])
    assert [bool(r.text) for r in records] == [False, True, False]
    assert records[1].text == print_graph(g)


def test_every_registered_pass_says_what_it_needs_and_leaves() -> None:
    for name, kind in REGISTRY.items():
        assert kind.name == name
        assert "Precondition:" in (kind.__doc__ or "") and "Postcondition:" in (kind.__doc__ or ""), name


# rules


def small() -> Graph:
    g = graph()
    x = g.input("embd", "embd", f32(8, T))
    g.outputs["y"] = g.add("neg", g.add("neg", g.add("neg", g.add("silu", x))))
    return g


@rule("double-negation", op("neg", op("neg", any_node("x"))))
def do_double_negation(rw: Rewriter, node: Node, m: Match) -> Node:
    return m["x"]


def test_rules_add_up_and_run_until_nothing_matches() -> None:
    @rule("negated-silu", op("neg", op("silu", any_node("x"))))
    def do_relu(rw: Rewriter, node: Node, m: Match) -> Node:
        return rw.add("relu", m["x"])

    negations, activations = (do_double_negation,), (do_relu,)
    g = small()
    result = apply_rules(g, negations + activations)
    assert result.counts == {"double-negation": 1, "negated-silu": 1}
    assert [n.op.name for n in g.nodes] == ["input", "relu"]


def test_a_rule_that_declines_counts_nothing() -> None:
    @rule("never", op("neg", any_node()))
    def do_never(rw: Rewriter, node: Node, m: Match) -> Node | None:
        return None

    g = small()
    before = print_graph(g)
    assert apply_rules(g, (do_never,)).changed is False
    assert print_graph(g) == before


def test_rules_that_undo_each_other_are_stopped() -> None:
    @rule("silu-to-relu", op("silu", any_node("x")))
    def do_relu(rw: Rewriter, node: Node, m: Match) -> Node:
        return rw.add("relu", m["x"])

    @rule("relu-to-silu", op("relu", any_node("x")))
    def do_silu(rw: Rewriter, node: Node, m: Match) -> Node:
        return rw.add("silu", m["x"])

    with pytest.raises(PassError, match=r"Rewriting does not end: rule '(silu-to-relu|relu-to-silu)'"):
        apply_rules(small(), (do_relu, do_silu))


def test_a_replacement_of_another_type_is_refused() -> None:
    @rule("wrong", op("silu", any_node("x")))
    def do_wrong(rw: Rewriter, node: Node, m: Match) -> Node:
        return rw.add("sum_rows", m["x"])

    with pytest.raises(PassError, match="another type"):
        apply_rules(small(), (do_wrong,))


def test_a_repeated_name_in_a_pattern_means_the_same_node() -> None:
    square = op("mul", any_node("x"), any_node("x"))

    @rule("square", square)
    def do_square(rw: Rewriter, node: Node, m: Match) -> Node:
        return rw.add("relu", m["x"])

    g = graph()
    x = g.input("embd", "embd", f32(8, T))
    y = g.add("silu", x)
    g.outputs["same"] = g.add("mul", x, x)
    g.outputs["other"] = g.add("mul", x, y)
    assert apply_rules(g, (do_square,)).counts == {"square": 1}
    assert g.outputs["other"].op.name == "mul"


def test_a_rule_needs_a_root_operator() -> None:
    @rule("anything", any_node("x"))
    def do_anything(rw: Rewriter, node: Node, m: Match) -> Node | None:
        return None

    with pytest.raises(PassError, match="without a root operator"):
        apply_rules(small(), (do_anything,))
