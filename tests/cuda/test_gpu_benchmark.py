"""What waits for a device runs on the simulated one: nothing may fail for silly reasons when there is a device at last."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest

from ggufc.runtime.errors import RuntimeRefusal
from simt_device import SimtDevice
from test_on_device import check_product

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["gpu_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_benchmark"]


@pytest.mark.slow
def test_the_prepared_run(script, tmp_path):
    """Everything but the times: goldens, bits, offload, memory, products, a made-up model with recordings and without."""
    report = script.Report(time.monotonic() + 3600)
    case = script.golden_folder(None) / "llama-gqa-tied"
    script.measure(SimtDevice(races=False), report, script.TINY, [case], None, 1, tmp_path)
    assert report.wrong == 0, report.table()
    rows = {what: result for _, what, result, _ in report.rows}
    assert "of the CPU's tolerance" in rows["golden llama-gqa-tied"] and rows["offload by layers"] == "holds"
    assert "(1 recordings, 4 replays)" in rows["decoding, recorded"] and "(0 recordings, 0 replays)" in rows["decoding, call by call"]
    assert all("roofline" in result for what, result in rows.items() if what.startswith(("q8_0", "prompt of")))


def test_failures_and_lack_of_time_are_rows(script):
    def broken() -> str:
        raise RuntimeRefusal("no memory left")

    report = script.Report(time.monotonic() + 3600)
    report.run(script.CHECKED, "a", broken)
    report.run(script.CHECKED, "b", lambda: None)
    report.end = 0.0
    report.run(script.MEASURED, "c", broken)
    assert [row[2] for row in report.rows] == ["FAILED: RuntimeRefusal: no memory left", "holds", "left out: no time"]
    assert report.wrong == 1 and "| checked | b | holds |" in report.table()


@pytest.mark.parametrize("tokens", [1, 17])
def test_the_product_check_of_devices(tokens):
    check_product(SimtDevice(races=False), tokens, 256, 32)
