"""The Python API: ``compile`` a model, ``load`` a model or artifact as a session.

Both take what the command line takes: a path, an alias (``smollm2``, ``gemma3-270m``), ``hf:ORG/REPO[:FILE]`` or an address.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufc import cache, devices
from ggufc.errors import DriverError
from ggufc.files import Progress
from ggufc.formats.cuda import split_target
from ggufc.resolve import is_artifact, model_file
from ggufc.runtime.errors import require_integer

if TYPE_CHECKING:
    from ggufc.codegen.compile import CompileReport
    from ggufc.runtime import Session

Say = Callable[[str], None]


def _require_texts(**values: object) -> None:
    """Raise ``DriverError`` unless each value is a text, or None."""
    for name, value in values.items():
        if not isinstance(value, str | None):
            raise DriverError(f"{name} is {value!r}; give a text")
    if values.get("target") == "":
        raise DriverError("--target is empty; leave it out for this machine, or name a level")


def _require_path(name: str, value: object) -> None:
    if not isinstance(value, str | Path):
        raise DriverError(f"{name} is {value!r}; give a path")


def _options(builder: object) -> dict[str, int | bool | str]:
    if builder is not None and not isinstance(builder, Mapping):
        raise DriverError(f"builder is {builder!r}; give a mapping from names of options to values")
    for name, value in (builder or {}).items():
        if not isinstance(value, int | str):
            raise DriverError(f"builder option {name!r} is {value!r}; give a number, a text, or True or False")
    return dict(builder or {})


def compile(
    source: str | Path,
    output: str | Path,
    *,
    target: str = "native",
    type_k: str = "f16",
    type_v: str = "f16",
    passes: str | None = None,
    builder: Mapping[str, int | bool | str] | None = None,
    jobs: int | None = None,
    keep: str = "",
    progress: Progress | None = None,
) -> CompileReport:
    """Compile a GGUF model into the artifact ``output``, which appears whole or not at all.

    ``target`` is ``native``, a feature level or a list of CPU features, with ``cuda:sm_90`` items for GPU code; ``type_k`` and ``type_v``
    are the dtypes of the KV cache; ``passes`` replaces the pass pipeline; ``builder`` holds options of the model's graph (``{"mla": 0}``);
    ``jobs`` bounds the processes used; ``keep`` names intermediate results that become outputs (``ggufc.codegen.keep``). Raises
    ``GgufcError``.
    """
    from ggufc.codegen.compile import CompileOptions, compile_file

    _require_path("source", source)
    _require_path("output", output)
    _require_texts(target=target, type_k=type_k, type_v=type_v, passes=passes, keep=keep)
    if jobs is not None:
        require_integer("jobs", jobs, 1, 1 << 16)
    options = CompileOptions(target=target, type_k=type_k, type_v=type_v, pipeline=passes, jobs=jobs, builder=_options(builder), keep=keep)
    return compile_file(model_file(str(source)), Path(output), options, progress)


def _fetch(
    source: Path, options: dict[str, str], builder: dict[str, int | bool | str], jobs: int | None, say: Say, progress: Progress | None
) -> Path:
    """The artifact of a model file from the cache, compiled if need be. ``options`` is text: it is part of the cache key."""

    def build(output: Path) -> None:
        from ggufc.codegen.compile import CompileOptions, compile_file

        say(f"compiling {source.name}")
        compile_options = CompileOptions(
            target=options["target"],
            type_k=options["type_k"],
            type_v=options["type_v"],
            pipeline=options["passes"] or None,
            jobs=jobs,
            builder=builder,
            keep=options.get("keep", ""),
        )
        for note in compile_file(source, output, compile_options, progress).notes:
            say(f"note: {note}")

    return cache.fetch(source, options, build, waiting=lambda: say(f"another process is compiling {source.name}, waiting for it"))


def artifact_for(
    reference: str,
    *,
    target: str = "native",
    type_k: str | None = None,
    type_v: str | None = None,
    passes: str | None = None,
    builder: Mapping[str, int | bool | str] | None = None,
    jobs: int | None = None,
    keep: str = "",
    say: Say = lambda _: None,
    progress: Progress | None = None,
    quiet: bool = True,
) -> Path:
    """The artifact behind any model reference: an artifact itself, or a model compiled to the cache.

    ``type_k`` and ``type_v`` (default f16) and ``builder`` are fixed at compile time; asking an existing artifact for other ones is a
    ``DriverError``.
    """
    _require_texts(target=target, type_k=type_k, type_v=type_v, passes=passes, keep=keep)
    builder = _options(builder)
    path = model_file(reference, say=say, progress=progress, quiet=quiet)
    options = {"target": target, "type_k": type_k or "f16", "type_v": type_v or "f16", "passes": passes or ""}
    options |= {f"builder.{key}": repr(value) for key, value in builder.items()}
    if keep:
        options["keep"] = keep
    if _is_native(target):
        from ggufc.runtime.cpuinfo import host_features

        options["host"] = ",".join(sorted(host_features()))
    # Looking into the cache first spares a known model the reading of its header.
    known = cache.artifact_path(path, options)
    if cache.is_whole(known):
        return known
    # A file that calls itself an artifact is checked once, when the session opens it.
    if path.suffix == cache.SUFFIX or is_artifact(path):
        _check_options(path, target, {"k": type_k, "v": type_v}, builder)
        return path
    return _fetch(path, options, builder, jobs, say, progress)


def _is_native(target: str) -> bool:
    """Whether a target text means the CPU it is read on: ``native``, or nothing but what is asked of any CPU."""
    items = {item.strip() for item in split_target(target)[0].split(",")} - {"fast-prefill"}
    return not items or "native" in items


def _check_options(artifact: Path, target: str, types: Mapping[str, str | None], builder: Mapping[str, int | bool | str]) -> None:
    target, gpus = split_target(target)
    if gpus:
        from ggufc.codegen.nvptx.target import resolve as resolve_gpu

        for item in gpus:
            resolve_gpu(item)
    native = target == "native"
    if native and not any(types.values()) and not builder:
        return
    from ggufc.codegen.cpu.target import resolve
    from ggufc.models.step import OPTIONS, checked
    from ggufc.runtime import Artifact

    # A name that exists nowhere is not what the model should be compiled again with.
    wanted_types = checked({f"type_{part}": dtype for part, dtype in types.items() if dtype})
    builder = checked(builder)
    features = None if native else set(resolve(target).features)
    with Artifact.open(artifact) as opened:
        manifest = opened.manifest
    if features is not None and features != set(manifest.features):
        raise DriverError(f"{artifact} holds code for {manifest.level}, not {target}; compile the model again with --target {target}")
    have = {"type_k": manifest.type_k, "type_v": manifest.type_v}
    for option, dtype in wanted_types.items():
        if dtype != have[option]:
            part = option.removeprefix("type_")
            raise DriverError(
                f"{artifact} has a {have[option]} {part.upper()} cache, not {dtype}; compile the model again with -ct{part} {dtype}"
            )
    for name, value in builder.items():
        compiled = manifest.options.get(f"builder.{name}", repr(OPTIONS.get(name)))
        if compiled != repr(value):
            raise DriverError(
                f"{artifact} was compiled with builder option {name!r} {_option_words(name, compiled)}, not "
                f"{_option_words(name, repr(value))}; compile the model again to change it"
            )


def _option_words(name: str, value: str) -> str:
    """The ``repr`` of a builder option's value as a user would say it."""
    if name == "dsa_top_k" and value == "0":
        return "as the model says"
    return {"True": "on", "False": "off", "''": "unset"}.get(value, value.strip("'"))


