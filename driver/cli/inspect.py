"""``ggufc inspect``: what a file holds and needs."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ggufc.cli import options

_HOLDERS_SHOWN = 4
_SIZE_SHOWN = 44
_ROWS_SHOWN = 12


@click.command()
@options.model
@click.option("--compiled", is_flag=True, help="Of a model: show its artifact, compiling it if needed.")
@click.option("--tensors", "show_tensors", is_flag=True, help="List the tensors.")
@click.option("--metadata", "show_metadata", is_flag=True, help="List all metadata keys.")
@click.option("-c", "--ctx-size", type=options.token_count, default=None, help="Context to size caches for (default: min(trained, 4096)).")
@click.option("-ub", "--ubatch-size", type=options.token_count, default=512, show_default=True, help="Micro-batch to size buffers for.")
@click.option("-v", "--verbose", is_flag=True, help="Of an artifact: also run a few steps and show which graphs could be reused.")
@click.option("--ptx", is_flag=True, help="Of an artifact with GPU code: registers, shared memory and occupancy of its kernels.")
@click.option("--verify", is_flag=True, help="Of an artifact: check the digest of every tensor, and nothing else.")
@click.option("--all", "everything", is_flag=True, help="Do not shorten lists.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    model: str,
    compiled: bool,
    show_tensors: bool,
    show_metadata: bool,
    ctx_size: int | None,
    ubatch_size: int,
    verbose: bool,
    ptx: bool,
    verify: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Show what MODEL holds.

    Of a model: architecture, tensors by type, hyperparameters. Of an artifact: sections, buffers and peak memory with their holders at the
    given -c and -ub, caches, reuse key, fixups, node budget and nodes, fusions, kernels and their sizes; with --verbose also how often a
    bound graph ran again in a prompt, some decoding, a shift of positions and a restored state, and why it did not; of GPU code the
    architectures and kernels, with --ptx what each takes, from NVIDIA's assembler.
    """
    from ggufc import inspection
    from ggufc.cli import terminal
    from ggufc.formats.gguf_reader import GGUFFile
    from ggufc.resolve import is_artifact, model_file

    path = options.artifact(model) if compiled else model_file(model, say=terminal.say, progress=None, quiet=not terminal.is_terminal())
    if verify:
        _verify(path, as_json)
        return
    with GGUFFile.open(path) as file:
        data = inspection.describe_model(file)
        if show_tensors or as_json:
            data["tensors"] = inspection.tensors(file)
        if show_metadata or as_json:
            data["metadata"] = {key: inspection.short_value(file.metadata[key]) for key in file.metadata}
    if is_artifact(path):
        extras = {key: data[key] for key in ("tensors", "metadata") if key in data}
        data = _artifact(path, ctx_size, ubatch_size, ptx) | extras | ({"reuse": _reuse(path)} if verbose else {})
    elif ptx:
        raise click.UsageError("--ptx is about artifacts with GPU code; compile the model with --target native,cuda:sm_90 first.")
    elif verbose:
        raise click.UsageError("--verbose runs an artifact; add --compiled to show that of a model.")
    if as_json:
        click.echo(json.dumps(data, indent=2, default=str))
        return
    rows = None if everything else _ROWS_SHOWN
    lines = _artifact_lines(data, rows) if data["kind"] == "artifact" else _model_lines(data)
    for line in [*lines, *_gpu_lines(data.get("gpu"), rows), *_extra_lines(data)]:
        click.echo(line)


def _verify(path: Path, as_json: bool) -> None:
    """Opening an artifact checks its manifest, code and references; here the tensors follow. Raises ``DriverError``, with ``as_json`` after
    the result.
    """
    from ggufc import verification
    from ggufc.cli import terminal
    from ggufc.errors import DriverError
    from ggufc.runtime import Artifact

    with Artifact.open(path, to_run=False) as artifact, terminal.progress() as progress:
        damaged = verification.damaged_tensors(artifact.file, progress)
        count = len(artifact.file.tensors) - 1
    if as_json:
        click.echo(json.dumps({"path": str(path), "tensors": count, "damaged": damaged}, indent=2))
    if damaged:
        raise DriverError(f"{path}: {len(damaged)} of {count} tensors are damaged ({_holders(damaged)}); compile the model again")
    if not as_json:
        click.echo(f"{path}: {count} tensors, manifest and code are as they were written")


