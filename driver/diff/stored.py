"""Tensors of another run or engine: .npz files and folders of .npy files, and the names other engines use.

A key is ``STEP/NODE`` with the step's name in the case and the node's name in the graph (``ggufc dump --stage built``). The
micro-batches of a step after the first are ``STEP.1/NODE``, ``STEP.2/NODE``, ... A key without a step is about the first step, but a
step's name alone holds the logits of all its rows, as ``ggufc logits`` writes them. In a folder the key is the path of a .npy file
without its suffix. Arrays have numpy's order, that is ``ne`` reversed; where the number of elements is right, their order in memory is
all that counts.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ggufc.diff.recording import CacheRows
from ggufc.errors import DriverError
from ggufc.files import read_text
from ggufc.ir import Node

LOGITS = "logits"
_STEP = re.compile(r"(.*)\.(\d{1,6})\Z")


@dataclass
class StoredStep:
    """The tensors of one micro-batch by node name. ``whole``, of a step's first one: logits [rows, n_vocab] of all micro-batches."""

    arrays: dict[str, np.ndarray]
    caches: dict[str, CacheRows] = field(default_factory=dict)
    whole: np.ndarray | None = None

    def like(self, node: Node) -> np.ndarray | None:
        """The tensor stored for a node."""
        return self.arrays.get(node.name)


def load(path: Path, names: Mapping[str, str], steps: Sequence[str]) -> dict[str, list[StoredStep]]:
    """The micro-batches of every step in ``path``; ``names`` as ``read_names``, ``steps`` those of the case. Raises ``DriverError``."""
    found: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    whole: dict[str, np.ndarray] = {}
    for key, array in _arrays(path):
        if key in steps and array.ndim:
            whole[key] = array
            found.setdefault(key, {}).setdefault(0, {})
            continue
        step, slash, name = key.partition("/")
        if not slash:
            step, name = steps[0], key
        match = None if step in steps else _STEP.match(step)
        base, number = (match[1], int(match[2])) if match else (step, 0)
        if base not in steps:
            raise DriverError(f"{path}: {key} is about a step {base!r}, which the case does not have; its steps are {', '.join(steps)}")
        found.setdefault(base, {}).setdefault(number, {})[translate(name, names)] = array
    if not found:
        raise DriverError(f"{path} holds no tensors; keys are STEP/NODE, as ggufc diff --save writes them")
    out = {step: [StoredStep(parts.get(i, {})) for i in range(max(parts) + 1)] for step, parts in found.items()}
    for step, logits in whole.items():
        out[step][0].whole = logits
    return out


def divided(parts: Sequence[StoredStep], rows: Sequence[int]) -> list[StoredStep]:
    """The micro-batches of a step whose logits have ``rows``, each with its share of the logits that were stored for the whole step."""
    logits = parts[0].whole if parts else None
    if logits is None:
        return list(parts)
    out, at = [], 0
    for number, n in enumerate(rows):
        part = parts[number] if number < len(parts) else StoredStep({})
        # Another number of rows cannot be dealt out: the report then shows both shapes.
        mine = logits[at : at + n] if len(logits) == sum(rows) else logits
        out.append(StoredStep({LOGITS: mine} | part.arrays, part.caches))
        at += n
    return out


def _arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*.npy")):
                yield file.relative_to(path).with_suffix("").as_posix(), np.load(file, allow_pickle=False)
            return
        with np.load(path, allow_pickle=False) as archive:
            for key in archive.files:
                yield key, archive[key]
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DriverError(f"{path} is no .npz file or folder of .npy files: {error}") from None


def read_names(path: Path) -> dict[str, str]:
    """A JSON object of other names and ours; ``{il}`` in both stands for a layer: ``{"attn_norm-{il}": "blk.{il}.attn_norm"}``."""
    try:
        names = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DriverError(f"{path} is not JSON: {error}") from None
    if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
        raise DriverError(f'{path}: a map of names is a JSON object of texts, such as {{"attn_norm-{{il}}": "blk.{{il}}.attn_norm"}}')
    return names


def translate(name: str, names: Mapping[str, str]) -> str:
    """``name`` as we call it; itself where no entry fits."""
    if name in names:
        return names[name]
    for pattern, ours in names.items():
        if "{il}" in pattern:
            match = re.fullmatch(re.escape(pattern).replace(r"\{il\}", r"(\d+)"), name)
            if match:
                return ours.replace("{il}", match[1])
    return name


def key(step: str, number: int, name: str) -> str:
    """The key of a node's values in micro-batch ``number`` of a step."""
    return f"{step}.{number}/{name}" if number else f"{step}/{name}"
