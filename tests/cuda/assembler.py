"""NVIDIA's assembler, where the machine has it: from PATH, or from the PyPI package nvidia-cuda-nvcc."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


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
def architectures() -> frozenset[str]:
    """What this assembler can target."""
    tool = find()
    text = subprocess.run([tool, "--help"], capture_output=True, text=True).stdout if tool else ""
    return frozenset(re.findall(r"'?(sm_\d+)'?", text))


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: registers per thread, shared bytes per block, spilled bytes per thread."""

    registers: int
    shared: int
    spilled: int


def assemble(text: str, sm: str, folder: Path) -> dict[str, Usage]:
    """Usage of every kernel; AssertionError with the assembler's message if it refuses."""
    tool = find()
    assert tool is not None
    (folder / "k.ptx").write_text(text)
    done = subprocess.run(
        [tool, f"-arch={sm}", "-v", "--warn-on-spills", str(folder / "k.ptx"), "-o", str(folder / "k.cubin")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:4000]
    found = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        spills = [int(v) for v in re.findall(r"(\d+) bytes spill (?:stores|loads)", part)]
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[name] = Usage(int(registers[1]) if registers else 0, int(shared[1]) if shared else 0, max(spills, default=0))
    return found
