"""The thread team: workers that enter native code once and stay, and the pool record they share with the caller (thread 0)."""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref

import numpy as np

from ggufc.formats import abi

from .memory import Region, align

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_EVAL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_FUTEX_WAKE_PRIVATE = 129
_SYS_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98}


def _wake(address: int) -> None:
    """Wake every thread sleeping on the futex word at ``address``."""
    number = _SYS_FUTEX.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_int(_FUTEX_WAKE_PRIVATE),
            ctypes.c_int(2**31 - 1),
            None,
            None,
            ctypes.c_int(0),
        )


def _stop(pool: np.ndarray, threads: list[threading.Thread]) -> None:
    """Ask the workers to return and wait for them.

    A worker may pass its check of the stop word just before it is set and fall asleep just after the wake-up, so the wake-up repeats
    until each has gone.
    """
    pool[abi.POOL_STOP] = 1
    for thread in threads:
        for _ in range(2000):
            _wake(int(pool.__array_interface__["data"][0]) + 8 * abi.POOL_EPOCH)
            thread.join(0.001)
            if not thread.is_alive():
                break
    threads.clear()


class Team:
    """``n_threads`` threads over the image's driver functions; ``scratch`` bytes for each.

    ``eval(exec_address)`` is one native call; it returns when all launches are complete. Not reentrant: one evaluation at a time.
    """

    def __init__(self, worker: int, evaluate: int, n_threads: int, scratch: int, keep: object = None) -> None:
        """``worker``, ``evaluate``: addresses of ``ggufc_worker`` and ``ggufc_eval``; ``keep`` is held while threads run (the mapped
        code).
        """
        self.n_threads = n_threads
        stride = align(scratch) + 64
        self._pool_memory = Region(8 * abi.POOL_WORDS, "the thread pool")
        self._scratch = Region(stride * n_threads, "scratch memory")
        self.pool = self._pool_memory.bytes.view(np.int64)
        self.pool[abi.POOL_SCRATCH] = self._scratch.base
        self.pool[abi.POOL_SCRATCH_STRIDE] = stride
        self.pool[abi.POOL_THREADS] = n_threads
        self._address = self._pool_memory.base
        self._call = _EVAL(evaluate)
        entry = _ENTRY(worker)
        self._holds: list[object] = [keep, self._pool_memory, self._scratch]
        self._threads: list[threading.Thread] = []
        for tid in range(1, n_threads):
            thread = threading.Thread(target=_work, args=(entry, self._address, tid, self._holds), name=f"ggufc-{tid}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._finalizer = weakref.finalize(self, _stop, self.pool, self._threads)
        # At interpreter exit daemon threads asleep in native code end with the process; joining them would only delay it.
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def hold(self, *memory: object) -> None:
        """Keep what an evaluation reads (launch table, parameters, counters) until the threads have gone.

        A worker that was descheduled may look at them after ``eval`` has returned, finds nothing left to claim, and must find memory to
        read that from.
        """
        self._holds.extend(memory)

    def eval(self, exec_address: int) -> None:
        self._call(self._address, exec_address)

    def close(self) -> None:
        """Stop the workers; further calls do nothing."""
        self._finalizer()


def _work(entry: object, pool: int, tid: int, holds: object) -> None:
    """Body of a worker thread; ``holds`` keeps code and memory mapped until the native function has returned."""
    entry(pool, tid)  # type: ignore[operator]
    del holds
