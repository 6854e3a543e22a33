"""``--device`` and ``-ngl``: what runs where, and what is said where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ggufc
from ggufc import devices
from ggufc.errors import DriverError
from ggufc.runtime import cuda
from ggufc.runtime.cuda import CudaExecutor, OffloadExecutor
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.executor import Executor
from simt_device import SimtDevice
from support import WITHOUT_CUDA_PACKAGES


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[SimtDevice]:
    """A machine with one simulated GPU; the list holds the devices that were opened."""
    opened: list[SimtDevice] = []

    def make(index: int = 0, binding: str = "auto") -> SimtDevice:
        if index:
            raise RuntimeRefusal(f"CUDA device {index} does not exist")
        opened.append(SimtDevice(races=False))
        return opened[-1]

    monkeypatch.setattr(cuda, "make_device", make)
    return opened


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(index: int = 0, binding: str = "auto") -> SimtDevice:
        raise RuntimeRefusal("CUDA cannot be used: its driver library libcuda is missing; install an NVIDIA driver, or run on the CPU")

    monkeypatch.setattr(cuda, "make_device", make)


@pytest.mark.parametrize(
    "device, n, executor, layers",
    [
        ("auto", None, Executor, 0),
        ("auto", 0, Executor, 0),
        ("cuda", 0, Executor, 0),
        ("cpu", 5, Executor, 0),
        ("auto", 1, OffloadExecutor, 1),
        ("cuda", None, CudaExecutor, -1),
        ("cuda:0", 3, CudaExecutor, 3),
    ],
)
def test_what_runs_where(gpu, text_model: Path, shared_cache: Path, monkeypatch, device, n, executor, layers):
    monkeypatch.setenv("GGUFC_CACHE", str(shared_cache))
    assert devices.choose(device, n).n_gpu_layers == layers
    gpu.clear()
    with ggufc.load(text_model, device=device, n_gpu_layers=n, n_ctx=256, n_threads=1) as session:
        assert type(session.executor) is executor
        assert session.decode([1, 5]).shape == (1, session.n_vocab)
    assert all(not opened.allocated and opened.launches for opened in gpu) and len(gpu) == (executor is not Executor)


def test_no_gpu_and_none_needed(no_gpu, invoke, artifact: Path):
    """S155: layers asked for in vain run on the CPU with a message; a GPU that was insisted on is an error."""
    plain = invoke("run", artifact, "-p", "ab", "-n", 4, "--raw", "--temp", 0, "-t", 1)
    asked = invoke("run", artifact, "-p", "ab", "-n", 4, "--raw", "--temp", 0, "-t", 1, "-ngl", 9)
    assert asked.stdout == plain.stdout
    assert "-ngl 9 has no effect: CUDA cannot be used: its driver library libcuda is missing" in asked.stderr
    with pytest.raises(RuntimeRefusal, match="libcuda is missing; install an NVIDIA driver, or run on the CPU"):
        invoke("run", artifact, "-p", "ab", "-n", 1, "--device", "cuda")
    with pytest.raises(DriverError, match=r"--device 'gpu' is unknown; use auto, cpu, cuda or cuda:N"):
        invoke("run", artifact, "-p", "ab", "-n", 1, "--device", "gpu")


def test_commands_on_a_gpu(gpu, invoke, text_model: Path, tmp_path: Path):
    """A model is compiled with code for the device; bench says where it ran; golden cases run there."""
    rows = json.loads(invoke("bench", text_model, "-p", 4, "-n", 2, "-r", 1, "-o", "json", "-ngl", 1, "-t", 1).stdout)
    assert {row["n_gpu_layers"] for row in rows} == {1} and {row["gpu_info"] for row in rows} == {"SIMT interpreter"}
    assert rows[0]["backends"] == "CUDA, SIMT interpreter, 1 layers"
    shown = invoke("bench", text_model, "-p", 0, "-n", 2, "-r", 1, "--device", "cuda", "--profile")
    assert "memory is filled at" in shown.stderr and "mat_mul(" in shown.stderr
    both = invoke("bench", text_model, "-p", 0, "-n", 2, "-r", 1, "-ngl", 1, "-t", 1, "--profile").stderr
    assert "1 layers, 1 threads; the GPU's memory is filled at" in both and "GPU blk.*.ffn" in both and "CPU embedding" in both
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"options": {"n_ctx": 64}, "steps": [{"op": "decode_last", "name": "a", "tokens": [1, 5]}]}))
    assert "a: 1x320" in invoke("logits", text_model, case, "-o", tmp_path / "out.npz", "--device", "cuda").stdout
    ran = invoke("run", text_model, "-p", "ab", "-n", 2, "--raw", "-ngl", 1, "-t", 1)
    assert "(SIMT interpreter, sm_90 for 1 layers, 1 threads)" in ran.stderr
    assert all(not opened.allocated for opened in gpu)


def test_an_artifact_without_code_for_the_device(gpu, invoke, artifact: Path):
    with pytest.raises(RuntimeRefusal, match=r"holds no GPU code; compile the model with --target native,cuda:sm_90"):
        invoke("run", artifact, "-p", "ab", "-n", 1, "--device", "cuda")


def test_cpu_commands_import_nothing_of_cuda(text_model: Path, shared_cache: Path):
    """S76: a run on the CPU neither needs nor touches a CUDA package, nor the rooms that use one."""
    code = WITHOUT_CUDA_PACKAGES + (
        "from ggufc.cli.failures import run\n"
        "from ggufc.cli import cli\n"
        f"status = run(cli, ['run', {str(text_model)!r}, '-p', 'ab', '-n', '2', '--raw', '--quiet'])\n"
        "assert not any(m.startswith('ggufc.runtime.cuda') for m in sys.modules), 'the GPU runtime was loaded'\n"
        "sys.exit(status)\n"
    )
    environment = {"GGUFC_CACHE": str(shared_cache), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


# Looking inside


@pytest.fixture(scope="module")
def fat(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fat") / "tiny.ggufc"
    ggufc.compile(text_model, path, target="native,cuda:sm_80,cuda:sm_90", jobs=1)
    return path


def test_ptx_of_models_and_artifacts(invoke, text_model: Path, artifact: Path, fat: Path):
    text = invoke("dump", text_model, "--stage", "ptx:sm_90").stdout
    assert ".target sm_90" in text and ".visible .entry" in text
    assert ".target sm_80" in invoke("dump", text_model, "--stage", "ptx").stdout
    assert ".target sm_86" in invoke("dump", text_model, "--stage", "ptx", "--target", "native,cuda:sm_86").stdout
    assert ".target sm_80" in invoke("dump", fat, "--stage", "ptx").stdout
    assert ".target sm_90" in invoke("dump", fat, "--stage", "ptx:sm_90").stdout
    with pytest.raises(DriverError, match=r"holds PTX for sm_80, sm_90, not for sm_100; use --stage ptx:sm_80"):
        invoke("dump", fat, "--stage", "ptx:sm_100")
    with pytest.raises(RuntimeRefusal, match="holds no GPU code"):
        invoke("dump", artifact, "--stage", "ptx")
    with pytest.raises(ggufc.GgufcError, match=r"unknown GPU architecture; use one of cuda:sm_80"):
        invoke("dump", text_model, "--stage", "ptx:sm_7")


def test_inspect_shows_gpu_kernels(invoke, artifact: Path, fat: Path, monkeypatch: pytest.MonkeyPatch):
    """What ptxas says where it is found, and that nothing is known where it is not."""
    from ggufc.codegen.nvptx import assembler

    assert "GPU" not in invoke("inspect", artifact).stdout
    gpu = json.loads(invoke("inspect", fat, "--json").stdout)["gpu"]
    assert [t["arch"] for t in gpu["targets"]] == ["sm_80", "sm_90"] and all("usage" not in k for k in gpu["kernels"])
    sections = {s["section"]: s["bytes"] for s in json.loads(invoke("inspect", fat, "--json").stdout)["sections"]}
    assert sections["GPU code (PTX)"] == sum(t["bytes"] for t in gpu["targets"])
    monkeypatch.setattr(assembler, "find", lambda: None)
    assert "assembler not found: registers and shared memory are unknown" in invoke("inspect", fat, "--ptx").stdout
    monkeypatch.setattr(assembler, "find", lambda: "ptxas")
    monkeypatch.setattr(assembler, "version", lambda: "V1.2.3")
    monkeypatch.setattr(assembler, "architectures", lambda: frozenset({"sm_90"}))
    usage = assembler.Usage(64, 2048, 0)
    monkeypatch.setattr(assembler, "assemble", lambda text, sm: {k["symbol"]: usage for k in gpu["kernels"]})
    shown = invoke("inspect", fat, "--ptx", "--all").stdout
    assert "assembler ptxas V1.2.3, which does not know sm_80" in shown
    assert "sm_90: 64 registers, 2048 bytes shared, 0 spilled, occupancy 50 %" in shown


def test_doctor_describes_cuda(invoke, monkeypatch: pytest.MonkeyPatch):
    from ggufc.runtime.cuda import library_device
    from ggufc.runtime.cuda.library_device import DeviceFacts

    def missing(library: object = None) -> object:
        raise RuntimeRefusal("CUDA cannot be used: its driver library libcuda is missing; install an NVIDIA driver, or run on the CPU")

    monkeypatch.setattr(library_device, "describe_devices", missing)
    report = json.loads(invoke("doctor", "--json").stdout)
    assert (
        report["cuda"] == "not available (its driver library libcuda is missing; install an NVIDIA driver, or run on the CPU)"
        and not report["problems"]
    )
    facts = [DeviceFacts("Big GPU", 90, 80 << 30, 132), DeviceFacts("Old GPU", 70, 16 << 30, 80)]
    monkeypatch.setattr(library_device, "describe_devices", lambda: ("12.8", facts))
    found = json.loads(invoke("doctor", "--json").stdout)["cuda"]
    assert "driver for CUDA 12.8; cuda:0 Big GPU, sm_90, 132 multiprocessors, 80.0 GiB (--target native,cuda:sm_90, PTX 7.8)" in found
    assert "cuda:1 Old GPU, sm_70, 80 multiprocessors, 16.0 GiB (too old for ggufc)" in found
    for version, code in (
        ("11.4", "cuda:sm_90 is PTX 7.8, which needs a driver for CUDA 11.8 or newer; update it, or --target native,cuda:sm_86"),
        ("10.2", "cuda:sm_90 is PTX 7.8, which needs a driver for CUDA 11.8 or newer; update it)"),
    ):
        monkeypatch.setattr(library_device, "describe_devices", lambda version=version: (version, facts))
        assert f"80.0 GiB ({code}" in json.loads(invoke("doctor", "--json").stdout)["cuda"]
    monkeypatch.setattr(library_device, "describe_devices", lambda: ("12.8", []))
    assert "no device visible (CUDA_VISIBLE_DEVICES hides devices)" in json.loads(invoke("doctor", "--json").stdout)["cuda"]
