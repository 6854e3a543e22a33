"""Cache types by layer and caches stored under a Hadamard transform, as builders lay them out (spec: runtime-cache, 1.8)."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.hadamard import walsh_hadamard
from ggufc.models import ModelError, Step
from ggufc.models.cache_types import hadamard_block, layer_type, override, rotation
from ggufc.models.registry import load_model
from support import BUNDLED_GOLDEN


def types(options: dict[str, str], n_layer: int, part: str = "k") -> list[str]:
    return [layer_type(Step(options), part, i, n_layer) for i in range(n_layer)]


def caches(case: str, **options: object) -> list[tuple[str, str, int]]:
    with GGUFFile.open(BUNDLED_GOLDEN / case / "model.gguf") as file:
        return [(cache.name, cache.dtype, cache.hadamard) for cache in load_model(file).caches(options)]


def notes(case: str, **options: object) -> list[str]:
    with GGUFFile.open(BUNDLED_GOLDEN / case / "model.gguf") as file:
        return load_model(file).notes(options)


def test_first_and_last_layers_may_have_other_types() -> None:
    options = {"type_k": "q4_0", "type_k_first": "q8_0,2", "type_k_last": "f16,1", "type_v_last": "bf16,3"}
    assert types(options, 5) == ["q8_0", "q8_0", "q4_0", "q4_0", "f16"]
    assert types(options, 5, "v") == ["f16", "f16", "bf16", "bf16", "bf16"]  # K and V are independent
    assert types(options, 2) == ["q8_0", "q8_0"]  # the first ones win where both reach a layer
    assert types({"type_k_last": "f32,99"}, 3) == ["f32"] * 3
    assert types({"type_k_first": "f32,0"}, 2) == ["f16"] * 2


@pytest.mark.parametrize("text", ["q8_0", "q8_0,", "q8_0,-1", "q2_k,3", "3,q8_0", "q8_0,1 ", ",2", "q8_0,9999999"])
def test_an_override_is_a_type_and_a_number(text: str) -> None:
    with pytest.raises(ModelError, match=r"'type_v_first' is .*such as q8_0,2"):
        Step({"type_v_first": text})
    assert override("type_v_first", "") == ("", 0)


def test_what_was_asked_for_is_in_the_reuse_key() -> None:
    with GGUFFile.open(BUNDLED_GOLDEN / "llama-fa-q8" / "model.gguf") as file:
        model = load_model(file)
        plain, mixed = (model.build(Step(options)).analysis["observations"] for options in ({}, {"type_k_last": "f32,1"}))
    assert {name for name in plain if plain[name] != mixed[name]} == {"type_k_last"}
    assert {"type_k_first", "type_v_first", "type_v_last", "k_hadamard", "v_hadamard"} <= set(plain)


@pytest.mark.parametrize(
    ("n", "block"), [(1, 1), (16, 16), (64, 64), (128, 128), (1024, 1024), (192, 64), (384, 128), (768, 256), (2560, 512), (80, 0), (96, 0)]
)
def test_a_head_is_transformed_whole_or_in_the_largest_block_that_divides_it(n: int, block: int) -> None:
    assert hadamard_block(n) == block


def test_latent_rows_are_always_transformed_in_blocks_of_64() -> None:
    step = Step({"k_hadamard": True})
    assert rotation(step, "k", "q8_0", 576, (512, 64)) == 64
    assert rotation(step, "k", "q8_0", 512, (448, 64)) == 64
    assert rotation(step, "k", "q8_0", 320, (256, 32)) == 0  # the values would end inside a block
    assert rotation(step, "k", "f16", 576, (512, 64)) == rotation(step, "v", "q8_0", 64) == 0


def test_only_quantised_layers_are_transformed() -> None:
    found = caches("llama-fa-q8", type_k="q4_0", type_k_first="f16,1", k_hadamard=True, v_hadamard=True, type_v_last="q8_0,1")
    assert found == [("blk.0.k", "f16", 0), ("blk.0.v", "f16", 0), ("blk.1.k", "q4_0", 64), ("blk.1.v", "q8_0", 64)]


def test_queries_and_results_follow_keys_and_values() -> None:
    options = {"type_k": "q8_0", "type_v": "q8_0", "v_hadamard": True, "k_hadamard": True}
    with GGUFFile.open(BUNDLED_GOLDEN / "llama-fa-q8" / "model.gguf") as file:
        names = [node.name for node in load_model(file).build(Step(options)).find("hadamard")]
    one = ["attn_k.rows", "attn_v", "attn_q.rope", "kqv.cont"]
    assert sorted(names) == sorted(f"blk.{i}.{name}.hadamard" for i in range(2) for name in one)


def test_what_has_no_effect_is_said() -> None:
    assert notes("llama-fa-q8", type_k="q8_0", k_hadamard=True, type_v_first="q8_0,1") == []
    assert notes("llama-fa-q8", k_hadamard=True) == [
        "the K cache is not rotated (builder option 'k_hadamard'): it only helps quantised types, and this one is f16"
    ]
    (why,) = notes("glm-dsa-topk8", v_hadamard=True)
    assert why == "the V cache is not rotated (builder option 'v_hadamard'): this model keeps no V cache"
    (why,) = notes("glm-dsa-topk8", type_k="q8_0", k_hadamard=True)
    assert "rows of 48 values do not divide into blocks of it here" in why
    (why,) = notes("openpangu-swa-dsa-ubatch", type_k_first="f32,2")
    assert why.startswith("builder option 'type_k_first' has no effect")
    with pytest.raises(ModelError, match="k_hadamard"):
        notes("deepseek4-split-decode", k_hadamard=True)


def test_types_that_do_not_divide_a_head_are_refused_in_any_layer() -> None:
    with GGUFFile.open(BUNDLED_GOLDEN / "llama-gqa-tied" / "model.gguf") as file, pytest.raises(ModelError, match="whole q8_0 blocks"):
        load_model(file).build(Step({"type_v_last": "q8_0,1"}))


@pytest.mark.parametrize("n", [1, 2, 64, 512])
def test_the_transform_is_its_own_inverse_and_keeps_products(n: int) -> None:
    a, b = np.random.default_rng(n).standard_normal((2, 3, 2 * n)).astype(np.float32)
    turned = walsh_hadamard(a, n)
    assert turned.dtype == np.float32
    np.testing.assert_allclose(walsh_hadamard(turned, n), a, atol=1e-5)
    np.testing.assert_allclose((turned * walsh_hadamard(b, n)).sum(), (a * b).sum(), rtol=1e-4)
    signs = np.array([[1.0 if bin(i & j).count("1") % 2 == 0 else -1.0 for j in range(n)] for i in range(n)])
    np.testing.assert_allclose(turned[0, :n], signs @ a[0, :n] / np.sqrt(n), atol=1e-4)
