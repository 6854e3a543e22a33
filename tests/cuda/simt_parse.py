"""PTX text to functions of plain instructions: the subset LLVM emits for our kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from simt_memory import SimtError


@dataclass(frozen=True)
class Instruction:
    """``opcode`` with its dots, operands as text; ``predicate`` guards it (``negated``: runs where it is false)."""

    opcode: str
    operands: tuple[str, ...]
    predicate: str = ""
    negated: bool = False
    text: str = ""


@dataclass
class Function:
    name: str
    params: list[tuple[str, int]] = field(default_factory=list)
    """Names and sizes in bytes."""
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name -> (offset, size); gaps lie between them."""
    shared_size: int = 0
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    max_threads: int = 0


@dataclass
class Module:
    functions: dict[str, Function] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    target: str = ""


_ENTRY = re.compile(r"\.visible \.entry ([\w$]+)\(")
_PARAM = re.compile(r"\.param \.[bufs](\d+)(?: \.ptr[^,]*?)? ([\w$]+)")
_SHARED = re.compile(r"\.shared \.align (\d+) \.[busf](\d+) ([\w$]+)(?:\[(\d+)\])?;")
_GLOBAL = re.compile(r"\.global \.align \d+ \.b8 ([\w$]+)\[(\d+)\](?: = \{(.*)\})?;")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);")
_SCOPED = re.compile(r"\{ \.reg \.b\d+ (\w+); (mov.*;) \}")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_GAP = 64


def parse(text: str) -> Module:
    module = Module()
    function: Function | None = None
    header, begun = False, ""
    for raw in text.splitlines():
        line = raw.split("//")[0].strip()
        if not line:
            continue
        if line.startswith(".target"):
            module.target = line.split()[1].rstrip(",")
        found = _GLOBAL.search(line)
        if found and function is None:
            values = [int(v) for v in found[3].split(",")] if found[3] else []
            data = np.zeros(int(found[2]), np.uint8)
            data[: len(values)] = values
            module.constants[found[1]] = data
            continue
        found = _ENTRY.search(line)
        if found:
            function, header = Function(found[1]), True
            module.functions[function.name] = function
            continue
        if function is None:
            continue
        if header:
            for width, name in _PARAM.findall(line):
                function.params.append((name, int(width) // 8))
            if line.startswith(".maxntid"):
                function.max_threads = int(line.split()[1].rstrip(","))
            if line == "{":
                header = False
            continue
        if line == "}":
            function = None
            continue
        begun = f"{begun} {line}".strip()  # long instructions take several lines
        if begun.endswith((";", ":", "}")):
            _body_line(function, begun)
            begun = ""
    return module


def _body_line(function: Function, line: str) -> None:
    found = _SHARED.search(line)
    if found:
        align, name, size = int(found[1]), found[3], int(found[2]) // 8 * int(found[4] or 1)
        at = -(-function.shared_size // align) * align
        function.shared[name] = (at, size)
        function.shared_size = at + size + _GAP
        return
    if line.startswith((".reg", ".local", ".loc", ".pragma")):
        if line.startswith(".local"):
            raise SimtError(f"{function.name}: local memory is outside the subset ({line})")
        return
    if line.endswith(":"):
        function.labels[line[:-1]] = len(function.code)
        return
    scoped = _SCOPED.fullmatch(line)  # a half of a 64-bit register, the other going to a throw-away register
    if scoped:
        line = scoped[2].replace(scoped[1], "_")
    found = _INSTRUCTION.fullmatch(line)
    if not found:
        raise SimtError(f"{function.name}: cannot read the line {line!r}")
    negated, predicate, opcode, rest = found.groups()
    function.code.append(Instruction(opcode, tuple(_OPERAND.findall(rest)), predicate or "", bool(negated), line))
