"""NVIDIA's assembler, where the machine has it: from PATH, or from the PyPI package nvidia-cuda-nvcc.

It is not needed to make artifacts (drivers assemble PTX when they load it), but it tells what kernels take: registers, shared memory,
spills.
"""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ggufc.codegen.errors import CodegenError


@lru_cache(maxsize=1)
def find() -> str | None:
    """Path of ``ptxas``, or None."""
    found = shutil.which("ptxas")
    if found:
        return found
    for folder in site.getsitepackages():
        for path in sorted(Path(folder).glob("nvidia/*/bin/ptxas")):
            return str(path)
    return None


@lru_cache(maxsize=1)
def version() -> str:
    """``V12.8.93`` or the like; nothing if there is no assembler."""
    found = re.search(r"\bV[\d.]+", _run("--version").stdout) if find() else None
    return found[0] if found else ""


@lru_cache(maxsize=1)
def architectures() -> frozenset[str]:
    """What this assembler can target."""
    return frozenset(re.findall(r"'?(sm_\d+)'?", _run("--help").stdout)) if find() else frozenset()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = find()
    if tool is None:
        raise CodegenError("there is no ptxas here; install the CUDA toolkit, or `pip install nvidia-cuda-nvcc`")
    try:
        return subprocess.run([tool, *arguments], capture_output=True, text=True)
    except OSError as error:
        raise CodegenError(f"{tool} does not run: {error.strerror or error}") from None


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: registers per thread, shared bytes per block, spilled bytes per thread."""

    registers: int
    shared: int
    spilled: int


def assemble(text: str, sm: str) -> dict[str, Usage]:
    """Usage of every kernel of a PTX text on ``sm`` (``sm_90``); CodegenError with the assembler's message if it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.ptx"
        source.write_text(text)
        done = _run(f"-arch={sm}", "-v", "--warn-on-spills", str(source), "-o", str(source.with_suffix(".cubin")))
    if done.returncode:
        raise CodegenError(f"ptxas refuses the code for {sm}: {done.stderr.strip()[:4000]}")
    found = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        spills = [int(v) for v in re.findall(r"(\d+) bytes spill (?:stores|loads)", part)]
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[name] = Usage(int(registers[1]) if registers else 0, int(shared[1]) if shared else 0, max(spills, default=0))
    return found
