"""CPU targets: a feature level and the properties kernels ask about.

LLVM's name for the host CPU is often wrong in virtual machines, so a target is always an explicit feature list over the generic CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufc.codegen.errors import CodegenError

_V2 = ("cx16", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_AVX512 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64": (),
    "x86-64-v3": _V3,
    "avxvnni": (*_V3, "avxvnni"),
    "avx512vnni": (*_AVX512, "avx512vnni"),
    "avx512vbmi": (*_AVX512, "avx512vnni", "avx512vbmi"),
}
"""Feature levels from the weakest to the strongest; a level needs all the features listed."""

X86_TRIPLE = "x86_64-unknown-linux-gnu"


@dataclass(frozen=True)
class Target:
    """What code is generated for.

    ``lanes``: f32 values per vector. ``has_fma`` decides whether ``Emitter.fma`` fuses: all kernels of one artifact round alike.
    """

    triple: str
    level: str
    features: tuple[str, ...]

    @property
    def lanes(self) -> int:
        if "avx512f" in self.features:
            return 16
        return 8 if "avx2" in self.features else 4

    @property
    def has_fma(self) -> bool:
        return "fma" in self.features

    @property
    def has_f16c(self) -> bool:
        return "f16c" in self.features

    @property
    def vector_bits(self) -> int:
        return 32 * self.lanes

    @property
    def vnni(self) -> str:
        """Which ``vpdpbusd`` exists: ``avx512``, ``avx`` or none (empty)."""
        if "avx512vnni" in self.features:
            return "avx512"
        return "avx" if "avxvnni" in self.features else ""

    def feature_string(self) -> str:
        """LLVM feature string; wide vectors must be asked for, LLVM prefers 256 bits otherwise."""
        return ",".join("+" + f for f in self.features)


def host_features() -> frozenset[str]:
    """Features of the machine that compiles, as LLVM sees them."""
    import llvmlite.binding as llvm

    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


def strongest_level(features: frozenset[str]) -> str:
    """Name of the strongest level whose features are all there."""
    return next(name for name in reversed(LEVELS) if features.issuperset(LEVELS[name]))


def resolve(text: str = "native") -> Target:
    """Target from ``native``, a level name (``x86-64-v3``) or a feature list (``avx2,fma,f16c,...``).

    A feature list is mapped to the strongest level it contains in full. Raises CodegenError for unknown names.
    """
    text = text.strip().removeprefix("cpu:")
    if text in LEVELS:
        return Target(X86_TRIPLE, text, LEVELS[text])
    if text == "native":
        have = host_features()
    else:
        have = frozenset(part.strip().lstrip("+") for part in text.split(",") if part.strip())
        known = {f for features in LEVELS.values() for f in features}
        unknown = sorted(have - known)
        if unknown or not have:
            raise CodegenError(
                f"--target {text!r}: unknown {'feature ' + ', '.join(unknown) if unknown else 'target'}; "
                f"use native, a level ({', '.join(LEVELS)}) or a list of features ({', '.join(sorted(known))})"
            )
        implied = {
            "avx2": _V3,
            "fma": _V3,
            "avxvnni": _V3,
            "avx512f": _AVX512,
            "avx512vnni": _AVX512,
            "avx512vbmi": (*_AVX512, "avx512vnni"),
        }
        have = have.union(*(implied.get(f, ()) for f in have))
    level = strongest_level(have)
    return Target(X86_TRIPLE, level, LEVELS[level])
