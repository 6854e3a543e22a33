"""SmolLM2-135M and Gemma 3 270M: logits against exact ones, greedy continuations, within the error of the engine that made the goldens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from support import golden_dirs

MODELS = {"smollm2-135m-instruct-q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m-q4_k_m": "gemma-3-270m-q4_k_m.gguf"}

pytestmark = pytest.mark.models


@pytest.fixture(scope="module", params=MODELS)
def real(request, tmp_path_factory):
    """(session, golden prompts) of one real model."""
    from ggufc.codegen.compile import CompileOptions, compile_file
    from ggufc.runtime.paths import models_dir
    from ggufc.runtime.session import Session

    places = [Path(p) / MODELS[request.param] for p in (os.environ.get("GGUFC_MODELS"), models_dir()) if p]
    source = next((p for p in places if p.is_file()), None)
    if source is None:
        pytest.skip(f"{MODELS[request.param]} is not in {models_dir()} or $GGUFC_MODELS; get it with ggufc pull")
    golden = json.loads((golden_dirs()[0] / "real" / request.param / "logits.json").read_text())
    path = tmp_path_factory.mktemp("real") / "model.ggufc"
    compile_file(source, path, CompileOptions())
    with Session(path, n_ctx=512) as session:
        yield session, golden


def rms_about_mean(difference: np.ndarray) -> float:
    return float(np.sqrt(np.mean((difference - difference.mean()) ** 2)))


def test_no_further_from_exact_logits_than_the_golden_engine(real):
    session, golden = real
    ours, theirs = [], []
    for prompt in golden["prompts"]:
        session.reset()
        row = session.decode(prompt["prompt"])[0][prompt["top_ids"]]
        exact = np.array(prompt["exact_logits"])
        ours.append(rms_about_mean(row - exact))
        theirs.append(rms_about_mean(np.array(prompt["top_logits"]) - exact))
        assert np.abs(row - np.array(prompt["top_logits"])).max() <= golden["atol"]
    print(f"rms error: ours {np.mean(ours):.4f}, golden engine {np.mean(theirs):.4f}")
    assert np.mean(ours) <= np.mean(theirs)


def test_greedy_continuations(real):
    """Equal to the golden's, unless its two best logits are closer than its tolerance where the texts part."""
    session, golden = real
    for prompt in golden["prompts"]:
        session.reset()
        row = session.decode(prompt["prompt"])[0]
        for want, gap in zip(prompt["greedy"], prompt["greedy_gap"]):
            token = int(row.argmax())
            if token != want:
                assert gap <= golden["atol"], f"{prompt['text']!r}: {token} instead of {want} with a gap of {gap}"
                break
            row = session.decode([token])[0]
