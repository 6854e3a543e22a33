"""``ggufc cache``: what pulled models and compiled artifacts occupy."""

from __future__ import annotations

import fnmatch
import json

import click


@click.group()
def command() -> None:
    """List or remove pulled models and compiled artifacts.

    They live in $GGUFC_CACHE, else $XDG_CACHE_HOME/ggufc, else ~/.cache/ggufc.
    """


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(as_json: bool) -> None:
    """List everything in the cache.

    An artifact is `current`, `outdated` (its model or ggufc changed: it will not be used again) or `orphan` (its model is gone).
    """
    from ggufc.cache import age_words, entries
    from ggufc.files import size_words
    from ggufc.runtime.paths import cache_dir

    found = entries()
    if as_json:
        rows = [
            {"kind": e.kind, "path": str(e.path), "bytes": e.size, "modified": e.modified, "source": e.source, "state": e.state}
            for e in found
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for entry in found:
        state = f"  {entry.state}" if entry.state else ""
        click.echo(f"{entry.kind:9} {size_words(entry.size):>10}  {entry.name}  {age_words(entry)}{state}")
    click.echo(f"{len(found)} {'entry' if len(found) == 1 else 'entries'}, {size_words(sum(e.size for e in found))} in {cache_dir()}")


@command.command()
@click.argument("patterns", nargs=-1, metavar="NAME...")
@click.option("--stale", is_flag=True, help="Remove artifacts that will not be used again, and what runs interrupted an hour ago left.")
@click.option("--all", "everything", is_flag=True, help="Remove everything, models too.")
def rm(patterns: tuple[str, ...], stale: bool, everything: bool) -> None:
    """Remove entries by name; * and ? match as in a shell."""
    from ggufc.cache import entries, remove
    from ggufc.errors import DriverError
    from ggufc.files import size_words

    if not (patterns or stale or everything):
        raise click.UsageError("Say what to remove: names (see `ggufc cache ls`), --stale or --all.")
    found = entries()
    unmatched = [p for p in patterns if not any(fnmatch.fnmatchcase(e.name, p) for e in found)]
    if unmatched:
        raise DriverError(f"nothing in the cache is called {', '.join(unmatched)}; `ggufc cache ls` shows the names")
    chosen = [e for e in found if everything or (stale and e.stale) or any(fnmatch.fnmatchcase(e.name, p) for p in patterns)]
    for entry in chosen:
        remove(entry)
        click.echo(f"removed {entry.name}")
    click.echo(f"{len(chosen)} entries, {size_words(sum(e.size for e in chosen))} freed")
