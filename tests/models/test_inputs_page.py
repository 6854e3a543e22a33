"""The page about inputs and resources names what exists."""

from __future__ import annotations

import re

import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir.ops.inputs import INPUT_KINDS
from ggufc.models import load_model
from support import ROOT, golden_cases

PAGE = (ROOT / "docs" / "runtime-inputs.md").read_text()


@pytest.mark.parametrize("name", sorted(INPUT_KINDS))
def test_every_kind_has_its_row(name: str) -> None:
    kind = INPUT_KINDS[name]
    settings = ", ".join(s for s in ("window", "ratio", "region") if getattr(kind, s)) or "-"
    assert f"| `{name}` | {kind.dtype} | {kind.doc} | {settings} |" in PAGE


def test_no_row_is_about_a_kind_that_does_not_exist() -> None:
    table = PAGE.split("## Kinds of inputs")[1].split("\n\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(INPUT_KINDS)


@pytest.mark.parametrize("case", golden_cases("openpangu-swa-dsa-ubatch", "deepseek4-split-decode"), ids=lambda case: case.name)
def test_resources_and_symbols_are_listed(case) -> None:  # type: ignore[no-untyped-def]
    with GGUFFile.open(case / "model.gguf") as file:
        model = load_model(file)
    for options in ({}, {"swa_compress": True}):
        for rows in {info.rows for info in model.caches(options)}:
            assert f"`{rows}`" in PAGE.split("## Resources")[1].split("## Symbols")[0]
    for symbol in model.build().symbols:
        assert f"`{symbol}`" in PAGE.split("## Symbols")[1]
