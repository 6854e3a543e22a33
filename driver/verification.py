"""Checking every byte of an artifact that its digests cover."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from ggufc.errors import DriverError
from ggufc.files import Progress
from ggufc.formats import artifact as fmt

if TYPE_CHECKING:
    from ggufc.formats.gguf_reader import GGUFFile


def damaged_tensors(file: GGUFFile, progress: Progress | None = None) -> list[str]:
    """Tensors of an artifact whose bytes are not those that were written. Raises ``DriverError`` for a file without digests of them."""
    names = [name for name in file.tensors if name != fmt.DIGESTS_TENSOR]
    stored = file.data(fmt.DIGESTS_TENSOR).tobytes() if fmt.DIGESTS_TENSOR in file.tensors else b""
    if len(stored) != 32 * len(names):
        raise DriverError(f"{file.path} holds no digests of its tensors, so they cannot be checked; compile the model again")
    damaged, done, total = [], 0, sum(tensor.nbytes for tensor in file.tensors.values())
    for index, name in enumerate(names):
        data = file.data(name)
        if hashlib.sha256(np.ascontiguousarray(data).data).digest() != stored[32 * index : 32 * index + 32]:
            damaged.append(name)
        done += data.nbytes
        if progress:
            progress("checking", done, total)
    return damaged
