"""What goes to the terminal: bars on stderr, harmless text on stdout."""

from __future__ import annotations

import io
import sys

import pytest

from ggufc.cli import terminal


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_of_generated_text_are_shown_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, pipe = Screen(), io.StringIO()
    for stream in (screen, pipe):
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.show("a\x1b[2Jb\r\x07\n\tc\x9b\x7f")
    assert screen.getvalue() == "a\u241b[2Jb\u240d\u2407\n\tc\ufffd\u2421"
    assert pipe.getvalue() == "a\x1b[2Jb\r\x07\n\tc\x9b\x7f", "a file gets what the model wrote"


def test_no_bars_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with terminal.progress() as progress:
        assert progress is None
    assert sys.stderr.getvalue() == ""


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress() as progress:
        assert progress is not None
        assert screen.getvalue() == "", "nothing is drawn before there is something to say"
        progress("kernels", 3, 30)
    assert "kernels" in screen.getvalue() and "3/30" in screen.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    with terminal.progress() as progress:
        assert progress is None


@pytest.mark.parametrize(
    ("done", "total", "words"),
    [(3, 30, "3/30"), (7, 0, "7"), (1 << 20, 98362432, "1.0 MiB / 93.8 MiB"), (1 << 20, 0, "1.0 MiB")],
)
def test_amounts(done: int, total: int, words: str) -> None:
    assert terminal.amount_words(done, total) == words


def test_text_the_encoding_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    terminal.accept_any_text()
    terminal.show("caf\u00e9")
    assert raw.getvalue() == b"caf?"