def _artifact(path: Path, ctx_size: int | None, ubatch_size: int, ptx: bool) -> dict[str, Any]:
    from ggufc import gpu_inspection, inspection
    from ggufc.runtime import Artifact

    with Artifact.open(path, to_run=False) as artifact:
        trained = artifact.manifest.n_ctx_train or 4096
        data = inspection.describe_artifact(artifact, ctx_size or min(trained, 4096), ubatch_size)
        gpu = gpu_inspection.describe_gpu(artifact, ptx)
        return data if gpu is None else data | {"gpu": gpu}


def _reuse(path: Path) -> list[str]:
    from ggufc.reuse_trial import reuse_trial
    from ggufc.runtime import Artifact

    with Artifact.open(path) as artifact:
        return reuse_trial(artifact)


def _table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        yield (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths))).rstrip()


def _model_lines(data: dict[str, Any]) -> Iterator[str]:
    from ggufc.files import size_words

    yield f"model         {data['path']}" + (f" and {len(data['files']) - 1} more files" if len(data["files"]) > 1 else "")
    yield f"name          {data['name'] or '-'}"
    yield f"architecture  {data['arch'] or '-'} (GGUF version {data['gguf_version']})"
    yield f"size          {size_words(data['bytes'])}, {data['parameters'] / 1e6:.2f} M parameters"
    template = "with" if data["chat_template"] else "without"
    yield f"tokenizer     {data['tokenizer'] or '-'}, {data['vocabulary']} tokens, {template} chat template"
    yield "tensors by type"
    yield from _table(
        [(dtype, f"{t['tensors']} tensors", f"{t['parameters'] / 1e6:.2f} M", size_words(t["bytes"])) for dtype, t in data["types"].items()]
    )
    yield "hyperparameters"
    yield from _table([(key, str(value)) for key, value in data["hyperparameters"].items()])


def _artifact_lines(data: dict[str, Any], rows: int | None) -> Iterator[str]:
    from ggufc.files import size_words

    model, limits = data["model"], data["limits"]
    yield f"artifact      {data['path']} (format {data['format_version']}, ABI {data['abi']}, {data['generator']})"
    yield f"model         {data['source']['name']}, architecture {data['arch']}, {model['n_layer']} layers, {model['n_embd']} wide"
    yield f"source        sha256 {data['source']['sha256'] or 'unknown'}"
    yield f"code          {data['target']}, level {data['level']}: {' '.join(data['features']) or 'baseline'}"
    if data["fast_prefill"]:
        yield "prefill       fast: batches multiply float weights as bf16, so bits depend on how many tokens are evaluated together"
    yield f"size          {size_words(data['bytes'])}"
    yield from _table([(s["section"], str(s["count"]), size_words(s["bytes"])) for s in data["sections"]])
    entries = data["caches"]["entries"]
    yield f"caches        {len(entries)} for {limits['n_ctx']} cells, {_cache_types(entries)}: {size_words(data['caches']['bytes'])}"
    yield from _table(_cache_rows(entries))
    for program in data["programs"]:
        yield from _program_lines(program, limits, rows)
    kernels = data["kernels"]
    yield f"kernels       {len(kernels)}, {size_words(sum(k['bytes'] for k in kernels))}"
    yield from _table([(size_words(k["bytes"]), f"{k['launches']} launches", k["symbol"], k["signature"]) for k in kernels[:rows]])
    yield from _more(kernels, rows)
    for index, line in enumerate(data.get("reuse", ())):
        yield f"graph reuse   {line}" if not index else f"  {line}"


