"""Filling an executor's input buffers for one micro-batch.

Each input of a program says by its ``kind`` what it wants (docs/runtime-inputs.md): the batch's own arrays, what the cells know about who
sees whom, or what ``state_inputs`` knows about sequences. Launches on compacted caches read inputs of their own (``windows``).
"""

from __future__ import annotations

import numpy as np

from .batch import Batch, Visibility
from .binding import BoundProgram
from .errors import RuntimeRefusal
from .state_inputs import SHAPES, StateStep
from .windows import SUFFIX, WindowRows


def fill(executor: BoundProgram, part: Batch, slots: np.ndarray, seen: Visibility, states: StateStep | None) -> None:
    """Every input of the program for the tokens ``part``, written to the cells ``slots`` i32 [T] and seeing what ``seen`` lists.

    RuntimeRefusal for an input of a kind nobody here can fill.
    """
    n, wanted = len(part), len(part.wanted)
    for name, spec in executor.input_specs.items():
        buffer = executor.inputs[name]
        kind = spec.kind
        if kind == "tokens":
            buffer[:n] = part.tokens
        elif kind == "positions":
            buffer[:n] = part.pos
        elif kind == "out_ids":
            buffer[:wanted] = part.wanted
        elif kind == "kv_slots":
            buffer[:n] = slots
        elif kind == "kv_cells":
            buffer[: len(seen.cells)] = seen.cells
        elif kind == "visible":
            buffer[: 3 * n].reshape(n, 3)[:] = seen.rows(spec.window)
        elif kind == "embd":
            buffer[: part.embd.size] = part.embd.reshape(-1)  # type: ignore[union-attr]
        elif states is not None and kind in SHAPES:
            values = states.values(kind, spec.ratio)
            buffer[: len(values)] = values
        else:
            raise RuntimeRefusal(
                f"the program {executor.program.name} has an input {name} of the unknown kind {kind!r}; compile the model again"
            )


def fill_windows(windows: WindowRows, executor: BoundProgram, part: Batch, cells: np.ndarray, seen: Visibility) -> None:
    """The inputs of launches on compacted caches, for tokens just inserted into the ``cells`` i32 [T]."""
    n = len(part)
    slots = windows.take(cells, int(part.pos[0]))
    cut, rows = windows.lists(seen)
    for name, spec in executor.input_specs.items():
        if spec.kind == "kv_slots":
            executor.inputs[name + SUFFIX][:n] = slots
        elif spec.kind == "kv_cells":
            executor.inputs[name + SUFFIX][: len(rows)] = rows
        elif spec.kind == "visible" and spec.window:
            executor.inputs[name + SUFFIX][: 3 * n].reshape(n, 3)[:] = seen.rows(spec.window) - np.array([0, cut, cut], np.int32)
