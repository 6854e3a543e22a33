"""What waits for a device runs on the simulated one: nothing may fail for silly reasons when there is a device at last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simt_device import SimtDevice
from test_on_device import check_product

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

STEPS = """
import os, subprocess, sys, time
from bounded import Step, work

def hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)

def broken():
    raise ValueError("no memory\\n left")

steps = [
    Step("checked", "right", lambda: None),
    Step("checked", "wrong", broken),
    Step("measured", "hangs", hang, 1.5),
    Step("measured", "dies", lambda: os._exit(3)),
    Step("measured", "number", lambda: "7 GB/s"),
]
if __name__ == "__main__":
    work(steps, int(sys.argv[1]))
"""


@pytest.fixture
def bounded(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import bounded

    return bounded


@pytest.fixture
def steps(bounded, tmp_path):
    """The steps above, and what starts the process that runs them from one on."""
    script = tmp_path / "steps_of_a_test.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n{STEPS}")
    names: dict[str, object] = {"__name__": "steps"}
    exec(compile(STEPS, "steps", "exec"), names)
    return names["steps"], lambda first: [sys.executable, str(script), str(first)]


@pytest.mark.slow
def test_the_prepared_run(tmp_path):
    """Everything but the times: goldens, bits, offload, heads, memory, products, a made-up model with recordings and without."""
    output = tmp_path / "table.md"
    options = ["--simulate", "--case", "llama-gqa-tied", "--minutes", "30", "--output", str(output)]
    done = subprocess.run([sys.executable, str(FOLDER / "gpu.py"), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert output.read_text() == done.stdout
    rows = {what.strip(): result.strip() for _, _, what, result, *_ in (line.split("|") for line in done.stdout.splitlines()[2:])}
    assert "of the CPU's tolerance" in rows["golden llama-gqa-tied"]
    assert {what for what, result in rows.items() if result == "holds"} == {
        "bits of a text in one piece, in many, and restored",
        "offload by layers",
        "caches divided by heads",
    }
    assert "(1 recordings, 4 replays)" in rows["decoding, recorded"] and "(0 recordings, 0 replays)" in rows["decoding, call by call"]
    assert all("roofline" in result for what, result in rows.items() if what.startswith(("q8_0", "prompt of")))
    assert "mat_mul(" in rows["a token's time"] and "mat_mul(" in rows["a prompt's time"]


def test_what_fails_hangs_or_dies_costs_its_own_row(bounded, steps, tmp_path, capfd):
    """The rest runs on in a process anew; the table is on disk after every step; nothing that was started stays."""
    written: list[int] = []

    class Watched(bounded.Report):
        def add(self, *args, **more) -> None:
            super().add(*args, **more)
            written.append(len((tmp_path / "table.md").read_text().splitlines()) - 2)

    report = Watched(tmp_path / "table.md")
    bounded.supervise(*steps, report, time.monotonic() + 600)
    results = {what: result for _, what, result, _ in report.rows}
    assert list(results) == [step.what for step in steps[0]] and report.wrong == 3 and written == [1, 2, 3, 4, 5]
    assert results["right"] == "holds" and results["number"] == "7 GB/s"
    assert results["wrong"] == "FAILED: ValueError: no memory left" and results["dies"] == "FAILED: its process ended with status 3"
    assert results["hangs"].startswith("FAILED: stopped after ")
    child = int(next(line for line in capfd.readouterr().err.splitlines() if line.isdigit()))
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):  # until the system has collected it
            os.kill(child, 0)
            if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.01)


def test_nothing_begins_when_time_is_over_or_there_is_no_device(bounded, steps):
    report = bounded.Report()
    bounded.supervise(*steps, report, time.monotonic() - 1)
    assert {result for _, _, result, _ in report.rows} == {"left out: no time"} and len(report.rows) == 5 and not report.wrong
    report = bounded.Report()
    needed = [bounded.Step("measured", "device", lambda: None, essential=True), *steps[0][2:]]
    bounded.supervise(needed, lambda first: steps[1](1), report, time.monotonic() + 600)
    assert [result for _, _, result, _ in report.rows] == ["FAILED: ValueError: no memory left"] and report.wrong == 1


def test_no_device_is_one_sentence(tmp_path):
    """S76: the script says what is missing, ends, and leaves its table."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    options = ["--binding", "none", "--output", str(tmp_path / "t.md")]
    done = subprocess.run([sys.executable, str(FOLDER / "gpu.py"), *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "the CUDA binding 'none' is unknown; use auto, pycuda or library" in done.stdout
    assert (tmp_path / "t.md").read_text() == done.stdout and len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize("tokens", [1, 17])
def test_the_product_check_of_devices(tokens):
    check_product(SimtDevice(races=False), tokens, 256, 32)
