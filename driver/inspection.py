"""What a model file or an artifact holds and needs, as plain data (the JSON of ``ggufc inspect``)."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggufc.formats import artifact as fmt
from ggufc.formats import cuda

if TYPE_CHECKING:
    from ggufc.formats.gguf_reader import GGUFFile
    from ggufc.runtime.artifact import Artifact

Data = dict[str, Any]

_TOKENIZER = "tokenizer."
_LONG_VALUE = 100


def _prod(ne: tuple[int, ...]) -> int:
    count = 1
    for n in ne:
        count *= n
    return count


def describe_model(file: GGUFFile) -> Data:
    """A GGUF model: what it calls itself, its tensors by type, its hyperparameters."""
    types: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for tensor in file.tensors.values():
        entry = types[tensor.type.name]
        entry[0] += 1
        entry[1] += _prod(tensor.ne)
        entry[2] += tensor.nbytes
    metadata = file.metadata
    return {
        "kind": "model",
        "path": str(file.path),
        "files": [str(path) for path in file.paths],
        "bytes": file.size,
        "gguf_version": file.version,
        "arch": str(metadata.get("general.architecture", "")),
        "name": str(metadata.get("general.name", "")),
        "parameters": sum(count for _, count, _ in types.values()),
        "types": {
            dtype: {"tensors": n, "parameters": count, "bytes": size}
            for dtype, (n, count, size) in sorted(types.items(), key=lambda item: -item[1][2])
        },
        "vocabulary": _length(metadata.get("tokenizer.ggml.tokens")),
        "tokenizer": str(metadata.get("tokenizer.ggml.model", "")),
        "chat_template": "tokenizer.chat_template" in metadata,
        "hyperparameters": {key: short_value(metadata[key]) for key in metadata if not key.startswith((_TOKENIZER, "general.", "ggufc."))},
    }


def _length(value: object) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def short_value(value: object) -> object:
    """A metadata value for display: long arrays and texts are abbreviated, numpy becomes Python."""
    if isinstance(value, str):
        return value if len(value) <= _LONG_VALUE else f"{value[:_LONG_VALUE]}... ({len(value)} characters)"
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return value if len(value) <= 8 else f"[{', '.join(str(v) for v in value[:4])}, ...] ({len(value)} values)"
    return value


def model_type(metadata: Mapping[str, Any], parameters: int) -> str:
    """A short description such as ``llama 134.52 M Q4_1``: architecture, parameters where known, main tensor type."""
    from gguf.constants import LlamaFileType

    parts = [str(metadata.get("general.architecture", "unknown"))]
    if parameters:
        parts.append(f"{parameters / 1e6:.2f} M")
    number = metadata.get("general.file_type")
    if number in set(LlamaFileType):
        parts.append(LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_"))
    return " ".join(parts)


def tensors(file: GGUFFile) -> list[Data]:
    """All tensors in file order; ``ne`` fastest dimension first."""
    return [
        {"name": name, "dtype": t.type.name, "ne": list(t.ne), "bytes": t.nbytes, "offset": t.offset, "file": t.shard}
        for name, t in file.tensors.items()
    ]


def describe_artifact(artifact: Artifact, n_ctx: int, n_ubatch: int, n_seq_max: int = 1) -> Data:
    """An artifact: sections, code, caches and every program's buffers at the given limits."""
    from ggufc.runtime.caches import CacheLayout
    from ggufc.runtime.sizes import Sizes

    manifest = artifact.manifest
    wanted = Sizes(n_ctx, n_ubatch, n_seq_max)
    limits = wanted.limits
    env = limits.env()
    layout = CacheLayout(artifact, wanted)
    caches = [
        {
            "name": cache.name,
            "part": cache.part,
            "dtype": cache.dtype,
            "hadamard": cache.hadamard,
            "row": cache.row,
            "heads": cache.row // cache.head if cache.head else 0,
            "window": cache.window,
            "rows": layout.n_rows[cache.name],
            "bytes": layout.bytes_of(cache.name),
        }
        for cache in manifest.caches
    ]
    return {
        "kind": "artifact",
        "path": str(artifact.path),
        "bytes": artifact.file.size,
        "arch": manifest.arch,
        "format_version": artifact.metadata[fmt.VERSION_KEY],
        "abi": manifest.abi,
        "generator": manifest.generator,
        "source": {"name": manifest.source_name, "sha256": manifest.source_sha256},
        "target": manifest.target,
        "level": manifest.level,
        "features": list(manifest.features),
        "options": dict(manifest.options),
        "fast_prefill": "fast-prefill" in manifest.options.get("target", "").split(","),
        "model": {key: getattr(manifest, key) for key in ("n_vocab", "n_ctx_train", "n_embd", "n_layer", "type_k", "type_v")},
        "sections": _sections(artifact),
        "limits": {"n_ctx": limits.n_cells, "n_ubatch": n_ubatch, "n_seq_max": n_seq_max},
        "caches": {"bytes": sum(cache["bytes"] for cache in caches), "entries": caches},
        "programs": [describe_program(program, env) | {"reads": attention_reads(manifest, program)} for program in manifest.programs],
        "kernels": _kernels(manifest),
    }


