"""Fixtures of the driver's tests: a tiny model with a tokenizer, and its artifact compiled once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "llama-gqa-tied"

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"


def write_text_model(path: Path, **extra: object) -> Path:
    """The golden model's weights with a tokenizer of bytes and letters, so that text goes in and comes out."""
    from ggufc.formats.gguf_reader import GGUFFile
    from ggufc.formats.gguf_writer import GGUFWriter

    with GGUFFile.open(GOLDEN / "model.gguf") as source, GGUFWriter(path) as writer:
        n_vocab = source.tensors["token_embd.weight"].ne[1]
        texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *(chr(c) for c in range(97, 123))]
        types = [2, 3, 3, *[6] * 256, *[1] * (len(texts) - 259)]
        texts += [f"<unused{i}>" for i in range(n_vocab - len(texts))]
        types += [5] * (n_vocab - len(types))
        writer.copy_metadata(source, except_keys={key for key in source.metadata if key.startswith("tokenizer.")})
        writer.add("tokenizer.ggml.model", "llama")
        writer.add("tokenizer.ggml.tokens", texts)
        writer.add("tokenizer.ggml.scores", -np.arange(n_vocab, dtype=np.float32))
        writer.add("tokenizer.ggml.token_type", np.array(types, np.int32))
        writer.add("tokenizer.ggml.bos_token_id", 1, "uint32")
        writer.add("tokenizer.ggml.eos_token_id", 2, "uint32")
        for key, value in extra.items():
            writer.add(key, value)
        for name, tensor in source.tensors.items():
            writer.add_tensor(name, tensor.ne, tensor.type.name, source.data(name))
        writer.finish()
    return path


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests that compile the tiny model."""
    return tmp_path_factory.mktemp("ggufc-cache")


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("models") / "tiny.gguf", **{"tokenizer.chat_template": TEMPLATE})


@pytest.fixture(scope="session")
def artifact(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's artifact."""
    import ggufc

    output = tmp_path_factory.mktemp("artifacts") / "tiny.ggufc"
    phases: list[str] = []
    report = ggufc.compile(text_model, output, progress=lambda phase, done, total: phases.append(phase))
    assert Path(report.output) == output and report.artifact_bytes == output.stat().st_size and "weights" in phases
    return output


@pytest.fixture
def invoke(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in this process; an exception is a failure of the test, an expected error is ``exit_code``."""
    from ggufc.cli import cli

    monkeypatch.setenv("GGUFC_CACHE", str(shared_cache))

    def run(*arguments: object, input: str | None = None, ok: bool = True) -> Result:
        result = CliRunner().invoke(cli, [str(a) for a in arguments], input=input, catch_exceptions=False)
        assert not ok or result.exit_code == 0, result.output
        return result

    return run


@pytest.fixture
def ggufc_process(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``ggufc`` as a process of its own, where exit codes, streams and start-up are the point."""
    monkeypatch.setenv("GGUFC_CACHE", str(shared_cache))

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ggufc", *(str(a) for a in arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]

    return run
