"""Scale searches of the quantisers: a grid of candidate scales, each refined by least squares, the best kept.

Errors are unweighted squares. Arrays are ``[groups, values]``; results ``[groups, 1]``.
"""

from __future__ import annotations

import numpy as np

_TINY = np.float32(1e-30)


def inverse(x: np.ndarray) -> np.ndarray:
    """1/x, and 0 where x is 0 or so small that its inverse overflows."""
    return np.where(np.abs(x) > _TINY, np.float32(1) / np.where(np.abs(x) > _TINY, x, np.float32(1)), np.float32(0)).astype(np.float32)


def signed_extreme(x: np.ndarray) -> np.ndarray:
    """The value of largest magnitude of each group, with its sign."""
    at = np.abs(x).argmax(axis=1)[:, None]
    return np.take_along_axis(x, at, axis=1)


def nearest(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Index of the entry of a sorted table nearest to each x."""
    t = table.astype(np.float32)
    return np.searchsorted((t[1:] + t[:-1]) / 2, x).astype(np.uint8)


def symmetric_scale(x: np.ndarray, half: int, steps: int = 9) -> np.ndarray:
    """Scale d (of either sign) minimising sum (x - d q)^2 over integers -half <= q < half."""
    extreme = signed_extreme(x)
    best = np.zeros_like(extreme)
    gain = np.full_like(extreme, -1)
    for step in range(-steps, steps + 1):
        q = np.clip(np.rint(x * ((-half + np.float32(0.1) * step) * inverse(extreme))), -half, half - 1)
        _keep_better(x, q, best, gain)
    return best


def table_scale(x: np.ndarray, table: np.ndarray, steps: int = 9) -> np.ndarray:
    """Scale d (of either sign) minimising sum (x - d t)^2 over entries t of a sorted table."""
    extreme = signed_extreme(x)
    best = np.zeros_like(extreme)
    gain = np.full_like(extreme, -1)
    values = table.astype(np.float32)
    for end in (values[0], values[-1]):
        for step in range(-steps, steps + 1):
            _keep_better(x, values[nearest(table, x * (end * (1 + np.float32(0.02) * step) * inverse(extreme)))], best, gain)
    return best


def _keep_better(x: np.ndarray, q: np.ndarray, best: np.ndarray, gain: np.ndarray) -> None:
    """Least-squares scale for fixed codes; it lowers the squared error by (sum xq)^2 / sum q^2."""
    xq = (x * q).sum(axis=1, keepdims=True)
    qq = (q * q).sum(axis=1, keepdims=True)
    got = xq * xq * inverse(qq)
    better = got > gain
    np.copyto(best, xq * inverse(qq), where=better)
    np.copyto(gain, got, where=better)


def scale_and_min(x: np.ndarray, top: int, steps: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Scale d >= 0 and min m >= 0 minimising sum (x - d q + m)^2 over integers 0 <= q <= top."""
    low = np.minimum(x.min(axis=1, keepdims=True), 0)
    span = x.max(axis=1, keepdims=True) - low
    best_d, best_m = span / top, -low
    q = _codes(x, best_d, best_m, top)
    error = np.square(x - best_d * q + best_m).sum(axis=1, keepdims=True)
    n = x.shape[1]
    sx = x.sum(axis=1, keepdims=True)
    for step in range(steps + 1):
        d0 = span / (top - 1 + np.float32(0.1) * step)
        q = _codes(x, d0, -low, top)
        sq = q.sum(axis=1, keepdims=True)
        sqq = (q * q).sum(axis=1, keepdims=True)
        sxq = (x * q).sum(axis=1, keepdims=True)
        determinant = n * sqq - sq * sq
        d = (n * sxq - sx * sq) * inverse(determinant)
        m = (sq * sxq - sqq * sx) * inverse(determinant)
        # A min below zero is not representable; the best scale without one is the plain least squares.
        d = np.where(m < 0, sxq * inverse(sqq), d)
        m = np.maximum(m, 0)
        got = np.square(x - d * q + m).sum(axis=1, keepdims=True)
        better = (got < error) & (d > 0)
        np.copyto(best_d, d, where=better)
        np.copyto(best_m, m, where=better)
        np.copyto(error, got, where=better)
    return best_d, best_m


def _codes(x: np.ndarray, d: np.ndarray, m: np.ndarray, top: int) -> np.ndarray:
    return np.clip(np.rint((x + m) * inverse(d)), 0, top)
