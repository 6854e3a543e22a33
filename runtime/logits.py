"""Running the steps of a golden case and collecting their logits.

A case is a JSON object with ``options`` and ``steps`` (decode, cache operations); two engines that run the same case can be compared
array by array. Unknown options and steps are refused by name before anything runs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import RuntimeRefusal
from .session import Session

_OPTION_WORDS = (
    "n_ctx n_batch n_ubatch n_seq_max threads fa mla dsa dsa_top_k fidx type_k type_v idx_type_k graph_reuse swa_compress mtp "
    "mtp_heads cross_ctx dspark"
)
OPTIONS = frozenset(_OPTION_WORDS.split())
"""Options a case may have. ``fa``, ``mla`` and ``fidx`` choose among ways of computing the same thing; this engine has its own."""

_LATER_OPTIONS = ("mtp", "mtp_heads", "cross_ctx", "dspark")

_FIELDS: dict[str, tuple[str, ...]] = {
    "decode": ("tokens",),
    "decode_last": ("tokens",),
    "decode_embd": ("embd",),
    "causal": ("value",),
    "seq_rm": ("seq", "p0", "p1"),
    "seq_cp": ("src", "dst", "p0", "p1"),
    "seq_add": ("seq", "p0", "p1", "delta"),
    "seq_div": ("seq", "p0", "p1", "k"),
    "seq_keep": ("seq",),
    "clear": (),
    "state_save": ("file", "seq"),
    "state_load": ("file", "seq"),
}
"""Steps and the fields they need; cache operations may give them as ``args`` in this order."""

_LATER_WORDS = "mtp_warmup mtp_update mtp_draft mtp_rm mtp rows tgt trm ckpt_init ckpt_save ckpt_restore ckpt_discard draft dappend drm"
_LATER_STEPS = frozenset(_LATER_WORDS.split())
_PREDICTION_STEPS = frozenset(("mtp_warmup", "mtp_update", "mtp_draft", "mtp_rm"))
_PREDICTION_OPTIONS = frozenset(("mtp", "mtp_heads"))
"""Steps and options about a companion with a cache of its own, which reads the model's results and changes none of them."""


def session_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``Session`` among a case's options: sizes, threads, graph reuse. Cache types and the rest concern compilation."""
    names = {"n_ctx": "n_ctx", "n_batch": "n_batch", "n_ubatch": "n_ubatch", "n_seq_max": "n_seq_max", "threads": "n_threads"}
    found: dict[str, Any] = {names[key]: int(value) for key, value in options.items() if key in names}
    if "graph_reuse" in options:
        found["graph_reuse"] = bool(int(options["graph_reuse"]))
    if int(options.get("swa_compress", 0)):
        found["compact_windows"] = True
    return found


_GRAPH_OPTIONS: dict[str, type] = {"mla": int, "dsa": bool, "dsa_top_k": int, "fidx": bool, "idx_type_k": str}


def graph_options(options: Mapping[str, Any]) -> dict[str, int | bool | str]:
    """The options of a case that concern how the model's graph is built, as compilation takes them (``builder``)."""
    return {
        key: kind(int(options[key])) if kind is not str else str(options[key]) for key, kind in _GRAPH_OPTIONS.items() if key in options
    }


