"""Choosing among the programs of an artifact by the size of the session.

A builder may ask about a size that only a session knows: ``n_ctx_seq``, the positions a sequence may have (phi3's rotation factors depend
on it). Each answer makes another graph, so an artifact holds several programs of one base name, ``eval`` and ``eval@n_ctx_seq > 4096``.
What each builder observed is in the program's ``reuse_key``; the program whose observations all hold is the one to run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError

from .artifact import Artifact
from .errors import RuntimeRefusal

_PREDICATE = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*(-?\w+)\s*\Z")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def base_name(program: str) -> str:
    """``eval`` of ``eval@n_ctx_seq > 4096``."""
    return program.partition("@")[0]


def unmet(program: fmt.Program, sizes: Mapping[str, int]) -> list[str]:
    """Observations of ``program`` that do not hold for ``sizes``, as text. Keys about anything else were settled at compile time."""
    wrong = []
    for key, then in program.reuse_key:
        now: int | bool
        if key in sizes:
            now = sizes[key]
        else:
            match = _PREDICATE.match(key)
            if match is None or not {match[1], match[3]} & sizes.keys():
                continue
            now = _COMPARE[match[2]](_operand(match[1], sizes, key), _operand(match[3], sizes, key))
        if now != then:
            wrong.append(f"{key} is {now}, compiled for {then}")
    return wrong


def _operand(text: str, sizes: Mapping[str, int], key: str) -> int:
    if text in sizes:
        return sizes[text]
    try:
        return int(text)
    except ValueError:
        raise ArtifactError(f"the reuse key {key!r} compares with the unknown size {text!r}; compile the model again") from None


def choose(artifact: Artifact, base: str, sizes: Mapping[str, int]) -> str:
    """Name of the program called ``base``, or a variant of it, whose observations all hold for ``sizes``.

    RuntimeRefusal if there is none of that name, or none for these sizes; ArtifactError if several are: an observation is missing.
    """
    variants = [program for program in artifact.manifest.programs if base_name(program.name) == base]
    reasons, fitting = [], []
    for program in variants:
        wrong = unmet(program, sizes)
        if wrong:
            reasons.append(f"{program.name}: {'; '.join(wrong)}")
        else:
            fitting.append(program.name)
    if len(fitting) > 1:
        raise ArtifactError(
            f"{artifact.path}: the programs {' and '.join(fitting)} differ in nothing their builders are known to have looked at; compile "
            "the model again"
        )
    if fitting:
        return fitting[0]
    if not variants:
        wants = "embeddings" if base.endswith("_embd") else "token ids"
        raise RuntimeRefusal(f"this artifact has no program {base!r}, so it does not take {wants} as input; compile the model with it")
    stated = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    raise RuntimeRefusal(
        f"this artifact has no program {base!r} for a session with {stated} ({' | '.join(reasons)}); choose another n_ctx or n_seq_max, or "
        "compile the model again"
    )
