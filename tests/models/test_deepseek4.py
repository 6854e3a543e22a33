"""deepseek4: the goldens of another engine, what each part of the family contributes, and where state lies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparse_runner
from ggufc.formats.ggml_types import row_bytes
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node, TensorType, interpret, verify
from ggufc.ir.layout import root
from ggufc.models import Model, ModelError, Step, deepseek4_attention, deepseek4_hparams, load_model
from ggufc.passes import PassManager
from sparse_runner import Runtime, excess, run_case
from support import golden_cases

CASES = golden_cases("deepseek4-")
SPLIT = next(case for case in CASES if case.name == "deepseek4-split-decode")


def model_of(folder: Path) -> Model:
    with GGUFFile.open(folder / "model.gguf") as file:
        return load_model(file)


def case_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "case.json").read_text()))


def tokens_of(folder: Path, n: int) -> list[int]:
    return [t for step in case_of(folder)["steps"] for t in step.get("tokens", [])][:n]


INERT = ("deepseek4-dense", "deepseek4-kq8", "deepseek4-q8-weights")
"""Cases whose choice keeps every entry, so that graphs for a known size leave it out; the others have one graph either way."""


@pytest.mark.parametrize(
    ("case", "sized"),
    [(case, True) for case in CASES] + [(case, False) for case in CASES if case.name in INERT],
    ids=lambda v: v.name if isinstance(v, Path) else "sized" if v else "any-size",
)
def test_logits_equal_the_golden(case: Path, sized: bool) -> None:  # S39, S40, S41, S42, S43, S45, S52, S54
    found, rt = run_case(case, sized=sized)
    assert excess(case, found) <= 1
    assert rt.builds == 1, "one graph serves all steps: what differs between them enters through inputs"


def start(folder: Path, **options: Any) -> tuple[Runtime, list[int]]:
    case = case_of(folder)
    with GGUFFile.open(folder / "model.gguf") as file:
        weights = {name: np.array(file.data(name)) for name in file.tensors}
        return Runtime(load_model(file), weights.__getitem__, case["options"] | options, sized=False), tokens_of(folder, 138)


def decode(rt: Runtime, tokens: list[int], first: int = 0, seq: int = 0) -> np.ndarray:
    n = len(tokens)
    return rt.decode(tokens, list(range(first, first + n)), [seq] * n)


@pytest.mark.parametrize("n_ubatch", [1, 7, 512])
def test_batching_does_not_matter(n_ubatch: int) -> None:  # S46, S42: blocks of 4 and 128 close within and between batches
    rt, tokens = start(SPLIT, n_ubatch=30)
    whole = decode(rt, tokens[:132])
    rt, _ = start(SPLIT, n_ubatch=n_ubatch)
    if n_ubatch == 1:
        decode_fast = decode(rt, tokens[:20])
        assert np.abs(decode_fast - whole[:20]).max() < 1e-4
    else:
        assert np.abs(decode(rt, tokens[:132]) - whole).max() < 1e-4


def test_clearing_leaves_nothing_behind() -> None:  # S44
    rt, tokens = start(SPLIT)
    first = decode(rt, tokens[:40])
    decode(rt, tokens[40:60], 40)
    rt.clear()
    assert np.array_equal(decode(rt, tokens[:40]), first)
    rt.remove(0, 0, -1)
    assert all(not rt.rows(name).any() for name, info in rt.infos.items() if info.rows != "C")
    assert np.array_equal(decode(rt, tokens[:40]), first)


def test_two_streams_in_one_batch_equal_each_alone() -> None:  # S52, S40: interleaved, of unequal length, in scattered cells
    rt, tokens = start(SPLIT, n_seq_max=2)
    a, c = tokens[:26], tokens[40:59]
    alone = [decode(rt, a), None]
    rt.clear()
    alone[1] = decode(rt, c, seq=1)
    rt.clear()
    decode(rt, a[:21])
    decode(rt, c[:14], seq=1)
    mixed = rt.decode([t for pair in zip(a[21:], c[14:]) for t in pair], [p for i in range(5) for p in (21 + i, 14 + i)], [0, 1] * 5)
    assert np.abs(mixed[0::2] - alone[0][21:]).max() < 1e-4
    assert np.abs(mixed[1::2] - alone[1][14:]).max() < 1e-4
    assert rt.builds == 1


@pytest.mark.parametrize("byte", [0x00, 0x7B, 0xFB])
def test_spare_and_unlisted_rows_cannot_matter(byte: int) -> None:  # S40
    """Zeros, and the largest numbers of both signs that bytes of one value make. Unfused graphs give unseen rows a weight of 0, so
    rows are numbers here; compiled models meet NaN in ``test_sparse_invariance``."""
    rt, tokens = start(SPLIT, n_seq_max=2)
    decode(rt, tokens[:30])
    clean = rt.save(0)
    expected = decode(rt, tokens[30:36], 30)
    rt.remove(0, 30, -1)
    rt.load(clean, 0)
    for name, info in rt.infos.items():
        data = rt.rows(name).copy()
        keep = (
            sorted(rt._cells(0))
            if info.rows == "C"
            else list(range(*(lambda first, n: (first, first + n))(*rt._stream_rows(info.rows, 0))))
        )
        if name.endswith(("entries", "indexer_k")):
            keep = keep[: 30 // 4 if info.rows == "C4" else 30 // 128]
        other = np.setdiff1d(np.arange(len(data)), keep)
        data[other] = byte
        rt.caches[name] = data
    assert np.array_equal(decode(rt, tokens[30:36], 30), expected)


def test_rewinding_within_a_block_needs_no_state() -> None:  # S54, section 9 of the specification
    rt, tokens = start(SPLIT)
    expected = decode(rt, tokens[:48])
    rt.clear()
    decode(rt, [*tokens[:37], 5, 6])
    rt.remove(0, 37, -1)
    assert np.abs(decode(rt, tokens[37:48], 37) - expected[37:]).max() < 1e-4
    rt.clear()
    decode(rt, [*tokens[:37], 5, 6, 7, 8])  # position 40 opened the next block: ring rows of the block before are gone
    rt.remove(0, 36, -1)
    assert np.abs(decode(rt, tokens[36:48], 36) - expected[36:]).max() > 1e-2


def test_no_node_is_a_nan() -> None:
    bad: list[str] = []

    def trapped(*args: Any, **kwargs: Any) -> Any:
        def trace(node: Node, value: Any) -> None:
            array = value.array if hasattr(value, "array") else value
            if array.dtype.kind == "f" and np.isnan(array).any():
                bad.append(node.name)

        return interpret(*args, **(kwargs | {"trace": trace}))

    rt, tokens = start(SPLIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_runner, "interpret", trapped)
        decode(rt, tokens[:10])
        decode(rt, tokens[10:12], 10)
    assert not bad


# What the graph says.


@pytest.fixture(scope="module")
def graph() -> Graph:
    built = model_of(SPLIT).build()
    verify(built)
    return built


def test_one_choice_per_indexer_layer_over_the_entries_mask(graph: Graph) -> None:  # S43
    layers = model_of(SPLIT).hparams.layers
    csa = [i for i, layer in enumerate(layers) if getattr(layer, "ratio", 0) == 4]
    choices = [n for n in graph.find("top_k") if "indexer" in n.name]
    assert [n.name.split(".")[1] for n in choices] == [str(i) for i in csa]
    masks = {n.operands[0].operands[1] for n in choices}
    assert [m.name for m in masks] == ["entry_mask_4"]


def test_the_ring_is_read_before_it_is_written(graph: Graph) -> None:  # S44
    for write in graph.find("set_rows"):
        if ".ring_" in write.name or "_ring_" in write.name:
            reads = [n for n in graph.nodes if write.operands[0] in n.operands and n is not write]
            assert reads and all(graph.index(n) < graph.index(write) for n in reads)


def test_one_projection_per_sublayer_for_the_gates(graph: Graph) -> None:  # S47
    products = [n.operands[0].attrs["tensor"] for n in graph.find("mul_mat") if n.operands[0].op.name == "weight"]
    gates = [name for name in products if ".hc_" in name or "output_hc" in name]
    assert len(gates) == len(set(gates)) == 2 * model_of(SPLIT).n_layer + 1


def test_every_indexer_uses_the_hadamard_operator(graph: Graph) -> None:  # S51
    names = [n.name for n in graph.find("hadamard")]
    assert len(names) == 2 * len([n for n in graph.find("top_k") if "indexer" in n.name])
    assert {n.attrs["n"] for n in graph.find("hadamard")} == {32}


def test_caches_are_never_copied(graph: Graph) -> None:  # S57
    sized = {"C", "C4", "C128"}
    for n in graph.nodes:
        if not n.is_leaf and not n.op.writes_cache and not n.is_view:
            assert not n.type.symbols & sized, n
        if n.op.name in ("cont", "cast"):
            assert root(n.operands[0]).op.name not in ("cache", "set_rows"), n


def test_products_have_unique_names_and_norms_are_shared(graph: Graph) -> None:  # S58
    names = [n.name for n in graph.find("mul_mat") + graph.find("mul_mat_id")]
    assert all(names) and len(names) == len(set(names))
    norms = [(n.operands[0], n.attrs["eps"]) for n in graph.find("rms_norm")]
    assert len(norms) == len(set(norms))


def test_router_weights_are_the_root_of_softplus() -> None:  # S48
    g = Graph("g")
    x = np.float32([[-80.0, -1.0, 0.0, 3.0, 25.0, 80.0]])
    p = g.add("sqrt", g.add("softplus", g.weight("x", TensorType("f32", (6, 1)))))
    g.outputs["p"] = p
    out = interpret(g, {"x": x}, {}, {}, {})["p"]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], [math.sqrt(math.log1p(math.exp(v))) if v < 20 else math.sqrt(v) for v in x[0].tolist()], rtol=1e-6)


@pytest.mark.parametrize("folder", [case for case in CASES if case.name in ("deepseek4-split-decode", "deepseek4-long", "deepseek4-names")])
def test_the_estimate_bounds_the_graph(folder: Path) -> None:
    model = model_of(folder)
    for step in (Step(), Step(sizes={"T": 1, "KV": 256, "V4": 256, "V128": 256}), Step({"type_k": "q8_0"})):
        nodes = len(model.build(step).nodes)
        assert nodes <= model.node_estimate(step) <= 2 * nodes


@pytest.mark.parametrize("type_k", ["f16", "bf16", "q8_0"])
def test_resources_are_what_the_graph_declares(type_k: str) -> None:  # S53
    model = model_of(SPLIT)
    options = {"type_k": type_k, "type_v": "q4_0"}
    graph = model.build(Step(options))
    declared = {n.name: (n.type.dtype, n.type.ne[0], str(n.type.ne[1])) for n in graph.find("cache")}
    infos = model.caches(options)
    assert declared == {c.name: (c.dtype, c.width, c.rows) for c in infos}
    assert {c.dtype for c in infos if c.part in ("k", "entries")} == {type_k}
    assert {c.dtype for c in infos if "ring" in c.part} == {"f32"}
    rt, _ = start(SPLIT, type_k=type_k)
    per_row = {c.name: row_bytes(c.dtype, c.width) for c in infos}
    rows = {"C": 512, "C4": 256, "C128": 256, "8*S+1": 9, "128*S+1": 129}
    assert sum(a.nbytes for a in rt.caches.values()) == sum(per_row[c.name] * rows[c.rows] for c in infos)


@pytest.mark.parametrize("option", ["type_k", "idx_type_k"])
@pytest.mark.parametrize("dtype", ["f32", "q4_0"])
def test_cache_types_the_family_lacks_are_refused(option: str, dtype: str) -> None:  # S53
    model = model_of(SPLIT)
    for use in (model.caches, lambda options: model.build(Step(options))):
        with pytest.raises(ModelError, match=rf"{option}.*supports only f16, bf16, q8_0"):
            use({option: dtype})


class Edited:
    """A model file with other keys or fewer tensors."""

    def __init__(self, file: GGUFFile, keys: dict[str, Any] | None = None, without: str = "") -> None:
        self.metadata = {k: v for k, v in (dict(file.metadata) | (keys or {})).items() if v is not None}
        self.tensors = {name: t for name, t in file.tensors.items() if name != without}


KEYS = {
    "other routing": ({"expert_gating_func": 2}, "root of softplus"),
    "two key heads": ({"attention.head_count_kv": 2}, "share one key"),
    "values of another size": ({"attention.value_length": 32}, "value_length"),
    "too few ratios": ({"attention.compress_ratios": [0, 4]}, "lists 2 layers"),
    "too few limits": ({"swiglu_clamp_exp": [1.0, 1.0]}, "swiglu_clamp_exp lists 2"),
    "one iteration": ({"hyper_connection.sinkhorn_iterations": 1}, "from 2"),
    "no streams": ({"hyper_connection.count": None}, "hyper_connection.count"),
    "dense layers": ({"leading_dense_block_count": 1}, "leading_dense_block_count"),
    "indexer too small": ({"attention.indexer.key_length": 8}, "at least 16"),
    "indexer no transform divides": ({"attention.indexer.key_length": 96}, "power of two"),
    "too many groups": ({"attention.output_group_count": 3}, "3 groups"),
}


@pytest.mark.parametrize("what", KEYS)
def test_keys_that_contradict_each_other_are_refused(what: str) -> None:
    keys, message = KEYS[what]
    with GGUFFile.open(SPLIT / "model.gguf") as file, pytest.raises(ModelError, match=message):
        load_model(Edited(file, {f"deepseek4.{k}": v for k, v in keys.items()}))


@pytest.mark.parametrize(
    "name", ["output_hc_fn.weight", "blk.1.attn_compressor_ape.weight", "blk.0.attn_kv.weight", "blk.0.ffn_gate_tid2eid.weight"]
)
def test_a_missing_tensor_is_named(name: str) -> None:
    with GGUFFile.open(SPLIT / "model.gguf") as file, pytest.raises(ModelError, match=f"no tensor '{name}'"):
        load_model(Edited(file, without=name))


def test_embeddings_cannot_replace_tokens_where_tokens_choose_experts() -> None:
    with pytest.raises(ModelError, match="embd_input"):
        model_of(SPLIT).build(Step({"embd_input": True}))


def test_groups_follow_from_shapes_where_keys_are_missing() -> None:
    keys = {f"deepseek4.attention.{k}": None for k in ("output_group_count", "output_lora_rank")}
    with GGUFFile.open(SPLIT / "model.gguf") as file:
        model = load_model(Edited(file, keys))
        assert deepseek4_attention.output_groups(model.weights, model.hparams, 0) == (2, 16)


@pytest.mark.parametrize(("n", "block"), [(64, 64), (128, 128), (96 * 4, 128), (192, 64), (1536, 512)])
def test_size_of_the_indexers_transform(n: int, block: int) -> None:  # S51
    assert deepseek4_hparams.index_block(n) == block


def test_a_compacted_window_equals_the_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:  # C1.11
    monkeypatch.setattr(sparse_runner, "COMPACT_SLACK", 20)
    rt, tokens = start(SPLIT, n_ubatch=20)
    whole = decode(rt, tokens[:120])
    rt, _ = start(SPLIT, n_ubatch=20, swa_compress=1)
    small = np.concatenate([decode(rt, tokens[:100]), *(decode(rt, [t], 100 + i) for i, t in enumerate(tokens[100:120]))])
    assert np.abs(whole - small).max() < 1e-4
    assert rt.region is not None and rt.region.base > 0 and rt.infos["blk.0.k"].rows == "CW"


@pytest.mark.parametrize("folder", [SPLIT, *golden_cases("openpangu-swa-dsa-ubatch")], ids=lambda case: case.name)
def test_keys_cannot_be_shifted(folder: Path) -> None:  # S54, S106
    model = model_of(folder)
    assert all(model.cache_rope(i) == {"mode": "latent"} for i in range(model.n_layer))
    assert all(info.rope in ({}, {"mode": "latent"}) for info in model.caches())


def test_kinds_of_layers_follow_from_tensors_where_no_key_tells() -> None:
    with GGUFFile.open(SPLIT / "model.gguf") as file:
        told = load_model(file).hparams
        model = load_model(Edited(file, {"deepseek4.attention.compress_ratios": None}))
    assert isinstance(told, deepseek4_hparams.DeepSeek4Params)
    seen = deepseek4_hparams.with_tensors(model.hparams, model.weights)
    assert [(a.ratio, a.rope) for a in seen.layers] == [(a.ratio, a.rope) for a in told.layers]  # type: ignore[attr-defined]
    with GGUFFile.open(SPLIT / "model.gguf") as file:
        odd = Edited(file, {"deepseek4.attention.compress_ratios": [16, *[layer.ratio for layer in told.layers[1:]]]})  # type: ignore[attr-defined]
        other = load_model(odd)
    assert other.hparams.layers[0].rope == told.entry_rope != told.raw_rope
    (note,) = other.notes()
    assert not model.notes() and "layer 0 has ratio 16, which no compressor serves (4 and 128 exist)" in note
    assert not [info for info in other.caches() if info.layer == 0 and info.part != "k"]


def fused(rt: Runtime) -> Graph:
    """The runtime's graph after the passes that fuse an indexer."""
    graph = rt.graph({})
    PassManager.parse("canonicalize,fuse-sum-rows-ext,fuse-indexer-topk,dce").run(graph)
    verify(graph)
    return graph


def test_scores_and_choice_are_fused_by_default_and_choose_the_same() -> None:  # S55, S63
    expected, tokens = start(SPLIT)
    plain = decode(expected, tokens[:40])
    rt, _ = start(SPLIT, fidx=1)
    graph = fused(rt)
    assert len(graph.find("indexer_topk")) == len(expected.graphs[0][1].find("hadamard")) // 2
    assert not [n for n in graph.find("top_k") if "indexer" in n.name]
    assert not [n for n in graph.nodes if n.type.rank == 3 and {"V4", "T"} <= n.type.symbols and "indexer" in n.name]
    assert np.abs(decode(rt, tokens[:40]) - plain).max() < 1e-4
    rt, _ = start(SPLIT, fidx=0)
    assert not fused(rt).find("indexer_topk")
