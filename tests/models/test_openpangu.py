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
    load_model,
    openpangu_plan,
)
from sparse_runner import Runtime, excess, run_case
from support import golden_cases

CASES = [case for case in golden_cases("openpangu-") if case.name not in ("openpangu-chat", "openpangu-chunked")]
LONG = golden_cases("openpangu-chunked")
SWA = next(case for case in CASES if case.name == "openpangu-swa-dsa-ubatch")
DENSE = next((case for case in CASES if case.name == "openpangu-dense"), SWA)


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
    assert gathers and all(n.type.ne[1] <= 65535 for n in gathers)


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
    assert bool(gathers) == (n <= 14)


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


GRID_FORMS: dict[str, dict[str, Any]] = {"view": {}, "full": {}, "compacted": {"swa_compress": True}, "kept-2048": {"dsa_top_k": 2048}}
"""Windowed layers read a view of their window, all rows, or a region of their own; a choice as wide as that of large models."""


@pytest.mark.parametrize(
    ("folder", "form"),
    [(DENSE, "view"), *((case, form) for case in (SWA, *LONG) for form in GRID_FORMS)],
    ids=lambda v: getattr(v, "name", v),
)
def test_node_estimates_and_gathers_are_bounded_over_the_grid(folder: Path, form: str) -> None:  # S101, S102
    model, gathers, options = model_of(folder), [], GRID_FORMS[form]
    for tokens in GRID_T:
        for kv in GRID_KV:
            window = min(kv, 32 * ((128 + tokens) // 32))
            sizes = {"T": tokens, "KV": kv, "WV": kv if form == "full" else window, "KVW": window}
            graph = model.build(Step(options, sizes))
            estimate = model.node_estimate(Step(options, sizes))
            assert len(graph.nodes) <= estimate <= 4 * len(graph.nodes) + 64
            found = [n for n in graph.find("get_rows") if n.name.endswith(".k.gathered")]
            gathers += [(tokens, evaluate(n.type.ne[1], {"T": tokens})) for n in found]
    assert all(rows <= 65535 for _, rows in gathers)
    if folder == DENSE:
        assert not gathers
    elif not options:
        assert {1, 14} <= {tokens for tokens, _ in gathers} and (folder == SWA or max(gathers)[0] == 2048)


@pytest.mark.parametrize("rows", [(64, 96), (96, 64)])
def test_another_view_of_a_window_is_another_graph(rows: tuple[int, int]) -> None:  # S111
    """Of two steps with equal tokens and cells: whether the view is smaller than the cache, and its rows where blocks depend on them."""
    model = model_of(SWA)
    first, second = (Step({}, {"T": 1, "KV": 96, "WV": n}) for n in rows)
    assert model.build(first).analysis["observations"]["WV < KV"] == (rows[0] < 96)
    assert second.matches(first.observations) == [f"WV < KV: {rows[0] < 96} -> {rows[1] < 96}"]
    assert first.matches(first.observations) == []
    long, other = (Step({}, {"T": 2048, "KV": 32768, "WV": n}) for n in (2176, 2208))
    model.build(long)
    assert other.matches(long.observations) == ["WV: 2176 -> 2208"]


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
