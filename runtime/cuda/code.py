"""The GPU code of an artifact: reading it, checking it, and choosing what a device can run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from ggufc.formats import cuda as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.errors import RuntimeRefusal

from .device import Device, PtxTooNew

_REMEDY = "compile the model again with this version of ggufc"


def target_for(device: Device | None) -> str:
    """The ``--target`` item whose code ``device`` runs best; RuntimeRefusal for a device that is too old for any."""
    if device is None:
        return "cuda:sm_80"
    newest = fmt.newest_for(device.capability)
    if newest is None:
        raise RuntimeRefusal(
            f"{device.name} is sm_{device.capability}, and GPU code needs {next(iter(fmt.PTX_VERSIONS))} or newer; run on the CPU"
        )
    return f"cuda:{newest}"


def cuda_manifest(artifact: Artifact, device: Device | None = None) -> fmt.CudaManifest:
    """The description of the artifact's GPU code. RuntimeRefusal, with the target ``device`` wants, if it has none; ArtifactError if it
    does not fit the CPU manifest.
    """
    text = artifact.metadata.get(fmt.KEY)
    if not isinstance(text, str):
        raise RuntimeRefusal(
            f"{artifact.path}: this artifact holds no GPU code; compile the model with --target native,{target_for(device)}, or run on "
            "the CPU"
        )
    try:
        manifest = fmt.loads(text)
    except msgspec.DecodeError as error:
        raise ArtifactError(
            f"{artifact.path}: the description of the GPU code does not have the expected form ({error}); {_REMEDY}"
        ) from None
    have, want = [k.signature for k in manifest.kernels], [k.signature for k in artifact.manifest.kernels]
    if have != want or not len(manifest.targets) == len(manifest.sha256) == len(manifest.ptx_versions) > 0:
        raise ArtifactError(f"{artifact.path}: the GPU code belongs to other kernels than the CPU code; {_REMEDY}")
    for kernel in manifest.kernels:
        for entry in kernel.entries:
            factors = all(f.div >= 1 and 0 <= f.mult < 1 << 40 for f in entry.grid)
            if not (0 < entry.block <= 1024 and factors and kernel.extra_bytes >= 0 and min(kernel.extra_div, kernel.slice_tokens) >= 1):
                raise ArtifactError(f"{artifact.path}: the launch of {entry.symbol!r} is malformed; {_REMEDY}")
    return manifest


def ptx_text(artifact: Artifact, manifest: fmt.CudaManifest, index: int) -> str:
    """PTX of one target, digest checked."""
    name = f"{fmt.TENSOR}.{manifest.targets[index]}"
    if name not in artifact.file.tensors:
        raise ArtifactError(f"{artifact.path}: the tensor {name} with the GPU code is missing; {_REMEDY}")
    raw = artifact.file.data(name).tobytes()
    if hashlib.sha256(raw).hexdigest() != manifest.sha256[index].lower():
        raise ArtifactError(f"{artifact.path}: the GPU code {name} does not match its digest; the file is damaged, {_REMEDY}")
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise ArtifactError(f"{artifact.path}: the GPU code {name} is not text; {_REMEDY}") from None


@dataclass(frozen=True)
class LoadedCode:
    """A module on a device; ``functions`` by symbol."""

    target: str
    manifest: fmt.CudaManifest
    functions: dict[str, Any]


def load_code(artifact: Artifact, device: Device) -> LoadedCode:
    """Load the newest code the device and its driver can run. RuntimeRefusal says what would have to change."""
    manifest = cuda_manifest(artifact, device)
    known = [(int(name.removeprefix("sm_")), i) for i, name in enumerate(manifest.targets)]
    usable = sorted((c, i) for c, i in known if c <= device.capability)
    if not usable:
        names = ", ".join(manifest.targets)
        raise RuntimeRefusal(
            f"{artifact.path}: its GPU code is for {names}, {device.name} is sm_{device.capability}; compile the model with "
            f"--target native,{target_for(device)}, or run on the CPU"
        )
    refused: PtxTooNew | None = None
    for _, i in reversed(usable):
        try:
            module = device.load(ptx_text(artifact, manifest, i))
        except PtxTooNew as error:
            refused = error
            continue
        symbols = {entry.symbol for kernel in manifest.kernels for entry in kernel.entries}
        return LoadedCode(manifest.targets[i], manifest, {s: device.function(module, s) for s in sorted(symbols)})
    versions = ", ".join(f"{v // 10}.{v % 10}" for v in sorted({manifest.ptx_versions[i] for _, i in usable}))
    raise RuntimeRefusal(
        f"{artifact.path}: the driver of {device.name} knows none of its PTX versions ({versions}); update the driver, or compile the "
        "model with --target cuda:sm_80"
    ) from refused
