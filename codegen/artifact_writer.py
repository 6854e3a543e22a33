"""Writes the artifact: the model's keys, the manifest, repacked weights (streamed) and the image."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ggufc.codegen.cpu.image import Image
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.weight_plan import StoredWeight, WeightPlan, as_f32
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.formats import artifact as fmt
from ggufc.formats import cuda
from ggufc.formats.ggml_types import row_bytes
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.ir.graph import Graph
from ggufc.ir.interp import evaluate_derived

ALIGNMENT = 64
_CHUNK_BYTES = 8 << 20


def write_artifact(
    output: Path,
    source: GGUFFile,
    manifest: fmt.Manifest,
    graphs: dict[str, str],
    image: Image,
    weights: list[tuple[WeightPlan, StoredWeight]],
    progress: Callable[[int, int], None] | None = None,
    ptx: tuple[cuda.CudaManifest, dict[str, str]] | None = None,
) -> None:
    """Write ``output`` atomically; memory stays at a few chunks whatever the size of the model. ``ptx``: GPU code by architecture."""
    writer = GGUFWriter(output, ALIGNMENT)
    split = [key for key in source.metadata if key.startswith("split.")]
    writer.copy_metadata(source, except_keys={"general.alignment", *split})
    text = fmt.dumps(manifest)
    writer.add(fmt.VERSION_KEY, fmt.FORMAT_VERSION, "uint32")
    writer.add(fmt.MANIFEST_KEY, text)
    for name, graph in graphs.items():
        writer.add(fmt.GRAPH_KEY + name, graph)
    code = np.frombuffer(image.code, np.uint8)
    writer.add(fmt.DIGEST_KEY + "manifest", hashlib.sha256(text.encode()).hexdigest())
    writer.add(fmt.DIGEST_KEY + "image", hashlib.sha256(image.code).hexdigest())
    writer.add_tensor(f"{fmt.IMAGE_TENSOR}.{manifest.target.split('-')[0]}", (code.size,), "i8", code)
    if ptx is not None:
        writer.add(cuda.KEY, cuda.dumps(ptx[0]))
        for name, source_text in ptx[1].items():
            raw = np.frombuffer(source_text.encode("ascii"), np.uint8)
            writer.add_tensor(f"{cuda.TENSOR}.{name}", (raw.size,), "i8", raw)
    done = 0
    total = sum(stored_bytes(w) for _, w in weights)

    digests: list[Any] = [hashlib.sha256(image.code)] + [hashlib.sha256(text.encode("ascii")) for text in (ptx[1].values() if ptx else ())]

    def count(chunks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        nonlocal done
        digests.append(hashlib.sha256())
        for chunk in chunks:
            digests[-1].update(np.ascontiguousarray(chunk).view(np.uint8).reshape(-1).data)
            done += chunk.nbytes
            if progress:
                progress(done, total)
            yield chunk

    for plan, weight in weights:
        writer.add_tensor(weight.name, (stored_bytes(weight),), "i8", lambda p=plan, w=weight: count(stored_chunks(p.graph, w, source)))
    size = 32 * (len(digests) + len(weights))
    writer.add_tensor(fmt.DIGESTS_TENSOR, (size,), "i8", lambda: [np.frombuffer(b"".join(d.digest() for d in digests), np.uint8)])
    writer.finish()


def require_space(output: Path, weights: list[StoredWeight]) -> None:
    """Refuse, before code is generated, an artifact that the disk cannot hold: its weights are known, and most of it. CodegenError."""
    needed = sum(map(stored_bytes, weights))
    folder = output.absolute().parent
    free = shutil.disk_usage(folder).free if folder.is_dir() else needed
    if free < needed:
        raise CodegenError(
            f"the weights of {output.name} take {needed / 2**20:.1f} MiB, but only {free / 2**20:.1f} MiB are free in {folder}; free "
            "space or choose another folder (GGUFC_CACHE names the cache)"
        )


def stored_bytes(weight: StoredWeight) -> int:
    """Size of a stored weight."""
    if weight.form == "plain":
        return 4 * int(np.prod(weight.ne))
    k, n = weight.ne[0], weight.ne[1]
    experts = weight.ne[2] if len(weight.ne) > 2 else 1
    return weight_format(weight.dtype).packed_bytes(k, n) * experts


def stored_chunks(graph: Graph, weight: StoredWeight, source: GGUFFile) -> Iterator[np.ndarray]:
    """The bytes of a stored weight in pieces."""
    if weight.form == "plain":
        yield _plain(graph, weight, source)
        return
    k, n = weight.ne[0], weight.ne[1]
    size = row_bytes(weight.dtype, k)
    rows = [source.data(name).reshape(-1, size) for name in weight.sources] or [_derived(graph, weight, source).reshape(-1, size)]
    layout = weight_format(weight.dtype)
    step = max(1, _CHUNK_BYTES // (ROWS * size)) * ROWS
    if weight.form == "glu":
        gate, up = rows
        for start in range(0, n // 2, step):
            yield layout.repack(_interleave(gate[start : start + step], up[start : start + step]), k)
        return
    for part in _slabs(rows, n):
        for start in range(0, n, step):
            yield layout.repack(_take(part, start, min(n, start + step)), k)


def _interleave(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Groups of 16 rows of ``gate`` and ``up`` in turn."""
    return np.stack([half.reshape(-1, ROWS, half.shape[1]) for half in (gate, up)], axis=1).reshape(-1, gate.shape[1])


def _slabs(rows: list[np.ndarray], n: int) -> Iterator[list[np.ndarray]]:
    """Groups of row arrays holding ``n`` rows each: one per matrix of a stack of experts."""
    current: list[np.ndarray] = []
    have = 0
    for array in rows:
        start = 0
        while start < len(array):
            take = min(n - have, len(array) - start)
            current.append(array[start : start + take])
            start += take
            have += take
            if have == n:
                yield current
                current, have = [], 0
    if have:
        raise CodegenError(f"internal: {have} rows left over where matrices have {n}")


def _take(parts: list[np.ndarray], start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of concatenated arrays."""
    out, at = [], 0
    for array in parts:
        lo, hi = max(start - at, 0), min(stop - at, len(array))
        if lo < hi:
            out.append(array[lo:hi])
        at += len(array)
    return out[0] if len(out) == 1 else np.concatenate(out)


def _plain(graph: Graph, weight: StoredWeight, source: GGUFFile) -> np.ndarray:
    raws = [source.data(name) for name in weight.sources] or [_derived(graph, weight, source)]
    if weight.dtype == "i32":
        table = np.concatenate([raw.view(np.int32).reshape(-1) for raw in raws])
        if table.size and not (table.min() >= 0 and table.max() < weight.below):
            at = int(np.flatnonzero((table < 0) | (table >= weight.below))[0])
            raise CodegenError(
                f"tensor {weight.name.removesuffix('.i32')}: entry {at} is {table[at]}, but it must name one of {weight.below}; the "
                "file is damaged, get it again"
            )
        return table
    return np.concatenate([as_f32(raw, weight.dtype).reshape(-1) for raw in raws])


def _derived(graph: Graph, weight: StoredWeight, source: GGUFFile) -> np.ndarray:
    """Bytes of a derived weight that is no byte concatenation: evaluated by the reference interpreter."""
    return evaluate_derived(graph, weight.derived, source.data).reshape(-1).view(np.uint8)
