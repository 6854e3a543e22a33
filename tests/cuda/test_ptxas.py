"""Every kernel form assembles for every target, within stated bounds of registers, shared memory and spills."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from ggufc.codegen import frontend
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.attention_cpu import FlashAttn, FlashAttnSplits
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
from ggufc.codegen.kernels.strided import contiguous
from ggufc.codegen.kernels.strided_matmul import StridedMatMul
from ggufc.codegen.kernels.sums import SumRowsExt
from ggufc.codegen.nvptx import PTX_VERSIONS, assembler, describe, emit_all, emit_ptx, resolve, split
from ggufc.codegen.nvptx.forms import FORMS
from ggufc.codegen.nvptx.occupancy import occupancy
from ggufc.codegen.options import CompileOptions
from ggufc.codegen.weights import known_formats
from ggufc.ir.dims import Dim
from ggufc.runtime.logits import graph_options
from products import kernel_name
from support import golden_cases

SPILLED_BYTES = 32
"""Per thread: what calls of 64-bit division may save, and tanh of many rows of attention."""
SHARED_BYTES = 48 << 10
"""Static shared memory of a block on every architecture."""

T = Dim((((("T",)), 1),))
ROWS = contiguous("f32", (4096, T))
CATALOGUE = [
    MatMul("q4_k", 4096, 6144, "none", False, "T"),
    MatMul("q4_k", 4096, 28672, "silu_glu", False, "T"),
    MatMul("q6_k", 14336, 4096, "add", True, "T"),
    MatMul("q8_0", 4096, 128256, "none", False, "O"),
    MatMul("f16", 4096, 4096, "gelu_glu", False, "T"),
    MatMul("bf16", 4096, 1000, "add", True, "T"),
    MatMul("f32", 4096, 256, "none", False, "T"),
    MatMul("f32", 250, 64, "silu_glu", False, "T"),
    MatMulId("q4_k", 2048, 768, 128, 8, True, epilogue="silu_glu"),
    MatMulId("q5_k", 2048, 2048, 512, 8, True, epilogue="silu_glu"),
    MatMulId("q6_k", 768, 2048, 128, 8, False),
    MatMulId("f16", 768, 2048, 64, 6, True, epilogue="silu_glu"),
    MatMulId("f32", 768, 2048, 64, 6, False),
    Quantize(4096, "q8_2", True, 1e-5),
    Quantize(14336, "q8_k", False, 0.0),
    GetRows("q4_k", 4096),
    RopeTable(128, 500000.0, freq_factors=True),
    RopeApply(128, 32, 128, "norm"),
    RopeApply(128, 8, 128, "neox", norm=True, eps=1e-6, store=True, to="q8_0"),
    StoreRows(1024, "f16"),
    StoreRows(1024, "q4_0"),
    FlashAttn(128, 128, 32, 8, "f16", "f16", 0.088),
    FlashAttn(64, 64, 64, 8, "q8_0", "q4_1", 0.125, softcap=30.0, sinks=True),
    FlashAttn(64, 64, 9, 3, "q8_0", "q8_0", 0.125),
    FlashAttn(128, 128, 32, 8, "q8_0", "q4_0", 0.088),
    FlashAttn(576, 512, 16, 1, "f16", "f16", 0.1, shared=True),
    FlashAttn(256, 256, 4, 1, "f16", "f16", 0.06, softcap=50.0),
    FlashAttnSplits(FlashAttn(128, 128, 32, 8, "f16", "f16", 0.088)),
    DecodeRows(576, "q8_0"),
    Fill(0.0, ROWS),
    Blend(ROWS, contiguous("i32", (2048, T)), 0.0, ROWS),
    MaskToIndex(ROWS, 2048),
    ListSpans(2048),
    Hadamard(ROWS, 128, ROWS),
    SumRowsExt(contiguous("f32", (4096, 4, T)), 1, contiguous("f32", (4096, 1, T))),
    RmsNorm(4096, 1e-5, True, True),
    Norm(2048, 1e-5),
    Elementwise(("mul", ("gelu", 0), 1), ROWS, (ROWS, ROWS)),
    Copy(ROWS, contiguous("f16", (4096, T))),
    GetRowsPlain(ROWS, contiguous("i32", (T,)), ROWS),
    SoftMax(contiguous("f32", (128, T)), contiguous("f32", (128, T))),
    Route(128, 8, T, "softmax", normalise="sum"),
    Route(256, 8, T, "sigmoid", True, normalise="sum", scale=2.5),
    SumRows(contiguous("f32", (8, T)), contiguous("f32", (1, T))),
    TopK(contiguous("f32", (128, T)), 8),
    TopK(contiguous("f32", (4000, T)), 40),
    TopK(contiguous("f32", (Dim((((("KV",)), 1),)), T)), 2048),
    IndexerScores(128, 64, "f16"),
    IndexerScores(128, 32, "q8_0"),
    IndexerSelect(2048, 4),
    SsmConv(contiguous("f32", (3 + T, 4096)), contiguous("f32", (4, 4096)), contiguous("f32", (4096, T))),
    Counting(2048),
    KqMask(Dim((((("KV",)), 1),))),
    StridedMatMul(contiguous("f32", (128, 64, 8)), contiguous("f32", (128, T, 32)), contiguous("f32", (64, T, 32))),
]

needs_ptxas = pytest.mark.skipif(assembler.find() is None, reason="no ptxas: install the CUDA toolkit or the package nvidia-cuda-nvcc")


ALWAYS = ("sm_80", "sm_90")
"""What a quick run assembles; the gate takes all."""


@lru_cache(maxsize=2)
def texts(specs: tuple, architectures: tuple[str, ...]) -> dict[str, str]:
    return emit_all(specs, [resolve(sm) for sm in architectures])


def check(specs, sm):
    if sm not in assembler.architectures():
        pytest.skip(f"this ptxas does not know {sm}")
    text = texts(tuple(specs), ALWAYS if sm in ALWAYS else tuple(PTX_VERSIONS))[sm]
    assert f".target {sm}" in text and ".local" not in text
    used = assembler.assemble(text, sm)
    entries = {entry.symbol: entry for spec in specs for entry in describe(spec).entries}
    assert set(used) == set(entries)
    for name, u in used.items():
        assert u.spilled <= SPILLED_BYTES, (name, u)
        assert u.shared <= SHARED_BYTES, (name, u)
        assert u.registers * entries[name].block <= 65536, (name, u)


@needs_ptxas
@pytest.mark.parametrize("sm", [sm if sm in ALWAYS else pytest.param(sm, marks=pytest.mark.full) for sm in PTX_VERSIONS])
def test_every_form_assembles(sm):
    check(CATALOGUE, sm)


@needs_ptxas
@pytest.mark.full
@pytest.mark.parametrize("sm", ["sm_80", "sm_90"])
def test_every_weight_type_assembles(sm):
    types = [t for t in known_formats() if kernel_name(t) == t]
    products = [MatMul(t, 4096, 4096, "silu_glu", False, "T") for t in types]
    experts = [MatMulId(t, 2048, 768, 256, 8, True, epilogue="silu_glu") for t in types]
    check([*products, *experts, *[GetRows(t, 4096) for t in types]], sm)


FAMILIES = ("llama-gqa-tied", "llama-fa-q8", "gemma3-7", "qwen3moe-a", "deepseek2-v3-mla3", "glm-dsa-topk8")


@needs_ptxas
@pytest.mark.full
@pytest.mark.parametrize("folder", [case for case in golden_cases(*FAMILIES) if case.name in FAMILIES], ids=lambda case: case.name)
def test_every_kernel_of_the_families_assembles(folder):
    """What their graphs are lowered to, for every architecture."""
    case = json.loads((folder / "case.json").read_text())["options"]
    types = {key: case[key] for key in ("type_k", "type_v") if key in case}
    options = CompileOptions(builder=graph_options(case), **types)
    with frontend.open_model(folder / "model.gguf") as (_, model):
        found = frontend.compile_graphs(model, options)
    specs = list(dict.fromkeys(spec for one in found for spec in one.schedule.kernels()))
    assert len(specs) > 8
    for sm in PTX_VERSIONS:
        check(specs, sm)


def test_the_catalogue_has_every_form():
    assert {type(spec) for spec in CATALOGUE} == set(FORMS)


def test_rounding_is_explicit():
    """Arithmetic that ptxas may not fuse or approximate: results must not depend on the assembler."""
    text = emit_ptx([CATALOGUE[1], FlashAttn(64, 64, 2, 1, "f16", "f16", 0.1)], "sm_80")
    for loose in ("add.f32", "mul.f32", "div.full", "div.approx", ".ftz", "sqrt.approx", "ex2"):
        assert loose not in text, loose


def test_unknown_targets_and_kernels_are_refused():
    with pytest.raises(CodegenError, match="unknown GPU architecture; use one of cuda:sm_80"):
        resolve("cuda:sm_61")

    assert split("avx2, cuda:sm_90,fma,cuda:sm_80") == ("avx2,fma", (resolve("sm_90"), resolve("sm_80")))
    assert split("cuda:sm_90")[0] == "native" and split("native") == ("native", ())

    class Strange:
        pass

    with pytest.raises((CodegenError, TypeError)):
        emit_ptx([Strange()], "sm_80")  # type: ignore[list-item]


@pytest.mark.parametrize(
    "sm, block, registers, shared, share",
    [
        ("sm_90", 256, 32, 0, 1.0),  # 2048 threads of 32 registers
        ("sm_90", 256, 128, 0, 0.25),  # 65536 / 128 = 512 threads
        ("sm_90", 32, 16, 0, 0.5),  # 32 blocks of one warp
        ("sm_80", 256, 32, 40 << 10, 0.5),  # 164 KiB hold four blocks of 41 KiB
        ("sm_89", 128, 40, 0, 1.0),  # 1536 threads
        ("sm_90", 1024, 255, 0, 0.0),  # more registers than there are
    ],
)
def test_occupancy(sm, block, registers, shared, share):
    assert occupancy(sm, block, registers, shared) == share
