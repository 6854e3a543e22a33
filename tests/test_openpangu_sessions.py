"""openpangu compiled: files with more, fewer and other tensors; windows and choices against layers that see everything; gathered rows
against masked ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.formats.errors import GgufcError
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.runtime.session import Session
from support import BUNDLED_GOLDEN, one_by_one

MODEL = BUNDLED_GOLDEN / "openpangu-swa-dsa-ubatch" / "model.gguf"
WINDOW, TOP_K = 8, 10
"""Of the model: positions that windowed layers see, rows that the other layer's indexer keeps."""
SINKS, ROW = 16, 64 * 4
"""Learned rows of every layer, which count beside both; bytes of a row."""
TYPES: dict[str, Any] = {"type_k": "f32", "builder": {"idx_type_k": "f32"}}


def edited(output: Path, *, without_keys: tuple[str, ...] = (), without: str = "", more: tuple[str, ...] = ()) -> Path:
    """The model with fewer keys or tensors, or with more tensors, which are copies of a norm."""
    with GGUFFile.open(MODEL) as file, GGUFWriter(output) as out:
        out.copy_metadata(file, without_keys)
        for name, tensor in file.tensors.items():
            if name != without:
                out.add_tensor(name, tensor.ne, tensor.type.name, np.array(file.data(name)))
        norm = file.tensors["output_norm.weight"]
        for name in more:
            out.add_tensor(name, norm.ne, norm.type.name, np.array(file.data("output_norm.weight")))
        out.finish()
    return output


Open = Callable[..., Session]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Sessions over the model, over it without a schedule (all layers see everything, beside tensors nobody reads), and unfused."""
    folder = tmp_path_factory.mktemp("openpangu")
    unused = ("blk.0.attn_k.weight", "blk.9.attn_norm.weight", "rope_freqs.weight")

    def make(kind: str = "plain", **options: Any) -> Session:
        path = folder / f"{kind}.ggufc"
        if not path.exists():
            source = MODEL
            if kind == "dense":
                source = edited(folder / "dense.gguf", without_keys=("openpangu.swa_layers",), more=unused)
            compile_file(source, path, CompileOptions(jobs=1, pipeline="hoist,dce" if kind == "unfused" else None, **TYPES))
        return Session(path, **{"n_ctx": 512, "n_batch": 512, "n_ubatch": 128, "n_threads": 1, **options})

    return make


def tokens(n: int, seed: int = 4) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, n).tolist()


@pytest.mark.parametrize("name", ["blk.1.attn_mhc_alpha", "blk.0.attn_param_sink_kv", "output_norm.weight"])
def test_a_missing_tensor_is_one_error_that_names_it(name: str, tmp_path: Path) -> None:  # S83
    source = edited(tmp_path / "model.gguf", without=name)
    with pytest.raises(GgufcError, match=f"no tensor '{name}'"):
        compile_file(source, tmp_path / "model.ggufc", CompileOptions(jobs=1, **TYPES))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_up_to_a_window_of_tokens_has_the_bits_of_dense_layers(opened: Open, recwarn: pytest.WarningsRecorder) -> None:  # S83, S96
    """The file without a schedule has no windows and no choice, and its unused tensors say nothing."""
    mine = tokens(14)
    found = {}
    for kind in ("plain", "dense"):
        with opened(kind, n_ubatch=3) as s:
            found[kind] = np.concatenate([s.decode(mine[:5], logits="all"), one_by_one(s, mine[5:])]).view(np.uint32)
            windows = {cache.window for cache in s.artifact.manifest.caches if cache.part == "k"}
            indexers = [cache.name for cache in s.artifact.manifest.caches if cache.part == "indexer_k"]
            assert (windows, indexers) == (({0, WINDOW}, ["blk.2.indexer_k"]) if kind == "plain" else ({0}, []))
    assert not recwarn.list
    assert np.array_equal(found["plain"][:WINDOW], found["dense"][:WINDOW])
    assert (found["plain"][WINDOW:] != found["dense"][WINDOW:]).any(axis=1).all()


def test_two_hundred_steps_read_one_window(opened: Open) -> None:  # S98, S109, S111
    """One bound graph serves them all, whatever the cache holds by then, and windowed layers count the rows of their window alone."""
    with opened() as s:
        s.decode(tokens(90), logits="none")
        s.stats.reset()
        one_by_one(s, tokens(200, 5))
        assert s.stats.reuse_misses <= 1 and s.stats.reuse_hits >= 199
        kernels, program = s.artifact.manifest.kernels, s.executor.program
        reads = {x.node: x.bytes for x in program.launches if kernels[x.kernel].signature.startswith("sparse_attn(")}
    counted = sorted(sum(moved.values()) for moved in reads.values())
    assert counted == [(WINDOW + SINKS) * ROW] * 3 + [(TOP_K + SINKS) * ROW] and all(set(moved) == {"T", ""} for moved in reads.values())


def test_gathered_rows_equal_masked_ones(opened: Open) -> None:  # S99, S101
    """Compiled without fusions, attention multiplies all rows and masks; with them it gathers what is chosen, however many tokens ask."""
    mine = tokens(95)
    with opened() as gathered, opened("unfused") as masked:
        for s in (gathered, masked):
            signatures = [kernel.signature.partition("(")[0] for kernel in s.artifact.manifest.kernels]
            assert ("sparse_attn" in signatures) == (s is gathered)
        for n in range(1, 16):
            found = []
            for s in (gathered, masked):
                s.reset()
                s.decode(mine[:80], logits="none")
                found.append(s.decode(mine[80 : 80 + n], logits="all"))
            assert np.abs(found[0] - found[1]).max() < 1e-4, n
