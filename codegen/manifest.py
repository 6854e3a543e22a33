"""The manifest of an artifact from what compilation knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from ggufc.codegen.cpu.driver import EVAL, WORKER
from ggufc.codegen.cpu.image import Image
from ggufc.codegen.cpu.target import Target
from ggufc.codegen.frontend import Compilation
from ggufc.codegen.kernels.base import KernelSpec
from ggufc.codegen.options import CompileOptions
from ggufc.codegen.schedule import form
from ggufc.codegen.weight_plan import as_f32
from ggufc.formats import abi
from ggufc.formats.artifact import Cache, Kernel, Manifest
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir.dims import parse_dim
from ggufc.models.model import Model
from ggufc.models.step import checked
from ggufc.passes.fusion_counts import fusion_counts
from ggufc.passes.split_heads import ANALYSIS as SPLIT_HEADS
from ggufc.passes.split_heads import REST


def model_manifest(gguf: GGUFFile, model: Model, options: CompileOptions) -> Manifest:
    """What a manifest says of a model before there are programs or code."""
    return Manifest(
        abi=abi.ABI_VERSION,
        arch=model.arch,
        source_sha256="",
        source_name=os.fsencode(gguf.path.name).decode("utf-8", "replace"),  # a file's name may be any bytes
        target="",
        level="",
        features=[],
        n_vocab=model.n_vocab,
        n_ctx_train=model.n_ctx_train,
        n_embd=model.n_embd,
        n_layer=model.n_layer,
        type_k=options.type_k,
        type_v=options.type_v,
        caches=cache_specs(gguf, model, options),
        programs=[],
        kernels=[],
        drivers={},
    )


def make_manifest(
    gguf: GGUFFile,
    model: Model,
    options: CompileOptions,
    target: Target,
    compilations: Sequence[Compilation],
    specs: Sequence[KernelSpec],
    kernels: list[Kernel],
    image: Image,
) -> Manifest:
    index = {spec: i for i, spec in enumerate(specs)}
    programs = []
    for c in compilations:
        observed = c.graph.analysis.get("observations", {})
        programs.append(
            c.schedule.finish(
                index,
                nodes=len(c.graph.nodes),
                node_budget=int(c.graph.analysis.get("node-estimate", 0)),
                reuse_key=sorted(observed.items()),
                fusions=fusion_counts(c.records),
            )
        )
    head = model_manifest(gguf, model, options)
    return msgspec.structs.replace(
        head,
        source_sha256=gguf.sha256(),
        target=target.triple,
        level=target.level,
        features=list(target.features),
        caches=by_heads(head.caches, compilations[0].graph.analysis.get(SPLIT_HEADS, {})),
        programs=programs,
        kernels=kernels,
        drivers={name: image.symbols[name][0] for name in (WORKER, EVAL)},
        options={
            "target": options.target,
            "pipeline": options.pipeline or "default",
            **{f"builder.{name}": repr(value) for name, value in checked(options.effective()).items()},
            **({"keep": options.keep} if options.keep else {}),
        },
    )


def by_heads(caches: Sequence[Cache], split: Mapping[str, int]) -> list[Cache]:
    """The caches with those that ``split`` names as two: the given number of heads, and the rest."""
    found = []
    for cache in caches:
        heads = split.get(cache.name)
        if heads is None:
            found.append(cache)
            continue
        first = heads * cache.head
        found.append(msgspec.structs.replace(cache, row=first))
        found.append(msgspec.structs.replace(cache, name=cache.name + REST, row=cache.row - first, rest_of=cache.name))
    return found


def cache_specs(gguf: GGUFFile, model: Model, options: CompileOptions) -> list[Cache]:
    """The caches of a model, with what a K-shift must know of their rotations."""
    caches = []
    for info in model.caches(options.for_builder()):
        rope = dict(info.rope)
        factors = rope.pop("factors", None)
        if factors is not None:
            values = as_f32(gguf.data(factors), gguf.tensors[factors].type.name)
            rope["freq_factors"] = [float(v) for v in values]
        rows = form(parse_dim(info.rows))
        head = info.name, info.layer, info.part, info.dtype, info.width, info.head_dim, info.window
        caches.append(Cache(*head, rope, rows, info.hadamard))
    return caches
