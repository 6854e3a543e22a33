"""Built graphs, evaluated step by step with the reference interpreter, give the logits of another engine within each case's tolerance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, TensorType
from ggufc.ir.interp import interpret
from ggufc.models import load_model
from golden_runner import Runner, assert_close, run_case
from nan_trap import no_nan
from support import BUNDLED_GOLDEN, golden_cases

CASES = golden_cases(
    "deepseek2-", "llama-", "gemma2-", "gemma3-", "glm4moe-", "gpt-oss-", "quant-", "phi3-", "qwen2-", "qwen3-", "qwen3moe-", "smollm3-"
)

TIPPED = {"gemma2-26": 0.02}
"""Tolerances where one f16 rounding in the cache tips the other way under single-precision arithmetic, in one row of a deep model; the
same graph without intermediate roundings is 0.003 off."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_the_golden(case: Path) -> None:  # S66, S67: cases with biases, f16 weights and split experts; S72: no node is NaN
    assert_close(case, run_case(case), atol=TIPPED.get(case.name))


def test_zero_times_a_hidden_score_is_caught() -> None:  # S72
    """The trap has teeth: a base for added terms that is made of a mask instead of a constant."""
    g = Graph("g")
    mask = g.add("fill", g.weight("w", TensorType("f32", (4, 2))), value=-np.inf)
    g.outputs["y"] = g.add("scale", mask, name="base", s=0.0)
    weights = {"w": np.zeros((2, 4), np.float32)}
    with pytest.raises(AssertionError, match=r"node 'base' \(scale\) has NaN in 8 places"), np.errstate(invalid="ignore"):
        interpret(g, weights, {}, {}, {}, trace=no_nan)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma3-7"])
def test_embeddings_given_from_outside(name: str) -> None:
    """Feeding the embedding rows (times sqrt(E) for gemma3) gives the logits of the tokens they belong to."""
    folder = BUNDLED_GOLDEN / name
    case = json.loads((folder / "case.json").read_text())
    step = case["steps"][0]
    with GGUFFile.open(folder / "model.gguf") as file:
        model = load_model(file)
        table = file.data("token_embd.weight").view(np.float32).reshape(model.n_vocab, model.n_embd)
        rows = table[step["tokens"]] * np.float32(model.n_embd**0.5 if model.arch == "gemma3" else 1)
        runner = Runner(model, file.data, case["options"])
        assert_close(folder, {step["name"]: runner.decode([], step["pos"], step["seq"], embd=rows)})


@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma3-7"])
def test_micro_batch_size_does_not_matter(name: str) -> None:
    folder = BUNDLED_GOLDEN / name
    case = json.loads((folder / "case.json").read_text())
    step = case["steps"][0]
    for n_ubatch in (1, 3, 64):
        with GGUFFile.open(folder / "model.gguf") as file:
            runner = Runner(load_model(file), file.data, case["options"] | {"n_ubatch": n_ubatch})
            assert_close(folder, {step["name"]: runner.decode(step["tokens"], step["pos"], step["seq"])})


def test_a_wrong_graph_misses_the_tolerance() -> None:
    """The comparison has teeth: a window one position wider is far outside."""
    folder = BUNDLED_GOLDEN / "gemma3-7"
    case = json.loads((folder / "case.json").read_text())
    step = case["steps"][0]
    with GGUFFile.open(folder / "model.gguf") as file:
        metadata = dict(file.metadata) | {"gemma3.attention.sliding_window": 9}
        model = load_model(type("Edited", (), {"metadata": metadata, "tensors": file.tensors})())
        runner = Runner(model, file.data, case["options"])
        with pytest.raises(AssertionError, match="tolerance"):
            assert_close(folder, {step["name"]: runner.decode(step["tokens"], step["pos"], step["seq"])})
