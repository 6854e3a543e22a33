"""Sides from what a user writes: ``target=x86-64-v3``, ``passes=canonicalize,cse``, ``interpreter``, a file of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from ggufc.codegen.options import CompileOptions
from ggufc.diff.sides import CodeSide, GraphSide, InterpreterSide, StoredSide
from ggufc.diff.stored import load, read_names
from ggufc.errors import DriverError
from ggufc.models.step import OPTIONS, Value

INTERPRETER = "interpreter"
FIELDS = {"target": "target", "passes": "pipeline", "type-k": "type_k", "type-v": "type_v"}
"""What ``KEY=VALUE`` may set of ``CompileOptions``."""
GRAPH_KEYS = {
    name.replace("_", "-"): name for name in OPTIONS if name not in ("type_k", "type_v", "embd_input", "n_ctx_seq", "swa_compress")
}
"""Options of the model's builder that it may set; the others follow from the session."""

_COARSE = {"q4_0": 0.3, "q4_1": 0.3, "iq4_nl": 0.3, "q5_0": 0.15, "q5_1": 0.15, "q8_0": 5e-2, "bf16": 5e-2}
_FREE = 2e-2

Compile = Callable[[CompileOptions], Path]
"""Makes the artifact for options."""


def side_of(source: Path, options: CompileOptions, interpreted: bool, activations: str, compiled: Compile) -> GraphSide:
    """A side that evaluates the model's graphs: generated code, or the interpreter."""
    passes = options.pipeline
    if interpreted:
        graph = "the unfused graph" if passes is None else f"after {passes or 'no passes'}"
        return InterpreterSide(source, options, f"interpreter, {graph}, activations {activations}", activations)
    if passes == "":
        raise DriverError("code is generated from fused graphs, so passes= alone is for the interpreter; add --against interpreter")
    told = [f"passes {passes}" if passes is not None else "default passes", f"K {options.type_k}, V {options.type_v}"]
    told += [f"{name} {value}" for name, value in sorted(options.builder.items())]
    return CodeSide(compiled(options), options, f"code for {options.target}, {', '.join(told)}")


def other_side(
    source: Path,
    options: CompileOptions,
    words: Sequence[str],
    interpreted: bool,
    activations: str,
    compiled: Compile,
    names: Path | None,
    steps: Sequence[str],
) -> GraphSide | StoredSide:
    """The right side: ``words`` are what ``--against`` was given, ``options`` those of the left side. Raises ``DriverError``."""
    changed, rest = options, []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            changed = _changed(changed, name, value)
        else:
            rest.append(word)
    if len(rest) > 1:
        raise DriverError(f"--against names two right sides, {rest[0]} and {rest[1]}; leave out one of them")
    if names is not None and (not rest or rest[0] == INTERPRETER):
        raise DriverError("--names is for tensors of another engine; give them with --against FILE.npz")
    if rest and rest[0] != INTERPRETER:
        path = Path(rest[0]).expanduser()
        if not path.exists():
            raise DriverError(f"--against {rest[0]}: that is no file, no folder, not {INTERPRETER} and no KEY=VALUE ({_keys()})")
        if changed is not options:
            raise DriverError(f"--against {rest[0]} are tensors, which no KEY=VALUE can change; leave out one of them")
        return StoredSide(load(path, read_names(names) if names else {}, steps), f"tensors of {path}")
    if changed is options and interpreted and not rest:
        raise DriverError("with --interpret both sides would be the same; say what differs, such as --against passes=canonicalize,cse,dce")
    if rest or not words:
        if changed.target != options.target:
            raise DriverError("--against target=... is about generated code, which the interpreter does not run; leave out one of them")
        unfused = not any(word.startswith("passes=") for word in words)
        return side_of(source, replace(changed, pipeline=None) if unfused else changed, True, activations, compiled)
    return side_of(source, changed, interpreted, activations, compiled)


def _keys() -> str:
    return ", ".join([*FIELDS, *GRAPH_KEYS])


def _changed(options: CompileOptions, name: str, value: str) -> CompileOptions:
    if not value and name != "passes":
        raise DriverError(f"--against {name}= has no value")
    if name in FIELDS:
        return replace(options, **{FIELDS[name]: value})
    key = GRAPH_KEYS.get(name)
    if key is None:
        raise DriverError(f"--against {name}={value}: there is no {name!r}; there are {_keys()}")
    return replace(options, builder={**options.builder, key: _value(name, value, OPTIONS[key])})


def _value(name: str, text: str, like: Value) -> Value:
    """``text`` as the kind of value the option has."""
    if isinstance(like, bool):
        if text.lower() in ("1", "true", "on", "yes", "0", "false", "off", "no"):
            return text.lower() in ("1", "true", "on", "yes")
        raise DriverError(f"--against {name}={text}: write on or off")
    if isinstance(like, int):
        try:
            return int(text)
        except ValueError:
            raise DriverError(f"--against {name}={text}: write a whole number") from None
    return text


def has_interpreter(*sides: GraphSide | StoredSide) -> bool:
    return any(isinstance(side, InterpreterSide) for side in sides)


def free_bound(left: GraphSide, right: GraphSide | StoredSide) -> float:
    """How far results may be apart where errors add up: what the coarser of two different cache types makes of them."""
    sides = [side.options for side in (left, right) if isinstance(side, (CodeSide, InterpreterSide))]
    types: Mapping[str, None] = dict.fromkeys(dtype for o in sides for dtype in (o.type_k, o.type_v))
    return max(_COARSE.get(dtype, _FREE) for dtype in types) if len(types) > 1 else _FREE
