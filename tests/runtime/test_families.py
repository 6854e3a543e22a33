"""State and copies of sequences over the families, where the full set of golden models is there."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from ggufc.runtime.session import Session
from support import artifact_of, golden_cases

FAMILIES = (
    "llama-moe",
    "llama-yarn",
    "qwen2-yarn",
    "qwen3-tied",
    "qwen3moe-a",
    "gemma2-46",
    "gemma3-7",
    "phi3-long",
    "phi3-swa",
    "gpt-oss-mxfp4",
    "glm4moe-a",
    "smollm3-partial",
    "deepseek2-lite-mla3",
    "deepseek2-v3-mla3",
)
CASES = [case for case in golden_cases(*FAMILIES) if case.name in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_state_and_copies_have_the_bits_of_the_run_that_went_on(case):  # S8
    from ggufc.codegen.compile import CompileOptions

    options = json.loads((case / "case.json").read_text())["options"]
    types = {key: options[key] for key in ("type_k", "type_v") if key in options}
    path = artifact_of(case / "model.gguf", CompileOptions(jobs=1, **types))
    with Session(path, n_ctx=256, n_seq_max=3, n_ubatch=16, n_threads=1) as s:
        tokens = np.random.default_rng(1).integers(3, s.n_vocab - 1, 40).tolist()
        s.decode(tokens[:20], seq=0)
        s.decode(tokens[3:8], seq=1)
        s.decode(tokens[20:30], seq=0)
        s.seq_cp(0, 2)
        file, whole = io.BytesIO(), io.BytesIO()
        assert s.state_save(file, 0) == s.state_size(0) == len(file.getvalue())
        assert s.state_save(whole) == s.state_size() == len(whole.getvalue())
        want = s.decode(tokens[30:], seq=0, logits="all")
        assert np.array_equal(s.decode(tokens[30:], seq=2, logits="all"), want)
        s.state_load(file.getvalue(), 1)
        s.defrag()
        assert np.array_equal(s.decode(tokens[30:], seq=1, logits="all"), want)
        s.state_load(whole.getvalue())
        assert np.array_equal(s.decode(tokens[30:], seq=2, logits="all"), want)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name == "phi3-long"], ids=lambda case: case.name)
def test_positions_of_a_long_context_move_by_its_own_factors(case):
    from ggufc.codegen.compile import CompileOptions

    path = artifact_of(case / "model.gguf", CompileOptions(jobs=1, type_k="f32", type_v="f32"))
    with Session(path, n_ctx=256, n_threads=1) as s:
        tokens = np.random.default_rng(1).integers(3, s.n_vocab - 1, 30).tolist()
        assert "@" in s.executor.program.name
        s.decode(tokens[:29])
        want = s.decode(tokens[29:])
        s.seq_rm(0, 29, -1)
        s.seq_add(0, 0, -1, 40)
        moved = s.decode(tokens[29:])
        assert np.abs(moved - want).max() < 2e-3 * np.abs(want).max()
        s.seq_rm(0, 69, -1)
        s.cells.seq_add(0, 0, -1, 40)
        s.cells.shift_done()  # without the rotation the logits are others
        assert np.abs(s.decode(tokens[29:]) - want).max() > 10 * np.abs(moved - want).max()
