"""The CUDA executor on the SIMT interpreter: a whole model end to end, and every way it can refuse."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

from fat_models import CASES, COVERED, compiled
from ggufc.formats import cuda as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.cuda import CudaExecutor, on_device
from ggufc.runtime.cuda.code import cuda_manifest, load_code
from ggufc.runtime.cuda.device import PtxTooNew
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session
from ggufc.runtime.sizes import Sizes
from simt_device import SimtDevice
from support import WITHOUT_CUDA_PACKAGES

# End to end


def test_a_whole_model_equals_its_golden(model):
    """S75: every step of the case, races and bounds watched; memory is given back."""
    device = SimtDevice()
    results = model.run(executor=on_device(device))
    model.check(results)
    assert device.launches > 100 and not device.allocated
    assert device.largest_grid <= fmt.MAX_GRID  # S73


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in COVERED else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_more_models(name, tmp_path):
    """S75 for windows and head norms, experts, integer products, block caches, sequence operations, latent and sparse attention."""
    model = compiled(name, tmp_path, "cuda:sm_80")
    model.check(model.run(executor=on_device(SimtDevice(races=False))))


def test_bits_do_not_depend_on_the_batch(model):
    """S65 on the device: one token at a time, in pieces, at once; state taken out and put back."""
    tokens = [5, 17, 200, 31, 7, 7, 90, 12]
    device = SimtDevice(races=False)

    def logits(cuts: list[int]) -> np.ndarray:
        with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
            return np.concatenate([s.decode(part, logits="all") for part in np.split(np.array(tokens), cuts)])

    whole = logits([])
    assert logits([1, 2, 6]).tobytes() == whole.tobytes()
    with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
        s.decode(tokens[:5], logits="none")
        rows = s.executor.caches.rows("blk.0.k")
        cells = np.array([0, 1, 2, 4], np.int32)
        kept = rows.read(cells).copy()
        s.executor.caches.clear()
        assert not rows.read(cells).any()
    with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
        s.decode(tokens[:5], logits="none")
        rows = s.executor.caches.rows("blk.0.k")
        assert rows.read(cells).tobytes() == kept.tobytes() and kept.any()
        rows.write(cells, kept)
        assert s.decode(tokens[5:], logits="all").tobytes() == whole[5:].tobytes()


@pytest.mark.full
def test_bits_of_experts_do_not_depend_on_the_batch(tmp_path):
    """S65 where a long prompt takes the tile kernels of experts and routers, and its pieces the others."""
    expert_model = compiled("qwen3moe-a", tmp_path, "cuda:sm_80")
    tokens = np.random.default_rng(3).integers(0, 200, 24)
    device = SimtDevice(races=False)
    with Session(expert_model.path, n_ctx=256, executor=on_device(device)) as s:
        whole = s.decode(tokens, logits="all")
        used = set(device.entries)
        s.reset()
        parts = [s.decode(part, logits="all") for part in np.split(tokens, [9, 12, 13])]
    assert any(name.startswith("mat_mul_id_") and name.endswith("_tile") for name in used)
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_profile(model):
    with Session(model.path, n_ctx=256, profile=True, executor=on_device(SimtDevice(races=False))) as s:
        s.decode([1, 2])
        times = s.executor.profile()
        assert times.shape == (len(s.executor.program.launches), 2) and not times[1:, 0].any(), "only the first waits, for its inputs"
        assert times.min() >= 0 and times[:, 1].any()


# Choosing code, refusing


def test_the_newest_code_a_device_can_run_is_chosen(model):
    with Artifact.open(model.path) as artifact:
        assert [load_code(artifact, SimtDevice(capability)).target for capability in (80, 89, 90, 120)] == [
            "sm_80",
            "sm_80",
            "sm_90",
            "sm_90",
        ]
        with pytest.raises(RuntimeRefusal, match="SIMT interpreter is sm_75, and GPU code needs sm_80 or newer; run on the CPU"):
            load_code(artifact, SimtDevice(75))


def test_a_driver_that_is_too_old(model):
    """The older code is taken where the newer is not understood; where neither is, the versions are named."""

    class Old(SimtDevice):
        newest = "7.0"

        def load(self, ptx):
            if f".version {self.newest}" not in ptx:
                raise PtxTooNew("unsupported PTX version")
            return super().load(ptx)

    with Artifact.open(model.path) as artifact:
        assert load_code(artifact, Old()).target == "sm_80"
        Old.newest = "6.0"
        with pytest.raises(RuntimeRefusal, match=r"knows none of its PTX versions \(7\.0, 7\.8\); update the driver"):
            load_code(artifact, Old())


def test_too_little_memory_is_refused_with_the_sum(model):
    device = SimtDevice(free=1 << 20)
    with pytest.raises(
        RuntimeRefusal, match=r"1 MiB free, \d+ MiB are needed \(weights .* caches .* attention .*, driver 64 MiB\); use a smaller n_ctx"
    ):
        Session(model.path, executor=on_device(device))
    assert not device.allocated


def changed(artifact: Artifact, **metadata) -> types.SimpleNamespace:
    """The artifact with other text under the key of its GPU code."""
    return types.SimpleNamespace(metadata=metadata, manifest=artifact.manifest, path=artifact.path, file=artifact.file)


def test_an_artifact_without_gpu_code(model):
    with (
        Artifact.open(model.path) as artifact,
        pytest.raises(RuntimeRefusal, match="holds no GPU code; compile the model with --target native,cuda:sm_90, or run"),
    ):
        load_code(changed(artifact), SimtDevice())


def test_damaged_gpu_code_is_refused(model, tmp_path):
    raw = bytearray(model.path.read_bytes())
    at = raw.index(b".target sm_90")
    raw[at + 8 : at + 13] = b"sm_89"
    damaged = tmp_path / "damaged.ggufc"
    damaged.write_bytes(raw)
    with Artifact.open(damaged) as artifact, pytest.raises(ArtifactError, match="does not match its digest"):
        load_code(artifact, SimtDevice())
    with Artifact.open(model.path) as artifact:
        text = artifact.metadata[fmt.KEY]
        for bad, why in [
            (text.replace("rms_norm(", "rms_worm(", 1), "belongs to other kernels"), (text[:-1], "does not have the expected form"),
            (text.replace('"block":', '"block":9999', 1), "is malformed"),
        ]:  # fmt: skip
            with pytest.raises(ArtifactError, match=why):
                cuda_manifest(changed(artifact, **{fmt.KEY: bad}))


def test_sizes_and_closed_sessions(model):
    with Artifact.open(model.path) as artifact:
        executor = CudaExecutor(artifact, "eval", Sizes(256, 4), device=SimtDevice())
        with pytest.raises(RuntimeRefusal, match="exceeds what was allocated"):
            executor.eval(5, 1, 5, 256)
        with pytest.raises(RuntimeRefusal, match="has no output 'nothing'"):
            executor.output("nothing")
        executor.close()
        executor.close()
        with pytest.raises(RuntimeRefusal, match="closed"):
            executor.eval(1, 1, 1, 256)
        with pytest.raises(RuntimeRefusal, match="needs a device"):
            CudaExecutor(artifact)


# Machines without CUDA


def test_cpu_sessions_ignore_gpu_code(model):
    """S155: the same file gives the CPU's bits with and without GPU code in it."""
    model.check(model.run())


def test_nothing_imports_a_cuda_package():
    """S76: the package, its CUDA room included, imports where every CUDA package is missing."""
    code = WITHOUT_CUDA_PACKAGES + (
        "import ggufc, ggufc.runtime, ggufc.runtime.session, ggufc.runtime.cuda, ggufc.codegen.nvptx\n"
        "assert not any(m.split('.')[0] == 'pycuda' for m in sys.modules)\n"
        "from ggufc.runtime.errors import RuntimeRefusal\n"
        "try:\n"
        "    with ggufc.runtime.cuda.open_device(binding='pycuda'): pass\n"
        "except RuntimeRefusal as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the package pycuda is missing" in done.stdout and "pip install 'ggufc[cuda]'" in done.stdout
