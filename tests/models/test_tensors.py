"""Tensors: every one an architecture needs is checked by name, shape and type before anything is built."""

from __future__ import annotations

import pytest

from ggufc.models import ARCHITECTURES, ModelError, load_model
from model_files import E, F, ModelFile, gemma3_file, llama_file

FILES = {
    "llama": llama_file(),
    "llama-tied": llama_file(tied=True),
    "llama-moe": llama_file(experts=3),
    "llama-moe-split": llama_file(experts=3, split=True),
    "gemma3": gemma3_file(),
}


def copy(file: ModelFile) -> ModelFile:
    return ModelFile(dict(file.metadata), dict(file.tensors))


@pytest.mark.parametrize("name", FILES)
def test_required_tensors_are_all_that_is_read(name: str) -> None:
    file = FILES[name]
    model = load_model(file)
    assert set(model.required_tensors) | {"output.weight"} == set(file.tensors) | {"output.weight"}
    used = {node.attrs["tensor"] for node in model.build().find("weight")}
    assert used == set(file.tensors)  # S74: no stray leaves


@pytest.mark.parametrize("name", FILES)
def test_missing_tensor_is_named(name: str) -> None:
    for tensor in load_model(FILES[name]).required_tensors:
        file = copy(FILES[name])
        del file.tensors[tensor]
        with pytest.raises(ModelError, match="no tensor"):
            load_model(file)
        if not tensor.endswith((".0.weight", "_exps.weight")):
            with pytest.raises(ModelError, match=repr(tensor).replace(".", r"\.")):
                load_model(file)


@pytest.mark.parametrize("name", FILES)
def test_wrong_shape_is_named(name: str) -> None:
    for tensor, info in FILES[name].tensors.items():
        file = copy(FILES[name])
        file.add(tensor, *info.ne[:-1], info.ne[-1] + 1)
        with pytest.raises(ModelError) as error:
            load_model(file)
        assert tensor in str(error.value) and str([*info.ne]) in str(error.value)


def test_trailing_ones_of_a_shape_do_not_matter() -> None:
    file = llama_file()
    file.add("blk.0.attn_norm.weight", E, 1)
    assert load_model(file).weights["blk.0.attn_norm.weight"].ne == (E,)


@pytest.mark.parametrize("dtype", ["i32", "f64", "q9_9"])
def test_unsupported_type_names_the_tensor(dtype: str) -> None:
    file = llama_file()
    file.add("blk.1.ffn_up.weight", E, F, dtype=dtype)
    with pytest.raises(ModelError, match=rf"blk\.1\.ffn_up\.weight.*{dtype}.*requantise"):
        load_model(file)


def test_norms_may_be_half_precision_but_not_quantised() -> None:
    file = llama_file()
    file.add("blk.1.attn_norm.weight", E, dtype="f16")
    casts = load_model(file).build().find("cast")
    assert [node.name for node in casts] == ["blk.1.attn_norm.weight.f32"]
    file.add("blk.1.attn_norm.weight", E, dtype="q8_0")
    with pytest.raises(ModelError, match=r"blk\.1\.attn_norm\.weight.*q8_0.*f16"):
        load_model(file)


def test_tensors_of_other_programs_are_ignored() -> None:
    file = llama_file()
    file.add("blk.0.attn_rot_embd", 8)
    assert "blk.0.attn_rot_embd" not in load_model(file).weights


def test_split_experts_must_be_complete() -> None:
    file = llama_file(experts=3, split=True)
    del file.tensors["blk.1.ffn_up.2.weight"]
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.2\.weight"):
        load_model(file)


def test_unknown_architecture_lists_the_known_ones() -> None:
    file = llama_file()
    file.metadata["general.architecture"] = "mamba"
    with pytest.raises(ModelError) as error:
        load_model(file)
    assert all(name in str(error.value) for name in ("'mamba'", *ARCHITECTURES))


@pytest.mark.parametrize("value", [None, 7])
def test_architecture_must_be_a_string(value: object) -> None:
    file = llama_file()
    if value is None:
        del file.metadata["general.architecture"]
    else:
        file.metadata["general.architecture"] = value
    with pytest.raises(ModelError, match=r"general\.architecture"):
        load_model(file)
