"""How an operator is declared: one class holds its name, operands, attributes, type rule, checks, text form and numpy reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ggufc.ir.dims import Dim, IntDim, is_multiple, product
from ggufc.ir.errors import IRError
from ggufc.ir.types import FLOATS, TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node
    from ggufc.ir.layout import Layout

REQUIRED: Any = object()
"""Default of an attribute that must be given."""

DTYPE_CLASSES: dict[str, frozenset[str] | None] = {
    "any": None,
    "float": FLOATS,
    "f32": frozenset({"f32"}),
    "i32": frozenset({"i32"}),
    "number": FLOATS | {"i32"},
}


@dataclass(frozen=True)
class Operand:
    """A declared operand. ``dtype`` is a key of ``DTYPE_CLASSES``; ``stored`` operands reach the reference as ``Stored`` values."""

    name: str
    doc: str = ""
    dtype: str = "float"
    min_rank: int = 1
    max_rank: int = 4
    optional: bool = False
    stored: bool = False

    def check(self, op: str, t: TensorType) -> None:
        allowed = DTYPE_CLASSES[self.dtype]
        if allowed is not None and t.dtype not in allowed:
            raise IRError(f"{op}: operand {self.name} is {t}; its dtype must be {' or '.join(sorted(allowed))}.")
        if not self.min_rank <= t.rank <= self.max_rank:
            want = str(self.min_rank) if self.min_rank == self.max_rank else f"{self.min_rank} to {self.max_rank}"
            raise IRError(f"{op}: operand {self.name} is {t}; it must have {want} dimension(s).")


@dataclass(frozen=True)
class Attr:
    """A declared attribute. ``kind`` is one of int, float, str, bool, dim, dims, ints.

    ``quiet`` ones print only where they differ from their default: settings that few users of an operator need.
    """

    name: str
    kind: str
    doc: str = ""
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    quiet: bool = False

    def convert(self, op: str, value: Any) -> Any:
        """The canonical form of ``value``; raises ``IRError`` when it does not fit."""
        good = value
        if self.kind == "int" and _is_int(value):
            good = int(value)
        elif self.kind == "float" and isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool):
            good = float(value)
            if good != good:
                raise IRError(f"{op}: attribute {self.name} is not a number (nan).")
        elif self.kind == "dim" and _is_dim(value):
            good = _dim(value)
        elif self.kind in ("dims", "ints") and isinstance(value, (tuple, list)):
            if not all(_is_dim(v) if self.kind == "dims" else _is_int(v) for v in value):
                raise IRError(f"{op}: attribute {self.name} = {list(value)} must be a list of {self.kind}.")
            good = tuple(_dim(v) for v in value)
        elif not ((self.kind == "str" and isinstance(value, str)) or (self.kind == "bool" and isinstance(value, bool))):
            raise IRError(f"{op}: attribute {self.name} = {value!r} must be of kind {self.kind}.")
        if self.choices and good not in self.choices:
            raise IRError(f"{op}: attribute {self.name} = {value!r} must be one of {', '.join(self.choices)}.")
        return good


def _is_int(v: object) -> bool:
    return isinstance(v, (int, np.integer)) and not isinstance(v, bool)


def _is_dim(v: object) -> bool:
    return _is_int(v) or isinstance(v, Dim)


def _dim(v: Any) -> IntDim:
    return v if isinstance(v, Dim) else int(v)


@dataclass
class Call:
    """What an operator's numpy reference sees. Arrays have numpy order (ne reversed); dims of ``attrs`` and ``ne`` are plain ints."""

    args: list[Any]
    types: list[TensorType]
    attrs: dict[str, Any]
    ne: tuple[int, ...]
    type: TensorType
    env: Mapping[str, int] = field(default_factory=dict)
    round_activations: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(reversed(self.ne))

    def f64(self, i: int) -> np.ndarray:
        return np.asarray(self.args[i], dtype=np.float64)


