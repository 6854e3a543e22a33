"""Built graphs: their text, names, inputs, and the budget that bounds their nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ggufc.ir import Graph, parse_graph, print_graph, verify
from ggufc.models import ModelError, Step, load_model
from ggufc.models.blocks import Builder
from ggufc.models.model import NODE_ESTIMATE, OBSERVATIONS
from ggufc.models.step import OPTIONS
from model_files import D, ModelFile, gemma3_file, llama_file

MODELS: dict[str, Callable[[], ModelFile]] = {
    "llama": llama_file,
    "llama-tied": lambda: llama_file(tied=True),
    "llama-bias": lambda: llama_file(biases=True),
    "llama-deep": lambda: llama_file(n_layer=40),
    "llama-wide-heads": lambda: llama_file(biases=True, d=32),
    "llama-one-layer": lambda: llama_file(n_layer=1),
    "llama-moe": lambda: llama_file(experts=8),
    "llama-moe-all-used": lambda: llama_file(experts=8, used=8),
    "llama-moe-one-used": lambda: llama_file(experts=3, used=1),
    "llama-moe-split": lambda: llama_file(experts=8, split=True),
    "gemma3": gemma3_file,
    "gemma3-deep": lambda: gemma3_file(n_layer=26),
}


def build(name: str, **options: bool | str) -> Graph:
    return load_model(MODELS[name]()).build(Step(options))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_text(name: str, golden_text: Callable[[object, str], None]) -> None:
    golden_text(print_graph(build(name)), f"{name}.ggir")


@pytest.mark.parametrize("name", MODELS)
def test_graphs_verify_and_their_text_parses_back(name: str) -> None:
    graph = build(name)
    verify(graph)
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_and_complete(name: str) -> None:  # S58
    names = Counter(node.name for node in build(name).nodes)
    assert names.most_common(1)[0][1] == 1 and "" not in names


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("embd_input", [False, True])
def test_node_estimate_bounds_the_graph(name: str, embd_input: bool) -> None:  # S102
    model = load_model(MODELS[name]())
    step = Step({"embd_input": embd_input}, {"T": 1, "KV": 256})
    graph = model.build(step)
    assert len(graph.nodes) <= model.node_estimate(step) <= 4 * len(graph.nodes) + 64
    assert graph.analysis[NODE_ESTIMATE] == model.node_estimate(step)


def test_every_optional_part_stays_within_the_estimate() -> None:
    file = llama_file(biases=True, d=32)
    file.add("rope_freqs.weight", 16, dtype="f16")
    for name, tensor in file.tensors.items():
        if len(tensor.ne) == 1:
            file.add(name, *tensor.ne, dtype="f16")
    model = load_model(file)
    graph = model.build(Step({"type_v": "q8_0"}))
    assert len(graph.nodes) <= model.node_estimate()


def test_a_block_over_its_estimate_is_refused() -> None:
    model = load_model(llama_file())
    builder = Builder(model.hparams, model.weights, Step())
    x = builder.embedding()
    with pytest.raises(ModelError, match=r"block 'mine' added 2 nodes.*at most 1"), builder.block("mine", 1):
        builder.add("silu", builder.add("silu", x, name="a"), name="b")


def test_a_tensor_outside_the_table_is_refused() -> None:
    model = load_model(llama_file())
    builder = Builder(model.hparams, model.weights, Step())
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_sinks\.weight'.*does not declare"):
        builder.weight("blk.0.attn_sinks.weight")


def test_block_cache_types_need_whole_blocks_per_head() -> None:
    graph = load_model(llama_file(d=32)).build(Step({"type_k": "q8_0", "type_v": "q8_0"}))
    assert {str(node.operands[0].type) for node in graph.find("cast")} == {"q8_0[64, C]"}
    for part in ("k", "v"):
        with pytest.raises(ModelError, match=f"type_{part}.*heads of 8 values.*q8_0.*32"):
            build("llama", **{f"type_{part}": "q8_0"})


LOOKED_AT = {"embd_input", "flash_attn", "type_k", "type_v", "k_hadamard", "v_hadamard"}
LOOKED_AT |= {f"type_{part}_{end}" for part in "kv" for end in ("first", "last")}
"""What builders of plain families ask the step: options only."""


def test_observations_travel_with_the_graph() -> None:
    graph = build("llama", type_k="f32")
    assert graph.analysis[OBSERVATIONS] == {name: OPTIONS[name] for name in LOOKED_AT} | {"type_k": "f32"}
    assert {node.dtype for node in graph.find("cache") if node.name.endswith(".k")} == {"f32"}


def test_sizes_are_never_observed() -> None:
    """These families have one graph for all batch and cache sizes."""
    for make in (llama_file, gemma3_file):
        graph = load_model(make()).build(Step(sizes={"T": 7, "KV": 512}))
        assert set(graph.analysis[OBSERVATIONS]) == LOOKED_AT


def test_one_mask_per_window() -> None:
    graph = load_model(gemma3_file(n_layer=12)).build()
    visible = {node.name: node.attrs["window"] for node in graph.inputs() if node.attrs["kind"] == "visible"}
    assert visible == {"visible": 0, "visible_w16": 16}
    users = graph.users()
    assert {node.name: len(users[node]) for node in graph.find("kq_mask")} == {"kq_mask": 2, "kq_mask_w16": 10}


def test_inputs_are_declared_once() -> None:  # S116
    names = [node.name for node in build("llama-deep").inputs()]
    assert sorted(names) == ["kv_cells", "kv_slots", "out_ids", "positions", "tokens", "visible"]


def test_embeddings_replace_tokens_and_are_not_scaled() -> None:
    tokens, embd = build("gemma3"), build("gemma3", embd_input=True)
    assert [node.attrs["s"] for node in tokens.find("scale")] == [pytest.approx(32**0.5)]
    assert embd.find("scale") == []
    kinds = {node.attrs["kind"] for node in embd.inputs()}
    assert "embd" in kinds and "tokens" not in kinds
    # The tied embedding is still the output matrix.
    assert [node.name for node in embd.nodes if node.name == "token_embd.weight"] == ["token_embd.weight"]


def test_rows_without_wanted_logits_skip_the_last_feed_forward() -> None:
    graph = build("llama")
    width = {node.name: str(node.type.ne[1]) for node in graph.nodes if node.op.name == "mul_mat"}
    assert width["blk.0.ffn_up"] == "T" and width["blk.0.attn_output"] == "T"
    assert width["blk.1.ffn_up"] == "O" and width["blk.1.attn_output"] == "O" and width["blk.1.attn_q"] == "T"


def test_frequency_factors_reach_every_rotation_and_the_caches() -> None:
    file = llama_file()
    file.add("rope_freqs.weight", D // 2)
    model = load_model(file)
    assert all(node.operands[2].name == "rope_freqs.weight" for node in model.build().find("rope"))
    assert {cache.rope.get("factors") for cache in model.caches() if cache.part == "k"} == {"rope_freqs.weight"}
    assert all(cache.rope == {} for cache in model.caches() if cache.part == "v")


def test_caches_describe_what_the_graph_declares() -> None:
    model = load_model(gemma3_file(n_layer=6))
    options = {"type_k": "f32", "type_v": "bf16"}
    declared = {node.name: (node.dtype, node.type.ne[0]) for node in model.build(Step(options)).find("cache")}
    assert declared == {cache.name: (cache.dtype, cache.width) for cache in model.caches(options)}
    assert [cache.window for cache in model.caches() if cache.part == "k"] == [16] * 5 + [0]
    assert {cache.rope["base"] for cache in model.caches() if cache.part == "k"} == {1e4, 1e6}


def test_split_experts_are_joined_as_weights() -> None:
    graph = build("llama-moe-split")
    assert len(graph.find("concat")) == 2 * 3 * 7
    assert {str(node.operands[0].type) for node in graph.find("mul_mat_id")} == {"f32[32, 48, 8]", "f32[48, 32, 8]"}
