"""What an artifact must prove before its code is mapped, and what binding refuses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_model
from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError, GgufcError, GGUFError
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.executor import Executor
from ggufc.runtime.session import Session
from ggufc.runtime.sizes import Limits, Sizes

pytest_plugins = ("runtime_fixtures",)


def refused(path, message, **options):
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(path, **options)


def test_a_good_artifact_opens(toy):
    with Artifact.open(toy) as artifact:
        assert artifact.manifest.arch == "toy" and artifact.program_names == ["eval", "eval_embd"]
        assert artifact.graph_text("eval") == "graph @eval {}"
        with pytest.raises(ArtifactError, match="holds eval"):
            artifact.graph_text("nothing")
        with pytest.raises(ArtifactError, match="eval, eval_embd"):
            artifact.program("draft")


def test_other_versions_name_the_remedy(tmp_path):
    refused(fake_model.write(tmp_path / "a", version=fmt.FORMAT_VERSION + 1), "compile the model again")
    refused(fake_model.write(tmp_path / "b", fake_model.manifest(abi=99)), "native ABI 99.*compile the model again")


def test_a_model_is_not_an_artifact(tmp_path):
    writer = GGUFWriter(tmp_path / "model.gguf")
    writer.add("general.architecture", "llama")
    writer.finish()
    refused(tmp_path / "model.gguf", "ggufc compile")


def test_damage_is_found_before_code_is_loaded(tmp_path):
    refused(fake_model.write(tmp_path / "a", image_digest="0" * 64), "image does not match")
    refused(fake_model.write(tmp_path / "b", text_digest="1" * 64), "manifest does not match")
    refused(fake_model.write(tmp_path / "c", text_digest="short"), "missing or malformed")
    data = bytearray(fake_model.write(tmp_path / "d").read_bytes())
    at = data.index(fake_model.IMAGE.tobytes())
    data[at] ^= 1
    (tmp_path / "d").write_bytes(data)
    refused(tmp_path / "d", "image does not match")


def test_every_truncation_is_refused(tmp_path):
    path = fake_model.write(tmp_path / "whole")
    with GGUFFile.open(path) as file:
        end = max(t.offset + t.nbytes for t in file.tensors.values())
    data = path.read_bytes()[:end]
    cut = tmp_path / "cut"
    for n in [*range(0, 64), *range(64, len(data), 997), len(data) - 1]:
        cut.write_bytes(data[:n])
        with pytest.raises((ArtifactError, GGUFError)):
            Artifact.open(cut)


def test_expected_digest(toy):
    digest = hashlib.sha256(toy.read_bytes()).hexdigest()
    Artifact.open(toy, digest.upper()).close()
    Artifact.open(toy, "sha256:" + digest).close()
    refused(toy, "not the artifact you asked for", expect_digest="0" * 64)


def test_foreign_cpu_features_are_refused_by_name(tmp_path):
    path = fake_model.write(tmp_path / "a", fake_model.manifest(features=["avx2", "amx-int8"], level="amx"))
    refused(path, r"lacks: amx-int8;.*--target", features=frozenset({"avx2"}))
    Artifact.open(path, features=frozenset({"avx2", "amx-int8"})).close()
    refused(fake_model.write(tmp_path / "b", fake_model.manifest(target="riscv64-unknown-linux-gnu")), "riscv64")


@pytest.mark.parametrize("change", [{"abi": "one"}, {"programs": 3}, {"caches": [{"name": "x"}]}, {"drivers": None}])
def test_manifest_of_another_form(tmp_path, change):
    text = json.loads(fmt.dumps(fake_model.manifest())) | change
    refused(fake_model.write(tmp_path / "a", text=json.dumps(text)), "expected form.*compile")


def test_manifest_that_is_not_json(tmp_path):
    refused(fake_model.write(tmp_path / "a", text="{"), "expected form")
    refused(fake_model.write(tmp_path / "b", text="[" * 100_000), "expected form")


def test_code_outside_the_image(tmp_path):
    kernels = [*fake_model.KERNELS[:3], fmt.Kernel("far", "far()", fake_model.IMAGE.size - 4, 32)]
    refused(fake_model.write(tmp_path / "a", fake_model.manifest(kernels=kernels)), "'far' lies outside")
    refused(fake_model.write(tmp_path / "b", fake_model.manifest(drivers={"ggufc_worker": 0})), "ggufc_eval is missing")


def changed_launch(index: int, **changes) -> fmt.Manifest:
    program = fake_model.program()
    launches = list(program.launches)
    launches[index] = msgspec.structs.replace(launches[index], **changes)
    return fake_model.manifest(programs=[msgspec.structs.replace(program, launches=launches)])


def with_program(**changes) -> fmt.Manifest:
    return fake_model.manifest(programs=[msgspec.structs.replace(fake_model.program(), **changes)])


def with_arg(index: int, position: int, arg: fmt.Arg) -> fmt.Manifest:
    args = list(fake_model.program().launches[index].args)
    args[position] = arg
    return changed_launch(index, args=args)


def test_missing_tensor_is_named_when_opening(tmp_path):
    refused(fake_model.write(tmp_path / "a", with_arg(3, 3, fake_model.arg("weight", "lost"))), "'lost', read by head")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (with_arg(3, 3, fake_model.arg("weight", "w", offset=8)), "outside its 8 bytes"),
        (with_arg(3, 3, fake_model.arg("weight", "w", offset=-1)), "outside"),
        (with_arg(3, 0, fake_model.arg("slot", value=2)), "there are 2 slots"),
        (with_arg(3, 0, fake_model.arg("slot", value=-1)), "there are 2 slots"),
        (with_arg(3, 0, fake_model.arg("slot", value=0, offset=1 << 40)), "outside"),
        (with_arg(0, 3, fake_model.arg("cache", "blk.9.k")), "no such buffer"),
        (with_arg(0, 0, fake_model.arg("magic", "x")), "no such buffer"),
        (changed_launch(0, kernel=4), "launch 0 .* is malformed"),
        (changed_launch(0, div=0), "malformed"),
        (changed_launch(0, sym="Q"), "malformed"),
        (changed_launch(1, wait=2), "malformed"),
        (changed_launch(1, mult=1 << 40), "malformed"),
        (changed_launch(1, div=1 << 70), "malformed"),
        (with_arg(3, 5, fake_model.arg("int", value=1 << 63)), "does not fit 64 bits"),
        (with_program(outputs={"logits": [{"": 7}, {"O": 1}]}), "the logits are"),
        (with_program(inputs=[fmt.Input("tokens", "tokens", "i32", [{"": 1}])]), "input tokens .* cannot fill"),
        (with_program(inputs=[fmt.Input("tokens", "tokens", "f32", [{"T": 1}])]), "input tokens .* cannot fill"),
        (with_program(inputs=[fmt.Input("x", "weather", "i32", [{"T": 1}])]), r"input x \(weather\)"),
    ],
)
def test_binding_refuses_what_would_crash(tmp_path, manifest, message):
    path = fake_model.write(tmp_path / "a", manifest)
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError, match=message):
        Executor(artifact, "eval", Sizes(64, 8, n_threads=1))


def test_impossible_sizes(tmp_path):
    program = msgspec.structs.replace(fake_model.program(), slots=[fmt.Slot([{"X": 4}]), fmt.Slot([{"T": 4}])])
    with (
        Artifact.open(fake_model.write(tmp_path / "a", fake_model.manifest(programs=[program]))) as a,
        pytest.raises(ArtifactError, match="'X'"),
    ):
        Executor(a, "eval", Sizes(64, 8, n_threads=1))
    program = msgspec.structs.replace(program, slots=[fmt.Slot([{"T": 1 << 60}]), fmt.Slot([{"T": 4}])])
    with (
        Artifact.open(fake_model.write(tmp_path / "b", fake_model.manifest(programs=[program]))) as a,
        pytest.raises(ArtifactError, match="impossible size"),
    ):
        Executor(a, "eval", Sizes(64, 8, n_threads=1))


def test_slots_take_the_largest_alternative_and_outputs_follow_the_batch(toy):
    with Artifact.open(toy) as artifact, Executor(artifact, "eval", Sizes(100, 8, n_threads=1)) as executor:
        assert executor.arena_bytes == 128  # two slots of at most 32 bytes, each 64-aligned
        assert executor.limits == Limits(8, 256, 1)
        executor.inputs["visible"][:] = 0
        executor.eval(3, 2, 0, 256)
        assert executor.output("logits").shape == (2, fake_model.N_VOCAB)
        with pytest.raises(RuntimeRefusal, match="no output 'x'"):
            executor.output("x")
        for sizes in ((9, 1, 0, 256), (0, 0, 0, 256), (1, 9, 0, 256), (1, 1, 257, 256), (1, 1, 0, 257)):
            with pytest.raises(RuntimeRefusal, match="exceeds"):
                executor.eval(*sizes)


def test_workers_enter_once_and_leave_on_close(toy):
    driver = fake_model.DRIVER
    with Artifact.open(toy) as artifact:
        executor = Executor(artifact, "eval", Sizes(64, 8, n_threads=3))
        executor.close()
        assert sorted(driver.workers[-2:]) == [1, 2] == sorted(driver.left[-2:])
        executor.close()


def test_a_forgotten_executor_stops_its_threads(toy):
    driver = fake_model.DRIVER
    with Artifact.open(toy) as artifact:
        before = len(driver.left)
        executor = Executor(artifact, "eval", Sizes(64, 8, n_threads=2))
        del executor
        assert len(driver.left) == before + 1


def test_profile_counts_cycles_per_launch(toy):
    with Artifact.open(toy) as artifact, Executor(artifact, "eval", Sizes(64, 8, n_threads=1), profile=True) as executor:
        executor.eval(1, 0, 0, 256)
        assert executor.profile().tolist() == [[20, 80], [20, 80], [20, 80], [20, 50]]
        executor.enable_profile(False)
        with pytest.raises(RuntimeRefusal, match="profile=True"):
            executor.profile()


def test_fixups_move_with_head(tmp_path):  # S146
    fix = fmt.Fixup(0, 3, "blk.0.k", 16, "blk.0.k_store")
    program = msgspec.structs.replace(fake_model.program(), fixups=[fix])
    path = fake_model.write(tmp_path / "a", fake_model.manifest(programs=[program]))
    with Artifact.open(path) as artifact, Executor(artifact, "eval", Sizes(64, 8, n_threads=1)) as executor:
        executor.eval(1, 0, 0, 256, head=3)
        keys = executor.caches.view("blk.0.k")
        assert keys[3].any() and not keys[:3].any()  # slot 0 of a store that begins at row 3
        with pytest.raises(RuntimeRefusal, match="cell 256"):
            executor.eval(1, 0, 0, 256, head=256)
    for wrong in (
        fmt.Fixup(0, 0, "blk.0.k", 16, "n"),
        fmt.Fixup(0, 3, "blk.0.v", 4, "n"),
        fmt.Fixup(0, 3, "blk.0.k", 8, "n"),
        fmt.Fixup(9, 0, "blk.0.k", 16, "n"),
    ):
        program = msgspec.structs.replace(fake_model.program(), fixups=[wrong])
        with (
            Artifact.open(fake_model.write(tmp_path / "b", fake_model.manifest(programs=[program]))) as a,
            pytest.raises(ArtifactError, match="fixup of n"),
        ):
            Executor(a, "eval", Sizes(64, 8, n_threads=1))


def test_four_hundred_launches_bind_quickly(tmp_path):
    program = fake_model.program()
    program = msgspec.structs.replace(program, launches=program.launches * 100)
    launches = [msgspec.structs.replace(launch, wait=max(0, i - 1) if i else -1) for i, launch in enumerate(program.launches)]
    described = fake_model.manifest(programs=[msgspec.structs.replace(program, launches=launches)])
    with (
        Artifact.open(fake_model.write(tmp_path / "a", described)) as artifact,
        Executor(artifact, "eval", Sizes(64, 8, n_threads=1)) as executor,
    ):
        before = executor._table.copy(), executor._args.copy(), executor._table
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            executor.rebind()
            seconds.append(time.perf_counter() - began)
        assert min(seconds) < 0.010
        # In place: a worker that was descheduled may still be reading the old table.
        assert executor._table is before[2] and np.array_equal(executor._table, before[0]) and np.array_equal(executor._args, before[1])


def test_caches_are_zero_aligned_and_sized_by_their_rows(toy):  # S8, S53
    with Artifact.open(toy) as artifact, Executor(artifact, "eval", Sizes(300, 8, n_threads=1)) as executor:
        keys = executor.caches.view("blk.0.k")
        assert keys.shape == (512, 16) and not keys.any()
        assert all(executor.caches.view(n).__array_interface__["data"][0] % 64 == 0 for n in ("blk.0.k", "blk.0.v"))
    caches = [fmt.Cache("k", 0, "k", "q8_0", 40, 40)]
    with pytest.raises(ArtifactError, match="cannot be stored"):
        from types import SimpleNamespace

        from ggufc.runtime.caches import CacheBuffers

        CacheBuffers(SimpleNamespace(manifest=fake_model.manifest(caches=caches), path="toy"), Sizes(64))


def paths_in(value, path=()):
    """Paths to every scalar of decoded JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*path, key))
    if not isinstance(value, (dict, list)):
        yield path


MANIFEST = json.loads(fmt.dumps(fake_model.manifest()))
STRANGE = st.sampled_from([0, -1, 1, 3, 1 << 31, 1 << 62, 1 << 64, -(1 << 63), 0.5, "", "T", "blk.0.k", "q8_0", "slot", None, True, [], {}])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(paths_in(MANIFEST))), STRANGE)
def test_any_changed_value_of_a_manifest_is_refused_or_binds(tmp_path_factory, path, value):
    changed = json.loads(json.dumps(MANIFEST))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = fake_model.write(tmp_path_factory.getbasetemp() / "changed.ggufc", text=json.dumps(changed))
    with contextlib.suppress(GgufcError), Session(file, n_ctx=256, n_ubatch=8, n_threads=1) as session:
        assert session.n_vocab == changed["n_vocab"]
