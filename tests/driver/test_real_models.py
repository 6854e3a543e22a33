"""The real models from the command line. They need `ggufc pull smollm2 gemma3-270m`, or the files in $GGUFC_MODELS."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ggufc.registry import ALIASES
from ggufc.runtime.paths import models_dir

pytestmark = [pytest.mark.models, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
MODELS_HERE = [Path(folder) for folder in (os.environ.get("GGUFC_MODELS"), models_dir()) if folder]


def model(alias: str) -> Path:
    for folder in MODELS_HERE:
        path = folder / ALIASES[alias].file_name
        if path.is_file():
            return path
    pytest.skip(f"{alias} is not here; get it with ggufc pull {alias}")


def readme_answer() -> str:
    """What README.md shows under the command that makes a model answer."""
    shown = re.search(r"^    \$ ggufc run smollm2 .*\n    (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown, "README.md shows no answer"
    return shown[1]


@pytest.mark.parametrize(
    ("alias", "arguments", "expected"),
    [
        ("smollm2", ["-p", "Why is the sky blue?", "-n", "48"], readme_answer()),
        ("gemma3-270m", ["-p", "The capital of France is", "-n", "8"], "the capital"),
    ],
)
def test_a_real_model_answers(ggufc_process, tmp_path: Path, alias: str, arguments: list[str], expected: str) -> None:
    path = model(alias)
    artifact = tmp_path / "model.ggufc"
    compiled = ggufc_process("compile", path, "-o", artifact)
    assert compiled.returncode == 0, compiled.stderr
    assert artifact.stat().st_size <= 1.12 * path.stat().st_size + 4 * 2**20
    done = ggufc_process("run", artifact, *arguments, "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert re.search(r"^prompt \d+ tokens, .* tokens/s; decode \d+ tokens, .* tokens/s", done.stderr, re.MULTILINE)
