"""K-shift: rotating stored keys when positions of their cells have moved.

Keys are stored rotated by their position, so moving a cell by ``delta`` is one more rotation by ``delta``. It is a pure rotation: the
magnitude factor of YaRN is in the stored key already and must not be applied twice. Rows that did not move keep their bytes. Quantised
rows are dequantised, rotated and quantised again; those stored under a Hadamard transform leave it for the rotation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.formats.ggml_types import TYPES
from ggufc.formats.hadamard import walsh_hadamard

from .artifact import Artifact
from .caches import logical
from .errors import RuntimeRefusal
from .kvcells import KVCells
from .memory import ALIGNMENT
from .programs import base_name
from .rows import Store

_ROWS_AT_ONCE = 1024
STORABLE = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


def angles(rope: Mapping[str, Any], freq_factors: np.ndarray | None = None) -> np.ndarray:
    """f64 [n_dims/2]: rotation per position of each pair, with YaRN's blend of interpolated and extrapolated frequencies.

    Source: YaRN (arXiv 2309.00071) in ggml's parametrisation: ``n_ctx_orig``, ``beta_fast``, ``beta_slow``, ``freq_scale``, ``ext_factor``.
    """
    n_dims, base = int(rope["n_dims"]), float(rope["base"])
    pair = np.arange(n_dims // 2, dtype=np.float64)
    theta = base ** (-2.0 * pair / n_dims)
    if freq_factors is not None:
        if len(freq_factors) < n_dims // 2:
            raise RuntimeRefusal(
                f"the model gives {len(freq_factors)} rope frequency factors for {n_dims // 2} pairs; the context cannot be shifted"
            )
        theta = theta / np.asarray(freq_factors, np.float64)[: n_dims // 2]
    scale = float(rope.get("freq_scale", 1.0))
    ext = float(rope.get("ext_factor", 0.0))
    if ext == 0.0:
        return theta * scale
    n_ctx = float(rope.get("n_ctx_orig", 0))

    def turn(beta: float) -> float:
        """Pair index at which a full context makes ``beta`` turns."""
        return n_dims * math.log(n_ctx / (beta * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(turn(float(rope.get("beta_fast", 32.0)))))
    high = min(float(n_dims - 1), math.ceil(turn(float(rope.get("beta_slow", 1.0)))))
    ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    mix = ramp * ext
    return theta * scale * (1.0 - mix) + theta * mix


def rotate(rows: np.ndarray, delta: np.ndarray, theta: np.ndarray, mode: str, n_dims: int) -> None:
    """Rotate f32 ``rows`` [n, heads, head] in place by ``delta`` [n] positions: pairs (2i, 2i+1) in mode ``norm``, (i, i + n_dims/2)
    in ``neox``.
    """
    turn = delta.astype(np.float64)[:, None] * theta[None, :]
    cos, sin = np.cos(turn).astype(np.float32)[:, None, :], np.sin(turn).astype(np.float32)[:, None, :]
    if mode == "norm":
        a, b = rows[..., 0:n_dims:2], rows[..., 1:n_dims:2]
    elif mode == "neox":
        a, b = rows[..., : n_dims // 2], rows[..., n_dims // 2 : n_dims]
    else:
        raise RuntimeRefusal(f"keys rotated in mode {mode!r} cannot be shifted; turn context shift off or use a larger n_ctx", soft=True)
    old = a.copy()
    a[...] = old * cos - b * sin
    b[...] = old * sin + b * cos


def to_f32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """f32 [n, values] of stored rows u8 [n, bytes]."""
    from ggufc.formats.quants import dequantize

    info = TYPES[dtype]
    return dequantize(dtype, np.ascontiguousarray(raw), raw.shape[1] // info.bytes * info.block)


def from_f32(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bytes u8 [n, bytes] of f32 rows [n, values], rounded as ggml's reference quantisers do."""
    from ggufc.formats.quants import quantize

    return quantize(dtype, np.ascontiguousarray(rows, np.float32))


