"""Sampling loop: a prompt in, pieces of text out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import RuntimeRefusal
from .sampling import Sampler, SamplingOptions

if TYPE_CHECKING:
    from .session import Session
    from .tokenizer import StreamDecoder


class StopFilter:
    """Holds text back while it may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.hit = ""

    def push(self, piece: str) -> str:
        """Text that can be shown now; ``hit`` is set when a stop text is complete (nothing is shown from it on)."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class Generation:
    """One continuation. Iterate for pieces of text; ``text()`` or ``str()`` for all of it. It runs as far as it is read, once.

    Afterwards: ``tokens`` (generated ids, without the one that ended it), ``n_prompt`` evaluated prompt tokens, ``n_reused`` tokens taken
    from the cache, ``finish_reason``: ``stop`` (end token or stop text), ``length`` (n_predict) or ``context`` (the cache is full).
    """

    def __init__(
        self,
        session: Session,
        prompt: str | Sequence[int],
        n_predict: int,
        sampling: SamplingOptions,
        stop: tuple[str, ...],
        on_token: Callable[[int, str], None] | None,
        seq: int,
        reuse_prefix: bool,
        ignore_eos: bool,
        context_shift: bool,
        n_keep: int,
    ) -> None:
        self._session, self._prompt, self._n_predict = session, prompt, n_predict
        self._sampler = Sampler(sampling)
        self._stop, self._on_token, self._seq = StopFilter(stop), on_token, seq
        self._reuse, self._ignore_eos = reuse_prefix, ignore_eos
        self._shift, self._n_keep = context_shift, n_keep
        self.tokens: list[int] = []
        self.n_prompt = self.n_reused = 0
        self.finish_reason = ""
        self._pieces: list[str] = []
        self._run = self._steps()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = next(self._run)
        self._pieces.append(piece)
        return piece

    def text(self) -> str:
        """Run to the end; everything generated so far and from here on."""
        for _ in self:
            pass
        return "".join(self._pieces)

    __str__ = text

    def close(self) -> None:
        """Stop here; the sequence keeps what was evaluated."""
        self._run.close()

    def _steps(self) -> Generator[str, None, None]:
        session, seq = self._session, self._seq
        logits = self._read_prompt()
        if self._n_predict == 0:
            self.finish_reason = "length"
            return
        ends = frozenset[int]() if self._ignore_eos else self._end_ids()
        decoder = self._decoder()
        while True:
            token = self._sampler.sample(logits)
            if token in ends:
                self.finish_reason = "stop"
                break
            self.tokens.append(token)
            piece = decoder.push(token) if decoder else ""
            shown = self._stop.push(piece)
            if self._on_token is not None:
                self._on_token(token, piece)
            if shown:
                yield shown
            if self._stop.hit:
                self.finish_reason = "stop"
                return
            if len(self.tokens) == self._n_predict:
                self.finish_reason = "length"
                break
            try:
                logits = session.decode_view([token], seq)
            except RuntimeRefusal as refusal:
                if not refusal.soft:
                    raise
                if not self._shift:
                    self.finish_reason = "context"
                    break
                session.shift_context(seq, self._n_keep)
                logits = session.decode_view([token], seq)
        rest = self._stop.push(decoder.finish()) if decoder else ""
        rest += "" if self._stop.hit else self._stop.finish()
        if rest:
            yield rest

    def _read_prompt(self) -> np.ndarray:
        """Evaluate the prompt in batches; the logits of its last token."""
        session, seq = self._session, self._seq
        if self._reuse and isinstance(self._prompt, str):
            tokens = session.tokenize(self._prompt)
        else:
            tokens = session._tokens_of(self._prompt, seq)
        if not tokens:
            raise RuntimeRefusal("the prompt is empty; give some text or a token")
        self._sampler.accept(tokens)
        self.n_reused = session.keep_prefix(tokens, seq) if self._reuse else 0
        rest = tokens[self.n_reused :]
        self.n_prompt = len(rest)
        free = session.cells.size - session.cells.used
        if len(rest) > free:
            raise RuntimeRefusal(
                f"the prompt has {len(rest)} tokens and {free} cells are free; use a larger n_ctx or a shorter prompt", soft=True
            )
        last = max(0, (len(rest) - 1) // session.n_batch * session.n_batch)
        for at in range(0, last, session.n_batch):
            session.decode(rest[at : at + session.n_batch], None, seq, "none")
        return session.decode_view(rest[last:], seq)

    def _end_ids(self) -> frozenset[int]:
        return self._session.tokenizer.end_ids if self._has_tokenizer() else frozenset()

    def _decoder(self) -> StreamDecoder | None:
        return self._session.tokenizer.stream(special=False, at_start=False) if self._has_tokenizer() else None

    def _has_tokenizer(self) -> bool:
        """Models without one generate ids (``tokens``, ``on_token``); a malformed tokenizer is still an error."""
        return (
            "tokenizer.ggml.model" in self._session.artifact.metadata and self._session.artifact.metadata["tokenizer.ggml.model"] != "none"
        )
