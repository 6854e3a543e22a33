"""Recorded micro-batches: CUDA graphs by shape.

Starting a few hundred launches one by one takes a CPU longer than a GPU needs for a decoded token. The second micro-batch of a shape is
recorded while it is started, later ones are a single call. What differs between them is in memory (inputs, symbols), so a recording is
never changed. Devices without graphs, and a recording that fails, fall back to single launches with the same result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from ggufc.runtime.errors import RuntimeRefusal

from .device import Device

KEPT = 32
"""Recordings per executor; a decoded text uses one per 128 entries of its list."""


class Recordings:
    """``run(key, issue)``: do what ``issue`` does; calls of one key do the same up to the contents of memory.

    ``recorded`` and ``replayed`` count recordings made and used.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._usable = device.graphs
        self.recorded = self.replayed = 0

    def run(self, key: Hashable, issue: Callable[[], None]) -> None:
        if not self._usable:
            issue()
            return
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._seen:  # once may be all: a prompt's last piece, say; it also loads the kernels
                self._seen[key] = None
                if len(self._seen) > 4 * KEPT:
                    self._seen.popitem(last=False)
                issue()
                return
            graph = self._record(key, issue)
            if graph is None:
                issue()
                return
        self._graphs.move_to_end(key)
        self.replayed += 1
        self._device.replay(graph)

    def _record(self, key: Hashable, issue: Callable[[], None]) -> Any:
        """The recording, or None where the device cannot make one: then nothing was done, and it is not tried again."""
        try:
            graph = self._device.record(issue)
        except RuntimeRefusal:
            self._usable = False
            return None
        self.recorded += 1
        self._graphs[key] = graph
        if len(self._graphs) > KEPT:
            self._device.drop(self._graphs.popitem(last=False)[1])
        return graph

    def clear(self) -> None:
        """Forget all recordings: what they do is no longer right."""
        for graph in self._graphs.values():
            self._device.drop(graph)
        self._graphs.clear()
        self._seen.clear()
