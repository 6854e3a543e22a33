"""What all tests share: golden text files, and signals as a terminal would deliver them. ``support`` finds golden cases."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from support import SHARED_ARTIFACTS

# A gate started in the background ignores SIGINT, and so would every process the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of shared artifacts; workers inherit its name from the process that starts them, which removes it in the end."""
    if SHARED_ARTIFACTS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="ggufc-tests-")
        os.environ[SHARED_ARTIFACTS] = folder.name

        def remove() -> None:
            del os.environ[SHARED_ARTIFACTS]
            folder.cleanup()

        config.add_cleanup(remove)


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
