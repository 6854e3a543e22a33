"""Numpy views of strided kernel operands, and the number of tiles of a grid."""

from __future__ import annotations

import numpy as np

from ggufc.codegen.kernels.strided import Grid, Strided
from ggufc.ir.dims import evaluate

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32}


def buffer(x: Strided, env: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    """Random storage just large enough for ``x``."""
    last = evaluate(x.offset, env) + sum((evaluate(n, env) - 1) * evaluate(s, env) for n, s in zip(x.ne, x.nb))
    values = rng.normal(size=last + 1).astype(np.float32) * 2
    if x.dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return (values * 10).astype(np.int32) if x.dtype == "i32" else values.astype(DTYPES[x.dtype])


def view(x: Strided, storage: np.ndarray, env: dict[str, int]) -> np.ndarray:
    """Writable array of shape ne[::-1] over ``storage``."""
    ne, nb = ([evaluate(d, env) for d in dims] for dims in (x.ne, x.nb))
    start = storage[evaluate(x.offset, env) :]
    return np.lib.stride_tricks.as_strided(start, ne[::-1], [s * storage.itemsize for s in nb[::-1]])


def values(x: Strided, storage: np.ndarray, env: dict[str, int]) -> np.ndarray:
    """The f32 (i32: integer) values of ``x``."""
    v = view(x, storage, env)
    return (v.astype(np.uint32) << 16).view(np.float32) if x.dtype == "bf16" else v if x.dtype == "i32" else v.astype(np.float32)


def repeated(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.tile(a, [n // m for n, m in zip(shape, a.shape)])


def tiles(grid: Grid, env: dict[str, int]) -> int:
    return grid.mult * (1 if grid.sym is None else -(-env[grid.sym] // grid.div))
