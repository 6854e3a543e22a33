"""Functions that kernels have in common: compiled once, whatever else differs between the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ggufc.codegen.cpu import image
from ggufc.codegen.cpu.target import Target, resolve
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernel_build import build_image, functions, kernel_object
from ggufc.codegen.kernels.attention_cpu import FlashAttn, FlashAttnSplits
from ggufc.codegen.kernels.attention_sparse import SparseAttn, SparseAttnSplits
from ggufc.codegen.kernels.attention_walk import AttentionWalk
from ggufc.codegen.kernels.base import KernelSpec, parts_of, symbol
from ggufc.codegen.kernels.matmul import MatMul

LATENT = FlashAttn(64, 32, 8, 1, "f16", "f16", 0.125, shared=True)
SPARSE = SparseAttn(64, 32, 8, "f16", "f16", 0.125, entries=16)


def walks(specs: list[KernelSpec], target: Target) -> list[KernelSpec]:
    return [spec for spec in functions(specs, target) if isinstance(spec, AttentionWalk)]


# The kernels of a family's window, listed and compressed layers differ in what surrounds one walk.
def test_kernels_over_rows_of_one_shape_share_the_walk():
    kernels: list[KernelSpec] = [
        LATENT,
        replace(LATENT, scale=0.5, sinks=True),
        FlashAttnSplits(LATENT),
        SPARSE,
        replace(SPARSE, entries="E128", sinks=True),
        SparseAttnSplits(SPARSE),
    ]
    target = resolve("x86-64-v3")
    assert walks(kernels, target) == [LATENT.walk(0)]
    linked, built = build_image(kernels, target, jobs=1)
    assert len({kernel.offset for kernel in built}) == len(kernels)
    assert linked.symbols[symbol(LATENT.walk(0))][1] > max(kernel.size for kernel in built)
    assert sum(name.startswith("attention_walk") for name in linked.symbols) == 1


def test_rows_of_another_shape_or_type_have_a_walk_of_their_own():
    target = resolve("x86-64-v3")
    others = [LATENT, replace(LATENT, softcap=30.0), replace(LATENT, dv=48), replace(SPARSE, type_more="q8_0")]
    assert len(walks(others, target)) == 4
    assert walks([replace(SPARSE, type_more="q8_0")], target) == [LATENT.walk(0), replace(LATENT, type_k="q8_0", type_v="q8_0").walk(0)]


def test_lone_tokens_with_few_heads_have_a_walk_of_their_own():
    dense = FlashAttn(64, 64, 9, 3, "f16", "f16", 0.125)
    wide, narrow = resolve("avx512vnni"), resolve("x86-64")
    assert parts_of(dense, wide) == (dense.walk(0), dense.walk(1))
    assert parts_of(dense, narrow) == (dense.walk(0),)
    for target in (wide, narrow):
        assert parts_of(FlashAttnSplits(dense), target) == (dense.walk(0), dense.walk(3))
    assert parts_of(MatMul("q8_0", 64, 32, "none", False, "T"), wide) == ()


def test_a_kernel_without_its_parts_does_not_link():
    target = resolve("x86-64-v3")
    with pytest.raises(CodegenError, match=r"refers to 'attention_walk_\w+', which is not part of the image"):
        image.link([kernel_object(LATENT, target)])
