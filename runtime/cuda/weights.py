"""Weights on a device: uploaded once and shared by all programs and sessions of an artifact.

Sessions of the same artifact on the same device use the same copy; it is freed when the last of them closes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.runtime.artifact import Artifact

from .device import Device

Progress = Callable[[int, int], None]
_UPLOAD_CHUNK = 64 << 20

_Key = tuple[str, int]
_HELD: WeakKeyDictionary[Device, dict[_Key, DeviceWeights]] = WeakKeyDictionary()


class DeviceWeights:
    """Weights of one artifact on one device; ``places``: name -> (address, bytes). ``hold`` makes or finds it, ``release`` ends a use."""

    def __init__(self, device: Device, key: _Key) -> None:
        self._device, self._key, self._users = device, key, 0
        self.places: dict[str, tuple[int, int]] = {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Which of ``names`` are not on the device."""
        return [name for name in names if name not in self.places]

    def upload(self, artifact: Artifact, names: Iterable[str], progress: Progress | None = None) -> None:
        """Bring what is missing of ``names`` to the device; ``progress(done, total)`` in bytes."""
        wanted = [(name, artifact.file.data(name).reshape(-1).view(np.uint8)) for name in self.missing(names)]
        total, done = sum(data.size for _, data in wanted), 0
        for name, data in wanted:
            address = self._device.alloc(data.size)
            try:
                for at in range(0, data.size, _UPLOAD_CHUNK):
                    part = data[at : at + _UPLOAD_CHUNK]
                    self._device.upload(address + at, part)
                    done += part.size
                    if progress:
                        progress(done, total)
            except BaseException:  # also an interruption: others may share what is here, so it must be whole
                self._device.free(address)
                raise
            self.places[name] = (address, data.size)

    def release(self) -> None:
        """One use less; the last one frees the memory."""
        self._users -= 1
        if self._users == 0:
            for address, _ in self.places.values():
                self._device.free(address)
            self.places.clear()
            _HELD[self._device].pop(self._key, None)


def hold(device: Device, artifact: Artifact) -> DeviceWeights:
    """The weights of ``artifact`` on ``device``, with one more user. What decides is the artifact's contents, not its path: the digest of
    its manifest, which names the model's.
    """
    key = (str(artifact.metadata.get(fmt.DIGEST_KEY + "manifest", id(artifact))), artifact.file.size)
    weights = _HELD.setdefault(device, {}).setdefault(key, DeviceWeights(device, key))
    weights._users += 1
    return weights
