"""Many prompts at once: continuous batching over the sequences of a session.

Each step evaluates one token of every text that is being continued, and fills the batch up with prompts that enter. A text that ends leaves
its sequence to the next prompt. Because a token's logits do not depend on what else is in its batch, every text is byte for byte the one
its prompt gives alone.

When the cache is full, the text that entered last gives up its cells and starts over later from its prompt and the tokens it has: they
evaluate to the same bits, so nothing but time is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .batch import Batch
from .errors import RuntimeRefusal, require_integer, token_list
from .generation import Continuation
from .sampling import SamplingOptions

if TYPE_CHECKING:
    from .session import Session


@dataclass
class _Running:
    """A text in the cache: ``todo`` are its tokens that have not been evaluated; the logits of the last of them continue it."""

    index: int
    seq: int
    todo: list[int]
    pos: int = 0


class ParallelGeneration:
    """Continuations of several prompts. Iterate for (index of the prompt, piece of text); ``texts()`` runs to the end. Runs once.

    Per prompt, in their order: ``tokens`` (generated ids), ``finish_reasons`` as of ``Generation``, ``pieces``. ``n_restarts`` counts
    texts that had to start over because the cache was full.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[str | Sequence[int]],
        n_predict: int,
        sampling: SamplingOptions | Sequence[SamplingOptions],
        stop: str | Sequence[str],
        ignore_eos: bool,
        n_parallel: int | None,
        on_token: Callable[[int, int, str], None] | None,
    ) -> None:
        self._session = session
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise RuntimeRefusal(f"the prompts are {prompts!r}; give a list of texts or of token ids")
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingOptions) else list(sampling)
        if len(each) != len(prompts):
            raise RuntimeRefusal(f"{len(prompts)} prompts but {len(each)} sampling options; give one for all, or one for each")
        if n_parallel is not None:
            require_integer("n_parallel", n_parallel, 1, session.n_seq_max)
        free = [seq for seq in range(session.n_seq_max) if session.pos_max(seq) < 0]
        wanted = len(free) if n_parallel is None else n_parallel
        if not 1 <= wanted <= len(free):
            raise RuntimeRefusal(
                f"{wanted} texts at once need as many empty sequences; {len(free)} of {session.n_seq_max} are empty (n_seq_max, seq_rm)"
            )
        self._free = free[:wanted]
        self._prompts = [self._tokens_of(i, prompt) for i, prompt in enumerate(prompts)]
        self._texts = [
            Continuation(session, n_predict, options, stop, ignore_eos, _numbered(on_token, i)) for i, options in enumerate(each)
        ]
        for text, prompt in zip(self._texts, self._prompts):
            text.read(prompt)
        self.pieces: list[list[str]] = [[] for _ in prompts]
        self.n_restarts = 0
        self._waiting = deque(i for i, text in enumerate(self._texts) if not text.finish_reason)
        self._running: list[_Running] = []
        self._run = self._steps()

    def _tokens_of(self, index: int, prompt: str | Sequence[int]) -> list[int]:
        """A prompt's tokens, checked before anything is evaluated."""
        session = self._session
        tokens = session.tokenize(prompt) if isinstance(prompt, str) else token_list(f"prompt {index}", prompt)
        room = session.cells.size - session.cells.used
        if not tokens or min(tokens) < 0 or max(tokens) >= session.n_vocab:
            what = f"holds tokens outside the vocabulary of {session.n_vocab}" if tokens else "is empty"
            raise RuntimeRefusal(f"prompt {index} {what}")
        if len(tokens) > room:
            raise RuntimeRefusal(
                f"prompt {index} has {len(tokens)} tokens and {room} cells are free; use a larger n_ctx or a shorter prompt", soft=True
            )
        return tokens

    @property
    def tokens(self) -> list[list[int]]:
        return [text.tokens for text in self._texts]

    @property
    def finish_reasons(self) -> list[str]:
        return [text.finish_reason for text in self._texts]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        index, piece = next(self._run)
        self.pieces[index].append(piece)
        return index, piece

    def texts(self) -> list[str]:
        """Run to the end; the text of each prompt."""
        for _ in self:
            pass
        return ["".join(pieces) for pieces in self.pieces]

    def close(self) -> None:
        """Stop here and free the sequences in use."""
        self._run.close()

    def _steps(self) -> Generator[tuple[int, str], None, None]:
        try:
            while self._waiting or self._running:
                self._admit()
                members = self._members()
                rows = self._evaluate(members)
                if rows is None:
                    if ended := self._make_room():
                        yield ended
                    continue
                done = [r for r, n in members if self._advance(r, n)]
                for r, logits in zip(done, rows):
                    text = self._texts[r.index]
                    piece = text.step(logits)
                    r.todo = text.tokens[-1:]
                    if text.finish_reason:
                        self._leave(r)
                    if piece:
                        yield r.index, piece
        finally:
            for r in list(self._running) if not self._session.closed else ():
                self._leave(r)

    def _admit(self) -> None:
        """Let waiting prompts enter while there is a sequence, and room for all of theirs and a step of the others."""
        cells = self._session.cells
        claimed = sum(len(r.todo) for r in self._running)
        while self._waiting and self._free:
            index = self._waiting[0]
            tokens = [*self._prompts[index], *self._texts[index].tokens]
            claimed += len(tokens)
            if self._running and claimed > cells.size - cells.used:
                return
            self._waiting.popleft()
            self._running.append(_Running(index, self._free.pop(0), tokens))

    def _members(self) -> list[tuple[_Running, int]]:
        """Who takes part in the next batch with how many tokens: first the texts that need one, then prompts, in order of entry."""
        room = self._session.n_batch
        members = []
        for r in sorted(self._running, key=lambda r: len(r.todo) > 1):
            if n := min(len(r.todo), room):
                members.append((r, n))
                room -= n
        return members

    def _evaluate(self, members: Sequence[tuple[_Running, int]]) -> list[np.ndarray] | None:
        """Evaluate the batch: logits f32 [n_vocab] of each member that has no tokens left, or None if the cache has no room."""
        counts = np.array([n for _, n in members])
        ends = np.cumsum(counts)
        batch = Batch(
            np.concatenate([np.arange(r.pos, r.pos + n, dtype=np.int32) for r, n in members]),
            np.repeat(np.array([r.seq for r, _ in members], np.int32), counts),
            ends[np.array([n == len(r.todo) for r, n in members])] - 1,
            np.array([token for r, n in members for token in r.todo[:n]], np.int32),
        )
        session = self._session
        for attempt in range(2):
            try:
                return session.decode_rows(batch)
            except RuntimeRefusal as refusal:
                if not refusal.soft:
                    raise
            # Enough free cells, though not side by side: gather them once and try again.
            if attempt or len(batch) > session.cells.size - session.cells.used or not session.defrag():
                break
        return None

    def _make_room(self) -> tuple[int, str] | None:
        """Send the text that entered last back to wait; the only text there is has filled the context and ends."""
        last = self._running[-1]
        self._leave(last)
        if self._running:
            self._waiting.appendleft(last.index)
            self.n_restarts += 1
            return None
        rest = self._texts[last.index].end("context")
        return (last.index, rest) if rest else None

    @staticmethod
    def _advance(r: _Running, n: int) -> bool:
        """``n`` tokens were evaluated; True if none is left."""
        r.pos += n
        del r.todo[:n]
        return not r.todo

    def _leave(self, r: _Running) -> None:
        self._session.seq_rm(r.seq)
        self._running.remove(r)
        self._free.append(r.seq)


def _numbered(on_token: Callable[[int, int, str], None] | None, index: int) -> Callable[[int, str], None] | None:
    if on_token is None:
        return None
    return lambda token, piece: on_token(index, token, piece)
