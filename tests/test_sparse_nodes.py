"""Compiled models of the sparse families, node by node: no NaN in any result, attention against its decompressed form, hoisted sinks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiled_graph import compile_graphs, run
from ggufc.codegen.options import CompileOptions
from ggufc.diff import CodeSide, InterpreterSide, Tolerances, compare_sides
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.quants.dequantize import dequantize
from ggufc.ir.interp import evaluate_derived
from ggufc.models import Step, load_model
from ggufc.passes import DEFAULT_PIPELINE, PassManager
from ggufc.runtime import Session
from ggufc.runtime.logits import graph_options, run_steps, session_options
from nan_trap import with_nan
from support import BUNDLED_GOLDEN, artifact_of

PANGU = "openpangu-swa-dsa-ubatch"


@dataclass(frozen=True)
class Kept:
    """A golden case compiled with its results kept."""

    folder: Path
    artifact: Path
    options: CompileOptions
    case: dict[str, Any]

    @contextmanager
    def session(self, **settings: Any) -> Iterator[tuple[Session, CodeSide]]:
        side = CodeSide(self.artifact, self.options, "code")
        with side.open(session_options(self.case["options"]) | settings) as session:
            yield session, side


def compiled(name: str) -> Kept:
    case = json.loads((BUNDLED_GOLDEN / name / "case.json").read_text())
    types = {key: case["options"][key] for key in ("type_k", "type_v") if key in case["options"]}
    options = CompileOptions(jobs=1, keep="stored", builder=graph_options(case["options"]), **types)
    return Kept(BUNDLED_GOLDEN / name, artifact_of(BUNDLED_GOLDEN / name / "model.gguf", options), options, case)


@pytest.fixture(scope="module")
def kept() -> Callable[[str], Kept]:
    """The artifact of each case, made once."""
    return cache(compiled)


@pytest.mark.parametrize("name, steps", [("glm-dsa-topk8", 3), ("deepseek4-split-decode", 4), (PANGU, 2)])
def test_code_equals_the_interpreter_node_by_node(kept: Callable[[str], Kept], name: str, steps: int) -> None:
    code = kept(name)
    case = code.case | {"steps": code.case["steps"][:steps]}
    left = CodeSide(code.artifact, code.options, "code")
    right = InterpreterSide(code.folder / "model.gguf", code.options, "interpreter")
    report = compare_sides(left, right, case, code.folder, session_options(case["options"]), Tolerances())
    assert report.first is None, report.first
    assert sum(len(batch.entries) for batch in report.batches) > 20 * len(report.batches)
    entries = [entry for batch in report.batches for entry in batch.entries]
    assert any(entry.name == "logits" for entry in entries) and any(entry.op == "set_rows" for entry in entries)


@pytest.mark.parametrize("name", ["glm-dsa-topk8", "deepseek4-split-decode", PANGU])
def test_no_result_of_generated_code_is_nan(kept: Callable[[str], Kept], name: str) -> None:  # S72
    """All steps of the case; the interpreter's values are looked at with every golden (``models.nan_trap``)."""
    code, seen = kept(name), set()
    with code.session() as (session, side):
        for step, _ in run_steps(session, code.case, code.folder):
            for recording in side.recordings:
                assert with_nan(recording) == [], step
                seen |= {node.name for node in recording.values}
            side.start(())
    assert "logits" in seen and len(seen) > 30


def test_a_nan_is_caught(kept: Callable[[str], Kept]) -> None:  # S72
    """One key that is not a number reaches the results of its layer and all after it."""
    with kept(PANGU).session() as (session, side):
        session.decode(list(range(5, 14)))
        assert with_nan(side.recordings[-1]) == []
        session.executor.buffers.view("blk.1.k")[7] = 0xFF
        session.decode([3])
        found = with_nan(side.recordings[-1])
    assert "logits" in found and "blk.1.k" in found and not any(name.startswith("blk.0.") for name in found)


