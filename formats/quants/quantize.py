"""float32 to block types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ggufc.formats.activations import round_bf16
from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import row_bytes, type_by_name
from ggufc.formats.quants import quantize_k
from ggufc.formats.quants.pack import f16_bytes, pack_planes, to_f16
from ggufc.formats.quants.search import inverse, nearest, signed_extreme, table_scale
from ggufc.formats.quants.tables import E2M1, N4

_SLAB = 1 << 18  # values quantised at a time: the searches hold about ten f32 temporaries of this size
_LARGEST = 65504.0  # of a half: types with an offset reach no further; the others could, but weights never do


def _away(x: np.ndarray) -> np.ndarray:
    """Round halves away from zero, as ggml's reference quantisers do."""
    return np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)


def q4_0(x: np.ndarray) -> np.ndarray:
    d = signed_extreme(x) / -8
    q = np.minimum(np.floor(x * inverse(d) + np.float32(8.5)), 15)
    return np.concatenate([f16_bytes(to_f16(d)), pack_planes(q, 16, 4)], axis=1)


def _span(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / top
    q = np.minimum(np.floor((x - low) * inverse(d) + np.float32(0.5)), top)
    return to_f16(d), to_f16(low), q.astype(np.uint8)


def q4_1(x: np.ndarray) -> np.ndarray:
    d, low, q = _span(x, 15)
    return np.concatenate([f16_bytes(d), f16_bytes(low), pack_planes(q, 16, 4)], axis=1)


def q5_0(x: np.ndarray) -> np.ndarray:
    d = signed_extreme(x) / -16
    q = np.minimum(np.floor(x * inverse(d) + np.float32(16.5)), 31).astype(np.uint8)
    return np.concatenate([f16_bytes(to_f16(d)), pack_planes(q >> 4, 1, 1), pack_planes(q & 15, 16, 4)], axis=1)


def q5_1(x: np.ndarray) -> np.ndarray:
    d, low, q = _span(x, 31)
    return np.concatenate([f16_bytes(d), f16_bytes(low), pack_planes(q >> 4, 1, 1), pack_planes(q & 15, 16, 4)], axis=1)


def q8_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.concatenate([f16_bytes(to_f16(d)), _away(x * inverse(d)).astype(np.int8).view(np.uint8)], axis=1)


def iq4_nl(x: np.ndarray) -> np.ndarray:
    d = to_f16(table_scale(x, N4))
    return np.concatenate([f16_bytes(d), pack_planes(nearest(N4, x * inverse(d)), 16, 4)], axis=1)


def mxfp4(x: np.ndarray) -> np.ndarray:
    """The exponent that maps the largest value into the range, or the next one: whichever errs less."""
    order = np.argsort(E2M1[[*range(8), *range(9, 16)]])
    codes = np.array([*range(8), *range(9, 16)], np.uint8)[order]
    table = E2M1[codes].astype(np.float32)
    _, exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True))
    best = np.full((len(x), 1), np.inf, np.float32)
    out = np.empty((len(x), 17), np.uint8)
    for more in (0, 1):
        # frexp gives max = f * 2^exponent with f < 1, and 8 * 2^(e-128) is the power of two below the table's largest value 12.
        e = np.clip(exponent - 4 + more + 128, 0, 254)
        d = np.ldexp(np.float32(1), e - 128)
        at = nearest(table, np.clip(np.ldexp(x, 128 - e), -24, 24))
        error = np.square(x - d * table[at]).sum(axis=1, keepdims=True)
        packed = np.concatenate([e.astype(np.uint8), pack_planes(codes[at], 16, 4)], axis=1)
        np.copyto(out, packed, where=error < best)
        best = np.minimum(best, error)
    return out


QUANTIZERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q4_0": q4_0,
    "q4_1": q4_1,
    "q5_0": q5_0,
    "q5_1": q5_1,
    "q8_0": q8_0,
    "iq4_nl": iq4_nl,
    "mxfp4": mxfp4,
    "q2_k": quantize_k.q2_k,
    "q3_k": quantize_k.q3_k,
    "q4_k": quantize_k.q4_k,
    "q5_k": quantize_k.q5_k,
    "q6_k": quantize_k.q6_k,
    "iq4_xs": quantize_k.iq4_xs,
}
"""Block type -> function from f32 ``[blocks, values]`` to uint8 ``[blocks, bytes]``."""


def quantize(type_name: str, x: np.ndarray) -> np.ndarray:
    """Rows f32 ``[..., ne0]`` -> uint8 ``[rows, bytes of a row]``.

    Defined for the float types and for ``QUANTIZERS``. ``GGUFError`` for other types, rows that are not whole blocks, values that are not
    finite, and values whose scale does not fit into half precision.
    """
    info = type_by_name(type_name)
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    width = row_bytes(info.name, rows.shape[1])
    if info.name == "f32":
        return rows.astype("<f4").view(np.uint8)
    if info.name == "f16":
        return to_f16(rows).astype("<f2").view(np.uint8)
    if info.name == "bf16":
        return (round_bf16(rows).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    function = QUANTIZERS.get(info.name)
    if function is None:
        raise GGUFError(f"there is no quantiser for {info.name}; available are f32, f16, bf16, {', '.join(QUANTIZERS)}")
    if not np.isfinite(rows).all():
        raise GGUFError(f"the values to quantise to {info.name} are not all finite")
    out = np.empty((len(rows), width), np.uint8)
    step = max(1, _SLAB // rows.shape[1])
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        if info.name != "mxfp4" and float(np.abs(part).max(initial=0)) > _LARGEST:
            raise GGUFError(f"values beyond {_LARGEST:g} do not fit into {info.name}: its scales are halves")
        out[at : at + step] = function(part.reshape(-1, info.block)).reshape(len(part), width)
    return out
