"""Shared fixtures: golden folders, golden text files, real models, CPU-feature markers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support import golden_cases, golden_dirs

__all__ = ["golden_cases", "golden_dirs"]


# A gate started in the background ignores SIGINT, and so would every process the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the expected text files instead of comparing")


@pytest.fixture
def golden_text(request: pytest.FixtureRequest):
    """Compare ``str(result)`` with a file beside the test; ``--update-golden`` rewrites it."""

    def check(result: object, name: str) -> None:
        path = Path(request.fspath).parent / "expected" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(str(result))
        assert path.is_file(), f"{path} is missing; run pytest with --update-golden"
        assert str(result) == path.read_text()

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``isa(...)`` on machines without those CPU features."""
    features: set[str] | None = None
    for item in items:
        mark = item.get_closest_marker("isa")
        if mark is None:
            continue
        if features is None:
            from ggufc.runtime.cpuinfo import host_features

            features = set(host_features())
        missing = [f for f in mark.args if f not in features]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"CPU lacks {', '.join(missing)}"))