def weight(file: GGUFFile, name: str) -> np.ndarray:
    """f32, in the tensor's shape."""
    info = file.tensors[name]
    return np.asarray(dequantize(info.type.name, file.data(name), info.ne[0]), np.float32).reshape(tuple(reversed(info.ne)))


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """NeoX rotation of rows [token, ..., d] (spec/openpangu.md 3: pairs i and i + d/2)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angle).reshape(len(x), *[1] * (x.ndim - 2), half) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def decompressed(file: GGUFFile, layer: int, q: np.ndarray, rows: np.ndarray, positions: np.ndarray, window: int) -> np.ndarray:
    """Attention over keys and values of every head, made from the latents of each row and each sink: [token, head, d_v]."""
    heads, d_n, d_r = 4, 16, 16
    k_b, v_b = (weight(file, f"blk.{layer}.attn_{part}_b.weight").astype(np.float64) for part in "kv")
    gamma, sinks = weight(file, f"blk.{layer}.attn_kv_a_norm.weight"), weight(file, f"blk.{layer}.attn_param_sink_kv").astype(np.float64)
    r, n_sink = len(gamma), len(sinks)
    sinks = sinks / np.sqrt((sinks**2).mean(axis=1, keepdims=True) + 1e-5) * gamma
    latents = np.concatenate([sinks, rows[:, :r].astype(np.float64)])
    tails = np.concatenate([weight(file, f"blk.{layer}.attn_param_sink_k_pe").astype(np.float64), rows[:, r:]])
    q = q.reshape(len(q), heads, d_n + d_r).astype(np.float64)
    q = np.concatenate([q[..., :d_n], turned(q[..., d_n:], positions)], axis=-1)
    own = np.concatenate([np.full(n_sink, -1), np.arange(len(rows))])
    age = positions[:, None] - own
    seen = (own < 0) | ((age >= 0) & (age < (window or 1 << 30)))
    out = []
    for h in range(heads):
        keys = np.concatenate([latents @ k_b.reshape(heads, r, d_n)[h], tails], axis=1)
        scores = np.where(seen, q[:, h] @ keys.T / np.sqrt(d_n + d_r), -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        out.append(p / p.sum(axis=1, keepdims=True) @ (latents @ v_b.reshape(heads, -1, r)[h].T))
    return np.stack(out, axis=1)


def test_absorbed_attention_equals_its_decompressed_form(kept: Callable[[str], Kept]) -> None:  # S93
    """Queries and latent rows are those of the compiled model; keys and values of each head never exist in it. Layers 0, 1 and 3 see a
    window of 8 positions; layer 2 chooses 10 rows, which is all there are for the first tokens."""
    tokens = np.random.default_rng(0).integers(3, 250, 31).tolist()
    with kept(PANGU).session() as (session, side):
        for part in (tokens[:9], tokens[9:10], tokens[10:30], tokens[30:]):
            session.decode(part)
        recordings = side.recordings
        buffers = session.executor.buffers
        sizes = {name: (spec, buffers.bytes_of(name)) for name, spec in buffers.specs.items()}
    at = 0
    with GGUFFile.open(kept(PANGU).folder / "model.gguf") as file:
        for recording in recordings:
            n = recording.env["T"]
            values = {node.name: array for node, array in recording.values.items()}
            positions = np.arange(at, at + n)
            at += n
            for layer, window in enumerate((8, 8, 0, 8)):
                if not window and at > 10:
                    continue
                rows = recording.caches[f"blk.{layer}.k"].decoded()[:at]
                want = decompressed(file, layer, values[f"blk.{layer}.attn_q_b"].reshape(n, -1), rows, positions, window)
                got = values[f"blk.{layer}.kqv"].reshape(4, n, -1).transpose(1, 0, 2)
                assert np.abs(want).max() > 0.01
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert at == len(tokens) and len(recordings) >= 4
    # A latent row of f32 for each layer and cell, and nothing for values.
    rows = {name: size for name, (spec, size) in sizes.items() if spec.rows == {"C": 1} and "indexer" not in name}
    assert rows == {f"blk.{layer}.k": 256 * 4 * (48 + 16) for layer in range(4)}
    assert not any(name.endswith(".v") or spec.part == "v" for name, (spec, _) in sizes.items())


def test_sinks_hoisted_are_those_computed_in_each_step(tmp_path: Path) -> None:  # S92
    """What ``hoist`` computes while compiling, as native code would compute it in each step; that nothing is left to compute is a test of
    ``passes``."""
    with GGUFFile.open(BUNDLED_GOLDEN / PANGU / "model.gguf") as file:
        graph = load_model(file).build(Step())
        PassManager.parse(DEFAULT_PIPELINE).run(graph)
        names = [f"blk.{layer}.attn_param_sink.rows" for layer in range(4)]
        assert {n.attrs["derived"] for n in graph.find("weight")} >= set(names)
        stored = {name: np.asarray(evaluate_derived(graph, name, file.data), np.float32) for name in names}
        in_graph = {f"layer{layer}": graph.derived[name] for layer, name in enumerate(names)}
        weights = {n.attrs["tensor"]: weight(file, n.attrs["tensor"]) for sub in in_graph.values() for n in sub.find("weight")}
        artifact = compile_graphs(in_graph, weights, tmp_path)
        for program, name in zip(in_graph, names):
            computed = run(artifact, program, ({}, {}, {}, {"T": 1, "O": 1}))["value"].reshape(16, 64)
            assert np.abs(computed).max() > 0.1
            np.testing.assert_allclose(stored[name].reshape(16, 64), computed, rtol=0, atol=1e-6)
            assert np.array_equal(computed[:, 48:], weights[name.replace(".rows", "_k_pe")]), "not turned, not normed"
