"""Choosing the next token from logits.

The chain and its defaults are llama.cpp's: repeat penalty, top-k, top-p, min-p, temperature, draw. Functions are pure; ``Sampler`` adds
the history and the random generator. Ties are broken by the lowest token id everywhere, so equal logits give equal text on every machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import RuntimeRefusal, require_integer

_BLOCK = 256
_LARGEST = 1e30
"""Bound of numbers that logits are multiplied with or divided by: within it, and 1 / it, ordinary logits stay f32 numbers."""


@dataclass(frozen=True)
class SamplingOptions:
    """``temp`` <= 0 (or too small to divide by) is greedy; ``top_k`` <= 0, ``top_p`` >= 1, ``min_p`` <= 0 and ``repeat_penalty`` = 1
    switch a step off.

    ``repeat_last_n``: tokens of history the penalty looks at, 0 = none, -1 = all. ``seed`` None or negative draws one from the system.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temp", "top_p", "min_p", "repeat_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise RuntimeRefusal(f"sampling: {name} is {value!r}; give a finite number")
        if self.repeat_penalty <= 0:
            raise RuntimeRefusal(f"sampling: repeat_penalty is {self.repeat_penalty}; it divides logits and must be positive (1 = off)")
        if not 1 / _LARGEST <= self.repeat_penalty <= _LARGEST or self.temp > _LARGEST:
            raise RuntimeRefusal(
                f"sampling: temp {self.temp} and repeat_penalty {self.repeat_penalty} scale logits; give numbers of at most {_LARGEST:g}, "
                f"and a penalty of at least {1 / _LARGEST:g}"
            )
        if self.top_p < 0 or self.min_p > 1:
            raise RuntimeRefusal(f"sampling: top_p {self.top_p} and min_p {self.min_p} are probabilities; give values from 0 to 1")
        require_integer("sampling: top_k", self.top_k, -(1 << 31), 1 << 31)
        require_integer("sampling: repeat_last_n", self.repeat_last_n, -1, 1 << 31)
        if self.seed is not None:
            require_integer("sampling: seed", self.seed, -(1 << 64), 1 << 64)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temp < 1 / _LARGEST


GREEDY = SamplingOptions(temp=0.0)


def greedy(logits: np.ndarray) -> int:
    """Id of the largest logit, the lowest on ties; NaN logits are refused."""
    best = int(np.argmax(logits))
    if math.isnan(float(logits[best])):
        raise RuntimeRefusal("the model produced logits that are not numbers; the file or the artifact is damaged")
    return best


def penalize(logits: np.ndarray, history: Iterable[int], penalty: float) -> np.ndarray:
    """A copy with the logits of tokens in ``history`` divided by ``penalty`` if positive, multiplied otherwise (each token once)."""
    out = np.array(logits, np.float32)
    ids = np.unique(np.fromiter(history, np.int64))
    ids = ids[(ids >= 0) & (ids < len(out))]
    if len(ids):
        x = out[ids]
        out[ids] = np.where(x > 0, x / np.float32(penalty), x * np.float32(penalty))
    return out


def top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` largest logits, largest first, ties by lowest id; all ids if ``k`` is 0 or negative."""
    n = len(logits)
    k = n if k <= 0 else min(k, n)
    candidates: np.ndarray | None = None
    blocks = n // _BLOCK
    if 4 * k < blocks:
        # The k-th largest block maximum bounds the k-th largest value from below, so few candidates remain to be sorted.
        maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        bound = np.partition(maxima, blocks - k)[blocks - k]
        if not math.isnan(float(bound)):
            candidates = np.flatnonzero(logits >= bound)
    elif k < n:
        candidates = np.flatnonzero(logits >= np.partition(logits, n - k)[n - k])
    if candidates is None:
        candidates = np.arange(n)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:k]


def softmax(logits: np.ndarray) -> np.ndarray:
    """f64 probabilities."""
    x = logits.astype(np.float64)
    e = np.exp(x - x.max())
    return e / e.sum()


def top_p(probs: np.ndarray, p: float) -> int:
    """How many of the descending ``probs`` to keep so that their sum reaches ``p``; at least one."""
    if p >= 1.0:
        return len(probs)
    return min(len(probs), int(np.searchsorted(np.cumsum(probs), p, side="left")) + 1)


def min_p(probs: np.ndarray, p: float) -> int:
    """How many of the descending ``probs`` are at least ``p`` times the largest; at least one."""
    return max(1, int(np.count_nonzero(probs >= p * probs[0]))) if p > 0 else len(probs)


def distribution(logits: np.ndarray, options: SamplingOptions, history: Iterable[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """(ids, probabilities) the next token is drawn from, most likely first."""
    if options.repeat_penalty != 1.0:
        logits = penalize(logits, history, options.repeat_penalty)
    if options.greedy:
        return np.array([greedy(logits)]), np.ones(1)
    ids = top_k(logits, options.top_k)
    kept = logits[ids]
    if not len(kept) or not math.isfinite(float(kept[0])):
        raise RuntimeRefusal("the model produced logits that are not finite numbers; the file or the artifact is damaged")
    probs = softmax(kept)
    n = top_p(probs, options.top_p)
    n = min(n, min_p(probs[:n] / probs[:n].sum(), options.min_p))
    return ids[:n], softmax(kept[:n] / np.float32(options.temp))


class Sampler:
    """A chain with its history and random generator (numpy PCG64). Two samplers with equal options, seed and history draw equal tokens."""

    def __init__(self, options: SamplingOptions | None = None) -> None:
        self.options = options or SamplingOptions()
        last = self.options.repeat_last_n
        self._history: deque[int] = deque(maxlen=None if last < 0 else last)

    @cached_property
    def _random(self) -> np.random.Generator:
        """Made on the first draw: greedy sampling never needs it."""
        seed = self.options.seed
        return np.random.default_rng(None if seed is None or seed < 0 else seed)

    def accept(self, tokens: Iterable[int]) -> None:
        """Add tokens to the history the repeat penalty sees."""
        self._history.extend(int(t) for t in tokens)

    def sample(self, logits: np.ndarray) -> int:
        """Draw a token from logits f32 [n_vocab] and add it to the history."""
        options = self.options
        if options.greedy and options.repeat_penalty == 1.0:
            token = greedy(logits)
        else:
            ids, probs = distribution(logits, options, self._history)
            if len(ids) == 1:
                token = int(ids[0])
            else:
                at = np.searchsorted(np.cumsum(probs), self._random.random() * probs.sum(), side="right")
                token = int(ids[min(int(at), len(ids) - 1)])
        self._history.append(token)
        return token
