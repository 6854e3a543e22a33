"""The tensors of a model file, checked against what its architecture needs.

Names and shapes are declared once, in the family's ``tensors`` function; builders then ask by name and get what was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ggufc.formats.ggml_types import TYPES
from ggufc.models.errors import ModelError

VECTOR_TYPES = ("f32", "f16", "bf16")
_NO_WEIGHTS = frozenset(("i8", "i16", "i32", "i64", "f64"))


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor an architecture reads: its name, its ggml shape (``also``: others in use for it), and whether the file may lack it.

    ``vector`` marks one-dimensional tensors (norms, biases), which must be plain floats; matrices may have any weight type. ``integer``
    tables hold i32 numbers instead.
    """

    name: str
    ne: tuple[int, ...]
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()
    integer: bool = False

    @property
    def vector(self) -> bool:
        return len(self.ne) == 1


class WeightInfo(msgspec.Struct, frozen=True):
    """A checked tensor of the file."""

    name: str
    ne: tuple[int, ...]
    dtype: str


Weights = Mapping[str, WeightInfo]
"""The tensors a model uses, by name; tensors of the file that the architecture does not read are absent."""


def check_tensors(specs: Iterable[TensorSpec], tensors: Mapping[str, Any], arch: str) -> Weights:
    """Look up every spec in ``tensors`` (name to an object with ``ne`` and ``type.name``, as ``formats.TensorInfo``).

    Raises ``ModelError`` naming the tensor: missing, of another shape, or of a type that cannot serve as weight.
    """
    found: dict[str, WeightInfo] = {}
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            if spec.optional:
                continue
            raise ModelError(
                f"the file has no tensor {spec.name!r} {list(spec.ne)}, which architecture {arch!r} requires; "
                "the file is incomplete or was made for another program"
            )
        found[spec.name] = WeightInfo(spec.name, _shape(spec, tensor), _dtype(spec, tensor))
    return found


def _shape(spec: TensorSpec, tensor: Any) -> tuple[int, ...]:
    ne = tuple(int(n) for n in tensor.ne)
    # Writers may or may not store trailing dimensions of size 1.
    for accepted in (spec.ne, *spec.also):
        if ne[: len(accepted)] == accepted and all(n == 1 for n in ne[len(accepted) :]):
            return accepted
    shapes = " or ".join(str(list(accepted)) for accepted in (spec.ne, *spec.also))
    raise ModelError(f"tensor {spec.name!r} has the shape {list(ne)}, but the hyperparameters say {shapes}; the file contradicts itself")


def _dtype(spec: TensorSpec, tensor: Any) -> str:
    dtype = str(tensor.type.name)
    if spec.integer and dtype != "i32":
        raise ModelError(f"tensor {spec.name!r} has type {dtype}; it holds indices and must be i32")
    if spec.integer:
        return dtype
    if spec.vector and dtype not in VECTOR_TYPES:
        raise ModelError(f"tensor {spec.name!r} has type {dtype}; one-dimensional weights must be one of {', '.join(VECTOR_TYPES)}")
    if dtype not in TYPES or dtype in _NO_WEIGHTS:
        raise ModelError(f"tensor {spec.name!r} has type {dtype}, which is not supported as a weight; requantise the model to another type")
    return dtype
