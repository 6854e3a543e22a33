"""Golden cases of the sparse families, compiled with all fusions and with attention unfused, and interpreted as built: logits, the distance
between the forms, and what the indexers choose.

Attention is unfused in two ways. Without any fusion a graph has no operators but those that builders emit (``hoist`` is none, it computes
products of weights at compile time, which have no kernels); with ``-no-fa`` everything else is fused. Way and feature level change from
case to case, so that each meets all kinds of layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufc.codegen.cpu.target import host_features, resolve
from ggufc.codegen.options import CompileOptions
from ggufc.diff import CodeSide, InterpreterSide
from ggufc.diff.compare import is_choice
from ggufc.diff.recording import Recording
from ggufc.diff.sides import GraphSide
from ggufc.runtime.logits import graph_options, run_steps, session_options, without_prediction
from support import artifact_of, check_golden, golden_cases

CASES = [case for case in golden_cases("glm-dsa-", "openpangu-", "deepseek4-") if case.name != "openpangu-chat"]
"""All but the one about text alone. Steps of layers that predict further ahead are left out: no other step depends on them."""

LARGE = ("openpangu-chunked",)
"""Scores of all heads, queries and cells at once are gigabytes: fused alone."""

INERT = (
    "deepseek4-dense", "deepseek4-kq8", "deepseek4-q8-weights", "glm-dsa-noop", "openpangu-nextn1", "openpangu-nextn3",
    "openpangu-prefill-window", "openpangu-swa-compress",
)  # fmt: skip
"""Cases whose indexer keeps all it is asked about; in every other case with an indexer it leaves something out."""

UNFUSED: dict[str, dict[str, Any]] = {
    "native": {"pipeline": "hoist,dce"},
    "x86-64-v3": {"pipeline": "hoist,dce", "target": "x86-64-v3"},
    "no-fa": {"builder": {"flash_attn": False}},
    "x86-64": {"pipeline": "hoist,dce", "target": "x86-64"},
}
FORMS = [name for name, form in UNFUSED.items() if host_features().issuperset(resolve(form.get("target", "native")).features)]

ATTENTION = ("soft_max", "flash_attn", "sparse_attn")

Chosen = dict[str, list[frozenset[int]]]
"""By name of the node, what each token chooses."""


@dataclass
class Form:
    """What one form of a case computes. ``chosen``: of every micro-batch. ``leaves_out``: whether a choice ever is a real one.
    ``attention``: the operators that weigh what is attended to.
    """

    logits: dict[str, np.ndarray] = field(default_factory=dict)
    chosen: list[Chosen] = field(default_factory=list)
    leaves_out: bool = False
    attention: set[str] = field(default_factory=set)


def evaluate(side: GraphSide, case: Mapping[str, Any], folder: Path) -> Form:
    out, settings = Form(), session_options(case["options"])
    if isinstance(side, InterpreterSide):
        settings.pop("compact_windows", None)  # it evaluates whole caches
    with side.open(settings) as session:
        steps = run_steps(session, case, folder)
        while True:
            side.start(())
            try:
                name, logits = next(steps)
            except StopIteration:
                return out
            if logits is not None:
                out.logits[name] = logits
            for recording in side.recordings:
                graph = recording.names.graph
                out.attention |= {n.op.name for n in graph.nodes if n.op.name in ATTENTION and ".kq" in n.name}
                out.chosen.append(dict(choices(recording)))
                listed = recording.env["E4" if "E4" in graph.symbols else "R"]
                sizes = [len(row) for rows in out.chosen[-1].values() for row in rows]
                out.leaves_out |= max(sizes, default=listed) < listed


def choices(recording: Recording) -> Iterator[tuple[str, list[frozenset[int]]]]:
    """Choices of indexers; entries below 0 stand for nothing."""
    for node in recording.names.results():
        if is_choice(node) and ".indexer." in node.name and node.name.endswith("top_k"):
            rows = recording.value(node)
            assert rows is not None, f"{node.name} never left its launch"
            yield node.name, [frozenset(i for i in row if i >= 0) for row in rows.reshape(-1, rows.shape[-1]).tolist()]


def check_choices(fused: Form, other: Form) -> None:
    """The same sets. Unfused choices are filled up with cells nobody sees where a token sees fewer than are kept."""
    for mine, theirs in zip(fused.chosen, other.chosen):
        assert mine.keys() == theirs.keys()
        for name, rows in mine.items():
            for token, (few, many) in enumerate(zip(rows, theirs[name], strict=True)):
                assert few <= many, f"{name} of token {token}: {sorted(few)} and {sorted(many)}"


def distance(a: Form, b: Form) -> float:
    assert b.logits
    return max(float(np.abs(a.logits[name] - logits).max()) for name, logits in b.logits.items())


@pytest.mark.parametrize(("case", "form"), [(c, FORMS[i % len(FORMS)]) for i, c in enumerate(CASES)], ids=lambda v: getattr(v, "name", v))
def test_golden(case: Path, form: str) -> None:  # S39, S42, S45, S55, S83, S137, S141, S149, S153
    spec, _ = without_prediction(json.loads((case / "case.json").read_text()))
    options, model = spec["options"], case / "model.gguf"
    types = {key: options[key] for key in ("type_k", "type_v") if key in options}

    def chosen(pipeline: str | None = None, target: str = "native", builder: Mapping[str, Any] = {}) -> CompileOptions:
        return CompileOptions(target, pipeline=pipeline, jobs=1, keep="stored", builder=graph_options(options) | builder, **types)

    def compiled(**more: Any) -> Form:
        return evaluate(CodeSide(artifact_of(model, chosen(**more)), chosen(**more), ""), spec, case)

    fused = compiled()
    check_golden(case, spec, fused.logits)
    has_indexer = any(fused.chosen)
    assert fused.leaves_out == (has_indexer and case.name not in INERT), "a choice of everything would show nothing"
    assert fused.attention and not fused.attention & {"soft_max"}
    if case.name in LARGE:
        return
    unfused = compiled(**UNFUSED[form])
    check_golden(case, spec, unfused.logits)
    assert unfused.attention == {"soft_max"}
    assert distance(fused, unfused) <= 5e-3
    check_choices(fused, unfused)
    built = evaluate(InterpreterSide(model, chosen(), ""), spec | {"steps": spec["steps"][:4]}, case)
    assert distance(fused, built) <= 5e-3
    check_choices(fused, built)
