"""The shape of one evaluation, as a builder may see it.

A graph serves every step that agrees on what its builder *looked at*. ``Step`` therefore hands out sizes as symbols, which bake
nothing, and concrete values only through ``observe``, which writes them down. ``Step.observations`` is the graph-reuse key: there
is no second, hand-kept list that could miss an entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ggufc.formats.abi import COMMON
from ggufc.ir.dims import Dim, IntDim, Sym
from ggufc.models.cache_types import CACHE_TYPES, OVERRIDES, override
from ggufc.models.errors import ModelError

Value = int | bool | str

SYMBOLS = COMMON
"""Symbols of an evaluation graph: tokens, rows with logits, cache cells, visible cells (padded), cell list entries."""

OPTIONS: dict[str, Value] = {
    "type_k": "f16",
    "type_v": "f16",
    "type_k_first": "",
    "type_k_last": "",
    "type_v_first": "",
    "type_v_last": "",
    "k_hadamard": False,
    "v_hadamard": False,
    "embd_input": False,
    "flash_attn": True,
    "mla": 3,
    "n_ctx_seq": 0,
    "idx_type_k": "f16",
    "dsa": False,
    "dsa_top_k": 0,
    "fidx": True,
    "swa_compress": False,
}
"""Builder options and their defaults: dtypes of the K and V caches, other ones of the first or last layers, as in ``q8_0,2``, and whether
quantised keys and values are stored under a Hadamard transform (``cache_types``); whether embeddings replace token ids as input; whether
passes may fuse attention over a cache into one operator; how latent attention is evaluated (0: keys and values of each head in an ordinary
cache, 1 to 3: absorbed, on a cache of latents); positions a sequence may have, as models with factors for long contexts ask (0: not more
than the original context); dtype of the indexers' key caches; whether layers read only what an indexer chooses, where that is a choice;
rows an indexer keeps (0 or -1: as the model says); whether passes may fuse an indexer's scores and choice; whether layers with a window
cache the window's rows only."""

_RANGES = {"mla": (0, 3), "n_ctx_seq": (0, 1 << 30), "dsa_top_k": (-1, 1 << 30)}

_PREDICATE = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*(\w+)\s*\Z")
_COMPARE = {
    "<": int.__lt__,
    "<=": int.__le__,
    ">": int.__gt__,
    ">=": int.__ge__,
    "==": int.__eq__,
    "!=": int.__ne__,
}


class Step:
    """One evaluation's shape and options.

    ``options`` overrides ``OPTIONS``; ``sizes`` gives concrete values of symbols (``{"T": 1, "KV": 256}``) and of anything else a
    builder may compare with. Sizes are needed only by builders that observe them: a graph built without looking serves all sizes.
    ``ModelError`` for an option or value that does not exist.
    """

    T: IntDim = Sym("T")
    O: Dim = Sym("O")
    C: Dim = Sym("C")
    KV: Dim = Sym("KV")
    R: Dim = Sym("R")

    def __init__(self, options: Mapping[str, Value] | None = None, sizes: Mapping[str, int] | None = None) -> None:
        self._values: dict[str, Value] = dict(OPTIONS)
        self._values.update(checked(options or {}))
        self._values.update(sizes or {})
        self._observations: dict[str, Value] = {}

    @property
    def observations(self) -> dict[str, Value]:
        """What the builder looked at, sorted by name: equal observations mean an equal graph."""
        return dict(sorted(self._observations.items()))

    def observe(self, name: str) -> Value:
        """The concrete value of an option or size, or the truth of a predicate ``"a < b"`` over sizes and integers; recorded.

        A predicate records only its truth, so a graph built for ``T > 8`` serves every T above 8.
        """
        value = self._evaluate(name)
        self._observations[name] = value
        return value

    def fix_tokens(self) -> None:
        """From now on ``T`` is this step's number of tokens, observed: for graphs that treat blocks of tokens one by one."""
        self.T = int(self.observe("T"))

    def says(self, name: str) -> bool:
        """Whether this step has a concrete value of a size. A graph for all sizes is built from a step that has none: what depends on
        them is then left to operators and inputs, and nothing is recorded, since such a graph serves every step."""
        return name in self._values

    def key(self) -> tuple[tuple[str, Value], ...]:
        """The observations as a hashable key."""
        return tuple(self.observations.items())

    def matches(self, observations: Mapping[str, Value]) -> list[str]:
        """Why a graph built under ``observations`` cannot serve this step, as ``"T: 1 -> 2"``; empty when it can."""
        reasons = []
        for name, then in observations.items():
            now = self._evaluate(name)
            if now != then:
                reasons.append(f"{name}: {then} -> {now}")
        return reasons

    def _evaluate(self, name: str) -> Value:
        if name in self._values:
            return self._values[name]
        match = _PREDICATE.match(name)
        if match is None:
            raise ModelError(f"the builder asks for {name!r}, which this step does not say; known are {', '.join(sorted(self._values))}")
        left, right = (self._operand(name, match[i]) for i in (1, 3))
        return _COMPARE[match[2]](left, right)

    def _operand(self, predicate: str, text: str) -> int:
        if text.isdigit():
            return int(text)
        value = self._values.get(text)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"the builder asks whether {predicate!r}, but this step has no number {text!r}; give it in sizes")
        return value


def checked(options: Mapping[str, Value]) -> dict[str, Value]:
    """Builder options as a step holds them: two texts for the same thing become one. ``ModelError`` names what does not exist."""
    return {name: _checked(name, value) for name, value in options.items()}


def _checked(name: str, value: Value) -> Value:
    if name not in OPTIONS:
        raise ModelError(f"builder option {name!r} is unknown; known are {', '.join(sorted(OPTIONS))}")
    if type(value) is not type(OPTIONS[name]):
        raise ModelError(f"builder option {name!r} must be a {type(OPTIONS[name]).__name__}, not {value!r}")
    if name in ("type_k", "type_v", "idx_type_k") and value not in CACHE_TYPES:
        raise ModelError(f"builder option {name!r}: a cache of type {value!r} is not supported; choose one of {', '.join(CACHE_TYPES)}")
    if name in OVERRIDES:
        override(name, str(value))
    if name in _RANGES and not _RANGES[name][0] <= int(value) <= _RANGES[name][1]:
        raise ModelError(f"builder option {name!r} is {value}; it must lie between {_RANGES[name][0]} and {_RANGES[name][1]}")
    # The command line of another engine says -1 for "as the model says".
    return 0 if name == "dsa_top_k" and int(value) < 0 else value
