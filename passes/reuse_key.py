"""``reuse-key``: what must be equal for a built graph to run again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ggufc.ir import Graph
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.errors import PassError

OBSERVATIONS = "observations"
"""Key of ``graph.analysis`` where the builder's ``Step.observations`` are kept."""
ANALYSIS = "reuse-key"

Key: TypeAlias = "dict[str, int | str | bool]"
"""Name -> value, sorted by name; plain data that prints with the graph."""


@dataclass(frozen=True)
class ReuseKey(Pass):
    """Store the canonical reuse key in ``graph.analysis["reuse-key"]``.

    The key holds every observation of the builder, the architecture, graph name and symbols, the type of each cache and the name, kind,
    type and window of each input. Values that enter through symbols or inputs are not in it: they may differ from run to run.

    Precondition: observations are integers, booleans or strings (a float or object has no canonical form). Postcondition: equal keys
    mean that the graph may run again; ``check_reuse_key`` accepts the graph.
    """

    name: ClassVar[str] = ANALYSIS

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        key = reuse_key(graph)
        changed = graph.analysis.get(ANALYSIS) != key
        graph.analysis[ANALYSIS] = key
        return PassResult(changed, {"entries": len(key)})


def reuse_key(graph: Graph) -> Key:
    """The key of a graph; raises ``PassError`` for an observation without a canonical form."""
    entries: dict[str, int | str | bool] = {"graph": graph.name, "arch": graph.arch, "symbols": " ".join(graph.symbols)}
    for name, value in graph.analysis.get(OBSERVATIONS, {}).items():
        if not isinstance(value, (bool, int, str)):
            raise PassError(
                f"Observation '{name}' of graph '{graph.name}' is {value!r}; the reuse key takes integers, booleans and strings."
            )
        entries[f"step.{name}"] = value
    for node in graph.nodes:
        if node.op.name == "cache":
            entries[f"cache.{node.attrs['name']}"] = str(node.type)
        elif node.op.name == "input":
            window = node.attrs["window"]
            entries[f"input.{node.attrs['name']}"] = f"{node.attrs['kind']} {node.type}" + (f" window {window}" if window else "")
    return dict(sorted(entries.items()))


def check_reuse_key(graph: Graph) -> None:
    """Refuse a stored key that lacks something the builder observed or the graph declares, or holds another value; raises ``PassError``."""
    stored = graph.analysis.get(ANALYSIS)
    if stored is None:
        raise PassError(f"Graph '{graph.name}' has no reuse key; run the pass {ANALYSIS}.")
    differences = explain(stored, reuse_key(graph))
    if differences:
        raise PassError(
            f"The reuse key of graph '{graph.name}' does not describe it ({'; '.join(differences)}); run the pass {ANALYSIS} again."
        )


def explain(old: Mapping[str, Any] | Iterable[tuple[str, Any]], new: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[str]:
    """Why a graph with key ``old`` cannot serve ``new``, one reason per entry, as ``n_kv 256 -> 512``; empty if it can.

    Keys are mappings or the pairs that an artifact's manifest stores.
    """
    before, after = dict(old), dict(new)
    reasons = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, "absent"), after.get(name, "absent")
        if was != now or isinstance(was, bool) is not isinstance(now, bool):
            reasons.append(f"{name.removeprefix('step.')} {was} -> {now}")
    return reasons