def without_prediction(case: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The case without the steps of layers that predict further ahead (MTP), and those steps in words, as ``"1 (mtp_warmup)"``.

    The other steps do not depend on them. Anything that is no well-formed case is left to ``check_case``.
    """
    steps, options = case.get("steps"), case.get("options", {})
    if not isinstance(steps, list) or not isinstance(options, Mapping):
        return case, []
    skipped = {i: step["op"] for i, step in enumerate(steps) if isinstance(step, Mapping) and _is_prediction(step.get("op"))}
    if not skipped or len(skipped) == len(steps):
        return case, []
    kept = [step for i, step in enumerate(steps) if i not in skipped]
    rest = {name: value for name, value in options.items() if name not in _PREDICTION_OPTIONS}
    return {**case, "options": rest, "steps": kept}, [f"{i} ({op})" for i, op in skipped.items()]


def _is_prediction(op: object) -> bool:
    return isinstance(op, str) and op in _PREDICTION_STEPS


def check_case(case: Mapping[str, Any]) -> None:
    """Refuse, by name, options and steps this version does not know or cannot run."""
    options = case.get("options", {})
    if not isinstance(options, Mapping) or not isinstance(case.get("steps"), list):
        raise RuntimeRefusal("the case needs an object 'options' and a list 'steps'")
    for name, value in options.items():
        if name not in OPTIONS:
            raise RuntimeRefusal(f"unknown option {name!r} in the case; known are {', '.join(sorted(OPTIONS))}")
        if name in _LATER_OPTIONS and value:
            raise RuntimeRefusal(f"option {name!r} of the case is not supported by this version")
        kind = (str, "a string") if "type" in name else ((bool, int), "an integer")
        if not isinstance(value, kind[0]):
            raise RuntimeRefusal(f"option {name!r} of the case is {value!r}, but it takes {kind[1]}")
    names: set[str] = set()
    for index, step in enumerate(case["steps"]):
        op = step.get("op") if isinstance(step, Mapping) else None
        op = op if isinstance(op, str) else repr(op)
        if op in _LATER_STEPS:
            raise RuntimeRefusal(f"step {index} ({op}) of the case is not supported by this version")
        if op not in _FIELDS:
            raise RuntimeRefusal(f"step {index} of the case is the unknown operation {op!r}; known are {', '.join(_FIELDS)}")
        missing = [name for name in _FIELDS[op] if name not in step]
        if not isinstance(step.get("args", []), list):
            raise RuntimeRefusal(f"step {index} ({op}) of the case: args is a list")
        if missing and not (op not in ("decode", "decode_last", "decode_embd") and len(step.get("args", ())) == len(_FIELDS[op])):
            raise RuntimeRefusal(f"step {index} ({op}) of the case lacks {', '.join(missing)}")
        _check_values(index, step)
        if op.startswith("decode"):
            name = str(step.get("name", f"step{index}"))
            if name in names:
                raise RuntimeRefusal(f"step {index} ({op}) of the case has the name {name!r} of an earlier step; its logits would be lost")
            names.add(name)


def _check_values(index: int, step: Mapping[str, Any]) -> None:
    """Cache operations take integers (``args`` also as strings), and ``seq`` is one or nested lists of them."""
    op = step["op"]
    given = [step[name] for name in _FIELDS[op]] if all(name in step for name in _FIELDS[op]) else step.get("args", ())
    if op.startswith("decode"):
        nested = [step.get("seq", 0)]
        for value in nested:
            nested.extend(value if isinstance(value, list) else ())
        given = [value for value in nested if not isinstance(value, list)]
    elif op.startswith("state"):
        given = given[1:]
    for value in given:
        if not isinstance(value, (bool, int)) and not (isinstance(value, str) and value.removeprefix("-").isdecimal()):
            raise RuntimeRefusal(f"step {index} ({op}) of the case has {value!r} where an integer is expected")


def run_case(session_factory: Callable[[dict[str, Any]], Session], case: Mapping[str, Any], folder: str | Path) -> dict[str, np.ndarray]:
    """Run a case's steps; returns f32 [rows, n_vocab] per step name.

    ``session_factory(options)`` makes the session for the case's options (see ``session_options``); it is closed at the end. Embeddings
    are read from .npy files in ``folder``.
    """
    check_case(case)
    with session_factory(dict(case.get("options", {}))) as session:
        return {name: logits for name, logits in run_steps(session, case, folder) if logits is not None}


def run_steps(session: Session, case: Mapping[str, Any], folder: str | Path) -> Iterator[tuple[str, np.ndarray | None]]:
    """Run a checked case's steps one at a time: (name, logits), None for cache operations."""
    states: dict[str, bytes] = {}
    for index, step in enumerate(case["steps"]):
        try:
            logits = _run_step(session, step, Path(folder), states)
        except RuntimeRefusal as refusal:
            raise RuntimeRefusal(f"step {index} ({step['op']}) of the case: {refusal}", soft=refusal.soft) from None
        yield str(step.get("name", f"step{index}")), logits


def _run_step(session: Session, step: Mapping[str, Any], folder: Path, states: dict[str, bytes]) -> np.ndarray | None:
    op = step["op"]
    if op in ("decode", "decode_last"):
        return session.decode(step["tokens"], step.get("pos"), step.get("seq", 0), "all" if op == "decode" else "last")
    if op == "decode_embd":
        rows = _embeddings(folder, str(step["embd"]))
        return session.decode(None, _text_positions(step.get("pos"), len(rows)), step.get("seq", 0), "all", embd=rows)
    given = [step[name] for name in _FIELDS[op]] if all(name in step for name in _FIELDS[op]) else step["args"]
    if op in ("state_save", "state_load"):
        _state(session, op, str(given[0]), int(given[1]), states)
        return None
    values = [int(v) for v in given]
    if op == "causal":
        session.causal = bool(values[0])
    elif op == "clear":
        session.reset()
    else:
        getattr(session, op)(*values)
    return None


def _state(session: Session, op: str, name: str, seq: int, states: dict[str, bytes]) -> None:
    """Save to or load from the "file" ``name``, which lives as long as the case runs; a negative ``seq`` is the whole context."""
    if op == "state_load":
        if name not in states:
            raise RuntimeRefusal(f"no earlier step saved a state to {name!r}")
        session.state_load(states[name], None if seq < 0 else seq)
        return
    file = io.BytesIO()
    session.state_save(file, None if seq < 0 else seq)
    states[name] = file.getvalue()


def _embeddings(folder: Path, name: str) -> np.ndarray:
    if Path(name).name != name:
        raise RuntimeRefusal(f"embeddings must lie beside the case; {name!r} is a path")
    try:
        rows = np.load(folder / name, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RuntimeRefusal(f"the embeddings {name} cannot be read: {error}") from None
    return np.asarray(rows, np.float32)


def _text_positions(pos: Any, rows: int) -> Any:
    """Positions of embeddings; four numbers per row (sections-major) are for rotations this version does not have."""
    if pos is not None and len(pos) != rows:
        raise RuntimeRefusal(
            f"{len(pos)} positions for {rows} embeddings: positions in sections (M-RoPE) are not supported by this version"
        )
    return pos
