"""Options that several commands share, spelled as llama.cpp spells them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ggufc.cli.flag_names import with_flags

if TYPE_CHECKING:
    from ggufc.runtime import Session

F = TypeVar("F", bound=Callable[..., Any])

MOST_TOKENS = 1 << 24
"""The largest context and batch that a ``Session`` takes."""
token_count = click.IntRange(1, MOST_TOKENS)


class OutputPath(click.Path):
    """A file to write, as a ``Path``. One that ends in a slash names a folder, which a ``Path`` would forget; that folder must be there."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.endswith("/") and not Path(value).is_dir():
            self.fail(f"there is no folder {value}; create it, or choose another file.", param, ctx)
        return super().convert(value, param, ctx)


output_file = OutputPath(dir_okay=False, path_type=Path)


def stack(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator out of several, in reading order."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def _either_model(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """``-m MODEL`` and the positional MODEL are the same thing; exactly one of them must be given."""
    positional = ctx.params.get("model")
    if value is not None and positional is not None:
        raise click.UsageError(f"The model is named twice: {positional!r} and -m {value!r}.")
    if value is None and positional is None:
        raise click.UsageError("Name a model: `MODEL` or `-m MODEL` (a file, an artifact, smollm2, gemma3-270m, hf:ORG/REPO).")
    if value is not None:
        ctx.params["model"] = value
    return value


# The argument is eager so that it is known when -m is looked at.
model: Callable[[F], F] = stack(
    click.argument("model", required=False, is_eager=True),
    click.option("-m", "--model", "model_option", metavar="MODEL", expose_value=False, callback=_either_model, help="The same as MODEL."),
)

cache_types: Callable[[F], F] = stack(
    click.option(
        "-ctk",
        "--cache-type-k",
        "type_k",
        default=None,
        metavar="TYPE",
        help="dtype of the K cache: f16 (default), f32, bf16, q8_0, q5_1 ... iq4_nl.",
    ),
    click.option("-ctv", "--cache-type-v", "type_v", default=None, metavar="TYPE", help="dtype of the V cache, likewise."),
)

_BUILDER = "ggufc.builder"


def _builder_option(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Options of the model's graph travel in the context: commands hand them on through ``builder_options``."""
    if value is not None:
        ctx.meta.setdefault(_BUILDER, {})[param.name] = value
    return value


def builder_options() -> dict[str, int | bool | str]:
    """What ``graph_options`` collected for the running command."""
    ctx = click.get_current_context(silent=True)
    return dict(ctx.meta.get(_BUILDER, {})) if ctx is not None else {}


def _graph_option(*names: str, **settings: Any) -> Callable[[F], F]:
    return click.option(*names, default=None, expose_value=False, callback=_builder_option, **settings)


def _layer_types(part: str, end: str) -> Callable[[F], F]:
    text = f"Another dtype of the {part.upper()} cache in the {end} N layers." if end == "first" else f"Likewise in the {end} N layers."
    return _graph_option(f"-ct{part}-{end}", f"--cache-type-{part}-{end}", f"type_{part}_{end}", metavar="TYPE,N", help=text)


graph_options: Callable[[F], F] = stack(
    *(_layer_types(part, end) for part in ("k", "v") for end in ("first", "last")),
    _graph_option(
        "-khad", "--k-cache-hadamard", "k_hadamard", is_flag=True, help="Store a quantised K cache under a Hadamard transform (less error)."
    ),
    _graph_option("-vhad", "--v-cache-hadamard", "v_hadamard", is_flag=True, help="Store a quantised V cache likewise."),
    _graph_option("-fa/-no-fa", "--flash-attn/--no-flash-attn", "flash_attn", help="Fuse attention over the cache (default)."),
    _graph_option("--mla", type=click.IntRange(0, 3), help="Latent attention: 0 decompressed, 1 to 3 (default) on cached latents."),
    _graph_option("--dsa/--no-dsa", "dsa", help="Attend only to what the model's indexer chooses (where the model leaves it open)."),
    _graph_option("--dsa-top-k", "dsa_top_k", type=click.IntRange(-1), help="Rows an indexer keeps; -1: as the model says."),
    _graph_option("-fidx/-no-fidx", "fidx", help="Let passes fuse an indexer's scores and choice (default)."),
    _graph_option(
        "-ctik", "--cache-type-idx-k", "idx_type_k", metavar="TYPE", help="dtype of indexer key caches: f16 (default), q8_0, ..."
    ),
)

_FAST_PREFILL = "ggufc.fast_prefill"


def _note_fast_prefill(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[_FAST_PREFILL] = value


def _whole_target(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """The target with what ``--fast-prefill``, which is eager, asked for."""
    return f"{value},fast-prefill" if ctx.meta.get(_FAST_PREFILL) else value


build: Callable[[F], F] = stack(
    cache_types,
    graph_options,
    click.option(
        "--target", default="native", show_default=True, metavar="LEVEL|FEATURES", callback=_whole_target, help="CPU to compile for."
    ),
    click.option(
        "--fast-prefill",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_note_fast_prefill,
        help="Multiply F32, F16 and BF16 weights in batches of 32 tokens or more as bf16 (AVX512-BF16): faster prompts, less precise. "
        "Gives up invariance: a token's bits then depend on how many are evaluated with it.",
    ),
)

threads: Callable[[F], F] = click.option(
    "-t", "--threads", type=click.IntRange(1, 256), default=None, help="Threads (default: physical cores available)."
)

batches: Callable[[F], F] = stack(
    click.option("-b", "--batch-size", type=token_count, default=2048, show_default=True, help="Most tokens handed over at once."),
    click.option("-ub", "--ubatch-size", type=token_count, default=512, show_default=True, help="Most tokens evaluated at once."),
    threads,
)

context: Callable[[F], F] = stack(
    click.option(
        "-c",
        "--ctx-size",
        type=click.IntRange(0, MOST_TOKENS),
        default=None,
        help="Tokens the KV cache holds; 0 = as trained. [default: min(trained, 4096)]",
    ),
    batches,
)

compact_windows: Callable[[F], F] = click.option(
    "--compact-windows", is_flag=True, help="Keep only the window of layers that have one: less memory, same text."
)

defrag: Callable[[F], F] = click.option(
    "-dt",
    "--defrag-thold",
    "defrag_threshold",
    type=click.FloatRange(max=1),
    default=-1.0,
    show_default=True,
    help="Gather the cells of the cache when more than this share of them is free; below 0: never.",
)

device: Callable[[F], F] = stack(
    click.option(
        "-ngl",
        "--n-gpu-layers",
        type=click.IntRange(0),
        default=None,
        metavar="N",
        help="Layers to run on a GPU, counted from the last; one more than there are: the output too. 0 needs no GPU.",
    ),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="auto|cpu|cuda[:N]",
        help="auto: the first GPU if -ngl asks for one and there is one; cuda: that GPU or an error, all layers without -ngl.",
    ),
)

expect_digest: Callable[[F], F] = click.option(
    "--expect-digest", default=None, metavar="SHA256", help="Refuse an artifact whose file has another SHA-256."
)

SAMPLING = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed")
"""Parameters of ``sampling``: fields of ``SamplingOptions``, whose defaults the help texts repeat."""

sampling: Callable[[F], F] = stack(
    click.option("--temp", type=click.FloatRange(0), default=None, help="Temperature; 0 takes the most likely token. [default: 0.8]"),
    click.option("--top-k", type=click.IntRange(0), default=None, help="Keep the k most likely tokens; 0 = all. [default: 40]"),
    click.option(
        "--top-p", type=click.FloatRange(0, 1), default=None, help="Keep the fewest tokens of this total probability. [default: 0.95]"
    ),
    click.option(
        "--min-p", type=click.FloatRange(0, 1), default=None, help="Keep tokens at least this likely relative to the best. [default: 0.05]"
    ),
    click.option(
        "--repeat-penalty", type=click.FloatRange(0, min_open=True), default=None, help="Penalise recent tokens; 1 = off. [default: 1.0]"
    ),
    click.option(
        "--repeat-last-n", type=click.IntRange(-1), default=None, help="Tokens the penalty looks back on; -1 = all. [default: 64]"
    ),
    click.option("-s", "--seed", type=int, default=None, help="Random seed; -1 takes a new one each time. [default: -1]"),
)

generating: Callable[[F], F] = stack(sampling, context, compact_windows, defrag, build, device, expect_digest)
"""Everything about a session that writes text."""

predict: Callable[[F], F] = click.option(
    "-n", "--predict", "n_predict", type=click.IntRange(-1), default=-1, help="Most tokens to generate; -1 (default): until the model ends."
)

output: Callable[[F], F] = click.option("-o", "--output", type=output_file, default=None, help="Write here instead of stdout.")


def sampling_options(given: dict[str, Any]) -> Any:
    """``SamplingOptions`` from the options of ``sampling``; what was not given keeps the runtime's default."""
    from ggufc.runtime import SamplingOptions

    chosen = {name: given[name] for name in SAMPLING if given[name] is not None}
    if chosen.get("seed", -1) < 0:
        chosen.pop("seed", None)
    return SamplingOptions(**chosen)


def artifact(
    model: str,
    type_k: str | None = None,
    type_v: str | None = None,
    target: str = "native",
    builder: dict[str, int | bool | str] | None = None,
) -> Path:
    """The artifact of a model reference, pulled and compiled as needed with progress on stderr; ``builder`` None: the command's own."""
    from ggufc.api import artifact_for
    from ggufc.cli import terminal

    with terminal.progress() as progress:
        return artifact_for(
            model,
            target=target,
            type_k=type_k,
            type_v=type_v,
            builder=builder_options() if builder is None else builder,
            say=lambda message: terminal.say(with_flags(message)),
            progress=progress,
            quiet=not terminal.is_terminal(),
        )


def _require_runnable(target: str) -> None:
    """Refuse code for a CPU this machine is not before it is compiled; ``native`` and artifacts need no look."""
    from ggufc.formats.cuda import split_target

    target = split_target(target)[0]
    if target == "native":
        return
    import platform

    from ggufc.codegen.cpu.target import resolve
    from ggufc.errors import DriverError
    from ggufc.runtime.cpuinfo import host_features

    wanted, machine = resolve(target), platform.machine()
    if wanted.arch != {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine):
        raise DriverError(f"--target {target} is code for {wanted.arch}, and this machine is {machine}; ggufc compile makes it for another")
    missing = sorted(set(wanted.features) - host_features())
    if missing:
        raise DriverError(
            f"--target {target} needs CPU features this machine lacks: {', '.join(missing)}; leave --target out to run here, or use "
            "ggufc compile for another machine"
        )


def open_session(model: str, given: dict[str, Any], **more: Any) -> Session:
    """A session for the parameters of ``build``, ``context``, ``device``, ``expect_digest``, ``compact_windows`` and ``defrag`` that
    ``given`` holds; ``more`` goes to ``Session``.
    """
    from ggufc import devices
    from ggufc.cli import terminal

    _require_runnable(given["target"])
    placement = devices.choose(given["device"], given["n_gpu_layers"], terminal.say)
    try:
        with terminal.progress() as progress:
            return _open(model, given, placement.target(given["target"]), {**placement.session_options(progress), **more})
    except BaseException:
        placement.close()
        raise


def _open(model: str, given: dict[str, Any], target: str, more: dict[str, Any]) -> Session:
    from ggufc import cache
    from ggufc.errors import DriverError
    from ggufc.runtime import Session

    path = artifact(model, given["type_k"], given["type_v"], target)
    digest = given.get("expect_digest")
    if digest and path != Path(model).expanduser():
        raise DriverError(
            f"--expect-digest is about artifacts, and {model} is a model; compile it first (ggufc compile) and give the artifact"
        )
    settings: dict[str, Any] = {
        "n_ctx": given["ctx_size"],
        "n_batch": given["batch_size"],
        "n_ubatch": given["ubatch_size"],
        "n_threads": given["threads"],
        "expect_digest": digest,
        **{name: given[name] for name in ("compact_windows", "defrag_threshold") if name in given},
        **more,
    }
    with cache.explaining(path):
        return Session(path, **settings)
