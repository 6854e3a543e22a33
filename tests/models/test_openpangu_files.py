"""openpangu: which files and cache types it takes, and what other schedules of layers and other types make of its logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.models import ModelError, Step, load_model
from sparse_runner import Runtime
from test_openpangu import SWA, model_of, tokens_of


@pytest.mark.parametrize(
    ("option", "dtype"),
    [("type_k", "bf16"), ("type_k", "q4_0"), ("type_k", "q4_1"), ("type_v", "bf16"), ("type_v", "q8_0"), ("idx_type_k", "q4_1")],
)
def test_cache_types_the_family_lacks_are_refused(option: str, dtype: str) -> None:  # S94, S103
    model = model_of(SWA)
    for use in (model.caches, lambda options: model.build(Step(options))):
        with pytest.raises(ModelError, match=option):
            use({option: dtype})


def test_latents_that_are_no_whole_blocks_refuse_q8_0() -> None:  # S95
    with pytest.raises(ModelError, match="type_k"):
        model_of(SWA).build(Step({"type_k": "q8_0"}))


class Edited:
    """A model file with other keys or fewer tensors."""

    def __init__(self, file: GGUFFile, keys: dict[str, Any] | None = None, without: str = "") -> None:
        self.metadata = {k: v for k, v in (dict(file.metadata) | (keys or {})).items() if v is not None}
        self.tensors = {name: t for name, t in file.tensors.items() if name != without}


@pytest.mark.parametrize(
    "name", ["merge_mhc_phi.weight", "blk.1.attn_mhc_alpha", "blk.0.attn_o_conv.weight", "blk.2.attn_indexer_k.weight"]
)
def test_a_missing_tensor_is_named(name: str) -> None:  # S83
    with GGUFFile.open(SWA / "model.gguf") as file, pytest.raises(ModelError, match=f"no tensor '{name}'"):
        load_model(Edited(file, without=name))


def test_tensors_the_family_does_not_use_are_skipped_silently(recwarn: pytest.WarningsRecorder) -> None:  # S83
    with GGUFFile.open(SWA / "model.gguf") as file:
        plain, more = load_model(file), Edited(file)
        for name in ("blk.0.attn_k.weight", "blk.0.attn_indexer_k.weight", "blk.9.attn_norm.weight", "rope_freqs.weight"):
            assert name not in more.tensors
            more.tensors[name] = file.tensors["output_norm.weight"]
        model = load_model(more)
    assert set(model.weights) == set(plain.weights)
    assert str(model.build()) == str(plain.build()) and not recwarn.list


KEYS = {
    "window of two kinds": ({"sliding_window_list": [8, 9, 8]}, "must be equal"),
    "layer that does not exist": ({"swa_layers": [0, 1, 9]}, "names layer 9"),
    "no rope": ({"rope.dimension_count": 32}, "leave room"),
    "all layers predict": ({"nextn_predict_layers": 4}, "only 4 layers"),
    "softmax": ({"expert_gating_func": 1}, "sigmoid"),
    "one iteration": ({"mhc_recur_norm": 1}, "from 2"),
    "nine streams": ({"mhc_num_stream": 9}, "up to 8"),
    "no sinks": ({"param_sink_number": 0}, "param_sink_number"),
    "other window heads": ({"attention.key_length_swa": 16}, "key_length_swa"),
}


@pytest.mark.parametrize("what", KEYS)
def test_keys_that_contradict_each_other_are_refused(what: str) -> None:
    keys, message = KEYS[what]
    with GGUFFile.open(SWA / "model.gguf") as file, pytest.raises(ModelError, match=message):
        load_model(Edited(file, {f"openpangu.{k}": v for k, v in keys.items()}))


@pytest.mark.parametrize("keys", [{"swa_layers": None}, {"sliding_window_list": [8, 8]}, {"swa_layers": None, "sliding_window_list": None}])
def test_a_broken_schedule_means_dense_layers(keys: dict[str, Any]) -> None:  # S96
    with GGUFFile.open(SWA / "model.gguf") as file:
        model = load_model(Edited(file, {f"openpangu.{k}": v for k, v in keys.items()}))
        graph = model.build()
        assert not load_model(file).notes()
    halves = {
        "swa_layers": "no entries and openpangu.sliding_window_list 3",
        "sliding_window_list": "3 entries and openpangu.sliding_window_list 2",
    }
    if len(keys) == 1:  # half a schedule is not dropped in silence
        assert model.notes() == [
            f"key openpangu.swa_layers has {halves[next(iter(keys))]} entries, so all layers are dense: no windows and no indexer"
        ]
    else:
        assert not model.notes()
    assert not any("indexer" in n.name for n in graph.nodes)
    assert {n.attrs["window"] for n in graph.inputs()} == {0}


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "any-size"])
def test_up_to_a_window_of_tokens_has_the_bits_of_dense_layers(sized: bool) -> None:  # S96
    """The model's window is 8 and its indexer keeps 10 rows: eight tokens see all there is, the ninth misses one in windowed layers."""
    options = {"n_ctx": 64, "type_k": "f32", "idx_type_k": "f32"}
    found = []
    for keys in ({}, {"openpangu.swa_layers": None}):
        with GGUFFile.open(SWA / "model.gguf") as file:
            rt = Runtime(load_model(Edited(file, keys)), file.data, options, sized=sized)
            tokens = tokens_of(SWA, 12)
            parts = [rt.decode(tokens[a:b], list(range(a, b)), [0] * (b - a)) for a, b in ((0, 5), (5, 6), (6, 8), (8, 12))]
            found.append(np.concatenate(parts).view(np.uint32))
            assert any("indexer.top_k" in n.name for n in rt.graphs[0][1].nodes) != bool(keys)
    scheduled, dense = found
    assert np.array_equal(scheduled[:8], dense[:8])
    assert (scheduled[8:] != dense[8:]).any(axis=1).all()
