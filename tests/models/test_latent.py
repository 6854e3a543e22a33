"""Latent attention: both forms mean the same from either set of matrices, and what its caches and keys are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from family_files import family_file, family_metadata
from ggufc.models import ARCHITECTURES, ModelError, Step, load_model
from ggufc.models.hparams import HParams
from golden_runner import Runner, assert_close, run_case
from model_files import ModelFile
from support import golden_cases

HEADS, NOPE, ROT, VALUE, RANK = 4, 32, 32, 32, 32


def read(**changes: Any) -> HParams:
    metadata = family_metadata("deepseek2") | {f"deepseek2.{key}": value for key, value in changes.items()}
    return ARCHITECTURES["deepseek2"].read({key: value for key, value in metadata.items() if value is not None})


def random_weights(file: ModelFile) -> dict[str, np.ndarray]:
    """Values of every tensor, in numpy order; matrices keep the size of what they multiply."""
    rng = np.random.default_rng(11)
    out = {}
    for name, tensor in file.tensors.items():
        values = rng.standard_normal(tensor.ne[::-1])
        out[name] = (values / math.sqrt(tensor.ne[0]) if len(tensor.ne) > 1 else 1 + 0.1 * values).astype(np.float32)
    return out


def logits(file: ModelFile, weights: dict[str, np.ndarray], **options: Any) -> np.ndarray:
    runner = Runner(load_model(file), weights.__getitem__, {"n_ctx": 32, "n_ubatch": 4, **options})
    tokens = [3, 1, 4, 1, 5, 9, 2]
    first = runner.decode(tokens, list(range(7)), [0] * 7)
    # The first micro-batch of these five tokens has no row whose logits are wanted.
    return np.concatenate([first, runner.decode([6, 5, 3, 5, 8], list(range(7, 12)), [0] * 5, last=True)])


@pytest.mark.parametrize("cache, tolerance", [("f32", 2e-5), ("f16", 5e-3), ("q8_0", 0.1)])
def test_all_forms_agree(cache: str, tolerance: float) -> None:
    """Decompressed and absorbed, from the joint matrix and from the pair; only the rounding of what is cached differs."""
    joint = family_file("deepseek2")
    weights = random_weights(joint)
    split, parts = family_file("deepseek2-split"), dict(weights)
    for i in range(2):
        del split.tensors[f"blk.{i}.attn_kv_b.weight"]
        heads = weights[f"blk.{i}.attn_kv_b.weight"].reshape(HEADS, NOPE + VALUE, RANK)
        parts[f"blk.{i}.attn_k_b.weight"] = np.ascontiguousarray(heads[:, :NOPE].transpose(0, 2, 1))
        parts[f"blk.{i}.attn_v_b.weight"] = np.ascontiguousarray(heads[:, NOPE:])
    # Some files store the matrices of all heads as one.
    flat = ModelFile(split.metadata, dict(split.tensors))
    for i in range(2):
        flat.add(f"blk.{i}.attn_k_b.weight", NOPE, HEADS * RANK)
        flat.add(f"blk.{i}.attn_v_b.weight", RANK, HEADS * VALUE)
    exact = logits(joint, weights, type_k="f32", type_v="f32", mla=0)
    assert np.std(exact) > 0.3
    for file, values in ((joint, weights), (split, parts), (flat, parts)):
        for mla in (0, 3):
            found = logits(file, values, type_k=cache, type_v=cache, mla=mla)
            np.testing.assert_allclose(found, exact, atol=tolerance, rtol=0, err_msg=f"mla {mla}")


@pytest.mark.parametrize("case", golden_cases("deepseek2-v3-mla1", "deepseek2-v3-seqops"), ids=lambda case: case.name)
def test_the_other_form_differs_from_the_golden_by_rounding_only(case: Any) -> None:
    """Decompressed keys in f16 round elsewhere than the golden's latents; in f32 both forms are equal."""
    assert_close(case, run_case(case, mla=0), atol=0.02)
    exact = {"type_k": "f32", "type_v": "f32"}
    absorbed, decompressed = run_case(case, mla=3, **exact), run_case(case, mla=0, **exact)
    for name, found in decompressed.items():
        np.testing.assert_allclose(found, absorbed[name], atol=2e-5, rtol=0)


def test_the_absorbed_form_caches_one_row_per_cell() -> None:  # S8
    model = load_model(family_file("deepseek2"))
    for mla in (1, 2, 3):
        caches = model.caches({"mla": mla, "type_k": "bf16"})
        assert [(c.name, c.width, c.head_dim, c.dtype) for c in caches] == [(f"blk.{i}.k", RANK + ROT, RANK + ROT, "bf16") for i in (0, 1)]
    decompressed = [(c.name, c.width, c.head_dim) for c in model.caches({"mla": 0})][:2]
    assert decompressed == [("blk.0.k", HEADS * (NOPE + ROT), NOPE + ROT), ("blk.0.v", HEADS * VALUE, VALUE)]


