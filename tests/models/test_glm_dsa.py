"""glm-dsa: the goldens of another engine, what the indexer chooses, which layers share a choice, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparse_runner
from family_files import family_file, family_metadata
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node, TensorType, interpret, verify
from ggufc.models import Model, ModelError, Step, glm_dsa_hparams, glm_dsa_indexer, load_model
from model_files import ModelFile
from sparse_runner import Runtime, excess, run_case
from support import golden_cases

CASES = golden_cases("glm-dsa-")
TOPK8 = next(case for case in CASES if case.name == "glm-dsa-topk8")
SPARSE = {"dsa": True, "dsa_top_k": 8}


def model_of(folder: Path = TOPK8) -> Model:
    with GGUFFile.open(folder / "model.gguf") as file:
        return load_model(file)


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, n).tolist()


class Play:
    """A runtime of the small model with the indexer on, and the chosen cells of every evaluation by node name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, folder: Path = TOPK8, **options: Any) -> None:
        self.chosen: list[dict[str, np.ndarray]] = []
        self.scores: dict[str, np.ndarray] = {}
        with GGUFFile.open(folder / "model.gguf") as file:
            base = {"n_ctx": 128, "n_ubatch": 64, "n_seq_max": 4} | SPARSE
            self.rt = Runtime(load_model(file), file.data, base | options, sized=False)
        monkeypatch.setattr(sparse_runner, "interpret", self._interpret)

    def _interpret(self, graph: Graph, *args: Any, **kwargs: Any) -> Any:
        found: dict[str, np.ndarray] = {}

        def trace(node: Node, value: Any) -> None:
            if node.op.name == "top_k" and ".indexer." in node.name:
                found[node.name] = np.array(value)
            if node.name.endswith(".indexer.scores"):
                self.scores[node.name] = np.array(value)

        self.chosen.append(found)
        return interpret(graph, *args, **(kwargs | {"trace": trace}))

    def __call__(self, tokens: list[int], first: int = 0, seq: int = 0) -> np.ndarray:
        return self.rt.decode(tokens, list(range(first, first + len(tokens))), [seq] * len(tokens))

    def positions(self, layer: int = 0) -> list[set[int]]:
        """Positions among the choices of the last evaluation, per token; hidden cells that fill up a choice are left out."""
        rows = self.chosen[-1][f"blk.{layer}.indexer.top_k"]
        return [{self.rt.pos[c] for c in row if c >= 0 and self.rt.pos[c] >= 0} for row in rows.tolist()]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Play]:
    return lambda **options: Play(monkeypatch, **options)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "any-size"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_the_golden(case: Path, sized: bool) -> None:  # S137, S141, S142, S143, S149
    found, _ = run_case(case, sized=sized)
    assert excess(case, found) <= 1


def test_the_comparison_has_teeth() -> None:
    for options in ({"dsa": 0}, {"dsa_top_k": 9}):
        found, _ = run_case(TOPK8, steps=1, **options)
        assert excess(TOPK8, found) > 100


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "any-size"])
def test_a_choice_of_all_cells_is_dense_bit_for_bit(sized: bool) -> None:  # S137
    dense, _ = run_case(TOPK8, dsa=0)
    everything, _ = run_case(TOPK8, sized=sized, dsa_top_k=4096)
    assert dense.keys() == everything.keys()
    for name, logits in dense.items():
        assert np.array_equal(logits, everything[name])


def test_padding_beyond_the_visible_cells_is_harmless() -> None:
    """A choice of more cells than a token sees is filled up with hidden ones, which the mask keeps hidden."""
    dense, _ = run_case(TOPK8, steps=1, dsa=0)
    padded, _ = run_case(TOPK8, steps=1, dsa_top_k=50)
    assert np.array_equal(dense["prefill"], padded["prefill"])


def test_batches_of_any_size_choose_alike() -> None:  # S138: index keys persist
    whole, _ = run_case(TOPK8)
    for n in (1, 7):
        cut, _ = run_case(TOPK8, n_ubatch=n)
        for name, logits in whole.items():
            np.testing.assert_allclose(cut[name], logits, rtol=0, atol=1e-3)


