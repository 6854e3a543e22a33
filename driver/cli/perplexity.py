"""``ggufc perplexity``: how well a model predicts a text."""

from __future__ import annotations

import json
import math
from typing import Any

import click

from ggufc.cli import options
from ggufc.cli.run import read_prompt


@click.command()
@options.model
@click.option("-f", "--file", type=click.Path(allow_dash=True), required=True, help="The text (- = stdin).")
@click.option("-c", "--ctx-size", type=click.IntRange(4, options.MOST_TOKENS), default=512, show_default=True, help="Tokens of a chunk.")
@click.option("--chunks", type=click.IntRange(1), default=None, help="Only the first chunks of the text.")
@click.option("-np", "--parallel", type=click.IntRange(1, 256), default=1, show_default=True, help="Chunks evaluated at once.")
@options.compact_windows
@options.batches
@options.build
@options.device
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(model: str, file: str, ctx_size: int, chunks: int | None, parallel: int, as_json: bool, **given: Any) -> None:
    """Measure MODEL's perplexity on a text, by llama.cpp's convention.

    The text is cut into chunks of -c tokens, each read from an empty cache; the second half of each chunk counts. Several chunks at once
    (-np) share the reading of the weights where a chunk alone does not fill a micro-batch; the figure is the same to the bit.
    """
    from ggufc.cli import terminal
    from ggufc.runtime.perplexity import Perplexity, perplexity

    text = read_prompt(None, file)
    sizes = {"ctx_size": parallel * ctx_size}
    with options.open_session(model, {**given, **sizes}, n_seq_max=parallel) as session, terminal.progress() as progress:

        def report(done: int, total: int, so_far: Perplexity) -> None:
            if progress:
                progress(f"perplexity {so_far.value:.4f}", done, total)

        result = perplexity(session, text, ctx_size, -1 if chunks is None else chunks, report, parallel)
    if as_json:
        row = {
            "perplexity": result.value if math.isfinite(result.value) else None,
            "error": result.error,
            "n_tokens": result.n_tokens,
            "n_chunks": result.n_chunks,
            "n_ctx": ctx_size,
        }
        click.echo(json.dumps(row))
    else:
        error = "" if result.error is None else f" +/- {result.error:.4f}"
        click.echo(f"perplexity {result.value:.4f}{error} over {result.n_tokens} tokens of {result.n_chunks} chunks")
