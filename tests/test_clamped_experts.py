"""Bounded activations of deepseek4's experts, ``min(silu(gate), L) * clamp(up, -L, L)``, where scaled weights drive them far beyond L."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufc.codegen.child import compile_here
from ggufc.codegen.options import CompileOptions
from ggufc.diff import InterpreterSide
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.runtime import Session
from support import golden_cases

SOURCE = next(case for case in golden_cases("deepseek4-prefill") if case.name == "deepseek4-prefill") / "model.gguf"
SCALED = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_shexp", "ffn_up_shexp")
TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 300, 20)]
TOLERANCE = 1e-4
"""Of logits of this one layer, whose sums differ in order alone."""

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The first layer of a golden's model, gates and ups of all experts four times as large; ``limits`` are other values of its keys."""
    folder = tmp_path_factory.mktemp("clamped")

    def model(limits: Mapping[str, Any]) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}.gguf"
        keys = {f"deepseek4.{key}": value for key, value in ({"block_count": 1} | dict(limits)).items()}
        with GGUFFile.open(SOURCE) as source, GGUFWriter(path) as out:
            for key, value in keys.items():
                out.add(key, value)
            out.copy_metadata(source)
            for name, info in source.tensors.items():
                data = np.array(source.data(name))
                if any(part in name for part in SCALED):
                    data = data.view(np.float32) * np.float32(4)
                if not name.startswith("blk.") or name.startswith("blk.0."):
                    out.add_tensor(name, info.ne, info.type.name, data)
            out.finish()
        return path

    return model


def interpreted(model: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits and the values of the experts' nodes."""
    side = InterpreterSide(model, CompileOptions(), "")
    with side.open({"n_ctx": 256}) as session:
        logits = session.decode(TOKENS, logits="all")
        (recording,) = side.recordings
        found = {node.name: recording.value(node) for node in recording.names.results() if ".ffn_" in node.name}
        return logits, {name: value for name, value in found.items() if value is not None}


def limits_of(model: Path) -> tuple[float, float]:
    with GGUFFile.open(model) as file:
        return tuple(float(file.metadata[f"deepseek4.swiglu_clamp_{kind}"][0]) for kind in ("exp", "shexp"))


@pytest.mark.parametrize("pipeline", [None, "hoist,dce"], ids=["fused", "unfused"])
def test_code_bounds_what_the_interpreter_bounds(make: Make, pipeline: str | None, tmp_path: Path) -> None:  # S49
    model = make({})
    want, values = interpreted(model)
    for suffix, limit in zip(("", "_shexp"), limits_of(model)):
        gate, up = values[f"blk.0.ffn_gate{suffix}.silu"], values[f"blk.0.ffn_up{suffix}"]
        for beyond in (gate > limit, up > limit, up < -limit):
            assert 0.02 < beyond.mean() < 0.9, "each bound is met by some values and not by all"
        assert (values[f"blk.0.ffn_gate{suffix}.clamped"] <= limit).all()
    compile_here(model, tmp_path / "model.ggufc", CompileOptions(jobs=1, pipeline=pipeline))
    with Session(tmp_path / "model.ggufc", n_ctx=256, n_threads=1) as session:
        np.testing.assert_allclose(session.decode(TOKENS, logits="all"), want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("freed", ["swiglu_clamp_exp", "swiglu_clamp_shexp"])
def test_without_a_bound_the_logits_are_others(make: Make, freed: str) -> None:  # S49
    """Of the chosen experts, and of the shared one, whose bound is its own."""
    bounded, _ = interpreted(make({}))
    free, values = interpreted(make({freed: 0.0}))
    suffix = "_shexp" if freed.endswith("shexp") else ""
    assert f"blk.0.ffn_gate{suffix}.clamped" not in values
    assert np.abs(free - bounded).max() > 100 * TOLERANCE * np.abs(bounded).max()
