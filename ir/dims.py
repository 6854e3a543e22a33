"""Symbolic dimensions: integers, or polynomials with integer coefficients over named symbols.

Shapes of graphs are affine (``2*T+1``). Products of symbols appear only as strides, sizes and element counts of unfused attention
(``KV*T``); they are ordinary ``Dim`` values here, and ``to_form`` writes them only where asked to. A result without symbols is always
a plain ``int``, so callers can test ``isinstance(d, int)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias, Union

from ggufc.ir.errors import IRError

Monomial: TypeAlias = tuple[str, ...]
"""Sorted symbol names of one term; the empty tuple is the constant term."""

IntDim: TypeAlias = Union[int, "Dim"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Dim:
    """An immutable polynomial with at least one symbol. Build it from ``Sym`` with ``+ - *``; never call the class directly."""

    __slots__ = ("_hash", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        object.__setattr__(self, "terms", terms)
        object.__setattr__(self, "_hash", hash(terms))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Dim is immutable")

    def __copy__(self) -> Dim:
        return self

    def __deepcopy__(self, memo: object) -> Dim:
        return self

    def __reduce__(self) -> tuple[type[Dim], tuple[object]]:
        return Dim, (self.terms,)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dim) and self.terms == other.terms)

    def __add__(self, other: IntDim) -> IntDim:
        if not isinstance(other, (int, Dim)):
            return NotImplemented
        return _collect([*self.terms, *_terms(other)])

    __radd__ = __add__

    def __neg__(self) -> IntDim:
        return self * -1

    def __sub__(self, other: IntDim) -> IntDim:
        return self + other * -1

    def __rsub__(self, other: IntDim) -> IntDim:
        return self * -1 + other

    def __mul__(self, other: IntDim) -> IntDim:
        if not isinstance(other, (int, Dim)):
            return NotImplemented
        return _collect((tuple(sorted(m + n)), a * b) for m, a in self.terms for n, b in _terms(other))

    __rmul__ = __mul__

    def __str__(self) -> str:
        parts = []
        for mono, coef in self.terms:
            body = "*".join(mono)
            sign = "-" if coef < 0 else "+"
            number = abs(coef)
            parts.append(sign + (str(number) if not mono else body if number == 1 else f"{number}*{body}"))
        return "".join(parts).removeprefix("+")

    def __repr__(self) -> str:
        return f"Dim({self})"

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(s for mono, _ in self.terms for s in mono)

    @property
    def is_affine(self) -> bool:
        return all(len(mono) <= 1 for mono, _ in self.terms)


def _terms(d: IntDim) -> tuple[tuple[Monomial, int], ...]:
    return d.terms if isinstance(d, Dim) else (((), d),)


def _collect(terms: Iterable[tuple[Monomial, int]]) -> IntDim:
    total: dict[Monomial, int] = {}
    for mono, coef in terms:
        total[mono] = total.get(mono, 0) + coef
    # Symbols come before the constant, higher degrees before lower ones: the order of the text form.
    kept = tuple(sorted(((m, c) for m, c in total.items() if c), key=lambda mc: (-len(mc[0]), mc[0])))
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    return Dim(kept)


def Sym(name: str) -> Dim:
    """The dimension that is just the symbol ``name``."""
    if not _NAME.match(name):
        raise IRError(f"{name!r} cannot name a dimension symbol; use letters, digits and underscores.")
    return Dim((((name,), 1),))


def symbols(d: IntDim) -> frozenset[str]:
    """Names of the symbols in ``d``; empty for an int."""
    return d.symbols if isinstance(d, Dim) else frozenset()


def evaluate(d: IntDim, env: Mapping[str, int]) -> int:
    """Value of ``d`` with the symbols of ``env``; raises ``IRError`` naming a symbol without a value."""
    if not isinstance(d, Dim):
        return d
    total = 0
    for mono, coef in d.terms:
        for s in mono:
            if s not in env:
                raise IRError(f"Dimension {d} needs a value for symbol {s}; known symbols: {', '.join(sorted(env)) or 'none'}.")
            coef *= env[s]
        total += coef
    return total


def substitute(d: IntDim, env: Mapping[str, IntDim]) -> IntDim:
    """``d`` with some symbols replaced by integers or other dimensions."""
    if not isinstance(d, Dim):
        return d
    total: IntDim = 0
    for mono, coef in d.terms:
        term: IntDim = coef
        for s in mono:
            term = term * env.get(s, Sym(s))
        total = total + term
    return total


def to_form(d: IntDim, *, products: bool = False) -> dict[str, int]:
    """Affine form ``{"": constant, "T": 2}`` as the artifact manifest stores it; the constant is left out when it is 0 beside symbols.

    A product of symbols is refused, or with ``products`` written as ``{"KV*T": 4}``: sizes may hold some, offsets may not.
    """
    if isinstance(d, int):
        return {"": d}
    if not (products or d.is_affine):
        raise IRError(f"Dimension {d} multiplies symbols; only sums of multiples of single symbols can be an offset.")
    return {"*".join(mono): coef for mono, coef in d.terms}


def divide(d: IntDim, by: IntDim) -> IntDim:
    """Exact quotient, which must be an int or a single product such as ``4*T``. Raises ``IRError`` if a remainder is possible."""
    factors = _terms(by)
    if by == 0:
        raise IRError(f"Dimension {d} cannot be divided by {by}.")
    if len(factors) > 1:
        # Only a single product times ``by`` is looked for; the terms of highest degree tell which.
        quotient = divide(_collect(_terms(d)[:1]), _collect(factors[:1]))
        if quotient * by != d:
            raise IRError(f"Dimension {d} is not a multiple of {by}.")
        return quotient
    mono, coef = factors[0]
    out = []
    for m, c in _terms(d):
        rest = list(m)
        for s in mono:
            if s not in rest:
                raise IRError(f"Dimension {d} is not a multiple of {by}.")
            rest.remove(s)
        if c % coef:
            raise IRError(f"Dimension {d} is not a multiple of {by}.")
        out.append((tuple(rest), c // coef))
    return _collect(out)


def is_multiple(d: IntDim, by: IntDim) -> bool:
    """Whether ``divide(d, by)`` is exact for all values of the symbols."""
    if d == by:
        return by != 0
    if isinstance(d, int) and isinstance(by, int):
        return by != 0 and d % by == 0
    try:
        divide(d, by)
    except IRError:
        return False
    return True


def product(dims: Iterable[IntDim]) -> IntDim:
    total: IntDim = 1
    for d in dims:
        total = total * d
    return total


_MAX_DIGITS = 18  # what surely fits into 64 bits
_TOKEN = re.compile(r"\s*(?:(?P<num>\d+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<op>[-+*]))")


def parse_dim(text: str) -> IntDim:
    """Parses ``2*T+1``, ``-T``, ``KV*T``, ``576``; raises ``IRError`` for anything else."""
    pos, tokens = 0, []
    stripped = text.rstrip()
    while pos < len(stripped):
        m = _TOKEN.match(stripped, pos)
        if m is None:
            raise IRError(f"{text!r} is not a dimension: unexpected {stripped[pos:].strip()[:1]!r}. Write sums of products such as 2*T+1.")
        tokens.append(m)
        pos = m.end()
    total: IntDim = 0
    term: IntDim = 1
    want_factor, sign_ok = True, True
    for m in tokens:
        op = m["op"]
        if want_factor:
            if op in ("+", "-") and sign_ok:
                term = term * (-1 if op == "-" else 1)
                sign_ok = False
                continue
            if op:
                raise IRError(f"{text!r} is not a dimension: a number or symbol must come before {op!r}.")
            if m["num"] and len(m["num"]) > _MAX_DIGITS:
                raise IRError(f"The number {m['num'][:_MAX_DIGITS]}... is too large for a dimension.")
            term = term * (int(m["num"]) if m["num"] else Sym(m["name"]))
            want_factor = False
        elif op == "*":
            want_factor, sign_ok = True, False
        elif op:
            total, term = total + term, (-1 if op == "-" else 1)
            want_factor, sign_ok = True, False
        else:
            raise IRError(f"{text!r} is not a dimension: an operator is missing before {m.group().strip()!r}.")
    if want_factor:
        raise IRError(f"{text!r} is not a dimension: it ends too early.")
    return total + term
