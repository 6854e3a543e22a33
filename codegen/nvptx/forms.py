"""From kernel specifications to GPU code: which form each has, and the PTX of a list of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.attention_cpu import FlashAttn, FlashAttnSplits
from ggufc.codegen.kernels.base import KernelSpec, signature, symbol
from ggufc.codegen.kernels.cache import StoreRows
from ggufc.codegen.kernels.convolution import SsmConv
from ggufc.codegen.kernels.decode import DecodeRows
from ggufc.codegen.kernels.elementwise import Copy, Elementwise
from ggufc.codegen.kernels.get_rows import GetRows
from ggufc.codegen.kernels.hadamard import Hadamard
from ggufc.codegen.kernels.indexer import IndexerScores, IndexerSelect
from ggufc.codegen.kernels.lists import Blend, Counting, Fill, ListSpans, MaskToIndex
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.kernels.quantize import Quantize
from ggufc.codegen.kernels.rope import RopeApply, RopeTable
from ggufc.codegen.kernels.routing import Route
from ggufc.codegen.kernels.rowwise import Norm, RmsNorm
from ggufc.codegen.kernels.select import GetRowsPlain, KqMask, TopK
from ggufc.codegen.kernels.softmax import SoftMax, SumRows
from ggufc.codegen.kernels.strided_matmul import StridedMatMul
from ggufc.codegen.kernels.sums import SumRowsExt
from ggufc.codegen.schedule import Schedule
from ggufc.formats import cuda as fmt
from ggufc.ir.dims import IntDim

from . import attention, choosing, indexing, product_forms, ptx, rows
from .emitter import WARP, PtxEmitter
from .entry import Entry, Form, power_of_two, shared_body
from .target import PtxTarget, resolve

_BLOCK = 256


def _shared(length: Callable[[Any], IntDim]) -> Callable[[Any], Form]:
    """The body of the CPU kernel: short rows (up to four values per thread of a warp, or of unknown length) go to warps, longer ones to
    blocks.
    """

    def form(spec: Any) -> Form:
        n = length(spec)
        group = min(_BLOCK, max(WARP, power_of_two(-(-n // 4)))) if isinstance(n, int) else WARP
        if group != WARP:
            group = _BLOCK
        return Form((Entry(symbol(spec), _BLOCK, shared_body(spec), group),))

    return form


def _row(spec: Any) -> Form:
    """A block for each row, as wide as the row."""
    block = min(_BLOCK, max(WARP, power_of_two(spec.ne0)))
    return Form((Entry(symbol(spec), block, shared_body(spec), block),))


def _serial(threads: int) -> Callable[[Any], Form]:
    """The body of the CPU kernel, a thread for each row of a tile: kernels whose rows are walked in order. ``threads`` = 1 where a tile is
    one row.
    """
    return lambda spec: Form((Entry(symbol(spec), threads, shared_body(spec), 1),))


FORMS: dict[type, Callable[[Any], Form]] = {
    MatMul: product_forms.matmul,
    MatMulId: product_forms.matmul_id,
    Quantize: rows.quantize,
    GetRows: rows.get_rows,
    RopeTable: rows.rope_table,
    RopeApply: rows.rope_apply,
    StoreRows: rows.store_rows,
    FlashAttn: attention.flash_attn,
    FlashAttnSplits: attention.flash_attn_splits,
    TopK: choosing.top_k,
    KqMask: choosing.kq_mask,
    DecodeRows: rows.decode_rows,
    IndexerScores: indexing.indexer_scores,
    IndexerSelect: indexing.indexer_select,
    RmsNorm: _row,
    Norm: _row,
    Elementwise: _shared(lambda s: s.out.ne[0]),
    Copy: _shared(lambda s: s.out.ne[0]),
    GetRowsPlain: _shared(lambda s: s.out.ne[0]),
    SoftMax: _shared(lambda s: s.out.ne[0]),
    SumRows: _shared(lambda s: s.a.ne[0]),
    SumRowsExt: _shared(lambda s: s.out.ne[0]),
    Route: _shared(lambda s: min(s.n, 4 * WARP)),
    Fill: _shared(lambda s: s.out.ne[0]),
    StridedMatMul: _shared(lambda s: s.a.ne[0]),
    SsmConv: _shared(lambda s: s.out.ne[0]),
    Blend: _serial(WARP),
    MaskToIndex: _serial(WARP),
    Hadamard: _serial(WARP),
    ListSpans: _serial(1),
    Counting: _serial(1),
}
"""Specification -> its form. Those with ``_row``, ``_shared`` and ``_serial`` are the CPU kernels' own bodies."""


def form_of(spec: KernelSpec) -> Form:
    """The GPU form of a specification; CodegenError for kernels that have none."""
    make = FORMS.get(type(spec))
    if make is None:
        raise CodegenError(f"the kernel {signature(spec)} has no GPU form; compile this model for the CPU")
    return make(spec)


def describe(spec: KernelSpec) -> fmt.CudaKernel:
    """What the runtime needs to know to launch the kernel."""
    form = form_of(spec)
    entries = [e.described() for e in form.entries]
    return fmt.CudaKernel(signature(spec), len(spec.arg_names), entries, form.extra_bytes, form.extra_div, form.slice_tokens)


def emit_ptx(specs: Sequence[KernelSpec], sm: str | PtxTarget) -> str:
    """PTX text holding every entry of ``specs`` for one architecture (``sm_80`` ...). Raises CodegenError."""
    target = sm if isinstance(sm, PtxTarget) else resolve(sm)
    return emit_all(specs, [target])[target.sm]


def emit_all(specs: Sequence[KernelSpec], targets: Sequence[PtxTarget]) -> dict[str, str]:
    """PTX text by architecture."""
    ordered = sorted(dict.fromkeys(targets), key=lambda t: int(t.sm.removeprefix("sm_")))
    target = ordered[0]
    module = ptx.new_module("ggufc")
    bounds: dict[str, tuple[int, int]] = {}
    for spec in dict.fromkeys(specs):
        for entry in form_of(spec).entries:
            e = PtxEmitter(module, target, entry.symbol, len(spec.arg_names), entry.block, entry.group)
            entry.body(e)
            e.finish()
            bounds[entry.symbol] = entry.block, entry.resident
    return dict(zip((t.sm for t in ordered), ptx.to_text(ordered, module, bounds)))


def manifest(schedules: Sequence[Schedule], texts: dict[str, str]) -> fmt.CudaManifest:
    """Description of the GPU code of an artifact; ``texts`` maps architectures to PTX."""
    specs = dict.fromkeys(spec for schedule in schedules for spec in schedule.kernels())
    names = sorted(texts, key=lambda name: int(name.removeprefix("sm_")))
    digests = [hashlib.sha256(texts[name].encode()).hexdigest() for name in names]
    return fmt.CudaManifest(
        names,
        [resolve(name).ptx_version for name in names],
        digests,
        [describe(spec) for spec in specs],
        {s.name: s.written() for s in schedules},
    )
