"""What the keys of a GGUF file must satisfy beyond being well formed: typed standard keys, a consistent vocabulary, ids inside it."""

from __future__ import annotations

import re
from typing import Annotated, NoReturn

import msgspec
import numpy as np

from ggufc.formats import gguf_values as gv
from ggufc.formats.errors import GGUFError
from ggufc.formats.gguf_header import Value

_Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_Layers = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]


class _Architecture(msgspec.Struct, frozen=True, rename=lambda field: field.replace("__", ".")):
    """Types of the keys that builders divide by or allocate from, without the architecture's prefix; all optional here."""

    block_count: _Layers | msgspec.UnsetType = msgspec.UNSET
    context_length: _Count | msgspec.UnsetType = msgspec.UNSET
    embedding_length: _Count | msgspec.UnsetType = msgspec.UNSET
    vocab_size: _Count | msgspec.UnsetType = msgspec.UNSET
    feed_forward_length: _Size | list[_Size] | msgspec.UnsetType = msgspec.UNSET
    attention__head_count: _Count | list[_Size] | msgspec.UnsetType = msgspec.UNSET
    attention__head_count_kv: _Size | list[_Size] | msgspec.UnsetType = msgspec.UNSET
    attention__key_length: _Count | msgspec.UnsetType = msgspec.UNSET
    attention__value_length: _Count | msgspec.UnsetType = msgspec.UNSET
    rope__dimension_count: _Size | msgspec.UnsetType = msgspec.UNSET
    expert_count: _Size | msgspec.UnsetType = msgspec.UNSET
    expert_used_count: _Size | msgspec.UnsetType = msgspec.UNSET


_STRING_KEYS = ("general.architecture", "general.name", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")
_DEFAULT_IDS = {"llama": ("bos", 1, "eos", 2, "unknown", 0), "gpt2": ("bos", 11, "eos", 11)}
_ID_KEY = re.compile(r"tokenizer\.ggml\.\w+_token_ids?")
_MAX_KEY_ELEMENTS = 1 << 12


def check_metadata(values: dict[str, Value], path: object) -> None:
    """Refuse metadata that would mislead a reader further on; ``GGUFError`` names the key and its byte."""
    for key in _STRING_KEYS:
        value = values.get(key)
        if value is not None and value.type is not gv.STRING:
            _refuse(value, path, f"{key} must be a string, not {value.type_name}")
    arch = values.get("general.architecture")
    if arch is not None:
        _check_architecture(values, str(arch.get()), path)
    _check_vocabulary(values, path)


def _refuse(value: Value, path: object, message: str) -> NoReturn:
    raise GGUFError(message, offset=value.start, path=path)


def _check_architecture(values: dict[str, Value], arch: str, path: object) -> None:
    for field in msgspec.structs.fields(_Architecture):
        value = values.get(f"{arch}.{field.encode_name}")
        if value is None:
            continue
        if value.count > _MAX_KEY_ELEMENTS:
            _refuse(value, path, f"{value.key} has {value.count} elements; at most one per layer is expected")
        plain = value.get()
        if isinstance(plain, np.ndarray):
            plain = plain.tolist()
        try:
            msgspec.convert({field.encode_name: plain}, _Architecture)
        except msgspec.ValidationError as e:
            _refuse(value, path, f"{value.key} is unusable: {str(e).partition(' - at `')[0]}")


def _check_vocabulary(values: dict[str, Value], path: object) -> None:
    tokens = values.get("tokenizer.ggml.tokens")
    wanted = {
        "tokenizer.ggml.tokens": ("string",),
        "tokenizer.ggml.merges": ("string",),
        "tokenizer.ggml.scores": ("float32",),
        "tokenizer.ggml.token_type": ("int32", "uint32"),
    }
    for key, elements in wanted.items():
        value = values.get(key)
        if value is None:
            continue
        if value.element is None or value.element.name not in elements:
            _refuse(value, path, f"{key} must be an array of {' or '.join(elements)}, not {value.type_name}")
        if tokens is not None and key.endswith(("scores", "token_type")) and value.count != tokens.count:
            _refuse(value, path, f"{key} has {value.count} elements for {tokens.count} tokens")
    if tokens is not None and tokens.count == 0:
        _refuse(tokens, path, "tokenizer.ggml.tokens is empty")
    for key, value in values.items():
        if _ID_KEY.fullmatch(key):
            _check_ids(value, tokens, path)
    if tokens is not None:
        _check_default_ids(values, tokens, path)


def _check_ids(value: Value, tokens: Value | None, path: object) -> None:
    kind = value.element or value.type
    if not kind.name.startswith(("int", "uint")):
        _refuse(value, path, f"{value.key} must be an integer token id, not {value.type_name}")
    if value.count > gv.MAX_STRINGS:
        _refuse(value, path, f"{value.key} lists {value.count} ids")
    ids = np.atleast_1d(np.asarray(value.get()))
    if tokens is None or not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= tokens.count:
        bad = low if low < 0 else high
        _refuse(value, path, f"{value.key} is {bad}, outside the vocabulary of {tokens.count} tokens")


def _check_default_ids(values: dict[str, Value], tokens: Value, path: object) -> None:
    """A tokenizer model implies ids where the file gives none; they must exist too."""
    model = values.get("tokenizer.ggml.model")
    defaults = _DEFAULT_IDS.get(str(model.get()), ()) if model else ()
    for name, token in zip(defaults[::2], defaults[1::2]):
        if f"tokenizer.ggml.{name}_token_id" not in values and int(token) >= tokens.count:
            _refuse(tokens, path, f"the vocabulary of {tokens.count} tokens has no token {token}, the default {name} id of its model")
