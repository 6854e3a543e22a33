"""What this machine says about itself (Linux)."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's model name, as the kernel tells it."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("model name", "Hardware", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def memory() -> tuple[int, int] | None:
    """(total, available) bytes of main memory, None where the kernel does not tell."""
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("Mem")}
    if not {"MemTotal", "MemAvailable"} <= values.keys():
        return None
    return values["MemTotal"], values["MemAvailable"]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
