"""What a session has done: tokens, times and how often a bound graph could be reused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ggufc.formats.artifact import Program


@dataclass
class Statistics:
    """Calls of more than one token count as prompt, calls of one token as decode (llama.cpp's convention). Seconds include everything but
    sampling.

    ``reuse_hits`` and ``reuse_misses`` count micro-batches; ``miss_reasons`` says why a graph had to be bound.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    reuse_hits: int = 0
    reuse_misses: int = 0
    miss_reasons: Counter[str] = field(default_factory=Counter)
    _last: str = ""

    def count(self, n_tokens: int, seconds: float) -> None:
        if n_tokens > 1:
            self.prompt_tokens += n_tokens
            self.prompt_seconds += seconds
        else:
            self.decode_tokens += n_tokens
            self.decode_seconds += seconds

    def count_graph(self, program: Program, reuse: bool) -> None:
        """Note that ``program`` is about to run. What the builder observed is in its reuse key, and the key is the same for all its
        micro-batches.
        """
        if reuse and self._last == program.name:
            self.reuse_hits += 1
            return
        self.reuse_misses += 1
        if not reuse:
            self.miss_reasons["reuse is off"] += 1
        elif not self._last:
            self.miss_reasons["first evaluation"] += 1
        else:
            self.miss_reasons[f"program {self._last} -> {program.name}"] += 1
        self._last = program.name

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second, 0 if there were none."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second, 0 if there were none."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]
