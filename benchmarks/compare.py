"""Compare the speed of ggufc with native builds of llama-bench on one model.

    python benchmarks/compare.py -m model.gguf --llama-bench ik=/path/to/llama-bench -t 1,2 -p 512 -n 128 -d 128,8192 --rounds 5

Runs alternate: in every round each engine measures each test once (after its own warm-up), so that a machine that slows down slows
all of them. The table shows medians over the rounds and ggufc's speed relative to each peer. With several depths (``-d``: tokens in the
cache before a test) a second table shows each engine's speed at the larger depths relative to the smallest. Nothing is installed or
built; peers must exist. Both llama.cpp's and ik_llama.cpp's llama-bench work: only ``-m -p -n -t -r -o json`` are used, and ``-d`` where
it is asked for; ``--peer-args`` adds more.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Key = tuple[str, int]
"""(test, threads), such as ("pp512", 2) or ("tg128 @ d8192", 1)."""


@dataclass(frozen=True)
class Sizes:
    """What to measure, as llama-bench's lists of numbers."""

    n_prompt: str
    n_gen: str
    n_depth: str = "0"

    def options(self) -> list[str]:
        """Older programs have no ``-d``: it is left out where there is nothing to ask for."""
        return ["-p", self.n_prompt, "-n", self.n_gen, *(["-d", self.n_depth] if self.n_depth != "0" else [])]


def at_depth(name: str, depth: object) -> str:
    return f"{name} @ d{depth}" if depth else name


@dataclass(frozen=True)
class Engine:
    """A program that speaks llama-bench's options and JSON."""

    name: str
    command: tuple[str, ...]

    def measure(self, model: str, sizes: Sizes, threads: int, timeout: float) -> Iterator[tuple[Key, float]]:
        """Tokens per second of each test, one repetition each. Raises SystemExit with the program's own last words."""
        command = [*self.command, "-m", model, *sizes.options(), "-t", str(threads), "-r", "1", "-o", "json"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"{self.name}: {error}") from error
        if done.returncode:
            raise SystemExit(
                f"{self.name}: {shlex.join(command)} ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
            )
        for row in parse_rows(done.stdout):
            name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
            yield (at_depth(name, row.get("n_depth")), threads), float(row["avg_ts"])


def parse_rows(text: str) -> list[dict[str, object]]:
    """The JSON array in a program's output; some builds print log lines before it."""
    start = text.find("[\n")
    try:
        rows = json.loads(text[start:] if start >= 0 else text)
    except ValueError:
        raise SystemExit(f"no JSON in the output: {text[:200]!r}") from None
    # A test of both kinds at once (pp+tg) has no counterpart here.
    return [row for row in rows if bool(row["n_prompt"]) != bool(row["n_gen"])]


def compare(
    engines: Sequence[Engine], model: str, sizes: Sizes, threads: Sequence[int], rounds: int, timeout: float
) -> dict[Key, dict[str, list[float]]]:
    """Speeds by test and engine; the engines' order is reversed in every other round."""
    speeds: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for index in range(rounds):
        for count in threads:
            for engine in engines if index % 2 == 0 else engines[::-1]:
                print(f"round {index + 1}/{rounds}, {count} threads: {engine.name}", file=sys.stderr)
                for key, speed in engine.measure(model, sizes, count, timeout):
                    speeds[key][engine.name].append(speed)
    return speeds


def table(speeds: dict[Key, dict[str, list[float]]], names: Sequence[str]) -> str:
    """Markdown: medians in tokens per second (smallest to largest), and ratios of the first engine to the others."""
    own, *peers = names
    lines = ["| test | threads | " + " | ".join([*names, *(f"{own} / {peer}" for peer in peers)]) + " |"]
    lines.append("|" + "---|" * (2 + len(names) + len(peers)))
    for (test, threads), by_engine in sorted(speeds.items(), key=lambda item: (item[0][0], item[0][1])):
        medians = {name: statistics.median(by_engine[name]) for name in names if by_engine.get(name)}
        cells = [
            f"{medians[name]:.1f} ({min(by_engine[name]):.1f}-{max(by_engine[name]):.1f})" if name in medians else "-" for name in names
        ]
        ratios = [f"{medians[own] / medians[peer]:.2f}" if own in medians and peer in medians else "-" for peer in peers]
        lines.append(f"| {test} | {threads} | " + " | ".join([*cells, *ratios]) + " |")
    return "\n".join(lines)


def depth_table(speeds: dict[Key, dict[str, list[float]]], names: Sequence[str]) -> str:
    """Markdown: the median speed of each test at each depth relative to the same test at its smallest depth; empty without depths."""
    by_test: dict[Key, dict[int, Key]] = defaultdict(dict)
    for key in speeds:
        name, _, depth = key[0].partition(" @ d")
        by_test[name, key[1]][int(depth or 0)] = key
    lines = []
    for (name, threads), depths in sorted(by_test.items()):
        first, *deeper = sorted(depths)
        for depth in deeper:
            pair = speeds[depths[depth]], speeds[depths[first]]
            cells = [
                f"{statistics.median(pair[0][engine]) / statistics.median(pair[1][engine]):.2f}"
                if all(side.get(engine) for side in pair)
                else "-"
                for engine in names
            ]
            lines.append(f"| {name} | {threads} | d{depth} / d{first} | " + " | ".join(cells) + " |")
    header = ["| test | threads | depths | " + " | ".join(names) + " |", "|" + "---|" * (3 + len(names))]
    return "\n".join([*header, *lines]) if lines else ""


def parse_peer(text: str, extra: Sequence[str]) -> Engine:
    """``NAME=PATH`` or ``PATH``."""
    name, equals, path = text.partition("=")
    program = Path(path if equals else text)
    if not program.is_file():
        raise SystemExit(f"--llama-bench {text}: there is no such program")
    return Engine(name if equals else program.parent.name or program.name, (str(program), *extra))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="the .gguf file")
    parser.add_argument("--llama-bench", action="append", default=[], metavar="[NAME=]PATH", help="a peer; may be given several times")
    parser.add_argument("--peer-args", default="", help="further options for the peers, e.g. '-fa 1'")
    parser.add_argument("-p", "--n-prompt", default="512")
    parser.add_argument("-n", "--n-gen", default="128")
    parser.add_argument("-d", "--n-depth", default="0", help="tokens in the cache before a test, e.g. 128,8192")
    parser.add_argument("-t", "--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600, help="seconds one run may take")
    parser.add_argument("--json", action="store_true", help="print all speeds as JSON instead of the table")
    given = parser.parse_args(arguments)
    if not Path(given.model).is_file():
        parser.error(f"there is no model file {given.model}")
    own = Engine("ggufc", (sys.executable, "-m", "ggufc", "bench"))
    engines = [own, *(parse_peer(text, shlex.split(given.peer_args)) for text in given.llama_bench)]
    threads = [int(item) for item in given.threads.split(",")]
    sizes = Sizes(given.n_prompt, given.n_gen, given.n_depth)
    speeds = compare(engines, given.model, sizes, threads, given.rounds, given.timeout)
    if given.json:
        print(json.dumps([{"test": test, "threads": count, "ts": dict(by)} for (test, count), by in speeds.items()], indent=2))
    else:
        names = [engine.name for engine in engines]
        print(table(speeds, names))
        if depths := depth_table(speeds, names):
            print("\n" + depths)


if __name__ == "__main__":
    main()
