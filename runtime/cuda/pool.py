"""A memory pool over a driver's allocator: many small buffers in few allocations.

Drivers give memory in pages of 2 MiB and take their time. A model has hundreds of small tensors and a session a dozen small buffers;
here they share chunks. Large buffers are allocated as they are.
"""

from __future__ import annotations

from collections.abc import Callable

ALIGNMENT = 256
CHUNK = 2 << 20
_SMALL = CHUNK // 2


class _Chunk:
    """``free`` is a list of (offset, size), in order; neighbours are joined."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.free = [(0, CHUNK)]

    def take(self, size: int) -> int | None:
        for i, (at, have) in enumerate(self.free):
            if have >= size:
                self.free[i : i + 1] = [(at + size, have - size)] if have > size else []
                return self.base + at
        return None

    def give(self, address: int, size: int) -> None:
        pieces = sorted([*self.free, (address - self.base, size)])
        joined = [pieces[0]]
        for at, n in pieces[1:]:
            last, m = joined[-1]
            if last + m == at:
                joined[-1] = (last, m + n)
            else:
                joined.append((at, n))
        self.free = joined

    @property
    def empty(self) -> bool:
        return self.free == [(0, CHUNK)]


class Pool:
    """``allocate(size)`` and ``release(address)`` are the driver's. Addresses are aligned to 256 bytes."""

    def __init__(self, allocate: Callable[[int], int], release: Callable[[int], None]) -> None:
        self._allocate, self._release = allocate, release
        self._chunks: list[_Chunk] = []
        self._small: dict[int, tuple[_Chunk, int]] = {}
        self._large: set[int] = set()

    def alloc(self, size: int) -> int:
        """``size`` bytes. What the driver's allocator raises passes through."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        if size > _SMALL:
            address = self._allocate(size)
            self._large.add(address)
            return address
        for chunk in self._chunks:
            found = chunk.take(size)
            if found is not None:
                break
        else:
            chunk = _Chunk(self._allocate(CHUNK))
            self._chunks.append(chunk)
            found = chunk.take(size)
        assert found is not None
        self._small[found] = (chunk, size)
        return found

    def free(self, address: int) -> None:
        """Give back what ``alloc`` returned; a chunk nobody uses goes back to the driver. KeyError for any other address."""
        if address in self._large:
            self._large.remove(address)
            self._release(address)
            return
        chunk, size = self._small.pop(address)
        chunk.give(address, size)
        if chunk.empty:
            self._chunks.remove(chunk)
            self._release(chunk.base)

    def close(self) -> None:
        """Give everything back."""
        for address in [*self._large, *(chunk.base for chunk in self._chunks)]:
            self._release(address)
        self._large.clear()
        self._small.clear()
        self._chunks.clear()