class Op:
    """Base of all operators. Subclasses declare the class variables and override ``infer`` and ``evaluate``."""

    name: ClassVar[str] = ""
    operands: ClassVar[tuple[Operand, ...]] = ()
    attrs: ClassVar[tuple[Attr, ...]] = ()
    headline: ClassVar[str] = ""
    """Attribute printed as a bare string or number after the operator's name instead of an operand list (leaves only)."""
    declared_type: ClassVar[bool] = False
    """The result type is stated by the creator, not inferred."""
    is_view: ClassVar[bool] = False
    writes_cache: ClassVar[bool] = False
    """The result is a new version of the cache that operand ``written`` belongs to; such a node is never dead."""
    commutative: ClassVar[bool] = False

    @property
    def is_leaf(self) -> bool:
        return not self.operands

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        """Result type; raises ``IRError`` when shapes do not fit. Operand dtypes and ranks are already checked."""
        raise NotImplementedError

    def verify(self, node: Node) -> None:
        """Rules beyond types (layouts, resources); raises ``IRError``."""

    def evaluate(self, call: Call) -> Any:
        """Numpy reference; the result has shape ``call.shape``."""
        raise NotImplementedError

    def flops(self, node: Node) -> IntDim:
        """Floating-point operations; the default counts one per result element, views and leaves none."""
        return 0 if self.is_view or self.is_leaf else node.type.numel

    def relayout(self, base: Layout, node: Node) -> Layout:
        """For views: where the result lies in the storage of operand 0."""
        raise NotImplementedError

    def canonical_attrs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All declared attributes in declaration order with defaults filled in; unknown or missing ones raise ``IRError``."""
        known = {a.name for a in self.attrs}
        for key in given:
            if key not in known:
                raise IRError(f"{self.name}: unknown attribute {key!r}; it has {', '.join(sorted(known)) or 'no attributes'}.")
        out = {}
        for a in self.attrs:
            value = given.get(a.name, a.default)
            if value is REQUIRED:
                raise IRError(f"{self.name}: attribute {a.name!r} is missing ({a.doc or a.kind}).")
            out[a.name] = a.convert(self.name, value)
        return out

    def check_operands(self, operands: Sequence[Node]) -> None:
        """Number, dtype and rank of the operands against the declaration."""
        least = sum(not o.optional for o in self.operands)
        if not least <= len(operands) <= len(self.operands):
            names = ", ".join(o.name + ("?" if o.optional else "") for o in self.operands)
            raise IRError(f"{self.name}: {len(operands)} operand(s) given; it takes ({names}).")
        for declared, node in zip(self.operands, operands):
            declared.check(self.name, node.type)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


OPS: dict[str, Op] = {}
"""All operators by name."""


def register(cls: type[Op]) -> type[Op]:
    """Class decorator that puts the operator's single instance into ``OPS``."""
    if cls.name in OPS:
        raise ValueError(f"operator {cls.name} is declared twice")
    OPS[cls.name] = cls()
    return cls


def repeats_to(small: IntDim, large: IntDim) -> bool:
    """Whether a dimension of ``small`` elements can be repeated a whole number of times to make ``large``."""
    return small == large or small == 1 or is_multiple(large, small)


def require_repeat(op: str, b: TensorType, a: TensorType) -> None:
    """ggml's broadcasting rule: every dimension of ``b`` divides the one of ``a``."""
    if not all(repeats_to(s, l) for s, l in zip(b.ne4, a.ne4)):
        raise IRError(f"{op}: {b} cannot be repeated to {a}; every dimension of the second operand must divide the first's.")


def repeat_to(b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``b`` tiled to ``shape`` (numpy order); dimensions are aligned at the last axis."""
    lifted = b.reshape((1,) * (len(shape) - b.ndim) + b.shape) if b.ndim < len(shape) else b.reshape(b.shape[b.ndim - len(shape) :])
    if all(m in (1, n) for m, n in zip(lifted.shape, shape)):
        return np.broadcast_to(lifted, shape)
    return np.tile(lifted, [n // m for n, m in zip(shape, lifted.shape)])


def f32(x: np.ndarray) -> np.ndarray:
    """The single rounding at the end of a float64 computation."""
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float32)


def same_numel(a: TensorType, ne: Sequence[IntDim]) -> bool:
    return a.numel == product(ne)