def _cache_rows(entries: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Caches of one kind in a row each: what they hold, values of a row, how many rows."""
    shapes: collections.Counter[tuple[str, ...]] = collections.Counter()
    for cache in entries:
        heads = f" in {cache['heads']} heads" if cache["heads"] > 1 else ""
        notes = [f"window {cache['window']}"] if cache["window"] else []
        notes += [f"transformed in blocks of {cache['hadamard']}"] if cache["hadamard"] else []
        shapes[cache["part"], cache["dtype"], f"{cache['row']} values{heads}", f"{cache['rows']} rows", ", ".join(notes)] += 1
    return [(f"{count} x", *shape) for shape, count in shapes.items()]


def _cache_types(entries: list[dict[str, Any]]) -> str:
    """``K q8_0, V f16``; of types that differ between layers ``K q8_0 x 2 + q4_0 x 28``."""
    texts = []
    for part in ("k", "v"):
        counts = collections.Counter(cache["dtype"] for cache in entries if cache["part"] == part)
        names = list(counts) if len(counts) == 1 else [f"{dtype} x {n}" for dtype, n in counts.items()]
        texts.append(f"{part.upper()} {' + '.join(names) or 'none'}")
    return ", ".join(texts)


def _program_lines(program: dict[str, Any], limits: dict[str, int], rows: int | None) -> Iterator[str]:
    from ggufc.files import size_words

    yield (
        f"program {program['name']}: {program['launches']} launches, {program['barriers']} barriers, "
        f"{program['nodes']} nodes (budget {program['node_budget']})"
    )
    yield f"  peak activations {size_words(program['activation_bytes'])} at -c {limits['n_ctx']} -ub {limits['n_ubatch']}, held by"
    slots = program["slots"]
    shown = [(size_words(s["bytes"]), f"= {_short(s['size'], rows)}", _holders(s["holders"])) for s in slots[:rows]]
    yield from _table(shown, "    ")
    yield from _more(slots, rows)
    if any(r["attention"] for r in program["reads"]):
        texts = [f"{size_words(r['attention'])} at {r['n_ctx']}{_scored(r)}" for r in program["reads"]]
        yield f"  attention reads per decoded token: {', '.join(texts)} cells"
    key = (
        ", ".join(f"{name} = {'unset' if value == '' else value}" for name, value in program["reuse_key"])
        or "nothing was observed: reused for every shape"
    )
    yield f"  reuse key: {key}"
    fixups = program["fixups"]
    yield f"  fixups: {len(fixups) or 'none'}"
    yield from _table([(f["node"], f["cache"], f"{f['step']} bytes per cell") for f in fixups[:rows]], "    ")
    yield from _more(fixups, rows)
    fusions = ", ".join(f"{name} {count}" for name, count in sorted(program["fusions"].items()) if count)
    yield f"  fusions: {fusions or 'none'}"


def _scored(reads: dict[str, Any]) -> str:
    from ggufc.files import size_words

    return f" (and {size_words(reads['scoring'])} to choose)" if reads["scoring"] else ""


def _gpu_lines(gpu: dict[str, Any] | None, rows: int | None) -> Iterator[str]:
    from ggufc.files import size_words

    if gpu is None:
        return
    yield "GPU code"
    yield from _table([(t["arch"], f"PTX {t['ptx_version']}", size_words(t["bytes"])) for t in gpu["targets"]])
    kernels = gpu["kernels"]
    yield f"GPU kernels   {len(kernels)}; assembler {gpu['assembler']}"
    for kernel in kernels[:rows]:
        yield f"  {kernel['symbol']}: {kernel['launches']} launches, {kernel['block']} threads, {kernel['when']}"
        for arch, u in kernel.get("usage", {}).items():
            taken = f"{u['registers']} registers, {u['shared']} bytes shared, {u['spilled']} spilled"
            yield f"    {arch}: {taken}, occupancy {100 * u['occupancy']:.0f} %"
    yield from _more(kernels, rows)


def _short(size: str, rows: int | None) -> str:
    """A buffer's size in words, cut to a readable column unless everything is asked for."""
    return size if rows is None or len(size) <= _SIZE_SHOWN else f"{size[: _SIZE_SHOWN - 4]} ..."


def _holders(names: list[str]) -> str:
    shown = ", ".join(names[:_HOLDERS_SHOWN])
    return shown if len(names) <= _HOLDERS_SHOWN else f"{shown} and {len(names) - _HOLDERS_SHOWN} more"


def _more(items: list[Any], rows: int | None) -> Iterator[str]:
    if rows is not None and len(items) > rows:
        yield f"    ... and {len(items) - rows} more (--all shows them)"


def _extra_lines(data: dict[str, Any]) -> Iterator[str]:
    from ggufc.files import size_words

    if "tensors" in data:
        yield "tensors"
        yield from _table([(t["name"], t["dtype"], "x".join(str(n) for n in t["ne"]), size_words(t["bytes"])) for t in data["tensors"]])
    if "metadata" in data:
        yield "metadata"
        yield from _table([(key, str(value)) for key, value in data["metadata"].items()])
