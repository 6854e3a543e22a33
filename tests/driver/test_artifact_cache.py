"""The artifact cache: what the key depends on, one compilation at a time, housekeeping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from ggufc import cache
from ggufc.cli import cli
from ggufc.errors import DriverError
from ggufc.files import replacing, size_words
from ggufc.formats.errors import GGUFError

OPTIONS = {"target": "native", "type_k": "f16", "type_v": "f16", "passes": ""}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GGUFC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny model.gguf"
    path.write_bytes(b"GGUF")
    return path


def write(text: str):
    def build(output: Path) -> None:
        with replacing(output) as temporary:
            temporary.write_text(text)

    return build


def test_a_second_request_compiles_nothing(source: Path) -> None:
    first = cache.fetch(source, OPTIONS, write("code"))
    again = cache.fetch(source, OPTIONS, lambda output: pytest.fail("compiled twice"))
    assert again == first
    assert first.name.startswith("tiny_model-")
    assert sorted(p.name for p in first.parent.iterdir()) == [first.name, first.with_suffix(".json").name]


def test_a_damaged_artifact_is_made_anew(source: Path) -> None:
    artifact = cache.fetch(source, OPTIONS, write("code"))
    for damage in (lambda: os.truncate(artifact, 1), artifact.unlink, artifact.with_suffix(".json").unlink):
        damage()
        assert not cache.is_whole(artifact)
        assert cache.fetch(source, OPTIONS, write("code")).read_text() == "code" and cache.is_whole(artifact)


def test_the_key_depends_on_the_file_and_on_every_option(source: Path) -> None:
    keys = {cache.artifact_path(source, OPTIONS)}
    keys.update(cache.artifact_path(source, {**OPTIONS, name: "other"}) for name in OPTIONS)
    source.write_bytes(b"GGUF2")
    keys.add(cache.artifact_path(source, OPTIONS))
    os.utime(source, ns=(1, 1))
    keys.add(cache.artifact_path(source, OPTIONS))
    assert len(keys) == len(OPTIONS) + 3


def test_the_key_depends_on_the_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.artifact_path(source, OPTIONS)
    monkeypatch.setattr(cache, "__version__", "99")
    assert cache.artifact_path(source, OPTIONS) != before


def test_every_shard_of_a_split_model_counts(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    before = cache.artifact_path(parts[0], OPTIONS)
    os.utime(parts[1], ns=(1, 1))
    assert cache.artifact_path(parts[0], OPTIONS) != before
    parts[1].unlink()
    with pytest.raises(FileNotFoundError):
        cache.artifact_path(parts[0], OPTIONS)


def test_a_link_and_its_target_share_an_artifact(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "tiny model-link.gguf"
    link.symlink_to(source)
    digest = [cache.artifact_path(p, OPTIONS).stem.rsplit("-", 1)[1] for p in (source, link)]
    assert digest[0] == digest[1]


def test_a_failed_compilation_leaves_nothing(source: Path) -> None:
    def build(output: Path) -> None:
        with replacing(output) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.fetch(source, OPTIONS, build)
    assert list(cache.artifacts_dir().iterdir()) == []


def test_concurrent_requests_compile_once(source: Path) -> None:
    builds: list[int] = []
    inside, go = threading.Event(), threading.Event()

    def build(output: Path) -> None:
        builds.append(1)
        inside.set()
        assert go.wait(10)
        write("code")(output)

    results: list[Path] = []
    first = threading.Thread(target=lambda: results.append(cache.fetch(source, OPTIONS, build)))
    first.start()
    assert inside.wait(10)
    # The lock belongs to the open file, so a second opening in the same process waits like another process.
    second = threading.Thread(target=lambda: results.append(cache.fetch(source, OPTIONS, build, waiting=go.set)))
    second.start()
    first.join(10)
    second.join(10)
    assert len(results) == 2 and results[0] == results[1]
    assert builds == [1]
    assert results[0].read_text() == "code"


def test_a_killed_holder_releases_the_lock(source: Path) -> None:
    script = (
        "import sys, pathlib; from ggufc import cache\n"
        "with cache.locked(pathlib.Path(sys.argv[1]), lambda: None):\n print('held', flush=True); sys.stdin.read()"
    )
    artifact = cache.artifact_path(source, OPTIONS)
    holder = subprocess.Popen([sys.executable, "-c", script, str(artifact)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    waited: list[bool] = []

    def kill() -> None:
        waited.append(True)
        holder.kill()

    assert cache.fetch(source, OPTIONS, write("code"), waiting=kill).read_text() == "code"
    holder.communicate()
    assert waited == [True]


def test_states_of_artifacts(source: Path) -> None:
    cache.fetch(source, OPTIONS, write("code"))
    assert [e.state for e in cache.entries()] == ["current"]
    os.utime(source, ns=(1, 1))
    assert [e.state for e in cache.entries()] == ["outdated"]
    source.unlink()
    assert [e.state for e in cache.entries()] == ["orphan"]


def test_removal_takes_the_notes_along_and_nothing_outside(source: Path) -> None:
    cache.fetch(source, OPTIONS, write("code"))
    (entry,) = cache.entries()
    cache.remove(entry)
    assert list(cache.artifacts_dir().iterdir()) == []
    with pytest.raises(DriverError, match="not inside the cache"):
        cache.remove(cache.Entry("model", source, 4, 0.0))
    assert source.exists()


def test_leftovers_are_listed_as_partial() -> None:
    cache.models_dir().mkdir(parents=True)
    (cache.models_dir() / "m.gguf.part").write_bytes(b"x" * 10)
    (cache.models_dir() / "n.gguf.wheels").mkdir()
    (cache.models_dir() / "n.gguf.wheels" / "a.whl").write_bytes(b"x" * 5)
    assert [(e.kind, e.name, e.size) for e in cache.entries()] == [("partial", "m.gguf.part", 10), ("partial", "n.gguf.wheels", 5)]
    for entry in cache.entries():
        cache.remove(entry)
    assert cache.entries() == []


def test_what_is_stale(source: Path) -> None:
    """Leftovers count after an hour, so that what another process is writing now is left alone."""
    cache.fetch(source, OPTIONS, write("code"))
    fresh, old = (cache.artifacts_dir() / f".m.ggufc.{name}.tmp" for name in ("fresh", "old"))
    for path in (fresh, old):
        path.write_text("half")
    os.utime(old, (1, 1))
    assert [e.name for e in cache.entries() if e.stale] == [old.name]
    os.utime(source, ns=(1, 1))
    assert len([e for e in cache.entries() if e.stale]) == 2


def test_ls_and_rm_commands(source: Path) -> None:
    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["cache", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    artifact = cache.fetch(source, OPTIONS, write("code"))
    assert f"{artifact.name}  just now  current" in invoke("ls")
    (row,) = json.loads(invoke("ls", "--json"))
    assert row["kind"] == "artifact" and row["bytes"] == 4 and row["source"] == str(source)
    assert "0 entries" in invoke("rm", "--stale")
    with pytest.raises(DriverError, match=r"called nothing\*"):
        invoke("rm", "nothing*")
    assert CliRunner().invoke(cli, ["cache", "rm"]).exit_code == 2
    assert "removed" in invoke("rm", "tiny_model*")
    assert cache.entries() == []


def test_replacing_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with pytest.raises(OSError), replacing(target) as temporary:
        temporary.write_text("new")
        raise OSError
    assert target.read_text() == "old"
    assert list(tmp_path.glob(".x.*")) == []


@pytest.mark.parametrize(("size", "words"), [(10, "10 B"), (98362432, "93.8 MiB"), (1 << 41, "2.0 TiB")])
def test_sizes_in_words(size: int, words: str) -> None:
    assert size_words(size) == words


def test_a_cache_that_takes_no_files_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GGUFC_CACHE", str(tmp_path / "file"))
    with pytest.raises(DriverError, match=r"file/artifacts takes no files .*set GGUFC_CACHE"):
        cache.fetch(source, OPTIONS, write("code"))


def test_a_damaged_artifact_of_the_cache_says_how_to_make_it_anew(source: Path, tmp_path: Path) -> None:
    artifact = cache.fetch(source, OPTIONS, write("code"))
    with pytest.raises(DriverError, match=rf"string 3 is too long; .*`ggufc cache rm {artifact.name}`"), cache.explaining(artifact):
        raise GGUFError("string 3 is too long")
    elsewhere = tmp_path / artifact.name
    with pytest.raises(GGUFError, match=r"^string 3 is too long$"), cache.explaining(elsewhere):
        raise GGUFError("string 3 is too long")