def test_the_transform_changes_no_choice(play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch) -> None:  # S139
    tokens = prompt(40)
    with_transform = play(idx_type_k="f32")
    logits = with_transform(tokens)
    nodes = with_transform.rt.graphs[0][1].find("hadamard")
    assert len(nodes) == 2 * 3 and all(node.attrs["n"] == 32 for node in nodes)
    turn = lambda b, heads, p, name: b.add("rope", heads, b.positions, name=name, **p.rope.attrs())  # noqa: E731
    monkeypatch.setattr(glm_dsa_indexer, "_transform", turn)
    without = play(idx_type_k="f32")
    np.testing.assert_allclose(without(tokens), logits, atol=2e-2)
    assert not without.rt.graphs[0][1].find("hadamard")
    for layer in (0, 1, 2):
        assert without.positions(layer) == with_transform.positions(layer)
    assert len(with_transform.scores) == 3
    for name, scores in with_transform.scores.items():
        np.testing.assert_allclose(without.scores[name], scores, rtol=1e-2, atol=1e-2 * np.abs(scores).mean())


def test_the_first_cell_of_each_sequence_is_always_chosen(play: Callable[..., Play]) -> None:  # S142
    """Four sequences in one batch choose and answer as each does alone."""
    tokens = {s: prompt(20 + s, s) for s in range(4)}
    alone = {}
    for s, mine in tokens.items():
        one = play()
        alone[s] = one(mine, seq=s)
        assert all(0 in chosen for layer in (0, 1, 2) for chosen in one.positions(layer))
    packed = play(n_ctx=256, n_ubatch=256)
    order = [(p, s) for p in range(23) for s in range(4) if p < len(tokens[s])]
    logits = packed.rt.decode([tokens[s][p] for p, s in order], [p for p, _ in order], [s for _, s in order])
    for s, mine in tokens.items():
        rows = [i for i, (_, q) in enumerate(order) if q == s]
        np.testing.assert_allclose(logits[rows], alone[s][: len(mine)], atol=2e-4)


def test_after_the_first_positions_are_dropped_the_first_survivor_is_chosen(play: Callable[..., Play]) -> None:  # S143
    run = play()
    run(prompt(40))
    run.rt.remove(0, 0, 10)
    run(prompt(3, 1), first=40)
    for layer in (0, 1, 2):
        for chosen in run.positions(layer):
            assert 10 in chosen and len(chosen) == 8 and min(chosen) == 10


def test_every_column_of_the_mask_is_written(play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch) -> None:  # S140
    """The mask is made of the causal one alone: 0 where a cell is seen and chosen, hidden everywhere else."""
    run = play()
    masks: dict[str, np.ndarray] = {}

    def trace(node: Node, value: Any) -> None:
        if node.name.endswith(".indexer.mask") or node.name == "kq_mask":
            masks[node.name] = np.array(value)

    monkeypatch.setattr(sparse_runner, "interpret", lambda *a, **k: interpret(*a, **(k | {"trace": trace})))
    run(prompt(30))
    causal = masks.pop("kq_mask")
    assert sorted(masks) == [f"blk.{i}.indexer.mask" for i in (0, 1, 2)]
    for mask in masks.values():
        assert not np.isnan(mask).any() and ((mask == 0) | (mask <= -1e30)).all()
        assert ((mask == 0).sum(axis=1) == np.minimum(8, (causal == 0).sum(axis=1))).all()
        assert (mask[causal < 0] < -1e38).all()


def test_a_quantised_key_cache_is_smaller_and_chooses_almost_alike(play: Callable[..., Play]) -> None:  # S152
    sizes, choices = {}, {}
    for dtype in ("f16", "q8_0"):
        run = play(idx_type_k=dtype, dsa_top_k=24)
        run(prompt(60, 5))
        sizes[dtype] = run.rt.rows("blk.0.indexer_k").nbytes
        choices[dtype] = [chosen for layer in (0, 1, 2) for chosen in run.positions(layer)]
    assert sizes["q8_0"] * 64 == sizes["f16"] * 34
    common = sum(len(a & b) for a, b in zip(*choices.values())) / sum(len(a) for a in choices["f16"])
    assert 0.95 <= common < 1.0


def edited(name: str = "glm-dsa", **keys: Any) -> ModelFile:
    file = family_file(name)
    metadata = family_metadata(name) | {f"glm-dsa.{key.replace('__', '.')}": value for key, value in keys.items()}
    out = ModelFile({key: value for key, value in metadata.items() if value is not None})
    out.tensors = file.tensors
    return out


def test_78_layers_of_which_21_choose() -> None:  # S151
    file = edited(block_count=78)
    hp = glm_dsa_hparams.read(file.metadata)
    full = [i for i, layer in enumerate(hp.layers) if layer.full]
    assert len(full) == 21 and full[:5] == [0, 1, 2, 6, 10] and full[-1] == 74


