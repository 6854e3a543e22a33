"""``ggufc logits``: the steps of a golden case, for comparison with other engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufc.cli import options

if TYPE_CHECKING:
    from ggufc.runtime import Session


@click.command()
@click.argument("model")
@click.argument("case_file", metavar="CASE.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=options.output_file, required=True, help="The .npz file to write.")
@click.option("-t", "--threads", type=click.IntRange(1, 256), default=None, help="Threads, instead of the case's.")
@click.option("-ub", "--ubatch-size", type=options.token_count, default=None, help="Micro-batch, instead of the case's.")
@options.build
@options.device
def command(
    model: str,
    case_file: Path,
    output: Path,
    threads: int | None,
    ubatch_size: int | None,
    type_k: str | None,
    type_v: str | None,
    target: str,
    n_gpu_layers: int | None,
    device: str,
) -> None:
    """Run the steps of CASE.json with MODEL and store one array of logits per step name in OUT.npz.

    A case has `options` (n_ctx, n_ubatch, threads, type_k, ...) and `steps` (decode, decode_last, decode_embd, seq_rm, ...). What this
    version does not know is refused by name; steps of layers that predict further ahead (mtp_warmup, mtp_draft, ...) are skipped and
    named. Cache types come from the case unless -ctk and -ctv say otherwise.
    """
    from ggufc import devices
    from ggufc.cli import terminal
    from ggufc.files import refuse_to_overwrite, write_npz
    from ggufc.runtime import Session
    from ggufc.runtime.logits import check_case, graph_options, run_case, session_options

    case = read_case(case_file)
    check_case(case)
    wanted = case.get("options", {})
    builder = graph_options(wanted) | options.builder_options()
    named = Path(model).expanduser()
    refuse_to_overwrite(output, case_file, *([named] if named.exists() else []))
    types = (type_k or wanted.get("type_k"), type_v or wanted.get("type_v"))
    with devices.choose(device, n_gpu_layers, terminal.say) as place:
        artifact = options.artifact(model, *types, place.target(target), builder)

        def make_session(case_options: dict[str, Any]) -> Session:
            settings = session_options(case_options)
            if threads is not None:
                settings["n_threads"] = threads
            if ubatch_size is not None:
                settings["n_ubatch"] = ubatch_size
            return Session(artifact, **settings, **place.session_options(close=False))

        arrays = run_case(make_session, case, case_file.parent)
    write_npz(output, arrays)
    for name, array in arrays.items():
        click.echo(f"{name}: {'x'.join(str(n) for n in array.shape)} {array.dtype}")


def read_case(path: Path) -> Mapping[str, Any]:
    """The case as a JSON object, without steps of layers that predict further ahead, which are named on stderr.

    Raises ``DriverError`` for anything else.
    """
    from ggufc.cli import terminal
    from ggufc.errors import DriverError
    from ggufc.files import read_text
    from ggufc.runtime.logits import without_prediction

    try:
        case = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DriverError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise DriverError(f"{path} is nested too deeply to be a case") from None
    if not isinstance(case, dict):
        raise DriverError(f"{path}: a case is a JSON object with options and steps, not a {type(case).__name__}")
    case, skipped = without_prediction(case)
    if skipped:
        terminal.say(f"layers that predict further ahead are not supported: of the case, these steps are skipped: {', '.join(skipped)}")
    return case