def test_keys_cannot_be_shifted() -> None:
    model = load_model(family_file("deepseek2"))
    for mla in (0, 3):
        assert {c.rope["mode"] for c in model.caches({"mla": mla}) if c.part == "k"} == {"latent"}


def test_the_form_is_part_of_the_reuse_key() -> None:
    model = load_model(family_file("deepseek2"))
    step = Step({"mla": 1})
    model.build(step)
    assert step.observations["mla != 0"] is True
    assert Step({"mla": 3}).matches(step.observations) == []
    assert Step({"mla": 0}).matches(step.observations) == ["mla != 0: True -> False"]


def test_values_are_a_view_of_the_version_the_keys_are_read_from() -> None:
    graph = load_model(family_file("deepseek2")).build()
    nodes = {node.name: node for node in graph.nodes}
    keys, latents = nodes["blk.1.k.view"], nodes["blk.1.k.latents"]
    assert keys.operands[0] is latents.operands[0] is nodes["blk.1.k.store"]
    assert latents.attrs["offset"] == 0 and latents.attrs["nb"] == (RANK + ROT, 1, RANK + ROT)


def test_matrices_cut_out_of_a_quantised_one() -> None:
    """Keys are transposed, which breaks their blocks; values stay the rows they are."""
    file = family_file("deepseek2")
    file.add("blk.1.attn_kv_b.weight", RANK, HEADS * (NOPE + VALUE), dtype="q4_0")
    nodes = {node.name: node for node in load_model(file).build().nodes}
    assert str(nodes["blk.1.attn_q_absorbed"].operands[0].type) == f"q8_0[{NOPE}, {RANK}, {HEADS}]"
    values = nodes["blk.1.attn_v_b"].operands[0]
    assert values.op.name == "view" and str(values.type) == f"q4_0[{RANK}, {VALUE}, {HEADS}]"


def test_latent_rows_need_whole_blocks_of_both_parts() -> None:
    file = family_file("deepseek2")
    file.metadata |= {"deepseek2.rope.dimension_count": 16, "deepseek2.attention.key_length": 64}
    for spec in ARCHITECTURES["deepseek2"].tensors(ARCHITECTURES["deepseek2"].read(file.metadata), ()):
        file.add(spec.name, *spec.ne)
    load_model(file).build()
    with pytest.raises(ModelError, match=r"type_k.*48.*q8_0.*32"):
        load_model(file).build(Step({"type_k": "q8_0"}))


def test_one_kv_head_form_of_the_keys() -> None:
    """A file may state the cached row as its only KV head and the true sizes under other keys."""
    wide = {"attention.head_count_kv": 1, "attention.key_length": RANK + ROT, "attention.value_length": RANK}
    wide |= {"attention.key_length_mla": NOPE + ROT, "attention.value_length_mla": VALUE}
    assert read(**wide) == read()


def test_yarn_scales_scores_and_leaves_the_rotation_pure() -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "rope.scaling.attn_factor": 1.5,
    }
    layer = read(**yarn).layers[0]
    assert layer.attn_scale == pytest.approx((1.5 * (1 + 0.1 * math.log(4))) ** 2 / math.sqrt(NOPE + ROT))
    assert layer.rope is not None and layer.rope.attn_factor * (1 + 0.1 * math.log(4)) == pytest.approx(1)
    assert read().layers[0].attn_scale == pytest.approx(1 / math.sqrt(NOPE + ROT))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"attention.q_lora_rank": None}, ("attention.q_lora_rank", "2 layers")),
        ({"attention.head_count_kv": 2}, ("head_count_kv is 2", "must be 4", "64")),
        ({"rope.dimension_count": 64}, ("dimension_count turns 64", "unturned")),
        ({"attention.head_count": [4, 8], "attention.head_count_kv": 4}, ("attention.head_count", "differs between layers")),
        ({"expert_count": 0}, ("expert_count is 0", "layers 1 and above")),
        ({"expert_gating_func": 3}, ("expert_gating_func", "up to 2")),
    ],
)
def test_keys_that_contradict_each_other_are_named(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as error:
        read(**changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("layers, gate", [(2, "softmax"), (47, "sigmoid"), (48, "sigmoid")])
def test_gate_where_the_file_does_not_say(layers: int, gate: str) -> None:
    assert read(block_count=layers).layers[-1].routing.gate == gate


def test_models_of_26_or_27_layers_project_queries_directly() -> None:
    for layers in (26, 27):
        latent = read(block_count=layers).layers[0].latent
        assert latent is not None and latent.q_rank == 0