def test_sharing_layers_have_no_scores_and_read_the_last_choice() -> None:  # S151
    g = model_of().build(Step(SPARSE))
    assert [n.name for n in g.find("top_k") if "indexer" in n.name] == [f"blk.{i}.indexer.top_k" for i in (0, 1, 2)]
    masks = {n.name.split(".")[1]: n.operands[1].name for n in g.find("soft_max") if n.name.endswith("kq_soft_max")}
    assert masks == {str(i): f"blk.{min(i, 2)}.indexer.mask" for i in range(5)}
    assert [n.name for n in g.find("cache") if n.name.endswith("indexer_k")] == [f"blk.{i}.indexer_k" for i in (0, 1, 2)]


def test_the_files_own_list_of_layers_wins() -> None:  # S151
    with GGUFFile.open(TOPK8 / "model.gguf") as file:
        metadata = dict(file.metadata) | {"glm-dsa.attention.indexer.types": ["full", "shared", "full", "shared", "shared"]}
        model = load_model(type("Edited", (), {"metadata": metadata, "tensors": file.tensors})())
    g = model.build(Step(SPARSE))
    assert [n.name for n in g.find("top_k") if "indexer" in n.name] == ["blk.0.indexer.top_k", "blk.2.indexer.top_k"]
    for types, message in ((["shared", "full"], "the first of them shared"), (["full"], "has 1 entries")):
        with pytest.raises(ModelError, match=message):
            glm_dsa_hparams.read(edited(attention__indexer__types=types).metadata)
    with pytest.raises(ModelError, match=r"indexer\.types"):
        glm_dsa_hparams.read(edited(attention__indexer__types=["full", "some"]).metadata)


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:  # S147
    monkeypatch.setenv("GGUFC_DSA", "1")
    model = model_of()
    plain = model.build(Step())
    assert not any("indexer" in n.name for n in plain.nodes) and plain.analysis["observations"]["dsa"] is False
    assert not any("indexer" in cache.name for cache in model.caches())
    sparse = model.build(Step({"dsa": True}))
    assert [n.attrs["k"] for n in sparse.find("top_k") if "indexer" in n.name] == [16] * 3
    assert sparse.analysis["observations"]["dsa_top_k"] == 0
    for k in (-1, 0):
        again = model.build(Step({"dsa": True, "dsa_top_k": k}))
        assert [n.attrs["k"] for n in again.find("top_k") if "indexer" in n.name] == [16] * 3
    assert {cache.name for cache in model.caches({"dsa": True})} >= {f"blk.{i}.indexer_k" for i in (0, 1, 2)}


@pytest.mark.parametrize("kv, selects", [(32, True), (16, False), (8, False)])
def test_a_sized_step_drops_a_choice_of_everything(kv: int, selects: bool) -> None:
    step = Step({"dsa": True}, {"KV": kv, "T": 3})
    g = model_of().build(step)
    verify(g)
    assert bool([n for n in g.find("top_k") if "indexer" in n.name]) is selects
    assert step.observations["KV > 16"] is selects
    # Index keys are written all the same: later steps score against them.
    assert len([n for n in g.find("set_rows") if "indexer_k" in n.name]) == 3


def test_estimates_hold_for_every_form() -> None:  # S58
    model = model_of()
    for options in ({}, SPARSE, SPARSE | {"mla": 1}, SPARSE | {"type_k": "bf16", "idx_type_k": "q8_0"}):
        g = model.build(Step(options))
        verify(g)
        assert len(g.nodes) <= model.node_estimate(Step(options)) <= 3 * len(g.nodes)
        declared = {node.name: (node.dtype, node.type.ne[0]) for node in g.find("cache")}
        assert declared == {cache.name: (cache.dtype, cache.width) for cache in model.caches(options)}


def test_layers_that_predict_further_ahead_are_left_out() -> None:
    hp = glm_dsa_hparams.read(family_metadata("glm-dsa-nextn"))
    assert hp.n_layer == 4 == len(hp.layers)
    with pytest.raises(ModelError, match="leaves none"):
        glm_dsa_hparams.read(edited(nextn_predict_layers=2).metadata)


@pytest.mark.parametrize("gating, gate", [(None, "softmax"), (0, "sigmoid"), (1, "softmax"), (2, "sigmoid")])
def test_an_absent_gating_function_is_a_softmax(gating: int | None, gate: str) -> None:
    assert glm_dsa_hparams.read(edited(expert_gating_func=gating).metadata).layers[-1].routing.gate == gate


