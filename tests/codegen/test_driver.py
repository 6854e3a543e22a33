"""The generated thread team: every tile once, launches in order, late threads harmless."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from ggufc.codegen.cpu import driver
from ggufc.codegen.cpu.target import resolve
from ggufc.codegen.emitter import I64, Emitter
from ggufc.codegen.kernels.base import symbol
from ggufc.formats import abi
from harness import build


@dataclass(frozen=True)
class CountTiles:
    """data[tile] += 1 + (sum of the previous launch's data must be complete)."""

    arg_names: ClassVar[tuple[str, ...]] = ("mine", "previous", "n_previous", "expected")

    def emit(self, e: Emitter) -> None:
        b = e.b
        mine, previous, n, expected = e.arg_ptr(0), e.arg_ptr(1), e.arg_int(2), e.arg_int(3)
        total = e.var(I64, e.i64(0))
        with e.for_range(0, n) as i:
            total.set(b.add(total.get(), e.load(I64, e.at(previous, i, 8))))
        ok = b.zext(b.icmp_signed("==", total.get(), expected), I64)
        slot = e.at(mine, e.tile, 8)
        e.store(b.add(e.load(I64, slot), ok), slot)
        e.ret()

    def scratch_bytes(self, target) -> int:
        return 0


@pytest.mark.parametrize(("threads", "absent"), [(1, 0), (2, 0), (3, 0), (5, 0), (1, 1), (2, 9)])
def test_team_runs_every_tile_once_and_in_order(threads, absent):
    """Threads that never come leave their shares of each launch to the others. S65"""
    target = resolve("native")
    spec = CountTiles()
    loaded = build([spec], target)
    rounds, launches, tiles = 200, 12, 7
    data = np.zeros((launches + 1, tiles), np.int64)
    args = np.zeros((launches, 4), np.int64)
    table = np.zeros((launches, abi.LAUNCH_WORDS), np.int64)
    counters = np.zeros((launches, abi.COUNTER_WORDS), np.int64)
    params = np.array([tiles, 0, 0, 0, 0], np.int64)
    for i in range(launches):
        args[i] = [data[i + 1].ctypes.data, data[i].ctypes.data, tiles, 0]
        table[i, : abi.LAUNCH_WAIT + 1] = [loaded.address(symbol(spec)), args[i].ctypes.data, 0, 1, 1, max(0, i - 1)]
    record = np.zeros(abi.EXEC_WORDS, np.int64)
    told, claims = np.zeros(launches, np.int64), np.zeros((threads + absent, launches, abi.CLAIM_WORDS), np.int64)
    record[:4] = [launches, table.ctypes.data, params.ctypes.data, counters.ctypes.data]
    record[abi.EXEC_TILES], record[abi.EXEC_CLAIMS] = told.ctypes.data, claims.ctypes.data
    pool = np.zeros(abi.POOL_WORDS, np.int64)
    pool[abi.POOL_THREADS] = threads + absent
    worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(loaded.address(driver.WORKER))
    evaluate = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(loaded.address(driver.EVAL))
    team = [threading.Thread(target=worker, args=(pool.ctypes.data, t)) for t in range(1, threads)]
    for thread in team:
        thread.start()
    try:
        for r in range(1, rounds + 1):
            data[0] = r
            args[0, 3] = r * tiles
            args[1:, 3] = r * tiles
            evaluate(pool.ctypes.data, record.ctypes.data)
            assert (data[1:] == r).all()
    finally:
        pool[abi.POOL_STOP] = 1
        pool[abi.POOL_EPOCH] += 1
        evaluate_empty = np.zeros(abi.EXEC_WORDS, np.int64)
        evaluate(pool.ctypes.data, evaluate_empty.ctypes.data)
        for thread in team:
            thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in team)
