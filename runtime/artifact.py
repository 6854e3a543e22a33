"""Opening an artifact: every check that must pass before its code is mapped."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np

from ggufc.formats import abi
from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.formats.gguf_reader import GGUFFile

from .cpuinfo import host_features

_REMEDY = "compile the model again with this version of ggufc"


class Artifact:
    """A checked artifact. ``file`` is the mapped GGUF container, ``manifest`` its description; weights are views of the map, never copies.

    ``metadata`` is the container's metadata: the model's own keys and tokenizer beside ``ggufc.*``.
    """

    def __init__(self, file: GGUFFile, manifest: fmt.Manifest, image: np.ndarray) -> None:
        self.file = file
        self.manifest = manifest
        self.path = file.path
        self.metadata = file.metadata
        self.image = image
        self._programs = {program.name: program for program in manifest.programs}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        expect_digest: str | None = None,
        features: frozenset[str] | None = None,
        to_run: bool = True,
    ) -> Artifact:
        """Map the file and check version, ABI, digests, CPU features and tensors.

        ``expect_digest``: sha256 (hex) the whole file must have, for artifacts from elsewhere: an artifact is native code and must be
        trusted as a program is. ``features``: CPU features to check against, this machine's by default. ``to_run`` false leaves out
        processor and features: whoever only looks at an artifact may look at one for any machine. Raises ArtifactError, or GGUFError
        for a malformed container.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise ArtifactError(f"the artifact is {path!r}; give a path")
        file = GGUFFile.open(path)
        try:
            if expect_digest is not None:
                _check_expected(file, expect_digest)
            manifest = _manifest(file)
            image = _image(file, manifest)
            if to_run:
                _check_features(file.path, manifest, host_features() if features is None else features)
            _check_references(file, manifest)
        except BaseException:
            file.close()
            raise
        return cls(file, manifest, image)

    @property
    def program_names(self) -> list[str]:
        return list(self._programs)

    def program(self, name: str) -> fmt.Program:
        """The program (scheduled graph) called ``name``; ArtifactError lists those there are."""
        if name not in self._programs:
            raise ArtifactError(f"{self.path}: there is no program {name!r}; the artifact holds {', '.join(self._programs) or 'none'}")
        return self._programs[name]

    def graph_text(self, name: str) -> str:
        """IR text stored for a graph; ArtifactError if there is none of that name."""
        text = self.metadata.get(fmt.GRAPH_KEY + name)
        if not isinstance(text, str):
            have = [k.removeprefix(fmt.GRAPH_KEY) for k in self.metadata if k.startswith(fmt.GRAPH_KEY)]
            raise ArtifactError(f"{self.path}: there is no graph {name!r}; the artifact holds {', '.join(have) or 'none'}")
        return text

    def close(self) -> None:
        """Unmap; arrays still in use keep their pages."""
        self.image = np.empty(0, np.uint8)
        self.file.close()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_artifact(file: GGUFFile) -> bool:
    """Whether an open container is an artifact (of any version) rather than a model."""
    return fmt.VERSION_KEY in file.metadata or fmt.MANIFEST_KEY in file.metadata


def _digest(file: GGUFFile, what: str) -> str:
    value = file.metadata.get(fmt.DIGEST_KEY + what)
    if not isinstance(value, str) or len(value) != 64:
        raise ArtifactError(f"{file.path}: the key {fmt.DIGEST_KEY}{what} with the sha256 of the {what} is missing or malformed; {_REMEDY}")
    return value.lower()


