"""Sampling loop: a prompt in, pieces of text out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import RuntimeRefusal, require_integer
from .sampling import Sampler, SamplingOptions

if TYPE_CHECKING:
    from .session import Session


class StopFilter:
    """Holds text back while it may be the beginning of a stop text."""

    def __init__(self, stops: str | Sequence[str]) -> None:
        texts = [stops] if isinstance(stops, str) else stops
        if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
            raise RuntimeRefusal(f"stop is {stops!r}; give a text, or a list of texts")
        self._stops = [text for text in texts if text]
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


class Continuation:
    """The tokens of one text as they are sampled: ends, stop texts, decoding. Knows nothing of caches or batches.

    ``tokens`` are the sampled ids without the one that ended it; ``finish_reason``: ``stop`` (end token or stop text), ``length``
    (n_predict) or ``context`` (the cache is full), empty while it goes on.
    """

    def __init__(
        self,
        session: Session,
        n_predict: int,
        sampling: SamplingOptions,
        stop: str | Sequence[str],
        ignore_eos: bool,
        on_token: Callable[[int, str], None] | None = None,
    ) -> None:
        require_integer("n_predict", n_predict, -1, 1 << 31)
        if not isinstance(sampling, SamplingOptions):
            raise RuntimeRefusal(f"sampling is {sampling!r}; give SamplingOptions(...)")
        if on_token is not None and not callable(on_token):
            raise RuntimeRefusal(f"on_token is {on_token!r}; give a function")
        self._sampler = Sampler(sampling)
        self._stop, self._on_token, self._n_predict = StopFilter(stop), on_token, n_predict
        has_tokenizer = session.artifact.metadata.get("tokenizer.ggml.model", "none") != "none"
        # A model without tokenizer generates ids (``tokens``, ``on_token``); a malformed tokenizer is still an error.
        self._ends = session.tokenizer.end_ids if has_tokenizer and not ignore_eos else frozenset[int]()
        self._decoder = session.tokenizer.stream(special=False, at_start=False) if has_tokenizer else None
        self.tokens: list[int] = []
        self.finish_reason = "length" if n_predict == 0 else ""

    def read(self, prompt: Sequence[int]) -> None:
        """Tell the sampler what came before."""
        self._sampler.accept(prompt)

    def step(self, logits: np.ndarray) -> str:
        """Sample a token from logits f32 [n_vocab]; the text that can be shown now. ``finish_reason`` is set if it was the last."""
        token = self._sampler.sample(logits)
        if token in self._ends:
            return self.end("stop")
        self.tokens.append(token)
        piece = self._decoder.push(token) if self._decoder else ""
        shown = self._stop.push(piece)
        if self._on_token is not None:
            self._on_token(token, piece)
        if self._stop.hit:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._n_predict:
            shown += self.end("length")
        return shown

    def end(self, reason: str) -> str:
        """End here; the text that was held back."""
        self.finish_reason = reason
        rest = self._stop.push(self._decoder.finish()) if self._decoder else ""
        return rest if self._stop.hit else rest + self._stop.finish()


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
        stop: str | Sequence[str],
        on_token: Callable[[int, str], None] | None,
        seq: int,
        reuse_prefix: bool,
        ignore_eos: bool,
        context_shift: bool,
        n_keep: int,
    ) -> None:
        require_integer("seq", seq, 0, session.n_seq_max - 1)
        require_integer("n_keep", n_keep, 0, 1 << 31)
        self._session, self._prompt, self._seq = session, prompt, seq
        self._next = Continuation(session, n_predict, sampling, stop, ignore_eos, on_token)
        self._reuse, self._shift, self._n_keep = reuse_prefix, context_shift, n_keep
        self.tokens = self._next.tokens
        self.n_prompt = self.n_reused = 0
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

    @property
    def finish_reason(self) -> str:
        return self._next.finish_reason

    def _steps(self) -> Generator[str, None, None]:
        session, seq, text = self._session, self._seq, self._next
        logits = self._read_prompt()
        while not text.finish_reason:
            shown = text.step(logits)
            if shown:
                yield shown
            if text.finish_reason:
                return
            token = text.tokens[-1:]
            try:
                logits = session.decode_view(token, seq)
            except RuntimeRefusal as refusal:
                if not refusal.soft:
                    raise
                if self._shift:
                    session.shift_context(seq, self._n_keep)
                    logits = session.decode_view(token, seq)
                elif rest := text.end("context"):
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
        self._next.read(tokens)
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
            self._placed(lambda: session.decode(rest[at : at + session.n_batch], None, seq, "none"))  # noqa: B023
        return self._placed(lambda: session.decode_view(rest[last:], seq, prompt=True))

    def _placed(self, evaluate: Callable[[], np.ndarray]) -> np.ndarray:
        """Evaluate; where cells are free but not side by side, gather them and try again."""
        try:
            return evaluate()
        except RuntimeRefusal as refusal:
            if not (refusal.soft and self._session.defrag()):
                raise
        return evaluate()
