"""Byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``) on the ``tokenizers`` package, built from the GGUF vocabulary and merges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import RuntimeRefusal
from .vocab import PREFIX, Vocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?({_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
"""Words that end where a capital follows a small letter: ``GetName`` is two."""
_CASED_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN_AND_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt2": (_GPT2,),
    "digits": (r"\p{N}", _GPT2),
    "llama3": (_CL100K.format(digits="{1,3}"),),
    "cl100k": (_CL100K.format(digits="{1,3}"),),
    "qwen2": (_CL100K.format(digits=""),),
    "gpt4o": (_CASED + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}" + _CASED_END,),
    "tekken": (_CASED + r"|\p{N}" + _CASED_END,),
    "deepseek": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN_AND_HANGUL,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}"),
    "deepseek3": (
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""Patterns that cut a text, one after the other: each splits the pieces the one before left. They are those of the models' own tokenizers
(``tokenizer.json``); a class of letters spelled out there is written as its Unicode categories here."""

PRE: dict[str, str] = {
    "default": "default",
    "gpt2": "gpt2",
    "gpt-2": "gpt2",
    "phi-2": "gpt2",
    "mpt": "gpt2",
    "olmo": "gpt2",
    "jais": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "codeshell": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "falcon3": "llama3",
    "pixtral": "llama3",
    "smaug-bpe": "cl100k",
    "dbrx": "cl100k",
    "glm4": "cl100k",
    "chatglm-bpe": "cl100k",
    "gpt-4o": "gpt4o",
    "llama4": "gpt4o",
    "tekken": "tekken",
    "deepseek-llm": "deepseek",
    "deepseek-coder": "deepseek-coder",
    "deepseek-v3": "deepseek3",
    "joyai-llm": "deepseek3",
    "qwen2": "qwen2",
    "stablelm2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "openpangu": "qwen2",
}
"""``tokenizer.ggml.pre`` -> name of its patterns."""

_WHOLE_WORDS_FIRST = frozenset({"llama3", "tekken"})
"""Patterns of models that take a whole piece as one token where the vocabulary has it, before any merge."""

ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Names that imply a BOS token where the file does not say."""


@cache
def byte_alphabet() -> tuple[str, ...]:
    """GPT-2's printable character for each byte: itself where printable, else the next free character from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    chars, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            chars.append(chr(byte))
        else:
            chars.append(chr(spare))
            spare += 1
    return tuple(chars)


@cache
def alphabet_bytes() -> dict[str, int]:
    """The inverse of ``byte_alphabet``."""
    return {char: byte for byte, char in enumerate(byte_alphabet())}


def pre_name(metadata: Mapping[str, Any]) -> str:
    """The file's ``pre`` as the name of its patterns; an unknown one is refused, listing those known."""
    pre = metadata.get(PREFIX + "pre", "default")
    if pre not in PRE:
        raise RuntimeRefusal(f"the key {PREFIX}pre is {pre!r}; this version splits text for {', '.join(sorted(PRE))}")
    return PRE[pre]


class BpeModel:
    """Encodes text whose special tokens have been cut out already.

    Pieces that merges produce but the vocabulary lacks get private ids past its end and are spelled in bytes afterwards, so the library's
    demand that every merge names tokens changes nothing.
    """

    def __init__(self, vocab: Vocab, metadata: Mapping[str, Any]) -> None:
        merges = metadata.get(PREFIX + "merges")
        if not isinstance(merges, list) or (merges and not isinstance(merges[0], str)):
            raise RuntimeRefusal(f"the key {PREFIX}merges is missing or not an array of strings; a tokenizer of type gpt2 needs it")
        self._pre = pre_name(metadata)
        self._ids = dict(vocab.ids)
        self._n = len(vocab)
        self._unknown = vocab.special_ids.get("unknown", -1)
        pairs = []
        for merge in merges:
            cut = merge.find(" ", 1)
            if cut < 1 or cut + 1 == len(merge):
                raise RuntimeRefusal(
                    f"the merge {merge!r} in {PREFIX}merges is not two texts with a space between; the file's tokenizer is malformed"
                )
            pairs.append((merge[:cut], merge[cut + 1 :]))
        self._extra: dict[int, str] = {}
        self._name(byte_alphabet())
        try:
            self._engine = self._build(pairs)
        except RuntimeRefusal:
            # Rare, and looking for it first would cost every start a tenth of a second.
            self._name(text for a, b in pairs for text in (a, b, a + b))
            self._engine = self._build(pairs)

    def _name(self, texts: Iterable[str]) -> None:
        """Give texts without a token ids past the vocabulary's end."""
        for text in texts:
            if text not in self._ids:
                i = self._n + len(self._extra)
                self._ids[text], self._extra[i] = i, text

    def _build(self, pairs: list[tuple[str, str]]) -> Tokenizer:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        try:
            model = models.BPE(self._ids, pairs, ignore_merges=self._pre in _WHOLE_WORDS_FIRST)
        except Exception as error:  # the library raises bare Exception
            raise RuntimeRefusal(f"the tokenizer cannot be built from {PREFIX}tokens and {PREFIX}merges: {error}") from None
        engine = Tokenizer(model)
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[self._pre]]
        engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        return engine

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        if not self._extra or max(ids, default=0) < self._n:
            return ids
        out: list[int] = []
        for i in ids:
            out.extend([i] if i < self._n else self._spell(self._extra[i]))
        return out

    def _spell(self, text: str) -> list[int]:
        found = [self._ids.get(char, self._n) for char in text]
        known = [i if i < self._n else self._unknown for i in found]
        return [i for i in known if i >= 0]