def _sections(artifact: Artifact) -> list[Data]:
    """Where the artifact's bytes are: weights by dtype of origin are not known here, so weights count as one."""
    tensors = artifact.file.tensors
    weights = [t for name, t in tensors.items() if not name.startswith((fmt.IMAGE_TENSOR, fmt.DIGESTS_TENSOR, cuda.TENSOR))]
    gpu = [t.nbytes for name, t in tensors.items() if name.startswith(cuda.TENSOR)]
    graphs = [key for key in artifact.metadata if key.startswith(fmt.GRAPH_KEY)]
    text = sum(len(str(artifact.metadata[key])) for key in graphs)
    manifest = len(str(artifact.metadata[fmt.MANIFEST_KEY]))
    weight_bytes = sum(t.nbytes for t in weights)
    rest = artifact.file.size - weight_bytes - artifact.image.size - sum(gpu) - text - manifest
    return [
        {"section": "weights", "count": len(weights), "bytes": weight_bytes},
        {"section": "code", "count": 1, "bytes": int(artifact.image.size)},
        *([{"section": "GPU code (PTX)", "count": len(gpu), "bytes": sum(gpu)}] if gpu else []),
        {"section": "graphs", "count": len(graphs), "bytes": text},
        {"section": "manifest", "count": 1, "bytes": manifest},
        {"section": "metadata, tokenizer, padding", "count": len(artifact.metadata) - len(graphs) - 1, "bytes": rest},
    ]


CONTEXTS = (8192, 32768)
"""Lengths of a context at which attention's reads are compared."""

_READERS = {"attention": ("flash_attn(", "sparse_attn("), "scoring": ("indexer_scores(",)}


def attention_reads(manifest: fmt.Manifest, program: fmt.Program, contexts: Sequence[int] = CONTEXTS) -> list[Data]:
    """Bytes that attention reads from caches, and an indexer's scoring beside it, for one decoded token at as many cells.

    Counted from the launches. Where attention reads windows or chosen rows the numbers do not grow; unfused attention is not counted.
    """
    from ggufc.runtime.sizes import Limits

    out = []
    for n_cells in contexts:
        env = Limits(1, n_cells).env()
        row: Data = {"n_ctx": n_cells}
        for what, kernels in _READERS.items():
            launches = (x for x in program.launches if manifest.kernels[x.kernel].signature.startswith(kernels))
            row[what] = sum(fmt.evaluate(x.bytes, env) for x in launches)
        out.append(row)
    return out


def describe_program(program: fmt.Program, env: Mapping[str, int]) -> Data:
    """One scheduled graph. ``slots`` are its activation buffers, largest first, with what lives in them."""
    slots: list[Data] = [
        {
            "slot": index,
            "bytes": max((fmt.evaluate(size, dict(env)) for size in slot.sizes), default=0),
            "size": " | ".join(affine_text(size) for size in slot.sizes),
            "holders": list(slot.holders),
        }
        for index, slot in enumerate(program.slots)
    ]
    slots.sort(key=lambda slot: -slot["bytes"])
    return {
        "name": program.name,
        "launches": len(program.launches),
        "barriers": sum(launch.wait >= 0 for launch in program.launches),
        "nodes": program.nodes,
        "node_budget": program.node_budget,
        "activation_bytes": sum(slot["bytes"] for slot in slots),
        "slots": slots,
        "inputs": [
            {"name": i.name, "kind": i.kind, "dtype": i.dtype, "ne": [affine_text(n) for n in i.ne], "window": i.window}
            for i in program.inputs
        ],
        "outputs": {name: [affine_text(n) for n in ne] for name, ne in program.outputs.items()},
        "reuse_key": [list(item) for item in program.reuse_key],
        "fixups": [{"node": f.node, "cache": f.cache, "step": f.step, "launch": f.launch, "arg": f.arg} for f in program.fixups],
        "fusions": dict(program.fusions),
    }


def _kernels(manifest: fmt.Manifest) -> list[Data]:
    """Kernels, largest first, with the number of launches over all programs."""
    used = collections.Counter(launch.kernel for program in manifest.programs for launch in program.launches)
    rows = [
        {"symbol": k.symbol, "signature": k.signature, "bytes": k.size, "scratch": k.scratch, "launches": used[index]}
        for index, k in enumerate(manifest.kernels)
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def affine_text(form: Mapping[str, int]) -> str:
    """``{"T": 2304, "": 64}`` -> ``2304 T + 64``."""
    terms = [f"{k} {symbol}" if k != 1 else symbol for symbol, k in form.items() if symbol and k]
    if form.get("") or not terms:
        terms.append(str(form.get("", 0)))
    return " + ".join(terms)
