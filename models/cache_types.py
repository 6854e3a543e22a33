"""Which type each layer's keys and values are stored in, and which of them are stored rotated (spec: runtime-cache, 1.8).

``type_k`` and ``type_v`` hold for all layers; ``type_k_first`` = ``q8_0,2`` overrides them for the first two layers, ``type_k_last`` for
the last ones (where both reach a layer, the first ones win). K and V are independent.

``k_hadamard`` and ``v_hadamard`` store keys and values under an orthonormal Walsh-Hadamard transform of each head. It spreads outliers over
the whole head, so that the few bits of a block type lose less. Queries are transformed alike, which leaves every score as it was, and what
attention returns is transformed back. Types that are not quantised gain nothing and stay plain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggufc.formats.ggml_types import TYPES
from ggufc.models.errors import ModelError

if TYPE_CHECKING:
    from ggufc.models.caches import CacheInfo
    from ggufc.models.step import Step

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
OVERRIDES = ("type_k_first", "type_k_last", "type_v_first", "type_v_last")
LATENT_BLOCK = 64
"""Block of the transform of latent rows, whatever their length."""
_BLOCKS = (512, 256, 128, 64)
_OVERRIDE = re.compile(r"([a-z0-9_]+),(\d{1,6})\Z")


def override(option: str, text: str) -> tuple[str, int]:
    """``q8_0,2`` -> (``q8_0``, 2); the empty text overrides nothing. ``ModelError`` naming the option."""
    if not text:
        return "", 0
    match = _OVERRIDE.match(text)
    if match is None or match[1] not in CACHE_TYPES:
        raise ModelError(
            f"builder option {option!r} is {text!r}; give a cache type and a number of layers, such as q8_0,2 (types: "
            f"{', '.join(CACHE_TYPES)})"
        )
    return match[1], int(match[2])


def layer_type(step: Step, part: str, i: int, n_layer: int) -> str:
    """The dtype of the cache ``part`` (``k`` or ``v``) of layer ``i`` of ``n_layer``."""
    return _chosen(step, part, i, n_layer)[1]


def deciding_option(step: Step, part: str, i: int, n_layer: int) -> str:
    """The option that decided ``layer_type``, for messages about it."""
    return _chosen(step, part, i, n_layer)[0]


def _chosen(step: Step, part: str, i: int, n_layer: int) -> tuple[str, str]:
    first, n_first = override(f"type_{part}_first", str(step.observe(f"type_{part}_first")))
    last, n_last = override(f"type_{part}_last", str(step.observe(f"type_{part}_last")))
    if i < n_first:
        return f"type_{part}_first", first
    if i >= n_layer - n_last:
        return f"type_{part}_last", last
    return f"type_{part}", str(step.observe(f"type_{part}"))


def hadamard_block(n: int) -> int:
    """Size of the transform of rows of ``n`` values: all of it if a power of two, else the largest of 512, 256, 128 and 64 that divides
    it; 0 if none does.
    """
    if n > 0 and n & (n - 1) == 0:
        return n
    return next((block for block in _BLOCKS if n % block == 0), 0)


def gains(dtype: str) -> bool:
    """Whether a transform lessens the error of storing in this type: it spreads what a block's scale would lose."""
    return TYPES[dtype].block > 1


def rotation(step: Step, part: str, dtype: str, head: int, latent: tuple[int, int] | None = None) -> int:
    """Block of the transform under which a layer's cache is stored, 0 for none. ``latent`` (values, rotated part) for latent rows, whose
    leading values are read back alone.
    """
    if not step.observe(f"{part}_hadamard") or not gains(dtype):
        return 0
    if latent is None:
        return hadamard_block(head)
    return 0 if any(n % LATENT_BLOCK for n in latent) else LATENT_BLOCK


def notes(caches: Iterable[CacheInfo], step: Step) -> list[str]:
    """What was asked for and has no effect on these caches, a sentence each: a transform that no layer takes, overrides of a cache that the
    model does not have or that has a type of its own.
    """
    found = []
    for part, name in (("k", "K"), ("v", "V")):
        mine = [cache for cache in caches if cache.part == part]
        if step.observe(f"{part}_hadamard") and not any(cache.hadamard for cache in mine):
            found.append(f"the {name} cache is not rotated (builder option '{part}_hadamard'): {_unrotated(name, mine)}")
        for option in (f"type_{part}_first", f"type_{part}_last"):
            dtype, n = override(option, str(step.observe(option)))
            end = mine[:n] if option.endswith("first") else mine[len(mine) - n :]
            if n and not any(cache.dtype == dtype for cache in end):
                found.append(
                    f"builder option {option!r} has no effect: the model keeps no {name} cache whose type may differ between layers"
                )
    return found


def _unrotated(name: str, caches: list[CacheInfo]) -> str:
    if not caches:
        return f"this model keeps no {name} cache"
    quantised = [cache for cache in caches if gains(cache.dtype)]
    if not quantised:
        return f"it only helps quantised types, and this one is {', '.join(sorted({cache.dtype for cache in caches}))}"
    return "rows of " + ", ".join(sorted({str(cache.head_dim) for cache in quantised})) + " values do not divide into blocks of it here"