def load(
    source: str | Path,
    *,
    target: str = "native",
    type_k: str | None = None,
    type_v: str | None = None,
    builder: Mapping[str, int | bool | str] | None = None,
    progress: Progress | None = None,
    device: str = "auto",
    n_gpu_layers: int | None = None,
    **session_options: Any,
) -> Session:
    """Open a model or artifact as a ``Session``; a model file is compiled to the cache first.

    ``n_gpu_layers`` layers, counted from the last, run on an NVIDIA GPU (the output too with one more than there are); ``device`` is
    ``auto`` (the first GPU if layers are asked for and there is one), ``cpu``, ``cuda`` or ``cuda:N``. ``session_options`` (``n_ctx``,
    ``n_threads``, ``expect_digest``, ...) are those of ``Session``. Raises ``GgufcError``.
    """
    from ggufc.runtime import Session

    _require_path("source", source)
    placement = devices.choose(device, n_gpu_layers, lambda message: warnings.warn(message, RuntimeWarning, stacklevel=3))
    try:
        wanted = placement.target(target)
        artifact = artifact_for(str(source), target=wanted, type_k=type_k, type_v=type_v, builder=builder, progress=progress)
        with cache.explaining(artifact):
            return Session(artifact, **placement.session_options(progress), **session_options)
    except BaseException:
        placement.close()
        raise
