"""The vocabulary of a GGUF file: texts, types, scores and special ids, checked before anything indexes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .errors import RuntimeRefusal

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPECIAL_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "separator", "cls", "mask", "fim_pre", "fim_suf", "fim_mid")

_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|return|>",
    "<EOT>",
    "_<EOT>",
)
"""Texts that end a turn in the models' own templates; many files name only one of them as eos."""


@dataclass(frozen=True)
class Vocab:
    """Tokens by id. ``types`` i32 [n] (ggml's token types), ``scores`` f32 [n] or None, ``special_ids`` by role (``bos``, ``eos``, ...)."""

    texts: list[str]
    types: np.ndarray
    scores: np.ndarray | None
    special_ids: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each text; the last wins where a text occurs twice."""
        return dict(zip(self.texts, range(len(self.texts))))

    @cached_property
    def byte_ids(self) -> list[int]:
        """Id of the token standing for each byte (``<0xXX>``), -1 where the vocabulary has none."""
        return [self.ids.get(f"<0x{b:02X}>", -1) for b in range(256)]

    def of_types(self, *types: int) -> list[tuple[str, int]]:
        """(text, id) of all tokens of these types with a text, longest text first, then by id."""
        found = [(self.texts[i], i) for i in np.flatnonzero(np.isin(self.types, types)).tolist() if self.texts[i]]
        return sorted(found, key=lambda item: -len(item[0]))

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        found = {self.special_ids[role] for role in ("eos", "eot", "eom") if role in self.special_ids}
        marked = self.types == CONTROL
        for text in _END_TEXTS:
            i = self.ids.get(text)
            if i is not None and marked[i]:
                found.add(i)
        return frozenset(found)


def _column(metadata: Mapping[str, Any], name: str, n: int, kind: str, what: str) -> np.ndarray | None:
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kind or (kind == "f" and value.dtype.itemsize != 4):
        raise RuntimeRefusal(f"the key {PREFIX}{name} must be an array of {what}; the file's tokenizer is malformed")
    if len(value) != n:
        raise RuntimeRefusal(f"the key {PREFIX}{name} has {len(value)} entries for {n} tokens; the file's tokenizer is malformed")
    return value


def read_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """The vocabulary in GGUF ``metadata``; RuntimeRefusal names the key that is missing or malformed."""
    texts = metadata.get(PREFIX + "tokens")
    if not isinstance(texts, list) or not texts or not isinstance(texts[0], str):
        raise RuntimeRefusal(f"the key {PREFIX}tokens is missing or not an array of strings; give token ids instead of text")
    n = len(texts)
    types = _column(metadata, "token_type", n, "iu", "integers")
    scores = _column(metadata, "scores", n, "f", "32-bit floats")
    special: dict[str, int] = {}
    for role in _SPECIAL_IDS:
        key = f"{PREFIX}{role}_token_id"
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise RuntimeRefusal(f"the key {key} must be an integer, got {value!r}; the file's tokenizer is malformed")
        if value == 0xFFFFFFFF:  # "none" as converters write it
            continue
        if not 0 <= value < n:
            raise RuntimeRefusal(f"the key {key} is {value}, outside the vocabulary of {n} tokens; the file's tokenizer is malformed")
        special[role] = value
    return Vocab(texts, np.ones(n, np.int32) if types is None else types.astype(np.int32), scores, special)


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean tokenizer key."""
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, (bool, np.bool_)):
        raise RuntimeRefusal(f"the key {PREFIX}{name} must be a boolean, got {value!r}; the file's tokenizer is malformed")
    return bool(value)
