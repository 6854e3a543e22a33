"""CPU features, cores, cache folders, and what importing the runtime may cost."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from ggufc.formats import cpustate
from ggufc.formats.errors import ArtifactError
from ggufc.runtime import cpuinfo, paths
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.image import CodeImage
from ggufc.runtime.memory import Region


def test_kernel_flags_become_llvm_names():
    flags = "fpu sse4_1 sse4_2 avx avx2 fma f16c bmi1 bmi2 abm avx_vnni avx512f avx512_vnni avx512_bf16 amx_tile amx_int8 nonsense"
    assert cpuinfo.features_from_flags(flags, "x86_64") == {
        *("sse4.1", "sse4.2", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "avxvnni", "avx512f"),
        *("avx512vnni", "avx512bf16", "amx-tile", "amx-int8"),
    }
    assert cpuinfo.features_from_flags("fp asimd asimddp i8mm sve", "aarch64") == {"neon", "dotprod", "i8mm", "sve"}


def test_capability_words_become_llvm_names():
    assert cpustate.arm_features(1 << 1 | 1 << 8 | 1 << 20, 1 << 13) == {"neon", "lse", "dotprod", "i8mm"}
    assert cpustate.arm_features(1 << 1, 0) == {"neon"}


def test_tiles_count_only_where_the_system_grants_them(monkeypatch):
    monkeypatch.setattr(cpuinfo, "flag_features", lambda: frozenset({"avx2", "amx-tile", "amx-int8"}))
    monkeypatch.setattr(cpuinfo, "tiles_granted", lambda: True)
    assert {"avx2", "amx-tile", "amx-int8"} <= cpuinfo.host_features()
    monkeypatch.setattr(cpuinfo, "tiles_granted", lambda: False)
    assert cpuinfo.host_features() & {"avx2", "amx-tile", "amx-int8"} == {"avx2"}


def test_code_with_tiles_asks_for_them(monkeypatch):
    from types import SimpleNamespace

    from ggufc.runtime import executor

    asked = []
    monkeypatch.setattr(executor, "request_tiles", lambda: bool(asked.append("tiles")))
    manifest = SimpleNamespace(features=["avx2", "amx-tile"], level="amx", kernels=[], drivers={})
    opened = SimpleNamespace(artifact=SimpleNamespace(manifest=manifest))
    with pytest.raises(RuntimeRefusal, match=r"tile registers, which the code \(level amx\) needs; .* --target avx512vbmi"):
        executor.Executor._make_team(opened, 1)
    assert asked == ["tiles"]


def test_host_features_are_llvms():
    llvm = pytest.importorskip("llvmlite.binding")
    theirs = {name for name, on in llvm.get_host_cpu_features().items() if on}
    ours = cpuinfo.host_features()
    needed = {
        "sse3",
        "ssse3",
        "sse4.1",
        "sse4.2",
        "popcnt",
        "cx16",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "bmi",
        "bmi2",
        "lzcnt",
        "movbe",
        "avxvnni",
    }
    needed |= {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "dotprod", "i8mm"}
    assert ours & needed == theirs & needed


def test_hyperthreads_count_once(tmp_path):
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cpuinfo.count_cores(frozenset({0, 1, 2, 3}), tmp_path) == 2
    assert cpuinfo.count_cores(frozenset({0, 2}), tmp_path) == 1
    assert cpuinfo.count_cores(frozenset({8, 9}), tmp_path) == 2


def test_quota_of_the_group_or_its_parents(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/box\n")
    assert cpuinfo.cgroup_quota(tmp_path, own) == math.inf
    (tmp_path / "pod" / "box").mkdir(parents=True)
    (tmp_path / "pod" / "box" / "cpu.max").write_text("max 100000\n")
    assert cpuinfo.cgroup_quota(tmp_path, own) == math.inf
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    assert cpuinfo.cgroup_quota(tmp_path, own) == 1.5
    own.write_text("4:cpu,cpuacct:/old\n")
    (tmp_path / "cpu" / "old").mkdir(parents=True)
    (tmp_path / "cpu" / "old" / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu" / "old" / "cpu.cfs_period_us").write_text("100000")
    assert cpuinfo.cgroup_quota(tmp_path, own) == math.inf
    (tmp_path / "cpu" / "old" / "cpu.cfs_quota_us").write_text("300000")
    assert cpuinfo.cgroup_quota(tmp_path, own) == 3


def test_physical_cores_follow_the_quota(monkeypatch):
    monkeypatch.setattr(cpuinfo, "count_cores", lambda cpus: 8)
    for quota, want in ((math.inf, 8), (2.5, 3), (0.1, 1), (100, 8)):
        monkeypatch.setattr(cpuinfo, "cgroup_quota", lambda q=quota: q)
        assert cpuinfo.physical_cores() == want


def test_folders_follow_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("GGUFC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.models_dir() == tmp_path / "xdg" / "ggufc" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.artifacts_dir() == tmp_path / "home" / ".cache" / "ggufc" / "artifacts"
    monkeypatch.setenv("GGUFC_CACHE", str(tmp_path / "own"))
    assert paths.cache_dir() == tmp_path / "own"


def test_code_is_executable_and_not_writable():
    image = CodeImage(np.arange(100, dtype=np.uint8))
    with open("/proc/self/maps") as maps:
        rights = [line.split()[1] for line in maps if int(line.split("-")[0], 16) <= image.base < int(line.split()[0].split("-")[1], 16)]
    assert rights == ["r-xp"]
    assert image.address(99) == image.base + 99
    for offset in (-1, 100):
        with pytest.raises(ArtifactError, match="outside the image"):
            image.address(offset)
    with pytest.raises(ArtifactError, match="empty"):
        CodeImage(np.empty(0, np.uint8))


def test_memory_is_zero_aligned_and_refused_beyond_reason():
    region = Region(1000, "a test")
    assert region.base % 64 == 0 and region.bytes.shape == (1000,) and not region.bytes.any()
    with pytest.raises(RuntimeRefusal, match=r"a test.*smaller n_ctx"):
        Region(1 << 60, "a test")


def test_import_is_light():
    code = """
import sys, time, numpy
import ggufc.formats.gguf_reader, ggufc.formats.artifact
began = time.process_time()
import ggufc.runtime.session
print(time.process_time() - began)
print(*sorted(set(sys.modules) & {"tokenizers", "jinja2", "llvmlite", "networkx", "rich", "click", "ggufc.codegen", "ggufc.passes",
"ggufc.models", "ggufc.ir"}))
"""
    seconds, modules = [], ""
    for _ in range(3):
        lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
        seconds.append(float(lines[0]))
        modules = lines[1]
    assert modules == ""
    assert min(seconds) < 0.060


@pytest.mark.parametrize(("machine", "cleared"), [("aarch64", True), ("x86_64", False)])
def test_instruction_caches_are_cleared_where_they_do_not_follow_writes(monkeypatch, machine, cleared):
    from types import SimpleNamespace

    from ggufc.runtime import image

    calls = []
    real, name = image.ctypes.CDLL, "__clear_cache"
    library = SimpleNamespace(**{name: lambda first, last: calls.append((first.value, last.value))})
    monkeypatch.setattr(image.ctypes, "CDLL", lambda file, **more: library if file == "libgcc_s.so.1" else real(file, **more))
    monkeypatch.setattr(image.platform, "machine", lambda: machine)
    code = CodeImage(np.arange(100, dtype=np.uint8))
    assert calls == ([(code.base, code.base + 100)] if cleared else [])
