"""Where golden cases lie, and Python without CUDA packages. Tests import it as ``support``: this folder is in pytest's ``pythonpath``."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUNDLED_GOLDEN = Path(__file__).resolve().parent / "golden"

WITHOUT_CUDA_PACKAGES = """\
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pycuda", "cuda", "cupy", "numba"): raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""
"""First lines of a program for which every package that speaks CUDA is missing."""


def golden_dirs() -> list[Path]:
    """The bundled subset, then the full set when it lies beside the repository or where GGUFC_GOLDEN points."""
    found = [BUNDLED_GOLDEN]
    for candidate in (os.environ.get("GGUFC_GOLDEN"), ROOT.parent / "shared" / "golden"):
        if candidate and Path(candidate).is_dir():
            found.append(Path(candidate))
            break
    return found


def golden_cases(*prefixes: str) -> list[Path]:
    """Folders of golden cases whose name starts with one of the prefixes; a case of the full set hides its bundled copy."""
    cases: dict[str, Path] = {}
    for root in golden_dirs():
        for path in sorted(root.iterdir()) if root.is_dir() else []:
            if (path / "case.json").is_file() and path.name.startswith(prefixes):
                cases[path.name] = path
    return [cases[name] for name in sorted(cases)]