def _freq_factors(rope: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    given = rope.get("freq_factors")
    if given is None or (isinstance(given, str) and not given):
        return None
    if isinstance(given, str):
        if given not in tensors:
            raise RuntimeRefusal(f"the rope frequency factors {given!r} are not in the artifact; the context cannot be shifted", soft=True)
        return np.asarray(tensors[given]).view(np.float32).reshape(-1)
    return np.asarray(given, np.float64)


def specs_for(artifact: Artifact, program: fmt.Program) -> list[fmt.Cache]:
    """The caches as ``program`` rotates their keys.

    The manifest describes the plain program. A variant for another context size may read other frequency factors; which ones, its launches
    say: where the same launch of the plain program reads those of the manifest. Soft refusal if there is no such launch.
    """
    caches = logical(artifact.manifest.caches)
    base = base_name(program.name)
    if program.name == base or not any(cache.rope.get("freq_factors") for cache in caches):
        return caches
    plain = {launch.node: launch for launch in artifact.program(base).launches}
    pairs = {
        (old.name, new.name)
        for launch in program.launches
        if launch.node in plain and plain[launch.node].kernel == launch.kernel
        for old, new in zip(plain[launch.node].args, launch.args)
        if old.kind == new.kind == "weight"
    }
    tensors = Tensors(artifact)
    return [_with_factors(cache, pairs, tensors, program.name) if cache.rope.get("freq_factors") else cache for cache in caches]


def _with_factors(cache: fmt.Cache, pairs: set[tuple[str, str]], tensors: Mapping[str, np.ndarray], program: str) -> fmt.Cache:
    """The cache with the factors that stand where the plain program has the cache's own."""
    known = np.asarray(cache.rope["freq_factors"], np.float32)
    size = known.nbytes
    for old, new in sorted(pairs):
        if old not in tensors or new not in tensors or not size <= len(tensors[old]) == len(tensors[new]) < size + ALIGNMENT:
            continue
        if np.array_equal(tensors[old][:size].view(np.float32), known):
            factors = tensors[new][:size].view(np.float32)
            return msgspec.structs.replace(cache, rope={**cache.rope, "freq_factors": [float(x) for x in factors]})
    raise RuntimeRefusal(
        f"positions cannot be moved: the artifact does not say how {program} rotates the keys of cache {cache.name}; turn context shift "
        "off or use a smaller n_ctx",
        soft=True,
    )


class Tensors(dict[str, np.ndarray]):
    """Bytes of an artifact's tensors by name, looked up on demand."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__()
        self._file = artifact.file

    def __contains__(self, name: object) -> bool:
        return name in self._file.tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.data(name)


def check(caches: list[fmt.Cache]) -> None:
    """Soft refusal, before anything changes, if the keys of an artifact cannot be shifted."""
    for cache in caches:
        if cache.part != "k" or not cache.rope:
            continue
        mode = cache.rope.get("mode")
        if mode not in ("norm", "neox") or cache.dtype not in STORABLE or not _is_rotation(cache):
            raise RuntimeRefusal(
                f"positions cannot be moved: keys of cache {cache.name} ({cache.dtype}, rotation {mode!r}) cannot be rotated in place; "
                "turn context shift off or use a larger n_ctx",
                soft=True,
            )


def _is_rotation(cache: fmt.Cache) -> bool:
    """Whether the manifest's numbers describe a rotation of this cache's rows."""
    n_dims, base = cache.rope.get("n_dims"), cache.rope.get("base")
    if not isinstance(n_dims, int) or not isinstance(base, (int, float)) or cache.head < 1 or cache.row % cache.head:
        return False
    return 0 < n_dims <= cache.head and n_dims % 2 == 0 and 1 < base < math.inf


def _turned(rows: np.ndarray, cache: fmt.Cache) -> np.ndarray:
    """Rows f32 [n, values] into the transform they are stored under, or out of it."""
    return walsh_hadamard(rows, cache.hadamard) if cache.hadamard else rows


def apply(cells: KVCells, buffers: Store, tensors: Mapping[str, np.ndarray] | None = None, caches: list[fmt.Cache] | None = None) -> int:
    """Rotate the keys of all moved cells and clear their deltas; returns the number of rows rotated per cache.

    ``tensors`` looks up frequency factors that the manifest gives by tensor name; ``caches`` says how keys are rotated (``specs_for``), by
    default as the manifest does.
    """
    caches = list(buffers.specs.values()) if caches is None else caches
    check(caches)
    moved = np.flatnonzero((cells.delta != 0) & (cells.pos >= 0))
    deltas = cells.delta[moved]
    known: dict[str, np.ndarray] = {}
    for cache in caches:
        if cache.part != "k" or not cache.rope or not len(moved):
            continue
        key = repr(sorted(cache.rope.items()))
        if key not in known:
            known[key] = angles(cache.rope, _freq_factors(cache.rope, tensors or {}))
        store = buffers.rows(cache.name)
        mode, n_dims = str(cache.rope["mode"]), int(str(cache.rope["n_dims"]))
        for at in range(0, len(moved), _ROWS_AT_ONCE):
            part = moved[at : at + _ROWS_AT_ONCE]
            rows = _turned(to_f32(store.read(part), cache.dtype), cache)
            rotate(rows.reshape(len(part), -1, cache.head), deltas[at : at + _ROWS_AT_ONCE], known[key], mode, n_dims)
            store.write(part, from_f32(_turned(rows, cache), cache.dtype))
    cells.shift_done()
    return len(moved)
