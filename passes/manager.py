"""The pass manager: pipelines as text, verification after each pass, times and counts.

Pipeline text: pass names separated by commas, options in braces: ``canonicalize,cse,memory-plan{t=64},dce``. Options are
``key=value`` pairs separated by commas or blanks; ``key`` alone means ``key=1``.
"""

from __future__ import annotations

import re
import time as clock
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ggufc.ir import Graph, IRError, print_graph, verify
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.errors import PassError

__all__ = ["Pass", "PassManager", "PassRecord", "PassResult", "format_records"]

_ITEM = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)\s*(?:\{([^{}]*)\})?\s*(,|$)")


@dataclass(frozen=True)
class PassRecord:
    """What one pass of a run did. ``seconds`` includes verification; ``text`` is the graph after the pass where asked for."""

    name: str
    changed: bool
    counts: Mapping[str, int]
    seconds: float
    nodes_before: int
    nodes_after: int
    text: str = ""


@dataclass(frozen=True)
class PassManager:
    """An ordered pipeline of passes."""

    passes: tuple[Pass, ...]

    @classmethod
    def parse(cls, text: str) -> PassManager:
        """Passes from pipeline text; an unknown pass or option is a ``PassError`` that lists the known ones."""
        from ggufc.passes.pipelines import REGISTRY

        passes: list[Pass] = []
        at = 0
        while at < len(text.rstrip()):
            match = _ITEM.match(text, at)
            if match is None:
                where = f"\n  {text}\n  {' ' * at}^"
                raise PassError(
                    f"Pipeline text does not parse at column {at + 1}: write NAME or NAME{{OPTION=VALUE}} between commas.{where}"
                )
            name, options, _ = match.groups()
            kind = REGISTRY.get(name)
            if kind is None:
                raise PassError(f"There is no pass '{name}'; the passes are: {', '.join(sorted(REGISTRY))}.")
            passes.append(kind.from_options(_options(name, options or "")))
            at = match.end()
        return cls(tuple(passes))

    def __str__(self) -> str:
        return ",".join(str(p) for p in self.passes)

    def run(
        self,
        graph: Graph,
        print_after: Callable[[str, Graph], None] | Collection[str] = (),
        time: bool = True,
        check: bool = True,
    ) -> list[PassRecord]:
        """Run all passes on ``graph`` in place.

        ``print_after``: a callback that receives (pass name, graph) after each pass, or the names of passes whose result is kept as
        text in the record (``all`` for every pass). The graph is verified before the first pass and after each one that touched it;
        ``check=False`` skips that (only for measuring passes). Raises ``PassError``, naming the pass, for an invalid graph.
        """
        names = frozenset() if callable(print_after) else self._known(print_after)
        if check:
            _verify(graph, "The graph given to the pipeline is invalid")
        records = []
        for item in self.passes:
            before = _structure(graph)
            started = clock.perf_counter()
            result = item.apply(graph)
            if check:
                # Most passes find nothing to do in most graphs, and verifying costs more than looking.
                touched = graph if _structure(graph) != before else Graph(graph.name, analysis=graph.analysis)
                _verify(touched, f"Pass '{item.name}' left an invalid graph")
            seconds = clock.perf_counter() - started if time else 0.0
            text = print_graph(graph) if item.name in names or "all" in names else ""
            records.append(PassRecord(item.name, result.changed, dict(result.counts), seconds, len(before[0]), len(graph.nodes), text))
            if callable(print_after):
                print_after(item.name, graph)
        return records

    def _known(self, names: Collection[str]) -> frozenset[str]:
        """A name that is not in the pipeline would silently print nothing."""
        mine = [p.name for p in self.passes]
        for name in names:
            if name != "all" and name not in mine:
                raise PassError(f"Cannot print after '{name}': the pipeline has no such pass. It runs: {', '.join(mine)}.")
        return frozenset(names)


def format_records(records: Sequence[PassRecord]) -> str:
    """A table of a run: pass, milliseconds, nodes before and after, counts."""
    lines = [f"{'pass':<16} {'ms':>8} {'nodes':>14}  counts"]
    for r in records:
        counts = " ".join(f"{name}={n}" for name, n in sorted(r.counts.items()) if n)
        lines.append(f"{r.name:<16} {r.seconds * 1e3:>8.1f} {f'{r.nodes_before}->{r.nodes_after}':>14}  {counts}".rstrip())
    return "\n".join(lines)


def _options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in re.split(r"[,\s]+", text.strip()):
        if not item:
            continue
        key, _, value = item.partition("=")
        if not key:
            raise PassError(f"Options of pass '{name}' hold '{item}'; write OPTION=VALUE.")
        if key in options:
            raise PassError(f"Option '{key}' of pass '{name}' is given twice.")
        options[key] = value if value else "1"
    return options


def _structure(graph: Graph) -> tuple[list[object], list[object], list[str]]:
    """What a pass can change of a graph: nodes and their operands, outputs, derived weights. Attributes of a node never change in place."""
    return [(node, node.operands) for node in graph.nodes], list(graph.outputs.items()), list(graph.derived)


def _verify(graph: Graph, what: str) -> None:
    try:
        verify(graph)
    except IRError as error:
        raise PassError(f"{what}: {error}") from error
