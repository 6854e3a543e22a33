"""Sessions on caches whose types differ between layers and whose rows are stored under a Hadamard transform."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from ggufc.formats.ggml_types import row_bytes
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import KVCells
from ggufc.runtime.session import Session
from split_buffers import SplitBuffers
from test_head_split import loaded, saved

pytest_plugins = ("runtime_fixtures",)

CASE = "llama-fa-q8"  # two layers, two KV heads of 64
BOTH = {"k_hadamard": True, "v_hadamard": True}
MIXED = {"type_k": "q4_0", "type_v": "q5_1", "builder": {**BOTH, "type_k_first": "q8_0,1", "type_v_last": "f16,1"}}
TOKENS = np.random.default_rng(4).integers(3, 300, 60).tolist()


@pytest.fixture(scope="module")
def turned_f32(tmp_path_factory) -> Path:
    """f32 caches under a transform, which no option gives: there the transform is seen alone, without what quantising loses."""
    from ggufc.codegen.child import compile_here
    from ggufc.codegen.options import CompileOptions
    from ggufc.models import cache_types
    from support import BUNDLED_GOLDEN

    path = tmp_path_factory.mktemp("turned") / "f32.ggufc"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_types, "gains", lambda dtype: True)
        compile_here(BUNDLED_GOLDEN / CASE / "model.gguf", path, CompileOptions(jobs=1, type_k="f32", type_v="f32", builder=BOTH))
    return path


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> list[Path]:
    """Rows of 32 latent values and 16 rotated ones in f32, plain and under a transform of 16 (64 would not divide so small a model)."""
    from ggufc.codegen.child import compile_here
    from ggufc.codegen.options import CompileOptions
    from ggufc.models import cache_types
    from support import BUNDLED_GOLDEN

    folder, paths = tmp_path_factory.mktemp("latent"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_types, "gains", lambda dtype: True)
        patch.setattr(cache_types, "LATENT_BLOCK", 16)
        for builder in ({}, {"k_hadamard": True}):
            paths.append(folder / f"{len(builder)}.ggufc")
            compile_here(BUNDLED_GOLDEN / "glm-dsa-topk8" / "model.gguf", paths[-1], CompileOptions(jobs=1, type_k="f32", builder=builder))
    return paths


def test_values_that_are_part_of_the_keys_rows_leave_the_transform(latent):
    found = []
    for path in latent:
        with Session(path, n_ctx=256, n_ubatch=16, n_threads=1) as s:
            assert {cache.hadamard for cache in s.artifact.manifest.caches} == {16 if found else 0}
            found.append(s.decode(TOKENS, logits="all"))
    assert not np.array_equal(*found)
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)


def logits(path: Path, shift: int = 0, **options) -> np.ndarray:
    """All logits of ``TOKENS``, the last ten after all positions have moved by ``shift``."""
    with Session(path, n_ctx=256, n_ubatch=16, n_threads=1, **options) as s:
        first = s.decode(TOKENS[:50], logits="all")
        s.seq_add(0, 0, -1, shift)
        return np.concatenate([first, s.decode(TOKENS[50:], logits="all")])


@pytest.mark.parametrize("shift", [0, 7])
def test_a_transform_changes_nothing_but_rounding(compiled, turned_f32, shift):
    """Also where stored keys are rotated: they leave the transform for it (spec: runtime-cache, 1.5)."""
    plain, turned = (logits(path, shift) for path in (compiled(CASE, type_k="f32", type_v="f32"), turned_f32))
    assert not np.array_equal(plain, turned)
    np.testing.assert_allclose(turned, plain, atol=1e-4)


def test_a_shift_that_forgot_the_transform_would_show(compiled, turned_f32, monkeypatch):
    from ggufc.runtime import kshift

    want = logits(turned_f32, 7)
    monkeypatch.setattr(kshift, "_turned", lambda rows, cache: rows)
    assert np.abs(logits(turned_f32, 7) - want)[50:].max() > 0.1


def test_allocated_bytes_are_the_sum_of_the_layers(compiled):
    path = compiled(CASE, **MIXED)
    with Session(path, n_ctx=512, n_threads=1) as s:
        buffers = s.executor.caches
        found = {name: (spec.dtype, spec.hadamard, buffers.view(name).shape) for name, spec in buffers.specs.items()}
        assert found == {
            "blk.0.k": ("q8_0", 64, (512, row_bytes("q8_0", 128))),
            "blk.0.v": ("q5_1", 64, (512, row_bytes("q5_1", 128))),
            "blk.1.k": ("q4_0", 64, (512, row_bytes("q4_0", 128))),
            "blk.1.v": ("f16", 0, (512, row_bytes("f16", 128))),
        }
        assert buffers.memory.bytes.size == sum(buffers.view(name).nbytes for name in buffers.specs)
        from ggufc.inspection import describe_artifact

        assert describe_artifact(s.artifact, 512, 512)["caches"]["bytes"] == buffers.memory.bytes.size


def blob_of(s: Session, seq: int) -> bytes:
    file = io.BytesIO()
    assert s.state_save(file, seq) == s.state_size(seq) == len(file.getvalue())
    return file.getvalue()


def test_mixed_caches_come_back_with_the_same_bits(compiled):
    with Session(compiled(CASE, **MIXED), n_ctx=256, n_seq_max=2, n_threads=1) as s:
        s.decode(TOKENS[:20], logits="none")
        s.decode(TOKENS[:9], seq=1, logits="none")
        s.decode(TOKENS[20:40], logits="none")
        blob = blob_of(s, 0)
        want = s.decode(TOKENS[40:], logits="all")
        s.state_load(blob, 1)
        assert np.array_equal(s.decode(TOKENS[40:], seq=1, logits="all").view(np.uint32), want.view(np.uint32))


def but(**builder: object) -> dict:
    """``MIXED`` with other options of the builder."""
    return {**MIXED, "builder": {**MIXED["builder"], **builder}}


OTHERS = {
    "no transform": (but(v_hadamard=False), "transform of V of layer 0 is in blocks of 64 in the saved state and absent here"),
    "another type": (but(type_k_first=""), "K of layer 0 is q8_0 in the saved state and q4_0 here"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_rows_stored_in_another_way_are_refused_naming_both(compiled, other):
    options, why = OTHERS[other]
    with Session(compiled(CASE, **MIXED), n_ctx=256, n_threads=1) as s:
        s.decode(TOKENS, logits="none")
        blob = blob_of(s, 0)
    with Session(compiled(CASE, **options), n_ctx=256, n_threads=1) as s:
        s.decode(TOKENS[:5], logits="none")
        with pytest.raises(RuntimeRefusal, match=why):
            s.state_load(blob, 0)
        assert s.pos_max(0) == -1
        back = blob_of(s, 0)
    with Session(compiled(CASE, **MIXED), n_ctx=256, n_threads=1) as s, pytest.raises(RuntimeRefusal, match="here"):
        s.state_load(back, 0)


def test_mixed_caches_pass_through_split_ones(compiled):  # S2, S5
    with Session(compiled(CASE, **MIXED), n_ctx=256, n_threads=1) as s:
        s.decode(TOKENS[:40], logits="none")
        blob = blob_of(s, 0)
        want = s.decode(TOKENS[40:], logits="all")
        split, cells = SplitBuffers(list(s.executor.caches.specs.values()), 256, {0: 1, 1: 1}), KVCells(256, 2, 1)
        loaded(blob, split, cells)
        cells.seq_cp(1, 0)
        s.reset()
        s.state_load(saved(cells, split), 0)
        assert np.array_equal(s.decode(TOKENS[40:], logits="all").view(np.uint32), want.view(np.uint32))


@pytest.mark.models
@pytest.mark.full
def test_a_transform_lessens_what_four_bits_lose_on_a_real_model(real_model, real_golden, tmp_path):
    """KL divergence to f32 caches on the golden prompts' text; random weights have no outliers and cannot show it."""
    from ggufc.codegen.compile import CompileOptions, compile_file

    source = real_model("SmolLM2-135M-Instruct.Q4_1.gguf")
    prompts = json.loads(real_golden("smollm2-135m-instruct-q4_1", "logits.json").read_text())["prompts"]
    tokens = [token for prompt in prompts for token in prompt["prompt"]][:256]
    rows = []
    for dtype, builder in (("f32", {}), ("q4_0", {}), ("q4_0", BOTH)):
        compile_file(source, tmp_path / "model.ggufc", CompileOptions(type_k=dtype, type_v=dtype, builder=builder))
        with Session(tmp_path / "model.ggufc", n_ctx=256, n_batch=256) as s:
            found = s.decode(tokens, logits="all").astype(np.float64)
        found -= found.max(axis=1, keepdims=True)
        rows.append(found - np.log(np.exp(found).sum(axis=1, keepdims=True)))
    plain, turned = (float((np.exp(rows[0]) * (rows[0] - other)).sum(axis=1).mean()) for other in rows[1:])
    assert turned < 0.6 * plain
