"""The compiling process ends when it is told to, at once, and leaves no files."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ggufc.codegen import artifact_writer, kernel_build
from ggufc.codegen.child import compile_here
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.options import CompileOptions

MODEL = Path(__file__).parents[1] / "golden" / "llama-gqa-tied" / "model.gguf"

_SCRIPT = """
import sys
from ggufc.codegen import child

def stand_in(source, output, options, progress, before_writing):
    {body}

child.compile_here = stand_in
sys.exit(child.main())
"""


def started(body: str, output: Path) -> subprocess.Popen[str]:
    """A child whose compilation is ``body``, which has said that it runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT.format(body=body)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"source": "model.gguf", "output": str(output), "options": {}}))
    process.stdin.close()
    assert json.loads(process.stdout.readline())["phase"] == "running"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    """Exit status after SIGTERM; a process that does not end is killed and fails the test."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("the child does not end")
    finally:
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def test_a_call_into_the_compiler_does_not_delay_the_end(tmp_path: Path) -> None:
    """As a call of LLVM, ``sum`` returns to Python, and so to a signal handler, only when it is done."""
    process = started('progress("running", 1, 1); sum(range(10**12))', tmp_path / "x.ggufc")
    time.sleep(0.2)
    assert ended(process) == -signal.SIGTERM


def test_what_is_being_written_is_removed(tmp_path: Path) -> None:
    body = """import tempfile, time
    before_writing()
    with tempfile.NamedTemporaryFile(dir=output.parent):
        progress("running", 1, 1)
        time.sleep(60)"""
    assert ended(started(body, tmp_path / "x.ggufc")) == 130
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_caller_ends_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``compile_file`` waits for the child, so that nothing of it remains when the interrupt reaches the caller."""
    from ggufc.codegen import compile as compiling

    children = []
    popen = subprocess.Popen
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda *a, **k: children.append(popen(*a, **k)) or children[-1])

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "kernels":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiling.compile_file(MODEL, tmp_path / "x.ggufc", progress=interrupt)
    assert [child.returncode for child in children] == [-signal.SIGTERM]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_noticed_before_code_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(artifact_writer.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(kernel_build, "build_image", lambda *_: pytest.fail("no code may be generated"))
    with pytest.raises(CodegenError, match=r"the weights of out\.ggufc take \d.* MiB, but only 0\.0 MiB are free in .*; free space or"):
        compile_here(MODEL, tmp_path / "out.ggufc", CompileOptions())
    assert not list(tmp_path.iterdir())
