"""What a pass is: a frozen dataclass whose fields are its options, and the text form of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ggufc.ir import Graph
from ggufc.passes.errors import PassError

if TYPE_CHECKING:
    from ggufc.passes.rules import Rule

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class PassResult:
    """Whether the graph changed, and how often each named rule (or finding of an analysis) occurred."""

    changed: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """One transformation or analysis of a graph.

    Subclasses set ``name`` (the word used in pipelines), declare their options as fields of type ``int``, ``float``, ``bool`` or
    ``str`` with defaults, and state pre- and postcondition in the docstring. A pass holds no state between two calls.
    """

    name: ClassVar[str] = ""

    def apply(self, graph: Graph) -> PassResult:
        """Rewrite ``graph`` in place, or store an analysis in ``graph.analysis[name]``."""
        raise NotImplementedError(f"pass {type(self).__name__} has no apply()")

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Options as written in pipelines (``-`` where the field has ``_``)."""
        return tuple(f.name.replace("_", "-") for f in dataclasses.fields(cls))

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Build the pass from option texts; an unknown option or a text of the wrong type is a ``PassError``."""
        fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, text in options.items():
            option = fields.get(key.replace("_", "-"))
            if option is None:
                known = ", ".join(fields) if fields else "none"
                raise PassError(f"Pass '{cls.name}' has no option '{key}'; its options are: {known}.")
            values[option.name] = _convert(cls.name, key, text, type(option.default))
        return cls(**values)

    def __str__(self) -> str:
        """The pipeline text of this pass: its name and the options that differ from their defaults."""
        changed = [
            f"{f.name.replace('_', '-')}={_option_text(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}{{{','.join(changed)}}}" if changed else self.name


def _option_text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _convert(name: str, key: str, text: str, kind: type) -> object:
    """Option text to the type of the option's default."""
    lowered = text.lower()
    if kind is bool:
        if lowered in _TRUE or lowered in _FALSE:
            return lowered in _TRUE
        raise PassError(f"Option '{key}' of pass '{name}' is '{text}'; write 1 or 0.")
    try:
        return kind(text)
    except ValueError:
        raise PassError(f"Option '{key}' of pass '{name}' is '{text}', which is not of type {kind.__name__}.") from None


@dataclass(frozen=True)
class RulePass(Pass):
    """A pass that is nothing but a list of rewrite rules."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    def apply(self, graph: Graph) -> PassResult:
        """Apply the rules until none matches."""
        from ggufc.passes.rules import apply_rules

        return apply_rules(graph, self.rules)
