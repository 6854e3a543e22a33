"""CPU features by LLVM name and the physical cores this process may use (Linux)."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

from ggufc.formats.cpustate import TILE_FEATURES, arm_features, tiles_granted

_CPUINFO = Path("/proc/cpuinfo")
_CPU_TREE = Path("/sys/devices/system/cpu")
_CGROUP_TREE = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")

# Kernel flag -> LLVM feature, where the two names differ.
_X86_RENAMED = {
    "pni": "sse3",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "bmi1": "bmi",
    "abm": "lzcnt",
    "pclmulqdq": "pclmul",
    "rdrand": "rdrnd",
    "cx8": "cx8",
    "sha_ni": "sha",
    "avx_vnni": "avxvnni",
    "avx_vnni_int8": "avxvnniint8",
    "avx_vnni_int16": "avxvnniint16",
    "avx_ifma": "avxifma",
    "avx_ne_convert": "avxneconvert",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx512_vp2intersect": "avx512vp2intersect",
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "amx_fp16": "amx-fp16",
}
_X86_WORDS = (
    "mmx sse sse2 ssse3 cx16 popcnt movbe aes xsave xsavec xsaveopt avx avx2 bmi2 f16c fma gfni vaes vpclmulqdq adx clflushopt clwb "
    "rdseed rdpid fsgsbase sse4a avx512f avx512bw avx512cd avx512dq avx512vl avx512ifma avx512vbmi fxsr sahf prfchw lwp"
)
_X86_SAME = frozenset(_X86_WORDS.split())
_ARM_RENAMED = {
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fullfp16",
    "fphp": "fullfp16",
    "asimdfhm": "fp16fml",
    "atomics": "lse",
    "crc32": "crc",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
    "svei8mm": "i8mm",
    "sme": "sme",
    "lrcpc": "rcpc",
    "aes": "aes",
    "sha2": "sha2",
}


def features_from_flags(flags: str, machine: str) -> frozenset[str]:
    """LLVM feature names for the words of a ``/proc/cpuinfo`` flag line on ``machine`` (as ``platform.machine()`` names it)."""
    words = flags.split()
    if machine in ("x86_64", "AMD64", "i686"):
        found = {_X86_RENAMED[w] for w in words if w in _X86_RENAMED}
        found.update(w for w in words if w in _X86_SAME)
    else:
        found = {_ARM_RENAMED[w] for w in words if w in _ARM_RENAMED}
    return frozenset(found)


def host_features() -> frozenset[str]:
    """Features this process may use; empty where the kernel does not tell (then only baseline artifacts load).

    Tiles (AMX) count only where the kernel grants them.
    """
    found = flag_features() | arm_features()
    return found if tiles_granted() else found - TILE_FEATURES


def flag_features() -> frozenset[str]:
    """Features in the flags of ``/proc/cpuinfo``."""
    machine = platform.machine()
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return features_from_flags(value, machine)
    return frozenset()


def available_cpus() -> frozenset[int]:
    """Logical CPUs the scheduler may put this process on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def cgroup_quota(tree: Path = _CGROUP_TREE, self_cgroup: Path = _SELF_CGROUP) -> float:
    """CPUs granted by the control group (version 2, or version 1's cpu controller); ``inf`` without a limit."""
    groups = {"/"}
    for line in _read(self_cgroup).splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and (parts[1] == "" or "cpu" in parts[1].split(",")):
            group = parts[2]
            while group not in ("", "/"):  # a parent's limit binds its children
                groups.add(group)
                group = group.rsplit("/", 1)[0]
    limit = math.inf
    for group in groups:
        words = _read(tree / group.lstrip("/") / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            limit = min(limit, int(words[0]) / int(words[1]))
        quota = _read(tree / "cpu" / group.lstrip("/") / "cpu.cfs_quota_us")
        period = _read(tree / "cpu" / group.lstrip("/") / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limit = min(limit, int(quota) / int(period))
    return limit


def count_cores(cpus: frozenset[int], tree: Path = _CPU_TREE) -> int:
    """Distinct physical cores among logical ``cpus``; a CPU without topology counts as a core of its own."""
    cores = {_read(tree / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu{cpu}" for cpu in cpus}
    return max(1, len(cores))


def physical_cores() -> int:
    """Physical cores available to this process: affinity, hyper-thread siblings and the control group's quota all count. At least 1."""
    cores = count_cores(available_cpus())
    quota = cgroup_quota()
    return max(1, min(cores, math.ceil(quota))) if math.isfinite(quota) else cores
