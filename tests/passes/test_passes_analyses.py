"""The analyses: what they find, and that their verifiers notice when something is taken away."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.ir import Graph, Node, Sym, TensorType, interpret, print_graph
from ggufc.ir.layout import root
from ggufc.passes import DEFAULT_PIPELINE, FUSIONS, PassError, PassManager
from ggufc.passes.cache_fixups import check_fixups
from ggufc.passes.memory_plan import intervals, liveness, plan, size_form
from ggufc.passes.memory_planner import evaluate
from ggufc.passes.reuse_key import check_reuse_key, explain, reuse_key
from passes_graphs import SYMBOLS, C, T, Tiny, Weights, f32, graph, step_inputs, tiny_model, tiny_models

HEAD = Sym("head")


def moving_graph(dtype: str = "f16", caches: tuple[str, ...] = ("blk.0.k", "blk.0.v", "blk.0.idx")) -> Graph:
    """Writes into the T rows from ``head`` on, one per cache; the third is the kind that was once forgotten (runtime-cache 3.4)."""
    g = Graph("decode", "test", (*SYMBOLS, "head"))
    x = g.input("embd", "embd", f32(32, T))
    for name in caches:
        rows = g.add("mul_mat", g.weight(f"{name}.weight", f32(32, 64)), x, name=f"{name}.rows")
        cache = g.cache(name, TensorType(dtype, (64, C)))
        where = g.add("view", cache, ne=(64, T), nb=(1, 64), offset=HEAD * 64, name=f"{name}.window")
        g.outputs[name] = g.add("cpy", rows, where, name=f"{name}.store")
    return g


# cache-fixups


@pytest.mark.parametrize(("dtype", "step"), [("f16", 128), ("f32", 256), ("q8_0", 68)])
def test_every_moving_write_gets_a_slot(dtype: str, step: int) -> None:
    g = moving_graph(dtype)
    (record,) = PassManager.parse("cache-fixups").run(g)
    assert record.counts["slots"] == 3
    assert g.analysis["cache-fixups"] == [
        {"node": f"{name}.store", "cache": name, "step": step, "offset": {"": 0}} for name in ("blk.0.k", "blk.0.v", "blk.0.idx")
    ]


@pytest.mark.parametrize("forgotten", [0, 1, 2])
def test_an_unregistered_write_is_refused(forgotten: int) -> None:
    # the mutation test of runtime-cache 3.5
    g = moving_graph()
    PassManager.parse("cache-fixups").run(g)
    check_fixups(g)
    name = g.analysis["cache-fixups"].pop(forgotten)["node"]
    with pytest.raises(PassError, match=f"Node '{name}' writes into cache .* no fixup slot is registered"):
        check_fixups(g)


@pytest.mark.parametrize(("field", "value"), [("cache", "blk.1.k"), ("step", 64), ("offset", {"": 2})])
def test_a_slot_that_says_something_else_is_refused(field: str, value: object) -> None:
    g = moving_graph()
    PassManager.parse("cache-fixups").run(g)
    g.analysis["cache-fixups"][1][field] = value
    with pytest.raises(PassError, match=r"The fixup slot of node 'blk\.0\.v\.store' says"):
        check_fixups(g)


def test_a_stale_slot_is_refused_and_rerunning_drops_it() -> None:
    g = moving_graph()
    PassManager.parse("cache-fixups").run(g)
    stale = copy.deepcopy(g.analysis["cache-fixups"])
    g = moving_graph(caches=("blk.0.k", "blk.0.v"))
    g.analysis["cache-fixups"] = stale
    with pytest.raises(PassError, match=r"Fixup slot 'blk\.0\.idx\.store' .* belongs to no write"):
        check_fixups(g)
    PassManager.parse("cache-fixups").run(g)
    assert [slot["cache"] for slot in g.analysis["cache-fixups"]] == ["blk.0.k", "blk.0.v"]


def test_the_slot_is_found_through_chains_of_views() -> None:
    g = Graph("decode", "test", (*SYMBOLS, "head"))
    x = g.input("embd", "embd", f32(64, T))
    base = g.add("view", g.cache("blk.0.k", TensorType("f16", (64, C))), ne=(64, T), nb=(1, 64), offset=128)
    where = g.add("reshape", g.add("view", base, ne=(64, T), nb=(1, 64), offset=HEAD * 64), ne=(8, 8, T))
    g.add("cpy", x, where, name="store")
    PassManager.parse("cache-fixups").run(g)
    assert g.analysis["cache-fixups"] == [{"node": "store", "cache": "blk.0.k", "step": 128, "offset": {"": 256}}]


def test_set_rows_and_fixed_writes_need_no_slot() -> None:
    g = tiny_model(Tiny())
    (record,) = PassManager.parse("cache-fixups").run(g)
    assert record.counts == {"slots": 0, "set_rows": 4}
    g = graph()
    where = g.add("view", g.cache("blk.0.s", f32(64, C)), ne=(64, T), nb=(1, 64), offset=64)
    g.add("cpy", g.input("embd", "embd", f32(64, T)), where, name="store")
    PassManager.parse("cache-fixups").run(g)
    assert g.analysis["cache-fixups"] == []


def test_a_moving_read_is_refused() -> None:
    g = moving_graph(caches=("blk.0.k",))
    old = g.outputs.pop("blk.0.k")
    g.outputs["y"] = g.add("scale", g.add("view", old, ne=(64, T), nb=(1, 64), offset=HEAD * 64, name="window.read"), s=2.0)
    with pytest.raises(PassError, match=r"Node 'window\.read' \(view\) depends on head but is no cache write"):
        PassManager.parse("cache-fixups").run(g)


def test_writes_that_a_slot_cannot_express_are_refused() -> None:
    def moving(offset: object, name: str) -> Graph:
        g = Graph("decode", "test", (*SYMBOLS, "head"))
        where = g.add("view", g.cache("blk.0.k", TensorType("f16", (64, C))), ne=(64, T), nb=(1, 64), offset=offset)
        g.add("cpy", g.input("embd", "embd", f32(64, T)), where, name=name)
        return g

    with pytest.raises(PassError, match="a constant times head plus the rest"):
        PassManager.parse("cache-fixups").run(moving(HEAD * T * 64, "store"))
    with pytest.raises(PassError, match="has no name"):
        PassManager.parse("cache-fixups").run(moving(HEAD * 64, ""))
    g = moving_graph(caches=("blk.0.k", "blk.0.v"))
    for node in g.find("cpy"):
        node.name = "store"
    with pytest.raises(PassError, match="Two writes at a moving offset are named 'store'"):
        PassManager.parse("cache-fixups").run(g)


# reuse-key


def observed(**observations: object) -> Graph:
    g = tiny_model(Tiny(layers=1))
    g.analysis["observations"] = dict(observations)
    PassManager.parse("reuse-key").run(g)
    return g


def test_the_key_holds_observations_caches_and_inputs() -> None:
    key = observed(n_kv=256, **{"n_kv > top_k": True}).analysis["reuse-key"]
    assert key["step.n_kv"] == 256 and key["step.n_kv > top_k"] is True
    assert key["cache.blk.0.k"] == "f16[16, C]"
    assert key["input.visible"] == "visible i32[3, T]"
    assert list(key) == sorted(key)


def test_reasons_name_what_changed() -> None:
    old = observed(n_kv=256, head_gt_0=True).analysis["reuse-key"]
    new = observed(n_kv=512, head_gt_0=True).analysis["reuse-key"]
    assert explain(old, new) == ["n_kv 256 -> 512"]
    assert explain(old, old) == []
    assert explain(list(old.items()), new) == ["n_kv 256 -> 512"]
    assert explain(old, observed(n_kv=256).analysis["reuse-key"]) == ["head_gt_0 True -> absent"]
    assert explain({"step.x": 1}, {"step.x": True}) == ["x 1 -> True"]


def test_a_window_is_part_of_the_key() -> None:
    # S111
    a, b = (reuse_key(tiny_model(Tiny(layers=1, window=w))) for w in (16, 32))
    assert explain(a, b) == ["input.visible visible i32[3, T] window 16 -> visible i32[3, T] window 32"]


@pytest.mark.parametrize("dropped", ["step.n_kv", "cache.blk.0.v", "input.visible", "arch"])
def test_a_dropped_entry_is_caught(dropped: str) -> None:
    g = observed(n_kv=256)
    check_reuse_key(g)
    del g.analysis["reuse-key"][dropped]
    with pytest.raises(PassError, match=rf"does not describe it \({dropped.removeprefix('step.')} absent -> "):
        check_reuse_key(g)


def test_an_observation_made_after_the_pass_is_caught() -> None:
    g = observed(n_kv=256)
    g.analysis["observations"]["head > 0"] = True
    with pytest.raises(PassError, match="head > 0 absent -> True"):
        check_reuse_key(g)


def test_graphs_without_a_key_and_values_without_a_form_are_refused() -> None:
    with pytest.raises(PassError, match="has no reuse key"):
        check_reuse_key(tiny_model(Tiny(layers=1)))
    with pytest.raises(PassError, match=r"Observation 'scale' of graph 'decode' is 0\.5"):
        observed(scale=0.5)


# node-budget


def test_the_budget_reports_both_and_refuses_a_graph_over_it() -> None:
    # S102: the refusal
    g = tiny_model(Tiny(layers=1))
    g.analysis["node-estimate"] = len(g.nodes)
    PassManager.parse("node-budget").run(g)
    assert g.analysis["node-budget"] == {"estimate": len(g.nodes), "actual": len(g.nodes)}
    g.analysis["node-estimate"] = len(g.nodes) - 1
    with pytest.raises(PassError, match=rf"has {len(g.nodes)} nodes, more than its estimate of {len(g.nodes) - 1}"):
        PassManager.parse("node-budget").run(g)


def test_a_missing_estimate_is_refused_only_on_request() -> None:
    g = tiny_model(Tiny(layers=1))
    PassManager.parse("node-budget").run(g)
    assert g.analysis["node-budget"]["estimate"] is None
    with pytest.raises(PassError, match="has no node estimate"):
        PassManager.parse("node-budget{required=1}").run(g)


# memory-plan


def test_views_keep_their_storage_alive() -> None:
    g = graph()
    x = g.add("silu", g.input("embd", "embd", f32(8, T)), name="x")
    view = g.add("transpose", g.add("reshape", x, ne=(4, 2, T)), name="view")
    other = g.add("relu", g.nodes[0], name="other")
    g.outputs["y"] = g.add("add", g.add("cont", view, name="copy"), g.add("cont", view, name="again"))
    last = liveness(g)
    assert last[x] == last[view] == g.index(next(n for n in g.nodes if n.name == "again"))
    assert last[other] == g.index(other)


def test_outputs_inputs_caches_and_weights_have_no_slot() -> None:
    g = tiny_model(Tiny(layers=1))
    PassManager.parse(DEFAULT_PIPELINE).run(g)
    labels = {it.label for it in intervals(g)}
    assert "logits" not in labels
    assert not labels & {n.name for n in g.nodes if n.is_leaf or n.is_view or n.op.writes_cache}
    assert "blk.0.ffn_hidden" in labels


def test_elementwise_results_take_over_dying_operands_only() -> None:
    g = graph()
    x = g.add("silu", g.input("embd", "embd", f32(8, T)), name="x")
    kept = g.add("neg", x, name="kept")
    moved = g.add("add", kept, x, name="moved")
    square = g.add("mul", moved, g.add("view", moved, ne=(8, T), nb=(1, 8), offset=0), name="square")
    g.outputs["y"] = g.add("sum_rows", square)
    by_label = {it.label: it for it in intervals(g)}
    assert by_label["kept"].inplace_with is None  # x is read again by "moved"
    assert by_label["moved"].inplace_with == id(kept)
    assert by_label["square"].inplace_with == id(moved)
    assert len(plan(list(by_label.values())).slots) == 2


def test_an_operand_read_in_another_order_is_not_overwritten() -> None:
    # writing element (i, j) of the sum would destroy element (j, i) before it is read
    g = graph()
    x = g.add("silu", g.weight("w", f32(8, 8)), name="x")
    g.outputs["y"] = g.add("sum_rows", g.add("add", x, g.add("transpose", x), name="sum"))
    assert {it.label: it.inplace_with for it in intervals(g)}["sum"] is None


def test_unfused_attention_has_sizes_with_products() -> None:
    g = tiny_model(Tiny(layers=1))
    scores = next(n for n in g.nodes if n.name == "blk.0.kq")
    assert size_form(scores) == {"KV*T": 16}
    assert evaluate(size_form(scores), {"KV": 10, "T": 3}) == 480
    PassManager.parse("memory-plan").run(g)
    assert g.analysis["memory-plan"]["peak"] >= 512 * 4096 * 4 * 4


@settings(max_examples=10, deadline=None)
@given(tiny_models())
def test_fusing_never_needs_more_memory(m: Tiny) -> None:
    unfused, fused = tiny_model(m), tiny_model(m)
    PassManager.parse("memory-plan").run(unfused)
    PassManager.parse(DEFAULT_PIPELINE).run(fused)
    a, b = unfused.analysis["memory-plan"], fused.analysis["memory-plan"]
    assert b["peak"] < a["peak"]


@settings(max_examples=10, deadline=None)
@given(tiny_models(), st.sampled_from(["", "cse", FUSIONS]))
def test_no_value_is_overwritten_before_its_last_read(m: Tiny, pipeline: str) -> None:
    # a whole evaluation in planned memory: each buffer remembers whose value it holds
    g = tiny_model(m)
    weights = Weights(g, 1)
    PassManager.parse(pipeline).run(g)
    values = intervals(g)
    slot_of = plan(values).assignment
    holds: dict[int, Node] = {}

    def execute(node: Node, _: object) -> None:
        if node.is_view:
            return
        for source in map(root, node.operands):
            if id(source) in slot_of:
                assert holds[slot_of[id(source)]] is source, f"{node.name} reads {source.name} too late"
        if id(node) in slot_of:
            holds[slot_of[id(node)]] = node

    arrays, env = step_inputs(g, 2, 0, 1, 1)
    interpret(g, weights, arrays, {}, env, trace=execute)
    assert len(set(slot_of.values())) < len(values)


def test_the_representative_sizes_are_options() -> None:
    g = tiny_model(Tiny(layers=1))
    PassManager.parse("memory-plan{t=8,kv=64}").run(g)
    assert {k: g.analysis["memory-plan"]["env"][k] for k in ("T", "O", "KV")} == {"T": 8, "O": 1, "KV": 64}


def test_analyses_print_with_the_graph() -> None:
    g = tiny_model(Tiny(layers=1))
    PassManager.parse(DEFAULT_PIPELINE).run(g)
    text = print_graph(g)
    for name in ("cache-fixups", "reuse-key", "node-budget", "memory-plan"):
        assert f'analysis "{name}" =' in text
