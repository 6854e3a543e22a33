"""State that belongs to sequences and not to cells: convolution inputs, rings of unfinished blocks, compressed entries.

``SequenceStates`` knows from the manifest which of these a model has, says what a batch and a removal must look like for the state to stay
true, and fills the inputs by which graphs read and write it. docs/runtime-inputs.md says what each kind of input holds.

    S+1      one row per sequence, and a zero row that a batch from position 0 reads instead
    m*S+1    rings: the row of position p of sequence s is s*m + p mod m; the last row is spare
    C_r      compressed entries of ``r`` positions: a part of equal size per sequence
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from ggufc.formats import artifact as fmt

from .batch import Batch
from .errors import RuntimeRefusal
from .kvcells import KVCells, position_range

RATIOS = (4, 128)
"""Positions per compressed entry that graphs have symbols for."""
_ENTRY_PAD = 256
_ONE_ROW = {"S": 1, "": 1}
_CELLS = {"C": 1}

SHAPES: dict[str, tuple[int, str]] = {
    "state_reads": (1, ""),
    "state_slots": (1, ""),
    "phases": (1, "T"),
    "ring_slots": (1, "T"),
    "entry_slots": (1, "W"),
    "entry_positions": (1, "W"),
    "entry_sources": (0, "W"),
    "entry_previous": (0, "W"),
    "entry_cells": (1, "E"),
    "entry_visible": (3, "T"),
}
"""Kind of input -> values per unit (0: the ratio) and what counts units: one, tokens, entries completed or entries listed."""


CELL_BLOCK = 256
"""Cells that a sequence of a model with such state takes at a time."""


def cells_of_session(n_ctx: int, n_seq_max: int) -> int:
    """Cells for ``n_ctx`` tokens however they are spread over the sequences: all but one may leave most of a block empty."""
    return -(-n_ctx // CELL_BLOCK) * CELL_BLOCK + (n_seq_max - 1) * CELL_BLOCK


def _taken(cells: KVCells) -> np.ndarray:
    """bool: which blocks of cells hold tokens."""
    whole = len(cells.pos) // CELL_BLOCK
    return np.asarray((cells.pos[: whole * CELL_BLOCK].reshape(whole, CELL_BLOCK) >= 0).any(axis=1))


def entry_rows(n_cells: int, ratio: int) -> int:
    """Rows of compressed entries that one sequence has."""
    return -(-n_cells // (ratio * _ENTRY_PAD)) * _ENTRY_PAD


def symbols(n_ubatch: int, n_cells: int, n_seq_max: int) -> dict[str, int]:
    """The largest values of the symbols about sequences and entries."""
    lists = min(n_seq_max, n_ubatch)
    out = {"S": n_seq_max}
    for ratio in RATIOS:
        rows = entry_rows(n_cells, ratio)
        out[f"C{ratio}"] = out[f"V{ratio}"] = n_seq_max * rows
        out[f"E{ratio}"] = lists * rows
        out[f"W{ratio}"] = min(n_ubatch, n_ubatch // ratio + lists)
    return out


def input_values(spec: fmt.Input, env: dict[str, int]) -> int:
    """Values of an input about states at the sizes ``env``; 0 for a kind or ratio nobody can fill."""
    width, symbol = SHAPES.get(spec.kind, (0, "T"))
    by_ratio = symbol in ("W", "E") or spec.kind in ("phases", "ring_slots", "entry_visible")
    if spec.kind not in SHAPES or spec.dtype != "i32" or (spec.ratio not in RATIOS if by_ratio else spec.ratio != 0):
        return 0
    units = 1 if not symbol else env[symbol] if symbol == "T" else env[f"{symbol}{spec.ratio}"]
    return (width or spec.ratio) * units


class SequenceStates:
    """Which states the caches of a model hold, and up to where they are true."""

    def __init__(self, caches: Sequence[fmt.Cache], n_cells: int, n_seq_max: int) -> None:
        self.specs = [cache for cache in caches if cache.rows != _CELLS]
        self.n_cells, self.n_seq_max = n_cells, n_seq_max
        forms = [cache.rows for cache in self.specs]
        self.rows_per_sequence = _ONE_ROW in forms
        self.ratios = tuple(ratio for ratio in RATIOS if {f"C{ratio}": 1} in forms)
        self.rings = {ratio: 2 * ratio if {"S": 2 * ratio, "": 1} in forms else ratio for ratio in self.ratios}
        self.next = [0] * n_seq_max
        """Position each sequence's row continues from."""
        if self.rows_per_sequence and n_seq_max > 1:
            raise RuntimeRefusal(
                f"n_seq_max is {n_seq_max}, but this model keeps the state of its convolutions for one sequence only; use n_seq_max 1"
            )

    def __bool__(self) -> bool:
        return bool(self.specs)

    # What may be done.

    def check(self, batch: Batch, cells: KVCells) -> None:
        """Refuse a batch that the states do not lead up to."""
        if not isinstance(batch.seqs, np.ndarray):
            raise RuntimeRefusal("this model keeps state per sequence, so a token belongs to one sequence; give each its own tokens")
        ends = {}
        for seq in np.unique(batch.seqs).tolist():
            pos = batch.pos[batch.seqs == seq]
            expected = cells.pos_max(seq) + 1
            ends[seq] = int(pos[-1])
            if pos[0] != expected or (len(pos) > 1 and bool((np.diff(pos) != 1).any())):
                raise RuntimeRefusal(
                    f"this model keeps state per sequence, so tokens follow one another: position {expected} of sequence {seq} is next, "
                    f"the batch has {int(pos[0])} to {int(pos[-1])}"
                )
            if self.rows_per_sequence and expected and self.next[seq] != expected:
                raise RuntimeRefusal(
                    f"sequence {seq} was cut at position {expected}, but the state of its convolutions is that of position "
                    f"{self.next[seq]}; restore a state saved there, or remove the sequence and evaluate it from the start"
                )
        self.check_room({seq: last // CELL_BLOCK - cells.pos_max(seq) // CELL_BLOCK for seq, last in ends.items()}, ends, cells)

    def check_room(self, blocks: Mapping[int, int], ends: Mapping[int, int], cells: KVCells) -> None:
        """Soft refusal if sequences need more ``blocks`` of cells, by sequence, than are free; ``ends``: their last positions."""
        if not any(blocks.values()):
            return
        free = int((~_taken(cells)).sum())
        if sum(blocks.values()) > free:
            seq = max(blocks, key=lambda one: blocks[one])
            raise RuntimeRefusal(
                f"no room for position {ends[seq]} of sequence {seq}: sequences of this model take cells in blocks of {CELL_BLOCK}, and "
                f"{free} of {self.n_cells // CELL_BLOCK} blocks are free; remove a sequence, or use a larger n_ctx",
                soft=True,
            )

    def check_rm(self, seq: int, p0: int, p1: int, cells: KVCells) -> None:
        """Soft refusal unless the removal is everything, nothing, or a tail that the states can be cut back to."""
        for one in range(self.n_seq_max) if seq < 0 else (seq,):
            low, high = cells.pos_min(one), cells.pos_max(one)
            first, end = position_range(p0, p1)
            if first > high or end <= low or (first <= low and end > high):
                continue
            if end <= high:
                raise RuntimeRefusal(
                    f"positions {first} to {end - 1} cannot be removed from the middle of sequence {one}: this model keeps state that does "
                    "not follow; remove an end, or everything",
                    soft=True,
                )
            if not self._cuts(first, high):
                blocks = " and ".join(str(ratio) for ratio in self.ratios)
                raise RuntimeRefusal(
                    f"sequence {one} cannot be cut at position {first}: its compressed blocks of {blocks} positions are complete beyond "
                    "it; restore a state saved there, or remove the whole sequence",
                    soft=True,
                )

    def _cuts(self, first: int, high: int) -> bool:
        """Whether the rings still hold what blocks from ``first`` on need, when ``high`` was the last position."""
        for ratio in self.ratios:
            overlaps = self.rings[ratio] > ratio
            if first // ratio != high // ratio and (overlaps or first % ratio):
                return False
        return True

    def check_save(self, seq: int | None, cells: KVCells) -> None:
        """Refuse to save a sequence whose state is not that of its end."""
        for one in range(self.n_seq_max) if seq is None else (seq,):
            end = cells.pos_max(one) + 1
            if self.rows_per_sequence and (not end or self.next[one] != end):
                raise RuntimeRefusal(
                    f"sequence {one} cannot be saved: it ends at position {end}, the state of its convolutions is that of position "
                    f"{self.next[one]}; evaluate tokens first"
                )
            if end:
                self.next[one] = end

    def continues(self, seq: int, position: int, high: int) -> bool:
        """Whether ``seq``, cut at ``position``, could go on from there."""
        if position == 0 or position > high:
            return True
        return self._cuts(position, high) and not self.rows_per_sequence

    def refuse_copy(self) -> None:
        """Raise the refusal of sharing cells between sequences."""
        raise RuntimeRefusal(
            "a sequence of this model cannot be copied: its state does not follow its cells; save it and load it as another sequence",
            soft=True,
        )

    # What belongs to a sequence.

    def cells(self, seqs: np.ndarray | int, pos: np.ndarray, books: KVCells) -> np.ndarray:
        """i32: free cells for tokens at ``pos``, which ascend within each sequence and lie beyond what it holds; ``check_room`` was asked.

        A sequence takes blocks of ``CELL_BLOCK`` cells and fills them in order of position, whatever other sequences do: the one that is
        its share of equal parts while nobody else has it, else the first free one.
        """
        taken: np.ndarray | None = None
        seqs = np.broadcast_to(seqs, pos.shape)
        where = np.empty(len(pos), np.int32)
        for seq in np.unique(seqs).tolist():
            mine = np.flatnonzero(seqs == seq)
            numbers, which = np.unique(pos[mine] // CELL_BLOCK, return_inverse=True)
            entries = books.list_of(seq)
            begun = len(entries) > 0 and entries.pos[-1] // CELL_BLOCK == numbers[0]
            blocks = [int(entries.cells[-1]) // CELL_BLOCK] if begun else []
            for number in numbers[len(blocks) :].tolist():
                taken = _taken(books) if taken is None else taken
                own = seq * (len(taken) // self.n_seq_max) + number
                blocks.append(int(np.argmin(taken)) if own >= len(taken) or taken[own] else own)
                taken[blocks[-1]] = True
            where[mine] = np.array(blocks)[which] * CELL_BLOCK + pos[mine] % CELL_BLOCK
        return where

    def part(self, cache: fmt.Cache, seq: int) -> tuple[int, int]:
        """(first row, rows) of a sequence's part of a cache."""
        if cache.rows == _ONE_ROW:
            return seq, 1
        ratio = next((ratio for ratio in RATIOS if cache.rows == {f"C{ratio}": 1}), 0)
        per = entry_rows(self.n_cells, ratio) if ratio else cache.rows.get("S", 0)
        return seq * per, per

    # Inputs.

    def step(self, part: Batch) -> StateStep:
        """What the inputs of a micro-batch hold; the states then are those after it."""
        step = StateStep(self, part)
        for seq, mine in step.tokens.items():
            self.next[seq] = int(part.pos[mine[-1]]) + 1
        return step


class StateStep:
    """Inputs and symbols of one micro-batch, whose positions ascend by one within each sequence."""

    def __init__(self, states: SequenceStates, part: Batch) -> None:
        self.states, self.pos = states, part.pos
        self.seq = part.first_seqs()
        self.tokens = {seq: np.flatnonzero(self.seq == seq) for seq in np.unique(self.seq).tolist()}
        self.last = np.zeros(states.n_seq_max, np.int64)
        self.first = np.zeros(states.n_seq_max, np.int64)
        for seq, mine in self.tokens.items():
            self.first[seq], self.last[seq] = part.pos[mine[0]], part.pos[mine[-1]]
        self._fill: dict[str, Callable[[int], np.ndarray]] = {kind: getattr(self, f"_{kind}") for kind in SHAPES}

    @cached_property
    def symbols(self) -> dict[str, int]:
        """Values of the symbols about entries."""
        out = {}
        for ratio in self.states.ratios:
            rows = entry_rows(self.states.n_cells, ratio)
            counts = {seq: (int(self.last[seq]) + 1) // ratio for seq in self.tokens}
            highest = max(seq * rows + n for seq, n in counts.items())
            out[f"E{ratio}"] = sum(counts.values())
            out[f"V{ratio}"] = min(self.states.n_seq_max * rows, -(-max(highest, 1) // _ENTRY_PAD) * _ENTRY_PAD)
            out[f"W{ratio}"] = len(self._closing(ratio))
        return out

    def values(self, kind: str, ratio: int) -> np.ndarray:
        """The content of an input, flat."""
        return self._fill[kind](ratio).reshape(-1)

    def _state_reads(self, ratio: int) -> np.ndarray:
        return np.array([self.seq[0] if self.pos[0] > 0 else self.states.n_seq_max])

    def _state_slots(self, ratio: int) -> np.ndarray:
        return self.seq[:1]

    def _phases(self, ratio: int) -> np.ndarray:
        return self.pos % ratio

    def _ring_slots(self, ratio: int) -> np.ndarray:
        m = self.states.rings[ratio]
        overwritten = self.pos + m <= self.last[self.seq]
        return np.where(overwritten, m * self.states.n_seq_max, self.seq * m + self.pos % m)

    def _closing(self, ratio: int) -> np.ndarray:
        """Tokens that complete a block."""
        return np.flatnonzero((self.pos + 1) % ratio == 0)

    def _entry_slots(self, ratio: int) -> np.ndarray:
        t = self._closing(ratio)
        return self.seq[t] * entry_rows(self.states.n_cells, ratio) + self.pos[t] // ratio

    def _entry_positions(self, ratio: int) -> np.ndarray:
        return self.pos[self._closing(ratio)] + 1 - ratio

    def _entry_sources(self, ratio: int) -> np.ndarray:
        return self._sources(ratio, 0)

    def _entry_previous(self, ratio: int) -> np.ndarray:
        return self._sources(ratio, ratio)

    def _sources(self, ratio: int, back: int) -> np.ndarray:
        """[W, ratio]: where the rows of each completed block, or of the block ``back`` positions before it, lie."""
        t = self._closing(ratio)
        m = self.states.rings[ratio]
        rings = m * self.states.n_seq_max + 1
        pos = (self.pos[t] + 1 - ratio - back).astype(np.int64)[:, None] + np.arange(ratio)
        out = self.seq[t][:, None] * m + pos % m
        for i, token in enumerate(t.tolist()):
            seq = int(self.seq[token])
            here = pos[i] >= self.first[seq]
            out[i, here] = rings + self.tokens[seq][pos[i, here] - self.first[seq]]
        out[pos < 0] = rings + len(self.pos)
        return out

    def _entry_cells(self, ratio: int) -> np.ndarray:
        rows = entry_rows(self.states.n_cells, ratio)
        return np.concatenate([seq * rows + np.arange((int(self.last[seq]) + 1) // ratio) for seq in self.tokens])

    def _entry_visible(self, ratio: int) -> np.ndarray:
        out = np.zeros((len(self.pos), 3), np.int64)
        total = 0
        for seq, mine in self.tokens.items():
            out[mine, 0] = total
            total += (int(self.last[seq]) + 1) // ratio
        out[:, 2] = (self.pos + 1) // ratio
        return out
