"""Reading typed, range-checked hyperparameter keys from GGUF metadata.

A family declares its keys as a msgspec struct: the field's ``name`` is the key without the architecture prefix, its annotation the
type and range, its default what an absent key means. ``read_keys`` turns metadata into that struct or raises a ``ModelError`` that
names the key.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ggufc.models.errors import ModelError

Struct = TypeVar("Struct", bound=msgspec.Struct)

# Ranges are generous bounds of plausibility: they keep a damaged file from asking for terabytes, not an unusual model from loading.
Layers = Annotated[int, Meta(ge=1, le=4096)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Heads = Annotated[int, Meta(ge=1, le=1 << 14)]
HeadDim = Annotated[int, Meta(ge=1, le=1 << 14)]
Experts = Annotated[int, Meta(ge=0, le=1 << 14)]
Positions = Annotated[int, Meta(ge=1, le=1 << 30)]
Vocabulary = Annotated[int, Meta(ge=1, le=1 << 26)]
Epsilon = Annotated[float, Meta(gt=0, le=1)]
Base = Annotated[float, Meta(ge=2, le=1e15)]
Factor = Annotated[float, Meta(ge=0, le=1e6)]
Magnitude = Annotated[float, Meta(gt=0, le=1e3)]

PerLayerHeads = Heads | Annotated[list[Heads], Meta(min_length=1)]
FeedForward = Annotated[int, Meta(ge=0, le=1 << 22)]
PerLayerFeedForward = FeedForward | Annotated[list[FeedForward], Meta(min_length=1)]


def read_keys(keys: type[Struct], metadata: Mapping[str, Any], arch: str) -> Struct:
    """Fill the struct ``keys`` from ``metadata``.

    Raises ``ModelError`` naming the key, its expected type and what was found, for a missing key without default, a value of
    another type and a value out of range. Keys the struct does not declare are ignored: files carry many that concern other
    programs.
    """
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(keys):
        key = f"{arch}.{field.encode_name}"
        if key not in metadata:
            if field.required:
                raise ModelError(f"the file has no key {key}, which architecture {arch!r} requires: expected {describe(field.type)}")
            continue
        value = plain(metadata[key])
        try:
            found[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ModelError(f"key {key} must be {describe(field.type)}, but the file has {show(value)} ({error})") from error
    return keys(**found)


def plain(value: Any) -> Any:
    """The Python form of a metadata value: numpy scalars and arrays become numbers and lists."""
    if isinstance(value, bool | int | float | str | list):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def show(value: Any) -> str:
    """A metadata value for a message, cut to a readable length."""
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def describe(annotation: Any) -> str:
    """An annotation in words: ``an integer from 1 to 4096, or one per layer``."""
    return _words(msgspec.inspect.type_info(annotation))


def _words(info: msgspec.inspect.Type) -> str:
    inspect = msgspec.inspect
    if isinstance(info, inspect.UnionType):
        members = [t for t in info.types if not isinstance(t, inspect.NoneType)]
        return ", or ".join(_words(t) for t in members)
    if isinstance(info, inspect.ListType):
        return "a list with one such value per layer"
    if isinstance(info, inspect.IntType | inspect.FloatType):
        noun = "an integer" if isinstance(info, inspect.IntType) else "a number"
        low = f" from {info.ge:g}" if info.ge is not None else f" above {info.gt:g}" if info.gt is not None else ""
        high = f" up to {info.le:.7g}" if info.le is not None else ""
        return noun + low + high
    if isinstance(info, inspect.LiteralType):
        return "one of " + ", ".join(repr(v) for v in info.values)
    return "a string" if isinstance(info, inspect.StrType) else "true or false" if isinstance(info, inspect.BoolType) else str(info)
