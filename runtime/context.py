"""A context: an artifact with memory and sequences, without text.

``decode`` is the primitive: it evaluates tokens and returns logits; everything it can refuse is refused before a cell changes. One thread
uses a context at a time: another that enters meanwhile is refused.
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from ggufc.formats import artifact as fmt

from . import inputs, kshift, programs, windows
from .artifact import Artifact
from .batch import Batch, check_order, make_batch, next_token, sizes, visibility
from .binding import BoundProgram
from .errors import RuntimeRefusal, require_integer, token_list
from .exclusive import exclusive
from .executor import Executor
from .history import TokenHistory
from .kvcells import KVCells
from .rows import of_cells
from .sizes import CACHE_PAD, Sizes, pad
from .state_inputs import SequenceStates, cells_of_session
from .statistics import Statistics
from .windows import WindowRows

DEFAULT_N_CTX = 4096
_DEFRAG_FROM = 128
"""Visible cells below which gathering them saves nothing."""
_TOKEN_PROGRAM, _EMBD_PROGRAM = "eval", "eval_embd"


class Context:
    """Evaluates tokens of up to ``n_seq_max`` sequences in a shared cache of ``n_ctx`` cells (rounded up to a multiple of 256).

    ``n_ctx`` None takes the smaller of 4096 and the model's own length, 0 the model's own. ``n_batch`` is clamped to ``n_ctx`` and raised
    to at least 16; ``n_ubatch`` is at most ``n_batch``. ``graph_reuse`` off binds the graph anew for every micro-batch (same results, for
    tests and bug reports). ``seed`` is the default of ``generate``. ``causal`` may be switched while running: off, a token sees its
    sequence's later tokens too. ``defrag_threshold`` >= 0 gathers the occupied cells (``defrag``) before a batch whenever more than this
    share of the visible cells is free. ``compact_windows`` gives caches of layers with a window the window's rows only (one sequence,
    continued or cut at its end; same logits). Models that keep state per sequence divide the cells evenly among ``n_seq_max`` sequences.
    ``executor`` makes the executors: ``ggufc.runtime.cuda.on_device(...)`` for a GPU.
    """

    def __init__(
        self,
        artifact: Artifact | str | os.PathLike[str],
        n_ctx: int | None = None,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_seq_max: int = 1,
        seed: int | None = None,
        graph_reuse: bool = True,
        expect_digest: str | None = None,
        profile: bool = False,
        defrag_threshold: float = -1.0,
        compact_windows: bool = False,
        executor: Callable[..., BoundProgram] = Executor,
    ) -> None:
        for name, value, low in (("n_ctx", n_ctx, 0), ("n_batch", n_batch, 1), ("n_ubatch", n_ubatch, 1), ("n_seq_max", n_seq_max, 1)):
            if value is not None:
                require_integer(name, value, low, 1 << 24)
        if seed is not None:
            require_integer("seed", seed, -(1 << 64), 1 << 64)
        if not isinstance(defrag_threshold, (int, float)) or not math.isfinite(defrag_threshold):
            raise RuntimeRefusal(f"defrag_threshold is {defrag_threshold!r}; give a share from 0 to 1, or a negative number for never")
        self._owns_artifact = not isinstance(artifact, Artifact)
        self.artifact = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact, expect_digest)
        manifest = self.artifact.manifest
        train = manifest.n_ctx_train or DEFAULT_N_CTX
        self.n_ctx = min(DEFAULT_N_CTX, train) if n_ctx is None else (n_ctx or train)
        if n_seq_max > 1 and any(not of_cells(cache) for cache in manifest.caches):
            self.n_ctx = cells_of_session(self.n_ctx, n_seq_max)
        self.n_batch = max(16, min(n_batch, self.n_ctx))
        self.n_ubatch = min(n_ubatch, self.n_batch)
        self.n_seq_max, self.n_vocab, self.seed = n_seq_max, manifest.n_vocab, seed
        self.causal, self.graph_reuse, self.defrag_threshold = True, graph_reuse, defrag_threshold
        self.sizes = {"n_ctx_seq": self.n_ctx // n_seq_max}
        self.stats = Statistics()
        try:
            bases = [programs.base_name(name) for name in self.artifact.program_names]
            first = bases[0] if bases and _TOKEN_PROGRAM not in bases else _TOKEN_PROGRAM
            self.states = SequenceStates(manifest.caches, pad(self.n_ctx), n_seq_max)
            rows = windows.rows_of_session(manifest.caches, pad(self.n_ctx), self.n_ubatch, n_seq_max, CACHE_PAD) if compact_windows else 0
            asked = Sizes(self.n_ctx, self.n_ubatch, n_seq_max, n_threads, rows)
            self._executor = executor(self.artifact, programs.choose(self.artifact, first, self.sizes), asked, profile=profile)
        except BaseException:
            if self._owns_artifact:
                self.artifact.close()
            raise
        self._make_executor, self._executors = executor, {first: self._executor}
        self.cells = KVCells(pad(self.n_ctx), n_seq_max, CACHE_PAD)
        self.history = TokenHistory(self.cells)
        self._stale = ""
        self.window_rows = WindowRows(self.cells, rows, max(cache.window for cache in manifest.caches)) if rows else None
        self.closed = False
        self.turn = threading.RLock()

    # Evaluation

    @exclusive
    def decode(
        self,
        tokens: Sequence[int] | np.ndarray | None = None,
        pos: Sequence[int] | np.ndarray | None = None,
        seq: int | Sequence[int] | Sequence[Sequence[int]] | np.ndarray = 0,
        logits: str | Sequence[int] | np.ndarray = "last",
        *,
        embd: np.ndarray | None = None,
    ) -> np.ndarray:
        """Evaluate tokens (or embeddings f32 [n, n_embd]) and return f32 logits [rows, n_vocab] in the order of the batch.

        ``pos`` None continues each sequence; given positions must be free and in order (``batch.check_order``); ``seq`` is one id, one
        per token, or several per token; ``logits`` names the rows: ``last``, ``all``, ``none`` or indices. A refusal with ``soft`` set
        means the cache had no room (or a pending shift is impossible) and that nothing was changed.
        """
        out: list[np.ndarray] = []
        batch = make_batch(self.cells, tokens, pos, seq, logits, self.n_vocab, embd, self.artifact.manifest.n_embd)
        if pos is not None or not isinstance(batch.seqs, np.ndarray):
            check_order(batch, self.cells, self.causal)
        self._decode(batch, lambda rows: out.append(rows.copy()))
        if len(out) == 1:
            return out[0]
        return np.concatenate(out) if out else np.empty((0, self.n_vocab), np.float32)

    @exclusive
    def decode_view(self, tokens: Sequence[int], seq: int = 0, prompt: bool = False) -> np.ndarray:
        """Logits f32 [n_vocab] of the last token, as a view that the next evaluation overwrites. ``prompt``: count the tokens as a
        prompt, even a single one.
        """
        out: list[np.ndarray] = []
        if len(tokens) == 1:
            batch = next_token(self.cells, tokens[0], seq, self.n_vocab)
        else:
            batch = make_batch(self.cells, tokens, None, seq, "last", self.n_vocab)
        self._decode(batch, out.append, prompt)
        return out[0][0]

    @exclusive
    def decode_rows(self, batch: Batch) -> list[np.ndarray]:
        """Evaluate a batch made by the caller, who answers for its contents; the wanted rows f32 [n_vocab] in order.

        With a single micro-batch they are views that the next evaluation overwrites.
        """
        out: list[np.ndarray] = []
        keep = len(batch) > self.n_ubatch
        self._decode(batch, lambda rows: out.extend(rows.copy() if keep else rows))
        return out

    def _decode(self, batch: Batch, take: Callable[[np.ndarray], None], prompt: bool = False) -> None:
        """Place and evaluate a checked batch; ``take`` gets the wanted rows of each micro-batch as a view."""
        began = time.perf_counter()
        cells = self.cells
        executor = self._executor_for(_TOKEN_PROGRAM if batch.embd is None else _EMBD_PROGRAM)
        counts = sizes(len(batch), self.n_ubatch)
        if self.window_rows is not None:
            self.window_rows.check(batch)
        if self.states:
            self.states.check(batch, cells)
            if not self.causal:
                raise RuntimeRefusal("this model keeps state per sequence, so tokens cannot see later ones; switch causal on")
        if self.defrag_threshold >= 0 and cells.n_kv() >= _DEFRAG_FROM and cells.holes() > self.defrag_threshold:
            self.defrag()
        if not self.causal and len(counts) > 1:
            raise RuntimeRefusal(f"{len(batch)} tokens that see each other must fit in one micro-batch; raise n_ubatch ({self.n_ubatch})")
        starts = [0] * len(counts) if self.states else cells.plan(counts)
        if starts is None:
            scattered = "; those that are free do not lie side by side, defrag() gathers them" * (cells.size - cells.used >= len(batch))
            raise RuntimeRefusal(
                f"no room for {len(batch)} tokens: {cells.used} of {cells.size} cells are in use{scattered}; free some (seq_rm), or use a "
                "larger n_ctx or a smaller batch",
                soft=True,
            )
        self.apply_shift()
        at = 0
        try:
            for start, n in zip(starts, counts):
                part = batch.part(at, at + n)
                if self.states:
                    slots = self.states.cells(part.first_seqs(), part.pos, cells)
                    cells.insert_at(slots, part.pos, part.seqs)
                else:
                    slots = np.arange(start, start + n, dtype=np.int32)
                    cells.insert(start, part.pos, part.seqs)
                self._evaluate(executor, part, slots, take)
                at += n
        except BaseException:
            self._take_back(batch)
            raise
        if self.causal:
            self.history.decoded(batch)
        else:
            self.history.clear()  # what was stored depends on the tokens that followed
        self.stats.count(len(batch), time.perf_counter() - began, prompt or not batch.is_step(self.n_seq_max))

    def _take_back(self, batch: Batch) -> None:
        """Remove what an interrupted batch (Ctrl-C) has put into its sequences: some of its cells may hold no keys yet. A sequence whose
        states or window rows cannot go back is removed whole.
        """
        spans: dict[int, tuple[int, int]] = {}
        for pos, seqs in zip(batch.pos.tolist(), batch.seqs):
            for seq in seqs if isinstance(seqs, tuple) else (int(seqs),):
                low, high = spans.get(seq, (pos, pos))
                spans[seq] = min(low, pos), max(high, pos)
        for seq, (low, high) in spans.items():
            try:
                self.seq_rm(seq, low, high + 1)
            except RuntimeRefusal:
                self.seq_rm(seq)

    def _evaluate(self, executor: BoundProgram, part: Batch, slots: np.ndarray, take: Callable[[np.ndarray], None]) -> None:
        """Fill the inputs for one micro-batch inserted into the cells ``slots``, run it, hand over the wanted rows."""
        n, wanted = len(part), len(part.wanted)
        seen = visibility(self.cells, part, self.causal)
        states = self.states.step(part) if self.states else None
        inputs.fill(executor, part, slots, seen, states)
        if self.window_rows is not None:
            inputs.fill_windows(self.window_rows, executor, part, slots, seen)
        if not self.stats.count_graph(executor.program.name, self.graph_reuse, self._stale):
            executor.rebind()
        self._stale = ""
        extra = {} if states is None else {"entries": states.symbols}
        executor.eval(n, wanted, len(seen.cells), self.cells.n_kv(), head=int(slots[0]), **extra)
        if wanted:
            take(executor.output("logits"))

    def _executor_for(self, base: str) -> BoundProgram:
        found = self._executors.get(base)
        if found is None:
            program = programs.choose(self.artifact, base, self.sizes)
            found = self._executors[base] = self._make_executor(self.artifact, program, share=self._executor)
        return found

    @exclusive
    def keep_prefix(self, tokens: Sequence[int], seq: int = 0) -> int:
        """Drop everything of ``seq`` after the longest prefix it shares with ``tokens``, leaving at least one token to evaluate.

        Returns the length of what is kept.
        """
        common = self.history.common(token_list("the conversation", tokens), seq)
        if self.states and not self.states.continues(seq, common, self.cells.pos_max(seq)):
            common = 0
        try:
            self.seq_rm(seq, common, -1)
        except RuntimeRefusal:  # the rows of its window are gone: evaluate all of it again
            common = 0
            self.seq_rm(seq)
        return common

    # Sequences

    @exclusive
    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Remove positions [p0, p1) of a sequence (all sequences if negative); negative bounds are open."""
        if self.window_rows is not None:
            self.window_rows.check_rm(seq, p0, p1)
        if self.states:
            self.states.check_rm(seq, p0, p1, self.cells)
        self.cells.seq_rm(seq, p0, p1)
        if self.states:
            self._clear_states()
        if self.window_rows is not None:
            self.window_rows.removed()
        self.history.removed(seq, p0, p1)

    @exclusive
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let ``dst`` share positions [p0, p1) of ``src``; no data is copied."""
        if self.states and src != dst:
            self.states.refuse_copy()
        self.cells.seq_cp(src, dst, p0, p1)
        self.history.copied(src, dst, p0, p1)

    @exclusive
    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        self.cells.seq_keep(seq)
        if self.states:
            self._clear_states()
        self.history.kept(seq)

    def _clear_states(self) -> None:
        """Zero what belongs to sequences that hold nothing any more."""
        stores = self._executor.caches
        for seq in range(self.n_seq_max):
            if self.states.next[seq] and self.cells.pos_max(seq) < 0:
                self.states.next[seq] = 0
                for cache in self.states.specs:
                    first, n = self.states.part(cache, seq)
                    stores.clear_rows(cache.name, first, n)

    @exclusive
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions [p0, p1) by ``delta``; stored keys are rotated before the next decode. Soft refusal if they cannot be."""
        if delta:
            self._check_shift()
            self.cells.seq_add(seq, p0, p1, delta)
            self.history.clear()

    @exclusive
    def seq_div(self, seq: int, p0: int, p1: int, k: int) -> None:
        """Divide positions [p0, p1) by ``k``; as ``seq_add`` otherwise."""
        if k != 1:
            self._check_shift()
            self.cells.seq_div(seq, p0, p1, k)
            self.history.clear()

    @exclusive
    def shift_context(self, seq: int = 0, n_keep: int = 0) -> int:
        """Drop half of the positions after the first ``n_keep`` and move the rest down; returns how many were dropped."""
        require_integer("n_keep", n_keep, 0, 1 << 31)
        low, high = self.cells.pos_min(seq) + n_keep, self.cells.pos_max(seq) + 1
        dropped = (high - low) // 2
        if dropped < 1:
            raise RuntimeRefusal(
                f"the context cannot be shifted: sequence {seq} holds nothing to drop after its first {n_keep} tokens", soft=True
            )
        self._check_shift()
        self.seq_rm(seq, low, low + dropped)
        self.seq_add(seq, low + dropped, -1, -dropped)
        return dropped

    @exclusive
    def defrag(self) -> int:
        """Gather the occupied cells at the front of the cache; returns how many were moved. No logits change.

        A cache with state that does not belong to cells cannot be rearranged: it is left as it is, with a warning.
        """
        stores = self._executor.caches
        compacted = self.window_rows is not None
        strict = [cache.name for cache in stores.specs.values() if not of_cells(cache) or (compacted and cache.window)]
        if strict:
            warnings.warn(f"the cache stays fragmented: {strict[0]} does not follow when cells move", RuntimeWarning, stacklevel=3)
            self.defrag_threshold = -1.0
            return 0
        src, dst = self.cells.defrag()
        for name in stores.specs if len(src) else ():
            stores.rows(name).move(src, dst)
        if len(src):
            self._stale = "cells were moved"
        return len(src)

    @exclusive
    def apply_shift(self) -> None:
        """Rotate the keys of cells whose positions have moved; ``decode`` and ``state_save`` do it when they must."""
        if self.cells.needs_shift:
            caches = self._check_shift()
            kshift.apply(self.cells, self._executor.caches, kshift.Tensors(self.artifact), caches)
            self._stale = "keys were rotated"

    def _check_shift(self) -> list[fmt.Cache]:
        """How keys are rotated; soft refusal if they cannot be."""
        if self.window_rows is not None:
            raise RuntimeRefusal(
                "positions cannot be moved in compacted window caches; open the session without compact_windows", soft=True
            )
        caches = kshift.specs_for(self.artifact, self._executor.program)
        kshift.check(caches)
        return caches

    def pos_min(self, seq: int = 0) -> int:
        """Smallest position of a sequence, -1 if empty."""
        return self.cells.pos_min(seq)

    def pos_max(self, seq: int = 0) -> int:
        """Largest position of a sequence, -1 if empty."""
        return self.cells.pos_max(seq)

    def restored(self, seq: int, tokens: Sequence[int]) -> None:
        """Rows of ``seq`` (and of all others, if the whole context) have come from elsewhere; ``tokens`` as far as they are known."""
        self.history.restored(seq, tokens)
        self._stale = "state was restored"

    @exclusive
    def reset(self) -> None:
        """Forget all sequences and zero the caches."""
        self._executor.caches.clear(self.cells.n_written)
        self.cells.clear()
        if self.window_rows is not None:
            self.window_rows.clear()
        self.states.next[:] = [0] * self.n_seq_max
        self.history.clear()

    clear = reset

    # Lifetime

    @property
    def n_threads(self) -> int:
        return self._executor.n_threads

    @property
    def executor(self) -> BoundProgram:
        """The executor of token programs: memory sizes and profile."""
        return self._executor

    def close(self) -> None:
        """Stop the threads and unmap, once another thread's evaluation is over. Safe to call twice."""
        with self.turn:
            if self.closed:
                return
            self.closed = True
            self._executor.close()
            if self._owns_artifact:
                self.artifact.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