def _manifest(file: GGUFFile) -> fmt.Manifest:
    if not is_artifact(file):
        raise ArtifactError(f"{file.path}: this is a model, not an artifact; compile it first (ggufc compile), or give it to ggufc run")
    version = file.metadata.get(fmt.VERSION_KEY)
    if version != fmt.FORMAT_VERSION:
        raise ArtifactError(f"{file.path}: artifact format {version!r}, this version of ggufc reads {fmt.FORMAT_VERSION}; {_REMEDY}")
    text = file.metadata.get(fmt.MANIFEST_KEY)
    if not isinstance(text, str):
        raise ArtifactError(f"{file.path}: the key {fmt.MANIFEST_KEY} is missing or not a string; {_REMEDY}")
    raw = text.encode("utf-8", "surrogateescape")
    if hashlib.sha256(raw).hexdigest() != _digest(file, "manifest"):
        raise ArtifactError(f"{file.path}: the manifest does not match its digest; the file is damaged, {_REMEDY}")
    try:
        manifest = fmt.loads(raw)
    except msgspec.DecodeError as error:  # ValidationError derives from it
        raise ArtifactError(f"{file.path}: the manifest does not have the expected form ({error}); {_REMEDY}") from None
    if not (0 < manifest.n_vocab < 1 << 31 and 0 < manifest.n_embd < 1 << 31 and 0 <= manifest.n_ctx_train < 1 << 31):
        raise ArtifactError(f"{file.path}: the manifest's n_vocab, n_embd or n_ctx_train is out of range; {_REMEDY}")
    if manifest.abi not in abi.RUNNABLE_ABIS:
        raise ArtifactError(f"{file.path}: native ABI {manifest.abi}, this version of ggufc runs {abi.ABI_VERSION}; {_REMEDY}")
    return manifest


def _check_expected(file: GGUFFile, expected: str) -> None:
    if not isinstance(expected, str):
        raise ArtifactError(f"expect_digest is {expected!r}; give the SHA-256 as text")
    wanted = expected.strip().lower().removeprefix("sha256:")
    have = file.sha256()
    if have != wanted:
        raise ArtifactError(
            f"{file.path}: the file's sha256 is {have}, expected {wanted}; it is not the artifact you asked for, nothing was loaded"
        )


def _image(file: GGUFFile, manifest: fmt.Manifest) -> np.ndarray:
    names = [name for name in file.tensors if name == fmt.IMAGE_TENSOR or name.startswith(fmt.IMAGE_TENSOR + ".")]
    if len(names) != 1:
        raise ArtifactError(f"{file.path}: {len(names)} code images ({fmt.IMAGE_TENSOR}) where one is expected; {_REMEDY}")
    image = file.data(names[0])
    if hashlib.sha256(image.data).hexdigest() != _digest(file, "image"):
        raise ArtifactError(f"{file.path}: the code image does not match its digest; the file is damaged, {_REMEDY}")
    for kernel in manifest.kernels:
        if not (kernel.offset >= 0 and 0 < kernel.size <= image.size - kernel.offset and 0 <= kernel.scratch < 1 << 32):
            raise ArtifactError(f"{file.path}: kernel {kernel.symbol!r} lies outside the code image of {image.size} bytes; {_REMEDY}")
    for driver in ("ggufc_worker", "ggufc_eval"):
        if not 0 <= manifest.drivers.get(driver, -1) < image.size:
            raise ArtifactError(f"{file.path}: the driver function {driver} is missing from the code image; {_REMEDY}")
    return image


def _check_features(path: Path, manifest: fmt.Manifest, have: frozenset[str]) -> None:
    machine = os.uname().machine
    arch = manifest.target.split("-", 1)[0]
    if arch != machine and {arch, machine} not in ({"x86_64", "amd64"}, {"aarch64", "arm64"}):
        raise ArtifactError(
            f"{path}: the code is for {arch}, this machine is {machine}; compile the model on or for this machine (--target)"
        )
    missing = [feature for feature in manifest.features if feature not in have]
    if missing:
        raise ArtifactError(
            f"{path}: the code (level {manifest.level}) needs CPU features this machine lacks: {', '.join(missing)}; "
            "compile the model here, or with --target for a weaker level"
        )


def _check_references(file: GGUFFile, manifest: fmt.Manifest) -> None:
    """Names in the manifest must exist before anything is bound; offsets are checked when a program is."""
    wanted: dict[str, str] = {}
    for program in manifest.programs:
        for launch in program.launches:
            for arg in launch.args:
                if arg.kind == "weight":
                    wanted.setdefault(arg.name, launch.node)
    for name, node in wanted.items():
        if name not in file.tensors:
            raise ArtifactError(f"{file.path}: tensor {name!r}, read by {node}, is missing; {_REMEDY}")
