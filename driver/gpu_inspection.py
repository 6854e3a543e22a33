"""What an artifact's GPU code holds, as plain data (the key ``gpu`` of ``ggufc inspect --json``)."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from ggufc.formats import cuda as fmt

if TYPE_CHECKING:
    from ggufc.runtime.artifact import Artifact

Data = dict[str, Any]


def describe_gpu(artifact: Artifact, assemble: bool = False) -> Data | None:
    """Architectures and kernels of an artifact, None without GPU code. With ``assemble``, registers, shared memory and occupancy of every
    kernel where the machine has NVIDIA's assembler (``assembler`` says so, or why not).
    """
    from ggufc.runtime.cuda.code import cuda_manifest, ptx_text

    if fmt.KEY not in artifact.metadata:
        return None
    manifest = cuda_manifest(artifact)
    targets = [
        {"arch": name, "ptx_version": f"{v // 10}.{v % 10}", "bytes": artifact.file.tensors[f"{fmt.TENSOR}.{name}"].nbytes}
        for name, v in zip(manifest.targets, manifest.ptx_versions)
    ]
    used = collections.Counter(launch.kernel for program in artifact.manifest.programs for launch in program.launches)
    kernels = [
        {"symbol": e.symbol, "signature": k.signature, "block": e.block, "launches": used[i], "when": _when(e)}
        for i, k in enumerate(manifest.kernels)
        for e in k.entries
    ]
    data: Data = {"targets": targets, "kernels": kernels, "assembler": "not asked (--ptx)"}
    if assemble:
        texts = {name: ptx_text(artifact, manifest, i) for i, name in enumerate(manifest.targets)}
        data["assembler"] = _measure(kernels, texts)
    return data


def _when(entry: fmt.Entry) -> str:
    if not entry.sym:
        return "always"
    return f"{entry.sym} from {entry.low}" + (f" to {entry.high}" if entry.high else "")


def _measure(kernels: list[Data], texts: dict[str, str]) -> str:
    """Add ``usage`` by architecture to the kernels; what assembled them, or why nothing did."""
    from ggufc.codegen.nvptx import assembler
    from ggufc.codegen.nvptx.occupancy import occupancy

    if assembler.find() is None:
        return "not found: registers and shared memory are unknown (install the CUDA toolkit, or `pip install nvidia-cuda-nvcc`)"
    known = [name for name in texts if name in assembler.architectures()]
    for name in known:
        usage = assembler.assemble(texts[name], name)
        for kernel in kernels:
            taken = usage[kernel["symbol"]]
            share = occupancy(name, kernel["block"], taken.registers, taken.shared)
            row = {"registers": taken.registers, "shared": taken.shared, "spilled": taken.spilled, "occupancy": round(share, 3)}
            kernel.setdefault("usage", {})[name] = row
    unknown = ", ".join(name for name in texts if name not in known)
    return f"ptxas {assembler.version()}" + (f", which does not know {unknown}" if unknown else "")
