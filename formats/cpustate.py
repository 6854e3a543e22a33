"""What Linux tells a process about its CPU, and grants it, beyond ``/proc/cpuinfo``: capabilities of AArch64, tile registers of AMX."""

from __future__ import annotations

import ctypes
import platform

_AT_HWCAP, _AT_HWCAP2 = 16, 26
# Bits of the two words (Linux, arch/arm64/include/uapi/asm/hwcap.h) by LLVM's feature names.
_HWCAP = {"neon": 1, "lse": 8, "dotprod": 20, "sve": 22}
_HWCAP2 = {"i8mm": 13, "bf16": 14}

TILE_FEATURES = frozenset({"amx-tile", "amx-int8", "amx-bf16", "amx-fp16"})
"""LLVM's names of features that need tile registers."""

_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP, _ARCH_REQ_XCOMP_PERM = 0x1021, 0x1023
_XTILEDATA = 18
"""Number of the state component that holds tile registers."""


def arm_features(hwcap: int | None = None, hwcap2: int | None = None) -> frozenset[str]:
    """LLVM feature names in the capability words, by default those of this process; empty on other machines."""
    if hwcap is None or hwcap2 is None:
        if platform.machine() not in ("aarch64", "arm64"):
            return frozenset()
        read = ctypes.CDLL(None).getauxval
        read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
        hwcap, hwcap2 = int(read(_AT_HWCAP)), int(read(_AT_HWCAP2))
    found = {name for name, bit in _HWCAP.items() if hwcap >> bit & 1}
    return frozenset(found | {name for name, bit in _HWCAP2.items() if hwcap2 >> bit & 1})


def tiles_granted() -> bool:
    """Whether the kernel lets processes use tile registers (AMX; Linux 5.16 or newer on such a CPU)."""
    mask = ctypes.c_uint64(0)
    return _arch_prctl(_ARCH_GET_XCOMP_SUPP, ctypes.byref(mask)) and bool(mask.value >> _XTILEDATA & 1)


def request_tiles() -> bool:
    """Ask for tile registers in all threads of this process; needed once before the first tile instruction. False if refused."""
    return _arch_prctl(_ARCH_REQ_XCOMP_PERM, ctypes.c_ulong(_XTILEDATA))


def _arch_prctl(code: int, argument: object) -> bool:
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(code), argument) == 0
