"""Bytes of the sparse families' caches: what their rows and types say is what is reported and what is allocated; other types are refused
before code is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fake_model
from ggufc.codegen.child import compile_here
from ggufc.codegen.manifest import cache_specs
from ggufc.codegen.options import CompileOptions
from ggufc.formats.errors import GgufcError
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.models import load_model
from ggufc.runtime.caches import CacheBuffers, CacheLayout
from ggufc.runtime.sizes import Sizes
from support import BUNDLED_GOLDEN, golden_cases

N_CTX, N_SEQ = 600, 2
CELLS = 768
"""``N_CTX`` rounded up to whole attention steps."""
BLOCK = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34)}


def model(name: str) -> Path:
    return next(case for case in golden_cases(name) if case.name == name) / "model.gguf"


def row(dtype: str, width: int) -> int:
    values, size = BLOCK[dtype]
    assert width % values == 0
    return width // values * size


def artifact(path: Path, options: CompileOptions) -> Any:
    """As much of an artifact as caches need."""
    with GGUFFile.open(path) as file:
        caches = cache_specs(file, load_model(file), options)
    return SimpleNamespace(manifest=fake_model.manifest(caches=caches), path=path)


def deepseek4_bytes(dtype: str, idx: str) -> dict[str, int]:
    """Layers of ratio 4, 128 and none: raw rows of 64 for every cell; per sequence 256 entries of either ratio at this size, and rings of
    8 and 128 rows with one spare row for all."""
    out = {f"blk.{i}.k": CELLS * row(dtype, 64) for i in range(3)}
    out |= {f"blk.{i}.entries": N_SEQ * 256 * row(dtype, 64) for i in (0, 1)}
    out["blk.0.indexer_k"] = N_SEQ * 256 * row(idx, 32)
    for part in ("kv", "score"):
        out[f"blk.0.ring_{part}"] = (N_SEQ * 8 + 1) * 128 * 4
        out[f"blk.0.indexer_ring_{part}"] = (N_SEQ * 8 + 1) * 64 * 4
        out[f"blk.1.ring_{part}"] = (N_SEQ * 128 + 1) * 64 * 4
    return out


def openpangu_bytes(dtype: str, idx: str) -> dict[str, int]:
    """Four layers of latent rows of 48 + 16 values, one of them with an indexer of 32; histories of two taps for one sequence."""
    out = {f"blk.{i}.k": CELLS * row(dtype, 64) for i in range(4)}
    out["blk.2.indexer_k"] = CELLS * row(idx, 32)
    return out


def glm_dsa_bytes(dtype: str, idx: str) -> dict[str, int]:
    """Five layers of latent rows of 32 + 16 values; the first three choose."""
    return {f"blk.{i}.k": CELLS * row(dtype, 48) for i in range(5)} | {f"blk.{i}.indexer_k": CELLS * row(idx, 32) for i in range(3)}


FAMILIES: dict[str, tuple[str, Callable[[str, str], dict[str, int]], dict[str, Any]]] = {
    "deepseek4": ("deepseek4-split-decode", deepseek4_bytes, {}),
    "openpangu": ("openpangu-swa-dsa-ubatch", openpangu_bytes, {}),
    "glm-dsa": ("glm-dsa-topk8", glm_dsa_bytes, {"dsa": True}),
}
TYPES = [
    ("deepseek4", "f16", "f16"), ("deepseek4", "bf16", "q8_0"), ("deepseek4", "q8_0", "bf16"), ("openpangu", "f16", "f16"),
    ("openpangu", "f32", "q8_0"), ("openpangu", "f16", "f32"), ("glm-dsa", "bf16", "f32"), ("glm-dsa", "f16", "q8_0"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "dtype", "idx"), TYPES)
def test_bytes_are_those_of_rows_and_types(family: str, dtype: str, idx: str) -> None:  # S53, S93, S103
    name, expected, builder = FAMILIES[family]
    made = artifact(model(name), CompileOptions(type_k=dtype, builder=builder | {"idx_type_k": idx}))
    sizes = Sizes(N_CTX, 64, 1 if family == "openpangu" else N_SEQ)
    layout, buffers = CacheLayout(made, sizes), CacheBuffers(made, sizes)
    want = expected(dtype, idx)
    found = {spec: buffers.view(spec).nbytes for spec in buffers.specs if "conv" not in spec}
    assert found == want
    assert {spec: layout.bytes_of(spec) for spec in found} == want
    assert sum(layout.bytes_of(spec) for spec in layout.specs) <= buffers.memory.bytes.nbytes
    if family == "openpangu":
        taps = {spec: buffers.view(spec).nbytes for spec in buffers.specs if "conv" in spec}
        each = {"conv_qa": 32, "conv_kv": 48, "conv_o": 64}
        assert taps == {f"blk.{i}.{part}": 2 * 2 * n * 4 for i in range(4) for part, n in each.items()}


def test_types_are_f16_where_nothing_is_said() -> None:  # S94, S103
    for name, _, builder in FAMILIES.values():
        caches = artifact(model(name), CompileOptions(builder=builder)).manifest.caches
        assert {cache.dtype for cache in caches if cache.part in ("k", "entries", "indexer_k")} == {"f16"}
        assert any(cache.part == "indexer_k" for cache in caches)


REFUSED = [
    ("deepseek4", "type_k", "q4_0"), ("deepseek4", "type_k", "f32"), ("deepseek4", "idx_type_k", "q4_0"), ("openpangu", "type_k", "q4_0"),
    ("openpangu", "type_k", "q4_1"), ("openpangu", "type_k", "bf16"), ("openpangu", "type_v", "bf16"), ("openpangu", "idx_type_k", "q4_1"),
    ("glm-dsa", "idx_type_k", "f64"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "option", "dtype"), REFUSED)
def test_other_types_are_refused_by_name_before_code_is_made(
    family: str, option: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # S53, S94, S103
    name, _, builder = FAMILIES[family]
    choice = {option: dtype} if option.startswith("type") else {}
    builder = builder | ({option: dtype} if not choice else {})
    monkeypatch.setattr("ggufc.codegen.frontend.lower", lambda *_, **__: pytest.fail("code generation began"))
    with pytest.raises(GgufcError, match=f"builder option '{option}'"):
        compile_here(BUNDLED_GOLDEN / name / "model.gguf", tmp_path / "a.ggufc", CompileOptions(jobs=1, builder=builder, **choice))
    assert not list(tmp_path.iterdir())
