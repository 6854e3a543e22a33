"""openpangu: the goldens of another engine, what each part of the family contributes, and the ways a cache is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparse_runner
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node, interpret, verify
from ggufc.ir.dims import evaluate
from ggufc.models import (
    Model,
    Step,
    conv,
    hyper_connections,
    load_model,
    openpangu,
    openpangu_attention,
    openpangu_plan,
)
from sparse_runner import Runtime, excess, run_case
from support import golden_cases

CASES = [case for case in golden_cases("openpangu-") if case.name not in ("openpangu-chat", "openpangu-chunked")]
LONG = golden_cases("openpangu-chunked")
SWA = next(case for case in CASES if case.name == "openpangu-swa-dsa-ubatch")


def model_of(folder: Path) -> Model:
    with GGUFFile.open(folder / "model.gguf") as file:
        return load_model(file)


def tokens_of(folder: Path, n: int) -> list[int]:
    """The first tokens a case decodes, one after another."""
    steps = json.loads((folder / "case.json").read_text())["steps"]
    found = [t for step in steps for t in step.get("tokens", [])]
    return (found * (1 + n // len(found)))[:n]


def logits(folder: Path, batches: list[int], *, sized: bool = True, **options: Any) -> tuple[np.ndarray, Runtime]:
    """Logits of all tokens of a sequence cut into batches of the given lengths."""
    case = json.loads((folder / "case.json").read_text())
    with GGUFFile.open(folder / "model.gguf") as file:
        rt = Runtime(load_model(file), file.data, case["options"] | {"n_ubatch": 4096} | options, sized=sized)
        tokens, out, at = tokens_of(folder, sum(batches)), [], 0
        for n in batches:
            out.append(rt.decode(tokens[at : at + n], list(range(at, at + n)), [0] * n))
            at += n
    return np.concatenate(out), rt


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "any-size"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_the_golden(case: Path, sized: bool) -> None:  # S83, S90, S93, S95, S96, S105, S110
    found, rt = run_case(case, sized=sized)
    assert excess(case, found) <= 1
    assert sized or rt.builds == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_prefill_in_blocks_equals_the_golden(case: Path) -> None:  # S100, S101
    found, rt = run_case(case)
    assert excess(case, found) <= 1
    prefill = rt.graphs[0][1]
    gathers = [n for n in prefill.find("get_rows") if n.name.endswith(".k.gathered")]
    assert gathers and all(n.type.ne[1] <= openpangu_plan.GATHER_ROWS for n in gathers)


def _transposed(b: Any, logits_node: Node, site: Any) -> Node:
    m = _SINKHORN(b, logits_node, site)
    return b.add("cont", b.add("permute", m, name=f"{m.name}.t", axes=(1, 0, 2)), name=f"{m.name}.tc")


_SINKHORN = hyper_connections._sinkhorn
_SINKS = openpangu_attention._sinks
_CONV = conv.causal_conv


def _raw_sinks(b: Any, hp: Any, m: Any, i: int) -> Any:
    raw = b.weight(f"blk.{i}.attn_param_sink_kv")
    rows = b.add("concat", raw, b.weight(f"blk.{i}.attn_param_sink_k_pe"), name=f"blk.{i}.sinks", dim=0)
    return openpangu_attention.Sinks(rows, b.add("cont", b.add("transpose", raw, name=f"blk.{i}.st"), name=f"blk.{i}.sc"))


def _hidden_sinks(b: Any, hp: Any, m: Any, i: int) -> Any:
    sinks = _SINKS(b, hp, m, i)
    return openpangu_attention.Sinks(b.add("scale", sinks.rows, name=f"blk.{i}.off", s=-1e4), sinks.values)


def _interleaved(b: Any, x: Node, layer: Any, name: str) -> Node:
    return b.add("rope", x, b.positions, name=name, **(layer.rope.attrs() | {"mode": "norm"}))


def _no_identity(b: Any, x: Node, weight: str, state: str) -> Node:
    return b.add("sub", _CONV(b, x, weight, state), x, name=f"{state}.bare")


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "transposed matrix": (hyper_connections, "_sinkhorn", _transposed),  # S86
    "sinks not normed": (openpangu_attention, "_sinks", _raw_sinks),  # S91
    "sinks out of reach": (openpangu_attention, "_sinks", _hidden_sinks),  # S91
    "interleaved pairs": (openpangu_attention, "rotate", _interleaved),  # S85
    "convolution without identity": (openpangu_attention, "causal_conv", _no_identity),  # S89
    "no norm over all streams": (openpangu, "_block_post_norm", lambda b, x, i: x),  # S87
    "streams merged with equal weights": (
        openpangu, "merge", lambda b, x, site: hyper_connections.mix_in(
            b, x, b.add("fill", b.add("view", x, name="v", ne=(x.type.ne[1], x.type.ne[2]), nb=(1, 1)), name="w", value=0.5), "merge"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MUTATIONS)
def test_every_part_matters_far_beyond_the_tolerance(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    found, _ = run_case(SWA, steps=1)
    assert excess(SWA, found) > 10


@pytest.mark.parametrize("norm", ["post_attention_norm", "post_ffw_norm"])
def test_sandwich_norms_matter(norm: str) -> None:  # S87
    """Halving what follows a sublayer moves the logits; so the norm is not swallowed by another one."""
    with GGUFFile.open(SWA / "model.gguf") as file:
        data = lambda name: file.data(name).view(np.float32) * (0.5 if norm in name else 1.0)  # noqa: E731
        rt = Runtime(load_model(file), data, json.loads((SWA / "case.json").read_text())["options"])
        step = json.loads((SWA / "case.json").read_text())["steps"][0]
        found = {step["name"]: rt.decode(step["tokens"], step["pos"], step["seq"])}
    assert excess(SWA, found) > 10


@pytest.mark.parametrize(("name", "moves"), [("exp_probs_b.bias", False), ("ffn_gate_shexp.weight", True)])
def test_selection_bias_chooses_but_does_not_weigh(name: str, moves: bool) -> None:  # S88
    with GGUFFile.open(SWA / "model.gguf") as file:
        data = lambda n: file.data(n).view(np.float32) + np.float32(0.75 if name in n else 0)  # noqa: E731
        case = json.loads((SWA / "case.json").read_text())
        rt = Runtime(load_model(file), data, case["options"])
        found = {s["name"]: rt.decode(s["tokens"], s["pos"], s["seq"]) for s in case["steps"][:1]}
    assert (excess(SWA, found) > 10) == moves


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
def test_histories_cross_batches(first: int) -> None:  # S89, S90
    whole, _ = logits(SWA, [12], sized=False)
    split, _ = logits(SWA, [first, *[1] * (12 - first)], sized=False)
    assert np.abs(whole - split).max() < 1e-4


def test_a_sequence_starts_afresh_at_position_zero_on_the_same_graph() -> None:  # S90, S110
    """Without position 0 the old history stays: the state row is the one thing that tells."""
    tokens = tokens_of(SWA, 9)
    with GGUFFile.open(SWA / "model.gguf") as file:
        rt = Runtime(load_model(file), file.data, {"n_ctx": 64, "type_k": "f32", "idx_type_k": "f32"}, sized=False)
        fresh = rt.decode(tokens[4:], list(range(5)), [0] * 5)
        rt.remove(0, 0, -1)
        again = rt.decode(tokens[4:], list(range(5)), [0] * 5)
        assert np.array_equal(fresh, again) and rt.builds == 1
        zero = {name: rt.rows(name)[-1] for name, info in rt.infos.items() if info.rows == "S+1"}
    assert zero and not any(row.any() for row in zero.values())


@pytest.mark.slow
def test_windowed_reads_equal_full_ones_and_their_view_stays_constant(monkeypatch: pytest.MonkeyPatch) -> None:  # S98, S111
    views: list[tuple[int, int]] = []
    sizes = sparse_runner.Batch.sizes

    def recorded(self: Any) -> dict[str, int]:
        out = sizes(self)
        views.append((out["WV"], out["KV"]))
        return out

    batches = [90, *[1] * 200]
    full, _ = logits(SWA, batches, sized=False, n_ctx=512)
    monkeypatch.setattr(sparse_runner.Batch, "sizes", recorded)
    viewed, rt = logits(SWA, batches, n_ctx=512)
    assert np.abs(full - viewed).max() < 1e-5
    windowed = [n for _, g in rt.graphs for n in g.find("kq_mask") if n.attrs["first"] != 0]
    assert windowed
    assert len(views) == 201 and {kv for _, kv in views[1:]} == set(range(96, 321, 32))
    assert {width for width, _ in views[1:]} == {64} and rt.builds == 2


@pytest.mark.parametrize("n", [1, 5, 14, 15])
def test_gathered_rows_equal_masked_ones(n: int) -> None:  # S99
    masked, _ = logits(SWA, [80, n], sized=False)
    gathered, rt = logits(SWA, [80, n])
    assert np.abs(masked - gathered).max() < 1e-4
    gathers = [node for node in rt.graphs[-1][1].find("get_rows") if node.name.endswith(".k.gathered")]
    assert bool(gathers) == (n <= openpangu_plan.GATHER_TOKENS)


def test_blocks_of_queries_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:  # S100, S101
    """Scores, attention and gathers in small blocks, ragged at the end."""
    whole, _ = logits(SWA, [70], sized=False)
    for name, value in (("SCORE_CHUNK", 16), ("ATTENTION_CHUNK", 16), ("SCORE_BYTES", 1000), ("GATHER_ROWS", 50)):
        monkeypatch.setattr(openpangu_plan, name, value)
    blocked, rt = logits(SWA, [70])
    assert np.abs(whole - blocked).max() < 1e-5
    graph = rt.graphs[0][1]
    gathers = [n for n in graph.find("get_rows") if n.name.endswith(".k.gathered")]
    assert len(gathers) > 2 and all(n.type.ne[1] <= 50 for n in gathers)
    assert max(n.type.ne[1] for n in graph.find("soft_max") if n.name.endswith("kq_soft_max")) <= 16


def test_nothing_is_a_nan_on_the_way() -> None:  # S108
    bad: list[str] = []
    original = sparse_runner.interpret

    def trapped(*args: Any, **kwargs: Any) -> Any:
        def trace(node: Node, value: Any) -> None:
            array = value.array if hasattr(value, "array") else value
            if array.dtype.kind == "f" and np.isnan(array).any():
                bad.append(node.name)

        return original(*args, **(kwargs | {"trace": trace}))

    sparse_runner.interpret = trapped
    try:
        run_case(SWA, steps=3)
        run_case(SWA, steps=3, sized=False)
    finally:
        sparse_runner.interpret = original
    assert interpret is original and not bad


GRID_T = (1, 14, 15, 256, 257, 2048)
GRID_KV = (256, 1024, 4096, 32768, 65536)


@pytest.mark.parametrize("folder", [SWA, *LONG], ids=lambda case: case.name)
def test_node_estimates_and_gathers_are_bounded_over_the_grid(folder: Path) -> None:  # S101, S102
    model, gathers = model_of(folder), []
    for tokens in GRID_T:
        for kv in GRID_KV:
            step = Step(sizes={"T": tokens, "KV": kv, "WV": min(kv, 32 * ((128 + tokens) // 32))})
            graph = model.build(step)
            estimate = model.node_estimate(Step(sizes={"T": tokens, "KV": kv, "WV": min(kv, 32 * ((128 + tokens) // 32))}))
            assert len(graph.nodes) <= estimate <= 4 * len(graph.nodes) + 65536
            found = [n for n in graph.find("get_rows") if n.name.endswith(".k.gathered")]
            gathers += [(tokens, evaluate(n.type.ne[1], {"T": tokens})) for n in found]
    assert all(rows <= openpangu_plan.GATHER_ROWS for _, rows in gathers)
    assert {1, 14} <= {tokens for tokens, _ in gathers} and (folder == SWA or max(gathers)[0] == 2048)


@pytest.mark.parametrize("options", [{}, {"swa_compress": True}, {"type_k": "f32", "idx_type_k": "bf16"}])
def test_graphs_are_valid_and_declare_what_the_model_lists(options: dict[str, Any]) -> None:  # S93, S103
    model = model_of(SWA)
    graph = model.build(Step(options))
    verify(graph)
    declared = {n.name: (n.type.dtype, n.type.ne[0], str(n.type.ne[1])) for n in graph.find("cache")}
    assert declared == {c.name: (c.dtype, c.width, c.rows) for c in model.caches(options)}
    assert not any(name.endswith(".v") for name in declared)
    rows = {c.name: (c.dtype, c.width) for c in model.caches(options)}
    latent = model.hparams.layers[0].latent
    assert latent is not None and rows["blk.0.k"] == (options.get("type_k", "f16"), latent.rank + latent.n_rot)
    assert [name for name in rows if "indexer" in name] == ["blk.2.indexer_k"]
    assert rows["blk.2.indexer_k"][0] == options.get("idx_type_k", "f16")


def test_selection_begins_when_more_rows_are_visible_than_kept() -> None:  # S96
    model = model_of(SWA)
    for kv, option, selects in ((32, 0, True), (32, 32, False), (64, 32, True)):
        graph: Graph = model.build(Step({"dsa_top_k": option}, {"T": 1, "KV": kv, "WV": 32}))
        assert any(n.name.endswith("indexer.top_k") for n in graph.nodes) == selects
        stored = [n for n in graph.find("set_rows") if n.name == "blk.2.indexer_k.store" or "indexer_k.store" in n.name]
        assert len(stored) == 1


def test_steady_decoding_reuses_graphs() -> None:  # S109
    one, _ = logits(SWA, [60], sized=False)
    many, rt = logits(SWA, [20, *[1] * 40])
    assert rt.builds <= 4
    assert np.abs(one - many).max() < 1e-5
