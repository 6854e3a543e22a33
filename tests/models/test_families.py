"""What every family must keep: graphs that verify and print, node estimates, caches, refusals that name key or tensor."""

from __future__ import annotations

import math
from collections import Counter
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from family_files import FAMILIES, family_file, family_metadata
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import parse_graph, print_graph, verify
from ggufc.models import ARCHITECTURES, ModelError, Step, load_model
from model_files import ModelFile
from support import BUNDLED_GOLDEN

MLA = [0, 3]


def forms(name: str) -> list[dict[str, Any]]:
    return [{"mla": mla} for mla in MLA] if name.startswith("deepseek2") else [{}]


CASES = [(name, options) for name in FAMILIES for options in forms(name)]


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_graphs_verify_print_and_stay_within_the_estimate(name: str, options: dict[str, Any]) -> None:  # S58, S102
    variants: list[dict[str, Any]] = [{}] if name == "deepseek2-lite" else [{}, {"optional": False}, {"vectors": "f16"}]
    for variant in variants:
        model = load_model(family_file(name, **variant))
        for embd_input in (False, True):
            graph = model.build(Step({**options, "embd_input": embd_input}))
            verify(graph)
            text = print_graph(graph)
            assert print_graph(parse_graph(text)) == text
            assert len(graph.nodes) <= model.node_estimate() <= 4 * len(graph.nodes) + 64
            names = Counter(node.name for node in graph.nodes)
            assert names.most_common(1)[0][1] == 1 and "" not in names


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_caches_are_what_the_graph_declares(name: str, options: dict[str, Any]) -> None:  # S8
    model = load_model(family_file(name))
    options = options | {"type_k": "f32", "type_v": "bf16"}
    declared = {node.name: (node.dtype, node.type.ne[0]) for node in model.build(Step(options)).find("cache")}
    assert declared == {cache.name: (cache.dtype, cache.width) for cache in model.caches(options)}
    for cache in model.caches(options):
        layer = model.hparams.layers[cache.layer]
        assert cache.width % cache.head_dim == 0 and cache.window == layer.window
        assert cache.part == "k" or not cache.rope


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_no_weight_is_read_in_vain_and_no_required_one_left_out(name: str, options: dict[str, Any]) -> None:  # S74
    model = load_model(family_file(name))
    used = {node.attrs["tensor"] for node in model.build(Step(options)).find("weight")}
    choice = {w for w in model.weights if w.endswith(("kv_b.weight", "k_b.weight", "v_b.weight")) or w.startswith("rope_factors")}
    choice |= {w for w in model.weights if ".indexer." in w}
    assert set(model.weights) - choice <= used <= set(model.weights)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek2-lite"])
def test_missing_tensor_is_named(name: str) -> None:
    for tensor in load_model(family_file(name, optional=False)).required_tensors:
        file = family_file(name, optional=False)
        del file.tensors[tensor]
        with pytest.raises(ModelError, match="no tensor") as error:
            load_model(file)
        # Without one form of a group of tensors the other is asked for.
        if not any(part in tensor for part in ("_b.weight", "_exps.weight", "rope_factors")):
            assert repr(tensor) in str(error.value)


