"""Native code of an artifact: an anonymous mapping that is writable while it is filled and executable afterwards, never both."""

from __future__ import annotations

import ctypes
import mmap
import platform

import numpy as np

from ggufc.formats.errors import ArtifactError


class CodeImage:
    """A mapped copy of a flat position-independent image.

    ``address(offset)`` is the address of a byte of it; offsets outside the image are refused. The mapping lives as long as the object, so
    whoever calls into it keeps the object alive.
    """

    def __init__(self, code: np.ndarray) -> None:
        """``code``: u8 array (any buffer). Raises ArtifactError if the system refuses executable memory."""
        data = np.ascontiguousarray(code, dtype=np.uint8).reshape(-1)
        if data.size == 0:
            raise ArtifactError("the artifact's code image is empty; compile it again")
        self.size = int(data.size)
        self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        target = np.frombuffer(self._map, np.uint8)
        target[:] = data
        self.base = int(target.__array_interface__["data"][0])
        libc = ctypes.CDLL(None, use_errno=True)
        length = -(-self.size // mmap.PAGESIZE) * mmap.PAGESIZE
        status = libc.mprotect(ctypes.c_void_p(self.base), ctypes.c_size_t(length), mmap.PROT_READ | mmap.PROT_EXEC)
        if status != 0:
            code_number = ctypes.get_errno()
            raise ArtifactError(
                f"the system refuses executable memory (mprotect, error {code_number}); a security policy of this machine forbids "
                "generated code"
            )
        _clear_instruction_cache(self.base, self.size)

    def address(self, offset: int) -> int:
        if not 0 <= offset < self.size:
            raise ArtifactError(
                f"code offset {offset} lies outside the image of {self.size} bytes; the artifact is damaged, compile it again"
            )
        return self.base + offset


def _clear_instruction_cache(base: int, size: int) -> None:
    """Let instruction fetches of an ARM machine see the bytes at ``base``: its caches do not follow data writes.

    The instructions for that are in a function of libgcc. Where there is none, what the system does when pages become executable must do.
    """
    if platform.machine() not in ("aarch64", "arm64"):
        return
    try:
        clear = ctypes.CDLL("libgcc_s.so.1").__clear_cache
    except (OSError, AttributeError):
        return
    clear(ctypes.c_void_p(base), ctypes.c_void_p(base + size))
