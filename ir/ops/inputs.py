"""What a runtime fills before an evaluation: the kinds of inputs, each with its exact content.

Sequences are numbered from 0; ``T`` tokens of the micro-batch stand in the order in which they were given, and the positions of one
sequence ascend by one. Three families of persistent resources lie behind the indices:

- *cells*: one row per token, shared by all sequences (``[row, C]``).
- *state*: one row per sequence and a last row that is always zero (``[row, S+1]``, ``S`` sequences). Nothing ever writes the last row:
  reading it is how a sequence starts afresh, without a special graph and without multiplying old contents by zero.
- *compressed entries* of ratio ``r``: entry ``b`` of a sequence stands for its positions ``r*b .. r*b+r-1`` and lies in row
  ``seq*(C_r/S) + b`` of ``[row, C_r]``. What an entry is made of waits in a *ring* ``[row, m*S+1]`` of ``m`` rows per sequence
  (``m`` = 2r for overlapping blocks, r otherwise); position p uses row ``seq*m + p mod m``. The last row of a ring is a spare: writes
  that must leave no trace go there, and nothing reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputKind:
    """Type, meaning and allowed settings of one kind. ``ne0`` fixes the first dimension where it is not a free choice."""

    dtype: str
    rank: int
    doc: str
    ne0: int = 0
    window: bool = False
    ratio: bool = False
    region: bool = False


INPUT_KINDS: dict[str, InputKind] = {
    "tokens": InputKind("i32", 1, "[T] token ids"),
    "embd": InputKind("f32", 2, "[E, T] embeddings instead of tokens"),
    "positions": InputKind("i32", 1, "[T] position of each token in its sequence"),
    "out_ids": InputKind("i32", 1, "[O] tokens (0..T-1) whose logits are wanted"),
    "kv_slots": InputKind("i32", 1, "[T] cell that each token's row is written to", region=True),
    "kv_cells": InputKind("i32", 1, "[R] concatenated cell lists, one per sequence of the batch, each sorted by position", region=True),
    "visible": InputKind(
        "i32", 2, "[3, T] per token (base, lo, hi): it sees kv_cells[base+lo : base+hi]", ne0=3, window=True, region=True
    ),
    "state_reads": InputKind(
        "i32", 1, "[1] state row the batch continues from: its sequence's number, or S (the zero row) if its first position is 0"
    ),
    "state_slots": InputKind("i32", 1, "[1] state row that keeps the state after the batch: its sequence's number"),
    "phases": InputKind("i32", 1, "[T] position mod ratio", ratio=True),
    "ring_slots": InputKind(
        "i32", 1,
        "[T] ring row seq*m + p mod m that keeps the token's row; m*S (the spare row) if a later token of the batch has the same ring row",
        ratio=True,
    ),
    "entry_slots": InputKind(
        "i32", 1,
        "[W] row of each entry the batch completes, one per token with (p+1) mod ratio = 0, in the order of the tokens; W may be 0",
        ratio=True,
    ),
    "entry_positions": InputKind("i32", 1, "[W] position of the first token of each completed block: p+1-ratio", ratio=True),
    "entry_sources": InputKind(
        "i32", 2,
        "[ratio, W] where the rows of each completed block lie, by position, in [ring rows (m*S+1) | rows of the batch (T) | empty row]",
        ratio=True,
    ),
    "entry_previous": InputKind(
        "i32", 2,
        "[ratio, W] the same of the block before it, for overlapping blocks; the empty row (index m*S+1+T) where positions are negative",
        ratio=True,
    ),
    "entry_cells": InputKind(
        "i32", 1, "[E] concatenated rows of compressed entries, one list per sequence of the batch, by block; E may be 0", ratio=True
    ),
    "entry_visible": InputKind(
        "i32", 2, "[3, T] per token (base, 0, (p+1) div ratio): it sees entry_cells[base : base+hi]", ne0=3, ratio=True
    ),
}  # fmt: skip
"""What the runtime can fill, by name. ``window`` (attribute of ``visible``) narrows ``lo`` to positions above p - window; ``region`` window
means the cells of a cache that keeps the rows of a sliding window only; ``ratio`` tells compressed resources apart."""
