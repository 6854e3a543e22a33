"""Golden texts of each pass, and the page that shows them.

``cases/PASS.ggir`` names its pipeline in the first line; ``expected/PASS.ggir`` is what it becomes. ``docs/passes.md`` holds both under
a marker ``<!-- PASS -->``; ``pytest tests/passes --update-golden`` rewrites the expected texts and the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ggufc.ir import parse_graph, print_graph
from ggufc.passes import DEFAULT_PIPELINE, REGISTRY, opt

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "passes.md"
CASES = sorted((HERE / "cases").glob("*.ggir"))


def read_case(path: Path) -> tuple[str, str]:
    """(pipeline, IR text) of a case."""
    first, _, text = path.read_text().partition("\n")
    assert first.startswith("# pipeline: "), f"{path.name} must start with '# pipeline: '"
    return first.removeprefix("# pipeline: "), text


def example(path: Path) -> str:
    """The section of the page that shows a case."""
    pipeline, text = read_case(path)
    return f"<!-- {path.stem} -->\n```text\n{text}```\n\n`{pipeline}` gives\n\n```text\n{opt(text, pipeline)}```\n"


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_what_each_pass_does(path: Path, golden_text: Callable[[object, str], None]) -> None:
    pipeline, text = read_case(path)
    result = opt(text, pipeline)
    golden_text(result, path.name)
    assert print_graph(parse_graph(result)) == result
    assert opt(result, pipeline) == result


def test_every_pass_has_a_case() -> None:
    assert {path.stem for path in CASES} == set(REGISTRY)


def test_the_page_shows_every_case_as_it_is(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text()
    for path in CASES:
        section = re.compile(rf"<!-- {path.stem} -->\n(```text\n.*?```\n\n`[^`]*` gives\n\n```text\n.*?```\n)?", re.DOTALL)
        assert section.search(page), f"docs/passes.md has no marker <!-- {path.stem} -->"
        shown = example(path)
        if request.config.getoption("--update-golden"):
            page = section.sub(lambda _, shown=shown: shown, page)
        assert shown in page, f"docs/passes.md shows {path.stem} differently; run pytest with --update-golden"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page)


def test_the_page_shows_the_default_pipeline() -> None:
    assert f"    {DEFAULT_PIPELINE}\n" in PAGE.read_text()
