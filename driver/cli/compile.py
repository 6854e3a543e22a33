"""``ggufc compile``: a model file into an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from ggufc.cli import options
from ggufc.cli.flag_names import with_flags


@click.command()
@options.model
@click.option("-o", "--output", type=options.output_file, default=None, help="The artifact (default: NAME.ggufc here).")
@options.build
@click.option("--passes", default=None, metavar="A,B,...", help="Pass pipeline instead of the default one.")
@click.option(
    "--split-heads",
    multiple=True,
    metavar="LAYERS:HEADS",
    help="Divide the caches of layers (3, or 0-7) after so many KV heads: with -ngl these are on the GPU, the rest on the host.",
)
@click.option("-j", "--jobs", type=click.IntRange(1), default=None, help="Processes to compile with (default: one per core, at most 2).")
@click.option("--force", is_flag=True, help="Replace an existing output file.")
def command(
    model: str,
    output: Path | None,
    type_k: str | None,
    type_v: str | None,
    target: str,
    passes: str | None,
    split_heads: tuple[str, ...],
    jobs: int | None,
    force: bool,
) -> None:
    """Compile MODEL into one file that runs without a compiler.

    LEVEL is native (this machine), a feature level such as x86-64-v3, or a comma-separated list of CPU features. The file appears when it
    is complete; an interrupted compilation leaves nothing.
    """
    import ggufc
    from ggufc.cli import terminal
    from ggufc.errors import DriverError
    from ggufc.files import require_writable, size_words
    from ggufc.resolve import is_artifact, model_file

    with terminal.progress() as progress:
        source = model_file(model, say=terminal.say, progress=progress, quiet=not terminal.is_terminal())
    if is_artifact(source):
        raise DriverError(f"{source} is an artifact, which is compiled already; give the model it came from")
    output = output or Path(source.name.removesuffix(".gguf") + ".ggufc")
    if output.exists():
        if output.samefile(source):
            raise DriverError(f"{output} is the model itself; choose another -o")
        if not output.is_file():
            raise DriverError(f"{output} is no regular file; choose another -o")
        if not force:
            raise DriverError(f"{output} exists; choose another -o, or --force to replace it")
    if split_heads:
        from ggufc.passes import DEFAULT_PIPELINE
        from ggufc.passes.split_heads import with_split

        passes = with_split(passes or DEFAULT_PIPELINE, split_heads)
    require_writable(output)
    with terminal.progress() as progress:
        report = ggufc.compile(
            source,
            output,
            target=target,
            type_k=type_k or "f16",
            type_v=type_v or "f16",
            passes=passes,
            builder=options.builder_options(),
            jobs=jobs,
            progress=progress,
        )
    for note in report.notes:
        terminal.say(with_flags(f"note: {note}"))
    click.echo(
        f"{report.output}: {size_words(report.artifact_bytes)} ({report.artifact_bytes / report.source_bytes:.2f} x the model), "
        f"{report.kernels} kernels ({size_words(report.image_bytes)} of code), {report.launches} launches, "
        f"{report.seconds:.1f} s, peak memory {size_words(report.peak_rss)}"
    )
