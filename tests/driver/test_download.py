"""Downloads: whole or not at all, continued where they broke, never over a good file."""

from __future__ import annotations

import errno
import hashlib
import json
import random
from pathlib import Path

import pytest

from ggufc import files
from ggufc.download import download, file_name
from ggufc.errors import DriverError
from local_web import Resource, serve

DATA = b"GGUF" + random.Random(7).randbytes(3 << 20)
SHA = hashlib.sha256(DATA).hexdigest()
NO_PAUSE = (0.0, 0.0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_file_arrives_and_nothing_else_stays(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with serve({"/m.gguf": Resource(DATA)}) as web:
        path = download(f"{web.url}/m.gguf", tmp_path / "m.gguf", sha256=SHA, progress=lambda what, done, total: seen.append((done, total)))
    assert path.read_bytes() == DATA
    assert names(tmp_path) == ["m.gguf"]
    assert seen[-1] == (len(DATA), len(DATA))


def test_broken_connections_continue_in_the_same_call(tmp_path: Path) -> None:
    resource = Resource(DATA, break_after=[1 << 20, 1 << 19])
    with serve({"/m.gguf": resource}) as web:
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", sha256=SHA, pauses=NO_PAUSE)
        ranges = [wanted for _, wanted in web.requests]
    assert ranges == [None, f"bytes={1 << 20}-", f"bytes={(1 << 20) + (1 << 19)}-"]
    assert (tmp_path / "m.gguf").read_bytes() == DATA


def test_a_later_call_continues_an_interrupted_one(tmp_path: Path) -> None:
    resource = Resource(DATA, break_after=[1000])
    with serve({"/m.gguf": resource}) as web:
        with pytest.raises(DriverError, match="keeps 1000 bytes, run the same command to continue"):
            download(f"{web.url}/m.gguf", tmp_path / "m.gguf", pauses=())
        assert names(tmp_path) == ["m.gguf.part", "m.gguf.part.json"]
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", pauses=())
        assert web.requests[-1][1] == "bytes=1000-"
    assert (tmp_path / "m.gguf").read_bytes() == DATA
    assert names(tmp_path) == ["m.gguf"]


def test_an_interrupt_keeps_the_part_and_never_makes_the_file(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with serve({"/m.gguf": Resource(DATA)}) as web:
        with pytest.raises(KeyboardInterrupt):
            download(f"{web.url}/m.gguf", tmp_path / "m.gguf", progress=interrupt)
        assert not (tmp_path / "m.gguf").exists()
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", sha256=SHA)
        assert web.requests[-1][1] is not None


def test_a_changed_resource_starts_from_zero(tmp_path: Path) -> None:
    resource = Resource(b"GGUF" + b"old" * 1000, break_after=[500])
    with serve({"/m.gguf": resource}) as web:
        with pytest.raises(DriverError):
            download(f"{web.url}/m.gguf", tmp_path / "m.gguf", pauses=())
        web.resources["/m.gguf"] = Resource(DATA, etag='"v2"')
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", sha256=SHA, pauses=())
    assert (tmp_path / "m.gguf").read_bytes() == DATA


@pytest.mark.parametrize("resource", [Resource(DATA, break_after=[999], ranges=False), Resource(DATA, etag="", break_after=[999])])
def test_servers_without_ranges_or_validators_start_over(tmp_path: Path, resource: Resource) -> None:
    with serve({"/m.gguf": resource}) as web:
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", sha256=SHA, pauses=NO_PAUSE)
    assert (tmp_path / "m.gguf").read_bytes() == DATA


def test_a_complete_part_only_needs_its_name(tmp_path: Path) -> None:
    with serve({"/m.gguf": Resource(DATA)}) as web:
        (tmp_path / "m.gguf.part").write_bytes(DATA)
        (tmp_path / "m.gguf.part.json").write_text(json.dumps({"url": f"{web.url}/m.gguf", "validator": '"v1"'}))
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", sha256=SHA)
    assert names(tmp_path) == ["m.gguf"]


def test_a_wrong_digest_removes_the_download(tmp_path: Path) -> None:
    with serve({"/m.gguf": Resource(DATA)}) as web, pytest.raises(DriverError, match="the download was removed"):
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", sha256="0" * 64)
    assert names(tmp_path) == []


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(b"mine")
    with serve({"/m.gguf": Resource(DATA)}) as web:
        assert download(f"{web.url}/m.gguf", target) == target
        with pytest.raises(DriverError, match="is not the file asked for"):
            download(f"{web.url}/m.gguf", target, sha256=SHA)
        assert web.requests == []
    assert target.read_bytes() == b"mine"


def test_a_refusal_of_the_server_is_named_at_once(tmp_path: Path) -> None:
    with serve({}) as web, pytest.raises(DriverError, match="the server answered 404"):
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf")
    assert names(tmp_path) == []


def test_a_full_disk_is_refused_before_the_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with serve({"/m.gguf": Resource(DATA)}) as web, pytest.raises(DriverError, match="only 1000 B are free"):
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    def fill(what: str, done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with serve({"/m.gguf": Resource(DATA)}) as web, pytest.raises(DriverError, match="the disk is full"):
        download(f"{web.url}/m.gguf", tmp_path / "m.gguf", progress=fill)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("url", "expected"), [("https://h/a/b.gguf?x=1", "b.gguf"), ("https://h/a%20b.gguf", "a b.gguf")])
def test_file_names_come_from_the_path(url: str, expected: str) -> None:
    assert file_name(url) == expected


@pytest.mark.parametrize("url", ["https://host/", "https://host/..", "https://host/a%2Fb", "https://host/%00"])
def test_file_names_cannot_leave_the_folder(url: str) -> None:
    with pytest.raises(DriverError, match="does not end in a file name"):
        file_name(url)


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="only http and https"):
        download("file:///etc/passwd", tmp_path / "x")
