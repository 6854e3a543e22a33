"""Text to token ids and back, from the tokenizer stored in a GGUF file.

Special tokens are cut out of the text first, longest text first; the rest goes through byte-level BPE (``bpe``) or merging by score
(``spm``).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from .bpe import ADDS_BOS, BpeModel, alphabet_bytes
from .errors import RuntimeRefusal
from .spm import SPACE, SpmModel
from .vocab import BYTE, CONTROL, PREFIX, UNKNOWN, USER_DEFINED, Vocab, flag, read_vocab

MODELS = ("gpt2", "llama")


def load_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a file's metadata; RuntimeRefusal names the key that is missing, malformed or not supported. Tables are built
    on first use.
    """
    model = metadata.get(PREFIX + "model")
    if model is None or model in ("none", "no_vocab"):
        raise RuntimeRefusal(f"this file has no tokenizer ({PREFIX}model); give token ids instead of text")
    if model not in MODELS:
        raise RuntimeRefusal(f"the tokenizer type {model!r} ({PREFIX}model) is not supported; this version reads {', '.join(MODELS)}")
    return Tokenizer(metadata, str(model))


class Tokenizer:
    """``encode`` and ``decode`` of one model. ``bos``, ``eos`` are ids or None; ``end_ids`` end a generation."""

    def __init__(self, metadata: Mapping[str, Any], model: str) -> None:
        self._metadata = metadata
        self.model = model
        self.vocab: Vocab = read_vocab(metadata)
        self.bos = self.vocab.special_ids.get("bos")
        self.eos = self.vocab.special_ids.get("eos")
        spm = model == "llama"
        self.add_bos = flag(metadata, "add_bos_token", spm or metadata.get(PREFIX + "pre") in ADDS_BOS)
        self.add_eos = flag(metadata, "add_eos_token", False)
        self.space_prefix = spm and flag(metadata, "add_space_prefix", True)
        self._model_built: BpeModel | SpmModel | None = None

    def __len__(self) -> int:
        return len(self.vocab)

    @property
    def end_ids(self) -> frozenset[int]:
        return self.vocab.end_ids

    @property
    def _merger(self) -> BpeModel | SpmModel:
        if self._model_built is None:
            self._model_built = SpmModel(self.vocab) if self.model == "llama" else BpeModel(self.vocab, self._metadata)
        return self._model_built

    @cached_property
    def _specials(self) -> list[tuple[str, int]]:
        return self.vocab.of_types(UNKNOWN, CONTROL, USER_DEFINED)

    @cached_property
    def _user_defined(self) -> list[tuple[str, int]]:
        return self.vocab.of_types(USER_DEFINED)

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """Token ids of ``text``.

        ``special``: control tokens written in the text become their ids (user-defined tokens always do). ``bos``: put BOS in front; None
        does what the model asks for, and then also appends EOS where it asks for that.
        """
        # Bytes that are not UTF-8 (surrogates, from a command line) have no characters to tokenize.
        clean = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        out: list[int] = []
        if self.bos is not None and (self.add_bos if bos is None else bos):
            out.append(self.bos)
        merger = self._merger
        after_special = True
        for piece in split_specials(clean, self._specials if special else self._user_defined):
            if isinstance(piece, int):
                out.append(piece)
                after_special = True
            else:
                out.extend(merger.encode(" " + piece if self.space_prefix and after_special else piece))
                after_special = False
        if bos is None and self.add_eos and self.eos is not None:
            out.append(self.eos)
        return out

    def token_bytes(self, token: int, special: bool = True) -> bytes:
        """The bytes a token stands for; control and unknown tokens give their text, or nothing if ``special`` is off."""
        if not 0 <= token < len(self.vocab):
            raise RuntimeRefusal(f"token {token} is outside the vocabulary of {len(self.vocab)} tokens")
        text, kind = self.vocab.texts[token], int(self.vocab.types[token])
        if kind in (CONTROL, UNKNOWN):
            return text.encode("utf-8", "surrogateescape") if special else b""
        if self.model == "llama":
            if kind == BYTE and len(text) == 6 and text.startswith("<0x"):
                try:
                    return bytes([int(text[3:5], 16)])
                except ValueError:
                    pass  # a byte token with a text of another form stands for its text
            return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")
        if kind == USER_DEFINED:
            return text.encode("utf-8", "surrogateescape")
        table = alphabet_bytes()
        if all(char in table for char in text):
            return bytes([table[char] for char in text])
        return text.encode("utf-8", "surrogateescape")

    def decode(self, tokens: Iterable[int], special: bool = True) -> str:
        """Text of tokens; bytes that are not UTF-8 become U+FFFD. The space ``encode`` put in front is taken away again."""
        stream = self.stream(special)
        return "".join([*(stream.push(token) for token in tokens), stream.finish()])

    def stream(self, special: bool = True, at_start: bool = True) -> StreamDecoder:
        """An incremental decoder; ``at_start`` is False where the tokens continue a text."""
        return StreamDecoder(self, special, at_start)


class StreamDecoder:
    """Text piece by piece: a character whose bytes are spread over several tokens appears when it is complete."""

    def __init__(self, tokenizer: Tokenizer, special: bool, at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = at_start and tokenizer.space_prefix

    def push(self, token: int) -> str:
        """Text that ``token`` completes, possibly empty."""
        raw = self._tokenizer.token_bytes(int(token), self._special)
        # BOS and other control tokens come before the text; the space to drop is the first text's.
        if self._strip and raw and int(self._tokenizer.vocab.types[token]) not in (CONTROL, UNKNOWN):
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """What an incomplete character at the end turns into (U+FFFD or nothing)."""
        return self._decoder.decode(b"", final=True)


def split_specials(text: str, specials: list[tuple[str, int]]) -> list[str | int]:
    """``text`` with special tokens replaced by their ids; ``specials`` are searched in the order given, each in what the ones before
    left over.
    """
    pieces: list[str | int] = [text] if text else []
    for special, token in specials:
        if special not in text:
            continue
        cut: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int) or special not in piece:
                cut.append(piece)
                continue
            for i, part in enumerate(piece.split(special)):
                if i:
                    cut.append(token)
                if part:
                    cut.append(part)
        pieces = cut
    return pieces