def test_the_plain_norm_uses_the_epsilon_of_the_others() -> None:  # S70
    g = model_of().build(Step(SPARSE))
    eps = {n.attrs["eps"] for n in g.nodes if n.op.name in ("norm", "rms_norm")}
    assert len(eps) == 1 and len(g.find("norm")) == 3
    # The file has that one key, and another would not be read (spec/glm-dsa.md 1).
    for other in (None, 0.5):
        file = edited(attention__layer_norm_rms_epsilon=3e-4)
        assert [key for key in file.metadata if "epsilon" in key] == ["glm-dsa.attention.layer_norm_rms_epsilon"]
        if other:
            file.metadata["glm-dsa.attention.layer_norm_epsilon"] = other
        g = load_model(file).build(Step(SPARSE))
        assert {n.attrs["eps"] for n in g.find("norm")} == {n.attrs["eps"] for n in g.find("rms_norm")} == {3e-4}
    with pytest.raises(ModelError, match="layer_norm_rms_epsilon"):
        glm_dsa_hparams.read(edited(attention__layer_norm_rms_epsilon=0.0).metadata)


def test_yarn_scales_the_indexers_rotation_but_not_that_of_attention() -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 128}
    layer = glm_dsa_hparams.read(edited(**keys).metadata).layers[0]
    assert layer.rope is not None and layer.rope.ext_factor == layer.indexer.rope.ext_factor == 1.0
    assert layer.indexer.rope.attn_factor == 1.0 and layer.rope.attn_factor == pytest.approx(1 / (1 + 0.1 * np.log(4)))
    assert layer.attn_scale == pytest.approx(1 / np.sqrt(64))


REFUSED = {
    "attention.indexer.key_length": ({"attention__indexer__key_length": 48}, "power of two"),
    "too short": ({"attention__indexer__key_length": 16}, "32 values of"),
    "attention.indexer.top_k": ({"attention__indexer__top_k": 0}, "indexer.top_k"),
    "no heads": ({"attention__indexer__head_count": None}, "indexer.head_count"),
    "no latent": ({"attention__q_lora_rank": None}, "q_lora_rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_contradict_each_other_are_named(case: str) -> None:
    keys, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        glm_dsa_hparams.read(edited(**keys).metadata)


def test_combined_maps_and_missing_biases_are_refused() -> None:
    for missing in ("blk.0.attn_k_b.weight", "blk.1.exp_probs_b.bias"):
        file = family_file("glm-dsa")
        del file.tensors[missing]
        with pytest.raises(ModelError, match=missing):
            load_model(file)


def test_options_that_cannot_be_met_are_refused() -> None:
    model = load_model(family_file("glm-dsa", optional=False))
    model.build(Step())
    with pytest.raises(ModelError, match=r"no tensor 'blk\.0\.indexer\.attn_k\.weight'"):
        model.build(Step({"dsa": True}))
    for part in glm_dsa_indexer.TENSORS:
        file = family_file("glm-dsa")
        del file.tensors[f"blk.0.indexer.{part}"]
        with pytest.raises(ModelError, match=rf"no tensor 'blk\.0\.indexer\.{part}', which layer 0 needs to choose cells"):
            load_model(file).build(Step({"dsa": True}))
    model = load_model(family_file("glm-dsa"))
    with pytest.raises(ModelError, match="needs the cache of latents"):
        model.build(Step({"dsa": True, "mla": 0}))
    with pytest.raises(ModelError, match="between -1 and"):
        Step({"dsa_top_k": -2})


def test_index_keys_can_be_turned_by_a_difference_of_positions() -> None:  # S144
    """H turn(d) H of a stored key is the key of a token d positions later: the transform is its own inverse, and angles add up."""
    rope = glm_dsa_hparams.read(family_metadata("glm-dsa")).layers[0].indexer.rope
    d = 64
    k = np.random.default_rng(0).standard_normal((5, 1, d)).astype(np.float32)
    pos, delta = np.array([3, 0, 40, 7, 100], np.int32), np.array([5, 9, -30, 0, 11], np.int32)

    def key(x: np.ndarray, at: np.ndarray, *, stored: bool) -> np.ndarray:
        g = Graph("g")
        node = g.weight("x", TensorType("f32", (d, 1, 5)))
        if stored:
            node = g.add("hadamard", node, n=d)
        turned = g.add("rope", node, g.weight("pos", TensorType("i32", (5,))), **rope.attrs())
        g.outputs["y"] = g.add("hadamard", turned, n=d)
        return interpret(g, {"x": x, "pos": at}, {}, {}, {})["y"]

    moved = key(key(k, pos, stored=False), delta, stored=True)
    np.testing.assert_allclose(moved, key(k, pos + delta, stored=False), atol=1e-3)
    assert np.abs(moved - key(k, pos, stored=False)).max() > 0.1
