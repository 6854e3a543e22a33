"""IR text in, IR text out: what ``ggufc opt`` calls."""

from __future__ import annotations

from collections.abc import Collection

from ggufc.ir import parse_graph, print_graph, verify
from ggufc.passes.manager import PassManager


def opt(text: str, pipeline: str, print_after: Collection[str] = ()) -> str:
    """Parse a graph, run the pipeline, print the result.

    ``print_after`` names passes whose result is printed as well, each under a ``# after PASS`` line, before the final graph (``all``
    for every pass); such output is for reading, only the plain form parses back. Raises ``IRError`` for text that does not parse or
    verify, ``PassError`` for the pipeline.
    """
    manager = PassManager.parse(pipeline)
    graph = parse_graph(text)
    verify(graph)
    records = manager.run(graph, print_after=print_after)
    shown = [f"# after {record.name}\n{record.text}" for record in records if record.text]
    if shown:
        shown.append("# final\n")
    return "".join(shown) + print_graph(graph)
