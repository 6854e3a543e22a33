"""CPU targets: a feature level and the properties kernels ask about.

LLVM's name for the host CPU is often wrong in virtual machines, so a target is always an explicit feature list over the generic CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ggufc.codegen.errors import CodegenError
from ggufc.formats.cpustate import TILE_FEATURES, arm_features, tiles_granted

_V2 = ("cx16", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_AVX512 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

X86_LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64": (),
    "x86-64-v3": _V3,
    "avxvnni": (*_V3, "avxvnni"),
    "avx512vnni": (*_AVX512, "avx512vnni"),
    "avx512vbmi": (*_AVX512, "avx512vnni", "avx512vbmi"),
    "amx": (*_AVX512, "avx512vnni", "avx512vbmi", "amx-tile", "amx-int8"),
}
_NEON = ("neon",)
_DOTPROD = (*_NEON, "lse", "dotprod")
ARM_LEVELS: dict[str, tuple[str, ...]] = {
    "aarch64": _NEON,
    "aarch64-dotprod": _DOTPROD,
    "aarch64-i8mm": (*_DOTPROD, "i8mm"),
}
LEVELS: dict[str, tuple[str, ...]] = {**X86_LEVELS, **ARM_LEVELS}
"""Feature levels, of each architecture from the weakest to the strongest; a level needs all the features listed."""

X86_TRIPLE = "x86_64-unknown-linux-gnu"
ARM_TRIPLE = "aarch64-unknown-linux-gnu"


@dataclass(frozen=True)
class Target:
    """What code is generated for.

    ``lanes``: f32 values per vector. ``has_fma`` decides whether ``Emitter.fma`` fuses: all kernels of one artifact round alike.
    """

    triple: str
    level: str
    features: tuple[str, ...]
    fast_prefill: bool = False
    """Whether batches may be multiplied with less precision than single tokens."""

    @property
    def arch(self) -> str:
        """``x86_64`` or ``aarch64``, as the kernel names machines."""
        return self.triple.split("-", 1)[0]

    @property
    def is_arm(self) -> bool:
        return self.triple == ARM_TRIPLE

    @property
    def lanes(self) -> int:
        if "avx512f" in self.features:
            return 16
        return 8 if "avx2" in self.features else 4

    @property
    def has_fma(self) -> bool:
        return "fma" in self.features or self.is_arm

    @property
    def has_f16c(self) -> bool:
        """Whether vectors of halves are widened and narrowed by instructions."""
        return "f16c" in self.features or self.is_arm

    @property
    def vector_bits(self) -> int:
        return 32 * self.lanes

    @property
    def vnni(self) -> str:
        """The instruction that multiplies quads of unsigned by quads of signed bytes: ``avx512`` or ``avx`` for ``vpdpbusd``, ``neon``
        for ``usdot``, or none (empty).
        """
        if "avx512vnni" in self.features:
            return "avx512"
        if "i8mm" in self.features:
            return "neon"
        return "avx" if "avxvnni" in self.features else ""

    @property
    def signed_dot(self) -> bool:
        """Whether quads of *signed* bytes are multiplied faster than quads of unsigned by signed ones (NEON without ``usdot``)."""
        return self.is_arm and "i8mm" not in self.features

    @property
    def has_tiles(self) -> bool:
        """Whether AMX multiplies tiles of bytes."""
        return "amx-int8" in self.features

    def feature_string(self) -> str:
        """LLVM feature string; wide vectors must be asked for, LLVM prefers 256 bits otherwise."""
        return ",".join("+" + f for f in self.features)


def host_features() -> frozenset[str]:
    """Features of the machine that compiles: as LLVM sees them, without tiles that the system does not grant."""
    import llvmlite.binding as llvm

    found = frozenset(name for name, on in llvm.get_host_cpu_features().items() if on) | arm_features()
    return found if tiles_granted() else found - TILE_FEATURES


def strongest_level(features: frozenset[str]) -> str:
    """Name of the strongest level whose features are all there; ``neon`` tells the architectures apart."""
    levels = ARM_LEVELS if "neon" in features else X86_LEVELS
    return next(name for name in reversed(levels) if features.issuperset(levels[name]))


_IMPLIED = {
    "avx2": _V3,
    "fma": _V3,
    "avxvnni": _V3,
    "avx512f": _AVX512,
    "avx512vnni": _AVX512,
    "avx512vbmi": (*_AVX512, "avx512vnni"),
    "amx-int8": (*_AVX512, "avx512vnni", "avx512vbmi", "amx-tile"),
    "lse": _NEON,
    "dotprod": _DOTPROD,
    "i8mm": _DOTPROD,
}


FAST_PREFILL = "fast-prefill"
"""The item of a target text that asks for ``Target.fast_prefill``."""


def resolve(text: str = "native") -> Target:
    """Target from ``native``, a level name (``x86-64-v3``, ``aarch64-dotprod``) or a feature list (``avx2,fma,f16c,...``).

    A feature list is mapped to the strongest level it contains in full. The item ``fast-prefill`` asks for bf16 products in batches.
    Raises CodegenError for unknown names.
    """
    items = [item.strip() for item in text.split(",")]
    if FAST_PREFILL in items:
        rest = ",".join(item for item in items if item != FAST_PREFILL) or "native"
        return _fast_prefill(resolve(rest), rest == "native")
    text = text.strip().removeprefix("cpu:")
    if text in LEVELS:
        return _at_level(text)
    if text == "native":
        return _at_level(strongest_level(host_features()))
    have = frozenset(part.strip().lstrip("+") for part in text.split(",") if part.strip())
    known = {f for features in LEVELS.values() for f in features}
    unknown = sorted(have - known - {*LEVELS, "native"})
    if unknown or not have:
        what = f"names {' and '.join(unknown)}, unknown here" if have else "is empty"
        raise CodegenError(
            f"--target {text!r} {what}; use native, a level ({', '.join(LEVELS)}) or a list of features such as avx2,fma (`ggufc doctor` "
            "lists those of this machine)"
        )
    if whole := sorted(have - known):
        raise CodegenError(
            f"--target {text!r}: {whole[0]} says everything about a CPU and stands alone (only {FAST_PREFILL} and cuda items may follow); "
            "name one level, or features only"
        )
    arm = have & {f for features in ARM_LEVELS.values() for f in features}
    if arm and have != arm:
        raise CodegenError(
            f"--target {text!r}: {', '.join(sorted(arm))} are features of AArch64, {', '.join(sorted(have - arm))} of x86-64; "
            "name those of one CPU"
        )
    return _at_level(strongest_level(have.union(*(_IMPLIED.get(f, ()) for f in have))))


def _fast_prefill(target: Target, here: bool) -> Target:
    """``target`` with bf16 products in batches; ``here``: it is for this machine."""
    if target.lanes != 16 or (here and _BF16 not in host_features()):
        raise CodegenError(
            f"fast prefill multiplies pairs of bf16 with AVX512-BF16, which {'this CPU' if here else 'level ' + target.level} lacks; leave "
            "it out, or name a level with AVX-512 (--target avx512vnni) for another machine"
        )
    return replace(target, features=(*target.features, _BF16), fast_prefill=True)


_BF16 = "avx512bf16"


def _at_level(level: str) -> Target:
    return Target(ARM_TRIPLE if level in ARM_LEVELS else X86_TRIPLE, level, LEVELS[level])
