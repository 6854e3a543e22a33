"""What the documents say about the command line is what the command line does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from ggufc.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
CLI_TEXT = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def commands() -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        found.append((name, command))
        if isinstance(command, click.Group):
            found.extend((name, sub) for sub in command.commands.values())
    return found


def section(name: str) -> str:
    match = re.search(rf"^## {name}\b.*?(?=^## |\Z)", CLI_TEXT, re.MULTILINE | re.DOTALL)
    assert match, f"docs/cli.md has no section for {name}"
    return match[0]


@pytest.mark.parametrize(("name", "command"), commands(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_every_option_is_documented(name: str, command: click.Command) -> None:
    """In the command's own section, or in that of ``run``, which lists the shared ones; -m is explained at the top."""
    text = section(name) + (section("run") if name != "run" else "")
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name != "model_option":
            assert any(f"`{option}" in text or f"{option}`" in text for option in parameter.opts), f"{name}: {parameter.opts}"


def test_documented_long_options_exist() -> None:
    known = {"--debug", "--help"}
    for _, command in commands():
        for parameter in command.params:
            known.update(parameter.opts, parameter.secondary_opts)
    for document in ("docs/cli.md", "docs/security.md", "README.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for line in text.splitlines():
            if "pip install" in line and "ggufc run" not in line:
                continue
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line):
                assert option in known, f"{document}: {option}"


def test_sampling_defaults_in_help_and_documents_are_the_runtimes() -> None:
    from ggufc.runtime.sampling import SamplingOptions

    defaults = SamplingOptions()
    run = cli.get_command(click.Context(cli), "run")
    assert run is not None
    for name in ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n"):
        value = getattr(defaults, name)
        option = next(p for p in run.params if p.name == name)
        assert isinstance(option, click.Option) and option.help and option.help.endswith(f"[default: {value}]")
        assert re.search(rf"^\| `{option.opts[0]} \w+` \| {re.escape(str(value))} \|", CLI_TEXT, re.MULTILINE), name


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/cli.md", "docs/security.md"])
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links {target}"


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^    (pip install .*)$", text, re.MULTILINE) == [
        'pip install . && ggufc run smollm2 -p "Why is the sky blue?"',
        "pip install '.[test]' && pytest",
    ]


def test_doctor_lists_what_is_supported_as_the_readme_says(invoke) -> None:
    from ggufc.codegen.weights import known_formats
    from ggufc.models import registry

    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["architectures"].split(", ") == sorted(registry.ARCHITECTURES)
    assert set(report["weights"].split()) == set(known_formats())
    assert report["problems"] == []


def test_the_packages_to_install_are_the_packages_there_are() -> None:
    """A package that is named too early breaks every installation that is not editable; one forgotten breaks it on import."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    rooms = tool["package-dir"]
    folders = {
        name: ROOT / rooms[name] if name in rooms else ROOT / rooms[name.rpartition(".")[0]] / name.rpartition(".")[2]
        for name in tool["packages"]
    }
    for name, folder in folders.items():
        assert (folder / "__init__.py").is_file(), f"{name} has no folder with an __init__.py"
    for room in rooms.values():
        for file in (ROOT / room).rglob("__init__.py"):
            assert file.parent in folders.values(), f"{file.parent.relative_to(ROOT)} is not in pyproject.toml's list of packages"


def test_the_python_document_runs_as_it_stands(text_model: Path, tmp_path: Path) -> None:
    """Its blocks are one program; what it claims about bits is asserted in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
    assert len(blocks) >= 5
    shutil.copy(text_model, tmp_path / "model.gguf")
    (tmp_path / "document.py").write_text("\n".join(blocks))
    run = subprocess.run([sys.executable, "document.py"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
