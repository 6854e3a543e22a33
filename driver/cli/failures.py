"""How the command line ends: exit codes, one-line errors, signals.

0 success, 2 an error the user can act on (stderr, no traceback), 1 a defect of ggufc itself, 130 interrupted, 143 terminated. ``diff``
also exits with 1, after its report, when something differs.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import IO, Any

import click

from ggufc.cli.flag_names import with_flags
from ggufc.formats.errors import GgufcError

OK, DEFECT, ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


def run(command: click.Command, arguments: Sequence[str], interruptible: bool = False) -> int:
    """Run ``command`` and return the exit code; nothing escapes except tracebacks asked for with ``--debug``.

    ``interruptible``: an interrupt becomes an exception from here on, whatever it did while the program loaded.
    """
    _open_closed_streams()
    _buffer_stdout()
    stdout = sys.stdout
    debug = "--debug" in arguments[:1]
    # SIGTERM unwinds like an exception, so that temporary files are removed.
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _note
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        result = command.main(list(arguments), prog_name="ggufc", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else OK
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return ERROR
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        context = getattr(error, "ctx", None)
        _say(f"{message} See `{context.command_path} --help`." if context else message)
        return ERROR
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted", prefix="")
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_gone(stdout)
    except SystemExit:
        # click has already met the broken pipe: it put a wrapper around stdout and chose to exit with 1.
        if sys.stdout is not stdout:
            return _reader_gone(stdout)
        raise
    except (GgufcError, OSError, UnicodeError, MemoryError) as error:
        if debug:
            raise
        _say(with_flags(describe(error)))
        if isinstance(error, OSError) and error.errno == errno.EBADF:
            _reader_gone(stdout)
        return ERROR
    except Exception as error:
        if debug:
            raise
        _say(f"internal error, {type(error).__name__}: {error}; `ggufc --debug ...` shows where. Please report it with that output.")
        return DEFECT


def _open_closed_streams() -> None:
    """Started with a closed stdin, stdout or stderr (``>&-``), Python has None there and the next file opened would get its number.

    stdin is then empty and stderr swallows; stdout refuses what is written to it, since a result must not vanish unnoticed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))


def _buffer_stdout() -> None:
    """With PYTHONUNBUFFERED, Python hands a text to the system in one call and drops what a nearly full disk did not take; a buffer
    writes on until all is there or an error says why not.
    """
    old = sys.stdout
    raw = getattr(old, "buffer", None)
    if old is sys.__stdout__ and isinstance(old, io.TextIOWrapper) and isinstance(raw, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, old.errors, line_buffering=True)


def describe(error: BaseException) -> str:
    """The error as a sentence."""
    if isinstance(error, OSError):
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            where = f" ({error.filename})" if error.filename else ""
            return f"the disk is full{where}; free space or choose another folder (GGUFC_CACHE names the cache)"
        if error.errno == errno.EFBIG:
            return "the output is larger than files may be here; see `ulimit -f` and the file system's limit"
        if error.errno == errno.EBADF and not error.filename:
            return "stdout is closed, so there is nowhere to write the result to"
        if error.filename and error.strerror:
            return f"{os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return f"the text is not UTF-8 (byte {error.start}: {error.reason})"
    if isinstance(error, MemoryError):
        return f"out of memory; use a smaller -c or -ub{': ' + str(error) if str(error) else ''}"
    return str(error) or type(error).__name__


def _say(message: str, prefix: str = "ggufc: error: ") -> None:
    try:
        sys.stderr.write(f"{prefix}{message}\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads stderr any more; the exit code still tells


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """A warning of ours, which needs no source line: what continues with a safe setting says so once."""
    _say(with_flags(str(message)), prefix="note: ")


def _reader_gone(stdout: IO[Any]) -> int:
    """The reader of our output closed the pipe (``ggufc ... | head``): end quietly, also at interpreter shutdown."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stdout.fileno())
    return OK


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)
