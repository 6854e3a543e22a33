"""The page about the architecture lists every operator there is, and no other."""

from __future__ import annotations

import re

from ggufc.ir import OPS
from support import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_table_of_operators_is_complete() -> None:
    section = PAGE.split("## 3. IR")[1].split("## 4. ")[0]
    leaves, rest = section.split("Inputs (filled by the runtime")
    operators = rest.split("Operators (operands;")[1]
    first_cells = re.findall(r"^\| ((?:`[a-z_ ]+`(?:, )?)+) \|", leaves + operators, re.M)
    named = [name for cell in first_cells for name in re.findall(r"\w+", cell)]
    assert sorted(named) == sorted(OPS)
