"""Measuring: llama-bench's formats, and the comparison script with stand-in engines."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import stat
import sys
from pathlib import Path

import pytest

from ggufc import benchmark
from ggufc.errors import DriverError

FACTS = {"model_type": "llama 1.00 M Q4_0", "model_size": 1 << 20, "model_n_params": 10**6, "backends": "CPU x", "n_threads": 2}


@pytest.mark.parametrize(("text", "values"), [("512", [512]), ("1,2", [1, 2]), ("1-3,8", [1, 2, 3, 8]), ("0", [0])])
def test_counts(text: str, values: list[int]) -> None:
    assert benchmark.parse_counts(text, "-p") == values


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "1-999999"])
def test_malformed_counts_name_the_option(text: str) -> None:
    with pytest.raises(DriverError, match="-p"):
        benchmark.parse_counts(text, "-p")


def test_tests_that_memory_cannot_hold_are_refused_before_they_run(invoke, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "memory", lambda: (1 << 30, 100_000))
    monkeypatch.setattr(benchmark, "measure", lambda *_: pytest.fail("nothing may run"))
    with pytest.raises(
        DriverError, match=r"10003 cells need .* for caches and .* for activations, but only 97\.7 KiB of memory are available"
    ):
        invoke("bench", artifact, "-p", 0, "-n", 4, "-d", 9999)


def test_rows_have_llama_bench_names_and_statistics() -> None:
    row = benchmark.row(benchmark.Test(512, 0), [10**9, 2 * 10**9], FACTS)
    assert row["avg_ns"] == 1.5e9 and row["samples_ts"] == [512.0, 256.0]
    assert row["avg_ts"] == 384.0 and row["stddev_ts"] == pytest.approx(181.019336)
    assert benchmark.row(benchmark.Test(0, 4), [10**9], FACTS)["stddev_ts"] == 0


def test_formats() -> None:
    rows = [benchmark.row(benchmark.Test(512, 0), [10**9], FACTS), benchmark.row(benchmark.Test(0, 128), [10**9], FACTS)]
    assert json.loads(benchmark.render(rows, "json")) == rows
    table = list(csv.DictReader(io.StringIO(benchmark.render(rows, "csv"))))
    assert [row["n_gen"] for row in table] == ["0", "128"]
    lines = benchmark.render(rows, "md").splitlines()
    assert len({len(line) for line in lines}) == 1, "columns line up"
    assert lines[2] == "| llama 1.00 M Q4_0 | 1.0 MiB | 1.00 M | CPU x   | 2       | pp512 | 512.00 ± 0.00 |"
    deep = benchmark.render([benchmark.row(benchmark.Test(0, 128, 8192), [10**9], FACTS)], "md")
    assert "| tg128 @ d8192 |" in deep
    with pytest.raises(DriverError, match="md, json, csv"):
        benchmark.render(rows, "xml")


def test_profiles_add_up_by_group_and_kernel() -> None:
    from ggufc.profile import Entry, report

    entries = [
        Entry("embd", "get_rows(k=2)", 0.0, 1e-6, 1000),
        Entry("blk.0.attn_q", "mat_mul(n=4)", 1e-6, 3e-6, 30_000),
        Entry("blk.0.ffn_down", "mat_mul(n=4)", 0.0, 5e-6, 50_000),
        Entry("logits", "mat_mul(n=9)", 0.0, 10e-6, 100_000),
    ]
    lines = report(entries, {"CPU": 2e10})
    assert lines[1].split() == ["output", "1", "10.0", "50.0%", "0.10", "10.0", "50%"]
    assert [line.split()[0] for line in lines[1:7]] == ["output", "blk.*.ffn", "blk.*.attn", "embedding", "barriers", "total"]
    assert "5.0%" in lines[5] and lines[6].split()[2] == "20.0"
    assert "40.0%" in lines[9] and "4.0 us x 2" in lines[9]
    assert report(entries, {"CPU": 2e10}, top=1)[-1].strip() == "and 2 more"


def test_launches_of_two_places_stand_in_one_table() -> None:
    """Each is measured with the memory it reads; the total by what both could do."""
    from ggufc.profile import Entry, report

    entries = [
        Entry("embd", "get_rows(k=2)", 0.0, 1e-6, 1000),
        Entry("blk.0.ffn_down", "mat_mul(n=4)", 0.0, 8e-6, 80_000),
        Entry("blk.1.ffn_down", "mat_mul(n=4)", 1e-6, 2e-6, 80_000, "GPU"),
    ]
    lines = report(entries, {"GPU": 1e11, "CPU": 2e10})
    assert [line.split()[:2] for line in lines[1:4]] == [["CPU", "blk.*.ffn"], ["GPU", "blk.*.ffn"], ["CPU", "embedding"]]
    assert lines[1].split()[-2:] == ["10.0", "50%"] and lines[2].split()[-2:] == ["40.0", "40%"]
    assert lines[5].split() == ["total", "3", "12.0", "100.0%", "0.16", "13.4", "40%"]
    assert [line.split("us x 1")[1].split()[0] for line in lines[7:9]] == ["CPU", "GPU"], "one kernel, two places"


@pytest.fixture(scope="module")
def compare():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "compare.py"
    spec = importlib.util.spec_from_file_location("compare", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    spec.loader.exec_module(module)
    return module


def engine(folder: Path, speed: float, log: str = "") -> Path:
    """A stand-in for llama-bench: prints one pp and one tg row."""
    path = folder / "llama-bench"
    rows = [{"n_prompt": 512, "n_gen": 0, "avg_ts": speed}, {"n_prompt": 0, "n_gen": 128, "avg_ts": speed / 10}]
    folder.mkdir()
    path.write_text(f"#!{sys.executable}\nprint({log!r}, end='')\nprint({json.dumps(rows, indent=2)!r})\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_compare_alternates_and_prints_medians_and_ratios(compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = compare.Engine("ggufc", (str(engine(tmp_path / "own", 300.0)),))
    peer = compare.parse_peer(f"ik={engine(tmp_path / 'peer', 200.0, log='loading [x]' + chr(10))}", [])
    speeds = compare.compare([own, peer], "m.gguf", compare.Sizes("512", "128"), [1, 2], 2, 60)
    order = [line.rsplit(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert order == ["ggufc", "ik", "ggufc", "ik", "ik", "ggufc", "ik", "ggufc"]
    lines = compare.table(speeds, ["ggufc", "ik"]).splitlines()
    assert lines[0] == "| test | threads | ggufc | ik | ggufc / ik |"
    assert lines[2] == "| pp512 | 1 | 300.0 (300.0-300.0) | 200.0 (200.0-200.0) | 1.50 |"
    assert len(lines) == 2 + 4
    assert compare.depth_table(speeds, ["ggufc", "ik"]) == ""


def test_compare_relates_depths(compare) -> None:
    assert compare.Sizes("0", "64", "128,8192").options() == ["-p", "0", "-n", "64", "-d", "128,8192"]
    assert "-d" not in compare.Sizes("512", "0").options()
    assert compare.at_depth("tg64", 8192) == "tg64 @ d8192" and compare.at_depth("tg64", None) == "tg64"
    speeds = {("tg64 @ d128", 1): {"ggufc": [200.0], "ik": [80.0]}, ("tg64 @ d8192", 1): {"ggufc": [90.0, 100.0, 110.0]}}
    assert compare.depth_table(speeds, ["ggufc", "ik"]).splitlines()[2:] == ["| tg64 | 1 | d8192 / d128 | 0.50 | - |"]


def test_compare_names_what_is_missing(compare, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such program"):
        compare.parse_peer("x=/no/such/llama-bench", [])
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho unknown model >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(SystemExit, match="ended with 3: unknown model"):
        list(compare.Engine("peer", (str(broken),)).measure("m", compare.Sizes("1", "1"), 1, 10))


class Recorder:
    """A session that notes what it is asked to do; ``keeps``: positions can be cut off."""

    n_vocab = 100

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.calls = keeps, []

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        from ggufc.runtime import RuntimeRefusal

        if p0 > 0 and not self.keeps:
            raise RuntimeRefusal("a recurrent state cannot be cut", soft=True)
        self.calls.append(("rm", p0))

    def decode(self, tokens, logits: str) -> None:
        self.calls.append((logits, len(tokens)))

    def decode_view(self, tokens) -> None:
        self.calls.append(("one", len(tokens)))


def test_a_depth_is_evaluated_once_and_cut_back_to() -> None:
    test = benchmark.Test(0, 1, 5)
    assert benchmark.context_for([test, benchmark.Test(3, 0)]) == 6
    session, filled = Recorder(keeps=True), [("rm", -1), ("none", 4), ("none", 1), ("one", 1)]
    benchmark.measure(session, test, 1, 4)
    assert session.calls == [*filled, ("rm", 5), ("one", 1)]
    session = Recorder(keeps=False)
    benchmark.measure(session, test, 1, 4)
    assert session.calls == [*filled, *filled]
