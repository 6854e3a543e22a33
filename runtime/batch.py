"""From a batch of tokens to the input arrays of micro-batches.

A micro-batch's tokens are placed in consecutive cells. Each token then sees a stretch ``[lo, hi)`` of its (first) sequence's cell list,
which is sorted by position: up to its own position if attention is causal, everything otherwise; a window narrows ``lo``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import RuntimeRefusal, token_list
from .kvcells import KVCells

MAX_POSITION = 2**31 - 2


@dataclass(frozen=True)
class Batch:
    """Checked tokens of one ``decode`` call.

    ``tokens`` i32 [n] or ``embd`` f32 [n, width]; ``pos`` i32 [n]; ``seqs`` i32 [n], or a list of sequence tuples when a token belongs to
    several; ``wanted`` are the ascending indices of rows whose logits are asked for.
    """

    pos: np.ndarray
    seqs: np.ndarray | list[tuple[int, ...]]
    wanted: np.ndarray
    tokens: np.ndarray | None = None
    embd: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.pos)

    def first_seqs(self) -> np.ndarray:
        """i32 [n]: the sequence whose cells each token attends to."""
        return self.seqs if isinstance(self.seqs, np.ndarray) else np.array([group[0] for group in self.seqs], np.int32)

    def is_step(self, n_seq_max: int) -> bool:
        """Whether each sequence of the batch has one token in it: a decode step of one or several texts."""
        n = len(self)
        return n == 1 or (n <= n_seq_max and isinstance(self.seqs, np.ndarray) and len(set(self.seqs.tolist())) == n)

    def part(self, start: int, stop: int) -> Batch:
        """The micro-batch of tokens [start, stop), ``wanted`` counted from its own start."""
        if start == 0 and stop == len(self.pos):
            return self
        a, b = np.searchsorted(self.wanted, [start, stop])
        return Batch(
            self.pos[start:stop],
            self.seqs[start:stop],
            self.wanted[a:b] - start,
            None if self.tokens is None else self.tokens[start:stop],
            None if self.embd is None else self.embd[start:stop],
        )


def make_batch(
    cells: KVCells,
    tokens: Sequence[int] | np.ndarray | None,
    pos: Sequence[int] | np.ndarray | None,
    seq: int | Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
    logits: str | Sequence[int] | np.ndarray,
    n_vocab: int,
    embd: np.ndarray | None = None,
    n_embd: int = 0,
) -> Batch:
    """Check the arguments of a decode call; RuntimeRefusal names the argument and the first bad entry.

    ``pos`` None continues each token's sequence after its last position. ``logits``: ``last``, ``all``, ``none`` or ascending row indices.
    """
    if (tokens is None) == (embd is None):
        raise RuntimeRefusal("decode: give either tokens or embeddings")
    ids = rows = None
    if embd is not None:
        try:
            given = np.asarray(embd)
            if given.dtype.kind not in "fiub" and given.dtype != object:
                raise TypeError
            rows = np.ascontiguousarray(given, np.float32)
        except (TypeError, ValueError):
            raise RuntimeRefusal(f"decode: embeddings are {embd!r}; give an array f32 [n, {n_embd}]") from None
        if rows.ndim != 2 or rows.shape[1] != n_embd:
            raise RuntimeRefusal(f"decode: embeddings have the shape {rows.shape}, this model takes [n, {n_embd}]")
        n = len(rows)
    else:
        ids = _integers(tokens, "tokens")
        n = len(ids)
        bad = np.flatnonzero((ids < 0) | (ids >= n_vocab))
        if len(bad):
            raise RuntimeRefusal(f"decode: token {int(ids[bad[0]])} at index {int(bad[0])} is outside the vocabulary of {n_vocab}")
    if n == 0:
        raise RuntimeRefusal("decode: the batch is empty")
    seqs = _sequences(seq, n, cells.n_seq_max)
    first = seqs if isinstance(seqs, np.ndarray) else np.array([group[0] for group in seqs], np.int32)
    where = _positions(pos, first, n, cells)
    return Batch(where, seqs, _wanted(logits, n), None if ids is None else ids.astype(np.int32), rows)


def check_order(batch: Batch, cells: KVCells, causal: bool = True) -> None:
    """Refuse positions that a sequence already holds, and batches in which a sequence goes back: what a token sees would depend on where
    the batch is cut into micro-batches.

    Gaps are allowed, and so is filling one later: masks and rotations go by position alone. Embeddings, which may be parts of one image,
    may share a position. Tokens that see each other (``causal`` off) may come in any order.
    """
    last: dict[int, int] = {}
    order = range(len(batch)) if causal else np.argsort(batch.pos, kind="stable").tolist()
    for i in order:
        pos, group = int(batch.pos[i]), batch.seqs[i]
        for seq in group if isinstance(group, tuple) else (int(group),):
            before = last.get(seq, -1)
            if pos < before or (batch.embd is None and (pos == before or _holds(cells.list_of(seq).pos, pos))):
                wrong = f"comes after position {before}" if pos < before else "is taken"
                raise RuntimeRefusal(
                    f"decode: position {pos} of sequence {seq} {wrong}; leave pos out to go on at {max(cells.pos_max(seq), before) + 1}, "
                    f"or {_REMEDY[pos < before]}"
                )
            last[seq] = pos


def _holds(positions: np.ndarray, pos: int) -> bool:
    """Whether sorted ``positions`` hold ``pos``."""
    at = int(np.searchsorted(positions, pos))
    return at < len(positions) and int(positions[at]) == pos


_REMEDY = ("remove what the sequence holds there first (seq_rm)", "put the batch in order")


_FIRST_ROW = np.zeros(1, np.int64)


def next_token(cells: KVCells, token: int, seq: int, n_vocab: int) -> Batch:
    """The batch of a decode step: one token after the last of ``seq``, logits wanted. As ``make_batch``, with a tenth of its work."""
    if not isinstance(token, (int, np.integer)) or not 0 <= token < n_vocab:
        raise RuntimeRefusal(f"decode: token {token!r} is outside the vocabulary of {n_vocab}")
    pos = cells.pos_max(seq) + 1
    if pos > MAX_POSITION:
        raise RuntimeRefusal(f"decode: positions must be from 0 to {MAX_POSITION}, got {pos}")
    return Batch(np.array([pos], np.int32), np.array([seq], np.int32), _FIRST_ROW, np.array([token], np.int32))


def _integers(values: Sequence[int] | np.ndarray | None, what: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and (array.size or array.dtype == object)):
        raise RuntimeRefusal(f"decode: {what} must be a list of integers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _sequences(
    seq: int | Sequence[int] | Sequence[Sequence[int]] | np.ndarray, n: int, n_seq_max: int
) -> np.ndarray | list[tuple[int, ...]]:
    if isinstance(seq, (int, np.integer)):
        array = np.array([int(seq)] * n)
    elif isinstance(seq, str) or not isinstance(seq, (Sequence, np.ndarray)):
        raise RuntimeRefusal(f"decode: seq is {seq!r}; give a sequence id, one per token, or several per token")
    elif len(seq) and not isinstance(seq[0], (int, np.integer)):
        groups = [tuple(dict.fromkeys(token_list("decode: seq", group))) for group in seq]  # type: ignore[arg-type]
        if len(groups) != n:
            raise RuntimeRefusal(f"decode: {n} tokens but {len(groups)} sequence entries")
        for i, group in enumerate(groups):
            if not group or min(group) < 0 or max(group) >= n_seq_max:
                raise RuntimeRefusal(f"decode: token {i} belongs to sequences {list(group)}; ids run from 0 to {n_seq_max - 1} (n_seq_max)")
        if any(len(group) > 1 for group in groups):
            return groups
        array = np.array([group[0] for group in groups], np.int32)
    else:
        array = _integers(seq, "sequences")  # type: ignore[arg-type]
    if len(array) != n:
        raise RuntimeRefusal(f"decode: {n} tokens but {len(array)} sequence entries")
    if array.min() < 0 or array.max() >= n_seq_max:
        bad = int(array.min() if array.min() < 0 else array.max())
        raise RuntimeRefusal(f"decode: sequence {bad} does not exist; ids run from 0 to {n_seq_max - 1} (n_seq_max)")
    return array.astype(np.int32)


def _positions(pos: Sequence[int] | np.ndarray | None, first: np.ndarray, n: int, cells: KVCells) -> np.ndarray:
    if pos is not None:
        where = _integers(pos, "positions")
        if len(where) != n:
            raise RuntimeRefusal(f"decode: {n} tokens but {len(where)} positions; this model takes one position per token")
        if where.min() < 0 or where.max() > MAX_POSITION:
            raise RuntimeRefusal(f"decode: positions must be from 0 to {MAX_POSITION}, got {int(where.min())} to {int(where.max())}")
        return where.astype(np.int32)
    where = np.empty(n, np.int64)
    for seq in np.unique(first).tolist():
        mine = np.flatnonzero(first == seq)
        where[mine] = cells.pos_max(seq) + 1 + np.arange(len(mine))
    if where.max() > MAX_POSITION:
        raise RuntimeRefusal(f"decode: positions must be from 0 to {MAX_POSITION}, got {int(where.max())}")
    return where.astype(np.int32)


def _wanted(logits: str | Sequence[int] | np.ndarray, n: int) -> np.ndarray:
    if isinstance(logits, str):
        if logits == "last":
            return np.array([n - 1])
        if logits in ("all", "none"):
            return np.arange(n if logits == "all" else 0)
        raise RuntimeRefusal(f"decode: logits={logits!r}; use 'last', 'all', 'none' or a list of row indices")
    rows = _integers(logits, "logits")
    if len(rows) and (rows[0] < 0 or rows[-1] >= n or (np.diff(rows) <= 0).any()):
        raise RuntimeRefusal(f"decode: the rows whose logits are wanted must be ascending and below {n}")
    return rows


def sizes(n: int, n_ubatch: int) -> list[int]:
    """Lengths of the micro-batches of ``n`` tokens."""
    return [min(n_ubatch, n - at) for at in range(0, n, n_ubatch)]


@dataclass(frozen=True)
class Visibility:
    """What the tokens of a micro-batch see.

    ``cells`` i32 [R]: the cell lists of its sequences, one after another. Per token: ``base`` of its list, ``hi`` entries counted from
    there, and the list's positions to narrow ``lo`` with.
    """

    cells: np.ndarray
    base: np.ndarray
    hi: np.ndarray
    pos: np.ndarray
    lists: list[tuple[np.ndarray, np.ndarray]]

    def rows(self, window: int) -> np.ndarray:
        """i32 [T, 3] (ne [3, T]): (base, lo, hi); with a window W, ``lo`` is the first entry whose position exceeds p - W."""
        out = np.empty((len(self.pos), 3), np.int32)
        out[:, 0] = self.base
        out[:, 2] = self.hi
        if window <= 0:
            out[:, 1] = 0
            return out
        for mine, positions in self.lists:
            out[mine, 1] = np.searchsorted(positions, self.pos[mine] - window, side="right")
        return out


def visibility(cells: KVCells, part: Batch, causal: bool = True) -> Visibility:
    """Cell lists and bounds of a micro-batch that has just been inserted."""
    first = part.first_seqs()
    n = len(part)
    base, hi = np.zeros(n, np.int32), np.empty(n, np.int32)
    lists: list[tuple[np.ndarray, np.ndarray]] = []
    if n == 1 or (first == first[0]).all():
        entries = cells.list_of(int(first[0]))
        hi[:] = np.searchsorted(entries.pos, part.pos, side="right") if causal else len(entries)
        return Visibility(entries.cells, base, hi, part.pos, [(np.arange(n), entries.pos)])
    pieces: list[np.ndarray] = []
    at = 0
    for seq in np.unique(first).tolist():
        mine = np.flatnonzero(first == seq)
        entries = cells.list_of(seq)
        base[mine] = at
        hi[mine] = np.searchsorted(entries.pos, part.pos[mine], side="right") if causal else len(entries)
        lists.append((mine, entries.pos))
        pieces.append(entries.cells)
        at += len(entries)
    return Visibility(np.concatenate(pieces), base, hi, part.pos, lists)