GIVEN = {"llama": "llama-gqa-tied", "gemma3": "gemma3-7", "deepseek4": "deepseek4-split-decode", "openpangu": "openpangu-swa-dsa-ubatch"}
"""Bundled golden cases of the families that have no file in memory."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("eps", [0.0, -1e-6, math.nan, 0])
def test_a_norm_without_epsilon_is_refused_before_a_graph_is_built(arch: str, eps: float) -> None:  # S70
    if arch in GIVEN:
        with GGUFFile.open(BUNDLED_GOLDEN / GIVEN[arch] / "model.gguf") as file:
            metadata = dict(file.metadata)
    else:
        metadata = family_metadata(next(name for name in FAMILIES if FAMILIES[name][0] == arch))
    key = f"{arch}.attention.layer_norm_rms_epsilon"
    ARCHITECTURES[arch].read(metadata)
    with pytest.raises(ModelError, match="layer_norm_rms_epsilon"):
        ARCHITECTURES[arch].read(metadata | {key: eps})
    del metadata[key]
    with pytest.raises(ModelError, match="layer_norm_rms_epsilon"):
        ARCHITECTURES[arch].read(metadata)


@pytest.mark.parametrize("name", FAMILIES)
def test_types_may_differ_per_tensor_but_must_be_known(name: str) -> None:
    file = family_file(name)
    types = cycle(("q8_0", "q4_0", "f16", "mxfp4", "bf16", "f32", "iq4_nl"))
    for tensor, info in file.tensors.items():
        if len(info.ne) > 1:
            file.add(tensor, *info.ne, dtype=next(types))
    for options in forms(name):
        verify(load_model(file).build(Step(options)))
    for tensor, info in file.tensors.items():
        broken = ModelFile(file.metadata, dict(file.tensors))
        broken.add(tensor, *info.ne, dtype="q9_9")
        with pytest.raises(ModelError, match="q9_9") as error:
            load_model(broken)
        assert repr(tensor) in str(error.value)


REQUIRED = {
    "deepseek2": (
        "attention.kv_lora_rank",
        "attention.q_lora_rank",
        "leading_dense_block_count",
        "expert_shared_count",
        "expert_weights_scale",
        "expert_feed_forward_length",
    ),
    "glm4moe": ("expert_count", "expert_used_count", "expert_weights_scale", "expert_feed_forward_length"),
    "gpt-oss": ("attention.sliding_window", "expert_count", "expert_used_count", "expert_feed_forward_length"),
    "qwen3moe": ("expert_count", "expert_used_count"),
    "phi3": ("attention.sliding_window",),
}


@pytest.mark.parametrize("name, key", [(name, key) for name, keys in REQUIRED.items() for key in keys])
def test_missing_key_is_named(name: str, key: str) -> None:
    file = family_file(name)
    del file.metadata[f"{name}.{key}"]
    with pytest.raises(ModelError) as error:
        load_model(file)
    assert f"{name}.{key}" in str(error.value)


VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 40), max_size=5),
    st.sampled_from(["none", "linear", "yarn"]),
)
ANY_KEY = sorted({key.split(".", 1)[1] for name in FAMILIES for key in family_metadata(name) if not key.startswith(("gen", "tok"))})


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_any_metadata_builds_or_is_refused(name: str, data: st.DataObject) -> None:
    """Whatever a file says, the answer is a graph within its budget or a ``ModelError``, never another exception."""
    arch = FAMILIES[name][0]
    changes = data.draw(
        st.dictionaries(st.sampled_from([*ANY_KEY, "rope.scaling.type", "rope.scaling.factor"]), VALUES, min_size=1, max_size=3)
    )
    file = family_file(name)
    file.metadata |= {f"{arch}.{key}": value for key, value in changes.items()}
    try:
        architecture = ARCHITECTURES[arch]
        hp = architecture.read(file.metadata)
        # Sizes that changed ask for other tensors; give them, so that the builder sees the strange sizes as well.
        if hp.n_layer <= 8:
            for spec in architecture.tensors(hp, FAMILIES[name][2]):
                file.add(spec.name, *spec.ne)
        model = load_model(file)
        graph = model.build(Step({"mla": data.draw(st.sampled_from(MLA))}))
    except ModelError as error:
        assert str(error)
        return
    assert len(graph.nodes) <= model.node_estimate()


def windows(name: str) -> list[int]:
    return [layer.window for layer in load_model(family_file(name)).hparams.layers]


def test_windows_of_layers() -> None:
    assert windows("gemma2") == windows("gpt-oss") == [16, 0]
    assert windows("phi3-factors") == [16, 16] and windows("phi3") == [0, 0]


def test_smollm3_turns_three_of_four_layers() -> None:
    model = load_model(family_file("smollm3"))
    assert [bool(model.cache_rope(i)) for i in range(5)] == [True, True, True, False, True]
    assert len(model.build().find("rope")) == 8


def test_gemma2_bounds_scores_before_the_mask_and_logits_at_the_end() -> None:
    graph = load_model(family_file("gemma2")).build()
    assert [node.attrs["cap"] for node in graph.find("softcap")] == [50.0, 50.0, 30.0]
    for node in graph.find("soft_max"):
        capped = node.operands[0]
        assert node.attrs["scale"] == 1.0 and capped.op.name == "softcap"
        assert capped.operands[0].attrs["s"] == pytest.approx(8**-0.5)
    assert graph.outputs["logits"].op.name == "softcap"


def test_gemma2_27b_scales_by_embedding_width() -> None:
    metadata = family_metadata("gemma2") | {
        "gemma2.block_count": 46,
        "gemma2.attention.key_length": 16,
        "gemma2.attention.value_length": 16,
    }
    assert {layer.attn_scale for layer in ARCHITECTURES["gemma2"].read(metadata).layers} == {1 / math.sqrt(32 // 4)}


@pytest.mark.parametrize(
    "layers, heads_kv, context, window", [(32, 2, 4096, 2047), (40, 2, 4096, 2047), (32, 32, 131072, 262144), (40, 2, 131072, 131072)]
)
def test_phi3_windows_of_released_models(layers: int, heads_kv: int, context: int, window: int) -> None:
    metadata = family_metadata("phi3") | {"phi3.block_count": layers, "phi3.context_length": context}
    metadata |= {"phi3.attention.head_count": 32, "phi3.attention.head_count_kv": heads_kv, "phi3.embedding_length": 64}
    del metadata["phi3.attention.sliding_window"]
    assert {layer.window for layer in ARCHITECTURES["phi3"].read(metadata).layers} == {window}


def test_phi3_factors_depend_on_the_context_asked_for() -> None:
    model = load_model(family_file("phi3-factors"))
    for n_ctx_seq, which in ((0, "short"), (512, "short"), (513, "long")):
        step = Step({"n_ctx_seq": n_ctx_seq})
        ropes = model.build(step).find("rope")
        assert {node.operands[2].name for node in ropes} == {f"rope_factors_{which}.weight"}
        assert step.observations["n_ctx_seq > 512"] == (which == "long")
        assert model.caches({"n_ctx_seq": n_ctx_seq})[0].rope["factors"] == f"rope_factors_{which}.weight"
    # Factors for a whole head serve a rotation of its part.
    file = family_file("phi3-factors")
    for part in ("long", "short"):
        file.add(f"rope_factors_{part}.weight", 4)
    load_model(file).build()
    file.add("rope_factors_short.weight", 3)
    with pytest.raises(ModelError, match=r"rope_factors_short.*\[3\].*\[2\] or \[4\]"):
        load_model(file)


def test_glm4moe_leaves_prediction_layers_alone() -> None:
    model = load_model(family_file("glm4moe-nextn"))
    assert model.n_layer == 2 and not any(name.startswith("blk.2.") for name in model.weights)
    file = family_file("glm4moe-nextn")
    file.metadata["glm4moe.nextn_predict_layers"] = 3
    with pytest.raises(ModelError, match=r"nextn_predict_layers is 3.*none of the 3 layers"):
        load_model(file)


@pytest.mark.parametrize("gating, op", [(0, "sigmoid"), (1, "soft_max"), (2, "sigmoid")])
def test_glm4moe_gates(gating: int, op: str) -> None:
    file = family_file("glm4moe")
    file.metadata["glm4moe.expert_gating_func"] = gating
    (node,) = (node for node in load_model(file).build().nodes if node.name == "blk.1.ffn_moe_probs")
    assert node.op.name == op


def test_selection_bias_chooses_but_does_not_weigh() -> None:
    nodes = {node.name: node for node in load_model(family_file("glm4moe")).build().nodes}
    assert nodes["blk.1.ffn_moe_ids"].operands[0].name == "blk.1.ffn_moe_probs.biased"
    assert nodes["blk.1.ffn_moe_chosen"].operands[0].operands[0].name == "blk.1.ffn_moe_probs"
    assert "blk.0.ffn_moe_probs" not in nodes  # the leading dense layer


def test_gpt_oss_sinks_reach_every_softmax_over_cells() -> None:
    graph = load_model(family_file("gpt-oss")).build()
    sinks = [node.operands[2].name for node in graph.find("soft_max") if len(node.operands) == 3]
    assert sinks == [f"blk.{i}.attn_sinks.weight" for i in range(2)]
