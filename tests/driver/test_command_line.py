"""The command line's frame: start-up, help, exit codes, streams, signals."""

from __future__ import annotations

import errno
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ggufc.cli import COMMANDS, cli, failures
from ggufc.errors import DriverError
from ggufc.files import read_text, write_text
from ggufc.formats.errors import GGUFError
from ggufc.formats.gguf_writer import GGUFWriter


def ggufc(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ggufc", *arguments], capture_output=True, text=True, timeout=60, **options)


def test_help_starts_without_the_heavy_packages() -> None:
    script = (
        "import sys; from ggufc.cli import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "print(sorted({'numpy', 'rich', 'llvmlite', 'jinja2', 'tokenizers', 'networkx', 'gguf', 'msgspec'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    for name in COMMANDS:
        assert f"  {name} " in result.stdout


def test_help_takes_a_fifth_of_a_second() -> None:
    """Processor time of the whole process less the bare interpreter's, so that a busy machine does not matter."""

    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare = min(seconds("-c", "pass") for _ in range(3))
    full = min(seconds("-m", "ggufc", "--help") for _ in range(3))
    assert full - bare < 0.12


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: cli {name}")
    command = cli.get_command(click.Context(cli), name)
    assert command is not None and command.help, "a command needs a docstring"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.opts} has no help"


def test_commands_import_nothing_heavy() -> None:
    script = (
        "import sys, importlib; from ggufc.cli import COMMANDS\n"
        "for name in COMMANDS: importlib.import_module(f'ggufc.cli.{name}')\n"
        "print(sorted({'numpy', 'rich', 'llvmlite', 'jinja2', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_unknown_commands_and_options_are_usage_errors() -> None:
    for arguments in (["no-such-command"], ["pull", "--no-such-option"], ["run"]):
        result = ggufc(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert "Traceback" not in result.stderr


def test_errors_are_one_line_on_stderr(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF\x03\0\0\0 and then nothing sensible")
    for arguments in (
        ["inspect", "no-such-model"],
        ["inspect", str(bad)],
        ["inspect", str(tmp_path)],
        ["run"],
        ["run", "m", "-c", "-1"],
        ["opt", str(bad)],
    ):
        result = ggufc(*arguments)
        assert result.returncode == 2, arguments
        assert result.stdout == ""
        # An error in IR text also shows the line and a caret under the place.
        assert re.match(r"ggufc: error: [^\n]+\n" + ("" if arguments[0] == "opt" else r"\Z"), result.stderr), result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-ctk", "q9"], "-ctk: a cache of type 'q9' is not supported"),
        (["--dsa", "--mla", "0"], "--dsa needs the cache of latents; set --mla to 1, 2 or 3"),
        (["-ctv-first", "f16"], "-ctv-first is 'f16'; give a cache type and a number of layers"),
    ],
)
def test_errors_name_the_options_that_were_given(tmp_path: Path, options: list[str], message: str) -> None:
    model = Path(__file__).parents[1] / "golden" / "glm-dsa-topk8" / "model.gguf"
    result = ggufc("compile", str(model), "-o", str(tmp_path / "x"), *options)
    assert result.returncode == 2 and message in result.stderr and "builder option" not in result.stderr, result.stderr


def test_every_flag_that_messages_name_exists() -> None:
    """Builder options become their flags, options of a session get them added once; what has no flag stays as it is."""
    from ggufc.cli import cli, flag_names
    from ggufc.models.step import OPTIONS

    context = click.Context(cli)
    flags = {
        text
        for name in ("run", "compile")
        for parameter in cli.get_command(context, name).params  # type: ignore[union-attr]
        for text in (*parameter.opts, *parameter.secondary_opts)
    }
    assert set(flag_names._BUILDER.values()) | set(flag_names._SESSION.values()) <= flags
    assert set(flag_names._BUILDER) == set(OPTIONS) - {"embd_input", "n_ctx_seq", "swa_compress"}
    text = "use a larger n_ctx, not n_ctx_seq; n_ctx is 4, builder option 'dsa' needs builder option 'mla', builder option 'embd_input'"
    assert flag_names.with_flags(text) == (
        "use a larger n_ctx (-c), not n_ctx_seq; n_ctx is 4, --dsa needs --mla, builder option 'embd_input'"
    )


def test_the_largest_context_is_that_of_sessions(artifact: Path) -> None:
    from ggufc.cli.options import MOST_TOKENS
    from ggufc.formats.errors import GgufcError
    from ggufc.runtime import Session

    for option in ("n_ctx", "n_batch", "n_ubatch"):
        with pytest.raises(GgufcError, match=rf"{option} is {MOST_TOKENS + 1}; give a whole number from \d to {MOST_TOKENS}$"):
            Session(artifact, **{option: MOST_TOKENS + 1})
    for command in (["inspect", "-c"], ["inspect", "-ub"], ["run", "-p", "a", "-c"], ["bench", "-ub"], ["perplexity", "-c"]):
        refused = ggufc(command[0], str(artifact), *command[1:], str(99999999999))
        assert refused.returncode == 2 and f"<={MOST_TOKENS}" in refused.stderr, refused.stderr


class TestFailures:
    """``failures.run`` maps every way of ending to an exit code."""

    @pytest.fixture(autouse=True)
    def keep_signals(self):
        before = signal.getsignal(signal.SIGTERM)
        yield
        signal.signal(signal.SIGTERM, before)

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (DriverError("no such thing"), 2, "ggufc: error: no such thing\n"),
            (
                FileNotFoundError(errno.ENOENT, "No such file or directory", "x.gguf"),
                2,
                "ggufc: error: x.gguf: No such file or directory\n",
            ),
            (OSError(errno.ENOSPC, "No space left on device"), 2, "ggufc: error: the disk is full; free space"),
            (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 2, "ggufc: error: the text is not UTF-8 (byte 0"),
            (MemoryError(), 2, "ggufc: error: out of memory; use a smaller -c or -ub\n"),
            (KeyboardInterrupt(), 130, ""),
            (ValueError("oops"), 1, "ggufc: error: internal error, ValueError: oops; `ggufc --debug"),
            (click.UsageError("wrong"), 2, ""),
        ],
    )
    def test_exit_codes(self, error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        @click.command()
        def command() -> None:
            raise error

        assert failures.run(command, []) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(message) and "Traceback" not in captured.err

    def test_debug_shows_the_traceback(self) -> None:
        @click.command()
        @click.option("--debug", is_flag=True)
        def command(debug: bool) -> None:
            raise DriverError("no such thing")

        with pytest.raises(DriverError):
            failures.run(command, ["--debug"])


def test_a_reader_that_stops_is_no_error() -> None:
    process = subprocess.Popen(
        f"{sys.executable} -m ggufc --help; echo code $? >&2", shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "code 0\n"
    process.wait()
    process.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_no_partial_file(tmp_path: Path, number: signal.Signals, code: int) -> None:
    script = (
        "import sys, time, click\nfrom pathlib import Path\nfrom ggufc.cli.failures import run\nfrom ggufc.files import replacing\n"
        "@click.command()\ndef command():\n"
        "    with replacing(Path(sys.argv[1])) as temporary:\n"
        "        temporary.write_text('half'); print('writing', flush=True)\n"
        # Short naps: a signal that arrives just before a long sleep would be seen after it.
        "        for _ in range(1000): time.sleep(0.02)\n"
        "sys.exit(run(command, []))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job (`pytest &`) ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    assert list(tmp_path.iterdir()) != []
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("inherited", "code", "out"), [("default_int_handler", 130, b""), ("SIG_IGN", 0, b"ggufc, version")])
def test_an_interrupt_while_modules_load_prints_no_traceback(inherited: str, code: int, out: bytes) -> None:
    script = (
        "import os, signal, sys; from ggufc import __main__\n"
        "class Interrupt:\n"
        "    def find_spec(name, *rest):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt); sys.argv = ['ggufc', '--version']\n"
        f"signal.signal(signal.SIGINT, signal.{inherited}); __main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert (done.returncode, done.stdout[:14], done.stderr) == (code, out, b"interrupted\n" if code else b"")


def test_closed_streams(tmp_path: Path) -> None:
    (graph := tmp_path / "g.ggir").write_text("graph @g(T) {\n}\n")

    def shell(tail: str) -> tuple[int, str, str]:
        done = subprocess.run(f"{sys.executable} -m ggufc opt {tail}", shell=True, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert shell(f"{graph} >&-") == (2, "", "ggufc: error: stdout is closed, so there is nowhere to write the result to\n")
    assert shell(f"{graph} 2>&- <&-")[0] == 0
    code, _, message = shell("- <&-")
    assert code == 2 and "a graph starts with the word graph" in message
    assert shell("nothing.ggir 2>&-") == (2, "", "")


def test_a_result_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Also where Python writes unbuffered, and would drop what the system did not take at once."""
    script = (
        "import sys, click; from ggufc.cli.failures import run\n"
        "@click.command()\ndef command(): sys.stdout.write('x' * 30000)\n"
        "sys.exit(run(command, []))"
    )
    for unbuffered in ("", "1"):
        with (tmp_path / "out").open("wb") as out:
            done = subprocess.run(
                [sys.executable, "-c", script],
                stdout=out,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
            )
        assert done.returncode == 2 and b"larger than files may be here" in done.stderr, done


def test_what_is_no_file_is_written_to_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "whole")
    assert os.read(reader, 100) == b"whole"
    os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(GGUFError, match="no regular file"):
        GGUFWriter(pipe).finish()
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_text_that_is_not_utf8_is_refused_with_its_name(tmp_path: Path) -> None:
    (path := tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DriverError, match=r"latin\.txt is not UTF-8 text \(byte 3"):
        read_text(path)


def test_piped_output_has_no_colour_and_no_bars(tmp_path: Path) -> None:
    result = ggufc("doctor", env={**os.environ, "GGUFC_CACHE": str(tmp_path), "FORCE_COLOR": "1"})
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert "llvmlite" in result.stdout


def test_version() -> None:
    import ggufc as package

    assert ggufc("--version").stdout == f"ggufc, version {package.__version__}\n"


def test_the_package_offers_its_names_lazily() -> None:
    script = "import sys, ggufc; print('numpy' in sys.modules, 'compile' in dir(ggufc), ggufc.GgufcError.__name__)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False True GgufcError\n"
    package = importlib.import_module("ggufc")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_doctor_reports_what_is_missing(tmp_path: Path) -> None:
    """Without LLVM artifacts still run; doctor says so instead of failing, and its exit code tells."""
    script = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "from ggufc.cli import cli; from ggufc.cli.failures import run; sys.exit(run(cli, ['doctor']))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "problem: llvmlite does not load" in result.stderr and "compiling does not" in result.stderr
    assert "Traceback" not in result.stderr
