"""Which token stands at which position: what makes a prompt's common prefix reusable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .batch import Batch
from .kvcells import KVCells


class TokenHistory:
    """Tokens of sequences that grew by consecutive tokens from position 0.

    A sequence that did anything else is forgotten until it is empty again.

    ``common`` compares with the cells before it promises anything, so a forgotten update can cost time, never correctness.
    """

    def __init__(self, cells: KVCells) -> None:
        self._cells = cells
        self._known: dict[int, list[int]] = {}

    def decoded(self, batch: Batch) -> None:
        """Tokens were evaluated and are in the cells."""
        if batch.tokens is not None and isinstance(batch.seqs, np.ndarray):
            seq, n = int(batch.seqs[0]), len(batch)
            if n == 1 or (batch.seqs == seq).all():
                entries = len(self._cells.list_of(seq))
                known = self._known.get(seq, [] if entries == n else None)
                if (
                    known is not None
                    and len(known) == batch.pos[0]
                    and entries == len(known) + n
                    and (n == 1 or (np.diff(batch.pos) == 1).all())
                ):
                    known.extend(batch.tokens.tolist())
                    self._known[seq] = known
                else:
                    self._known.pop(seq, None)
                return
        groups = batch.seqs if not isinstance(batch.seqs, np.ndarray) else batch.seqs[:, None].tolist()
        for seq in {s for group in groups for s in group}:
            self._known.pop(seq, None)

    def removed(self, seq: int, p0: int, p1: int) -> None:
        """Positions [p0, p1) are gone (all sequences if ``seq`` is negative)."""
        for s in [*self._known] if seq < 0 else [seq]:
            known = self._known.get(s)
            if known is None:
                continue
            if p1 < 0 or p1 >= len(known):
                del known[max(p0, 0) :]
            elif p1 > max(p0, 0):
                del self._known[s]
            if s in self._known and not known:
                del self._known[s]

    def copied(self, src: int, dst: int, p0: int, p1: int) -> None:
        """``dst`` shares the cells of ``src`` in [p0, p1); it is known if that is all it holds."""
        if src == dst:
            return
        self._known.pop(dst, None)
        known = self._known.get(src, [])
        known = known[: len(known) if p1 < 0 else p1]
        if p0 <= 0 and known and len(self._cells.list_of(dst)) == len(known):
            self._known[dst] = known

    def kept(self, seq: int) -> None:
        """Every other sequence is gone."""
        self._known = {s: known for s, known in self._known.items() if s == seq}

    def clear(self) -> None:
        """Nothing is known any more: cells may be shared, so a moved position concerns every sequence."""
        self._known.clear()

    def restored(self, seq: int, tokens: Sequence[int]) -> None:
        """The cells of ``seq`` came from a saved state, made of ``tokens`` where those are known."""
        self._known.pop(seq, None)
        positions = self._cells.list_of(seq).pos
        if len(tokens) and len(positions) == len(tokens) and np.array_equal(positions, np.arange(len(tokens))):
            self._known[seq] = [int(token) for token in tokens]

    def tokens(self, seq: int) -> list[int]:
        """Tokens of positions 0, 1, ... of a sequence that holds nothing else; empty where they are not known."""
        known = self._known.get(seq, [])
        positions = self._cells.list_of(seq).pos
        return known if len(positions) == len(known) and np.array_equal(positions, np.arange(len(known))) else []

    def common(self, tokens: Sequence[int], seq: int) -> int:
        """Length of the longest prefix of ``tokens`` that is in the cells; at least one token is left over to evaluate."""
        known = self.tokens(seq)
        n = min(len(known), len(tokens) - 1)
        if n <= 0:
            return 0
        different = np.flatnonzero(np.array(known[:n]) != np.array(tokens[:n]))
        return int(different[0]) if len(different) else n
