"""What a session has done: tokens, times and how often a bound graph could be reused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Calls with one token of each of their sequences count as decode, others, and a prompt of one token, as prompt. Seconds include
    everything but sampling.

    ``reuse_hits`` and ``reuse_misses`` count micro-batches: whether the graph bound for the last one could run again as it was, or its
    arguments were resolved anew. ``miss_reasons`` counts the misses by reason: ``first evaluation``, ``reuse is off``, ``program A -> B``
    (token and embedding inputs are different programs), ``keys were rotated``, ``cells were moved``, ``state was restored``.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    reuse_hits: int = 0
    reuse_misses: int = 0
    miss_reasons: Counter[str] = field(default_factory=Counter)
    _last: str = ""

    def count(self, n_tokens: int, seconds: float, prompt: bool) -> None:
        """Note a call of ``n_tokens``, of a prompt or of a step of decoding."""
        if prompt:
            self.prompt_tokens += n_tokens
            self.prompt_seconds += seconds
        else:
            self.decode_tokens += n_tokens
            self.decode_seconds += seconds

    def count_graph(self, program: str, reuse: bool, stale: str = "") -> bool:
        """Note that ``program`` is about to run; True if it may run as it was bound.

        ``stale`` names what happened since the last micro-batch that a bound graph is not carried across. Sizes are no reason: tokens,
        outputs, cells and positions enter a graph as parameters and inputs, and what its builder looked at is the same for all its
        micro-batches.
        """
        reason = ""
        if not reuse:
            reason = "reuse is off"
        elif not self._last:
            reason = "first evaluation"
        elif self._last != program:
            reason = f"program {self._last} -> {program}"
        elif stale:
            reason = stale
        self._last = program
        if not reason:
            self.reuse_hits += 1
            return True
        self.reuse_misses += 1
        self.miss_reasons[reason] += 1
        return False

    @property
    def reuse_rate(self) -> float:
        """Share of micro-batches that ran on a graph bound before, 0 if there were none."""
        total = self.reuse_hits + self.reuse_misses
        return self.reuse_hits / total if total else 0.0

    def reuse_lines(self) -> list[str]:
        """``reused 118 of 120 graphs (98.3 %)`` and one line per reason, most frequent first."""
        total = self.reuse_hits + self.reuse_misses
        lines = [f"reused {self.reuse_hits} of {total} graphs ({100 * self.reuse_rate:.1f} %)"]
        return lines + [f"not reused {count} times: {reason}" for reason, count in self.miss_reasons.most_common()]

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
