"""Whole models as AArch64 code: compiled here, run in an emulator, compared with the logits of another engine."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import aarch64
from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.codegen.cpu.target import resolve
from ggufc.formats import abi
from ggufc.formats.errors import ArtifactError
from ggufc.runtime import artifact as artifacts
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.executor import Executor
from ggufc.runtime.logits import graph_options, run_case, session_options
from ggufc.runtime.session import Session

GOLDEN = Path(__file__).resolve().parent / "golden"
_FIRST = 0x10000000
_PAGE = 4096


def compiled(case: str, level: str, folder: Path) -> Path:
    output = folder / f"{case}.ggufc"
    options = json.loads((GOLDEN / case / "case.json").read_text())["options"]
    types = {key: options[key] for key in ("type_k", "type_v") if key in options}
    compilation = CompileOptions(target=level, jobs=1, builder=graph_options(options), **types)
    compile_file(GOLDEN / case / "model.gguf", output, compilation)
    return output


def test_code_for_aarch64_is_made_here_and_refused_here(tmp_path):
    path = compiled("llama-gqa-tied", "aarch64-dotprod", tmp_path)
    with pytest.raises(ArtifactError, match="the code is for aarch64, this machine is x86_64"):
        Artifact.open(path)
    with Artifact.open(path, to_run=False) as artifact:
        assert artifact.manifest.level == "aarch64-dotprod"


class Emulator:
    """Evaluates micro-batches in the emulator: copies what the driver functions reach, and back what they write."""

    def __init__(self, level: str) -> None:
        self.target = resolve(level)
        self.calls = 0

    def run(self, executor: Executor, segment: int) -> None:
        """As ``Executor.run``; one thread."""
        team, weights = executor.team, [place for (kind, _), place in executor._places.items() if kind == "weight"]
        words = [executor._args, executor._table, executor.params, executor._exec, executor._tiles]
        written = [executor._arena, executor.caches.memory, executor._counters, executor._claims, team._pool_memory, team._scratch]
        written += executor._keep
        places = [(w.ctypes.data, w.nbytes) for w in words] + [(r.base, r.size + 64) for r in written]
        places += [(executor.image.base, executor.image.size), *weights]
        guest, at = {}, _FIRST
        for base, size in places:
            guest[base] = at + base % _PAGE
            at += -(-(base % _PAGE + size) // _PAGE) * _PAGE + _PAGE

        def moved(word: int) -> int:
            """An address here as an address there; other numbers stay."""
            return next((guest[base] + word - base for base, size in places if base <= word < base + size), word)

        memory, results = [], []
        pointers = {w.ctypes.data for w in words} | {team._pool_memory.base}
        for base, size in places:
            data = ctypes.string_at(base, size)
            if base in pointers:
                whole = np.frombuffer(data[: size // 8 * 8], np.int64)
                data = np.array([moved(int(v)) for v in whole], np.int64).tobytes() + data[size // 8 * 8 :]
            wanted = any(base == r.base for r in written) and base != team._pool_memory.base
            if wanted:
                results.append((base, size))
            padded = bytes(base % _PAGE) + data
            code = base == executor.image.base
            memory.append(aarch64.Memory(guest[base] // _PAGE * _PAGE, padded, executable=code, wanted=wanted))
        evaluate = guest[executor.image.base] + executor.artifact.manifest.drivers["ggufc_eval"]
        record = guest[executor._exec.ctypes.data] + executor._execs[segment] - executor._exec.ctypes.data
        call = aarch64.Call(evaluate, (guest[team._pool_memory.base], record))
        for (base, size), data in zip(results, aarch64.execute(self.target, memory, [call])):
            ctypes.memmove(base, data[base % _PAGE :], size)
        team.pool[abi.POOL_EPOCH] += 1
        self.calls += 1


@pytest.fixture
def emulator(monkeypatch, request):
    """Sessions of this test run AArch64 code."""
    if not aarch64.QEMU:
        pytest.skip(aarch64.REASON)
    emulator = Emulator(request.param)
    monkeypatch.setattr(artifacts, "host_features", lambda: frozenset(emulator.target.features))
    monkeypatch.setattr(artifacts.os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    monkeypatch.setattr(Executor, "run", lambda executor, segment: emulator.run(executor, segment))
    return emulator


@pytest.mark.parametrize(
    ("emulator", "case"),
    [
        ("aarch64", "llama-gqa-tied"),
        ("aarch64-dotprod", "quant-q4_k"),
        ("aarch64-dotprod", "glm-dsa-topk8"),
        ("aarch64-i8mm", "llama-moe-split"),
    ],
    indirect=["emulator"],
)
def test_logits_are_those_of_another_engine(emulator, case, tmp_path):
    spec = json.loads((GOLDEN / case / "case.json").read_text())
    path = compiled(case, emulator.target.level, tmp_path)
    got = run_case(lambda o: Session(path, **session_options({**o, "threads": 1})), spec, GOLDEN / case)
    assert emulator.calls
    for name, logits in got.items():
        want = np.load(GOLDEN / case / f"{name}.npy")
        assert (np.abs(logits - want) - spec["rtol"] * np.abs(want)).max() <= spec["atol"], name
