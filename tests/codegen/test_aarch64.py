"""AArch64 code: the instructions of each level, links without run-time relocations, and results in an emulator.

Kernels that differ from x86 only in the width of vectors run the checks of their own tests; products, whose dot products are written
per level, are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import aarch64
import test_attention
import test_cache
import test_elementwise
import test_generic
import test_rope
import test_rowwise
import test_sparse
import test_state_kernels
import test_vmath
from ggufc.codegen.cpu import driver, image, objectcode
from ggufc.codegen.cpu.target import ARM_LEVELS, Target, resolve
from ggufc.codegen.emitter import I64, Emitter
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernel_build import driver_module
from ggufc.codegen.kernels.attention_cpu import FlashAttnSplits
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.quantize import Quantize
from ggufc.codegen.weights import known_formats
from ggufc.formats import abi
from harness import build, emulated_targets, run
from products import FEW_TYPES, loaded, multiply, packed, product, records, weight_rows

LEVELS = [pytest.param(resolve(name), id=name) for name in ARM_LEVELS]
emulated = pytest.mark.skipif(not aarch64.QEMU, reason=aarch64.REASON)


def assembly(spec, level: str) -> str:
    target = resolve(level)
    module = objectcode.new_module(target, "test")
    spec.emit(Emitter(module, target, symbol(spec)))
    return objectcode.emit_assembly(target, module)


def test_code_uses_the_dot_instructions_of_its_level():
    codes = {(name, level): assembly(MatMul(name, 512, 64, "none", False, "T"), level) for name in ("q4_1", "q8_0") for level in ARM_LEVELS}
    for name in ("q4_1", "q8_0"):
        assert "smull" in codes[name, "aarch64"]
        assert "sdot" in codes[name, "aarch64-dotprod"] and "smull" not in codes[name, "aarch64-dotprod"]
        assert "usdot" in codes[name, "aarch64-i8mm"]
        assert ".4b[3]" in codes[name, "aarch64-dotprod"], "activations are not taken by lane"
        assert "dot\t" not in codes[name, "aarch64"]


def test_scales_and_tables_use_vector_instructions():
    code = assembly(MatMul("iq4_nl", 512, 64, "none", False, "T"), "aarch64-dotprod")
    assert "tbl\t" in code and "fcvtl\t" in code and "fmla\t" in code


@pytest.mark.parametrize("name", known_formats())
def test_every_product_links(name):
    target = resolve("aarch64-dotprod")
    spec = MatMul(name, 512, 48, "add", True, "O")
    module = objectcode.new_module(target, symbol(spec))
    spec.emit(Emitter(module, target, symbol(spec)))
    linked = image.link([objectcode.emit_object(target, module)])
    offset, size = linked.symbols[symbol(spec)]
    assert offset % 4 == 0 and 0 < size <= len(linked.code) - offset


@pytest.mark.parametrize("target", LEVELS)
def test_driver_functions_link(target):
    linked = image.link([objectcode.emit_object(target, driver_module(target))])
    assert {driver.WORKER, driver.EVAL} <= set(linked.symbols)
    words = np.frombuffer(linked.code[: len(linked.code) // 4 * 4], np.uint32)
    assert (words == 0xD4000001).any(), "no system call, so workers could not sleep"


def test_features_of_two_architectures_do_not_mix():
    assert resolve("i8mm").level == "aarch64-i8mm" and resolve("lse,neon").level == "aarch64"
    with pytest.raises(CodegenError, match=r"dotprod are features of AArch64, avx2 of x86-64; name those of one CPU"):
        resolve("avx2,dotprod")


# Results

PRODUCTS = [(t.level, name) for t in emulated_targets() for name in FEW_TYPES]


@emulated
@pytest.mark.parametrize(("level", "name"), PRODUCTS)
def test_products(level, name):
    """Few tokens, a ragged batch, and tokens enough for the unpacked copy give one token the same bits, near the exact value."""
    target, k, n = resolve(level), 512, 40
    spec = MatMul(name, k, n, "none", False, "T")
    raw = weight_rows(name, k, n)
    x = np.random.default_rng(1).standard_normal((75, k)).astype(np.float32)
    many = multiply(spec, target, packed(name, raw, k), x)
    few = multiply(spec, target, packed(name, raw, k), x[:7])
    assert (many[:7].view(np.uint32) == few.view(np.uint32)).all()
    want = product(name, raw, k, x)
    assert np.abs(many - want).max() <= 2e-6 * np.abs(want).max()


@emulated
@pytest.mark.parametrize("name", FEW_TYPES)
def test_products_have_the_bits_of_x86(name):
    """Integer sums are exact and every level with fused multiply-add applies scales in one order."""
    k, n = 512, 32
    spec = MatMul(name, k, n, "none", False, "T")
    raw = weight_rows(name, k, n)
    x = np.random.default_rng(2).standard_normal((5, k)).astype(np.float32)
    x86 = multiply(spec, resolve("x86-64-v3"), packed(name, raw, k), x)
    arm = multiply(spec, resolve("aarch64-dotprod"), packed(name, raw, k), x)
    assert (x86.view(np.uint32) == arm.view(np.uint32)).all()


CHECKS = [
    (test_rowwise.test_rows, test_rowwise.SPECS),
    (test_elementwise.test_expression, test_elementwise.SPECS[::3]),
    (test_elementwise.test_copy, test_elementwise.COPIES[::3]),
    (test_rope.test_table, test_rope.TABLES[::2]),
    (test_rope.test_apply, test_rope.APPLIES[::2]),
    (test_rope.test_store_rows_rounds_to_nearest_even, test_rope.STORES),
    (test_cache.test_stored_rows, test_cache.STORES),
    (test_generic.test_softmax, test_generic.SOFTMAX[::2]),
    (test_generic.test_sum_rows, test_generic.SUMS),
    (test_generic.test_strided_products, test_generic.PRODUCTS),
    (test_generic.test_get_rows, test_generic.ROWS),
    (test_generic.test_sorting, test_generic.SORTS),
    (test_sparse.test_choice_of_the_largest_scores_in_list_order, test_sparse.SELECTS[::2]),
    (test_sparse.test_hadamard, test_sparse.TRANSFORMS[::2]),
    (test_sparse.test_sums_over_any_dimension, test_sparse.SUMS),
    (test_sparse.test_decoded_rows, test_sparse.DECODE),
]


@emulated
@pytest.mark.parametrize(
    ("check", "spec"), [pytest.param(check, s, id=f"{check.__name__}-{i}") for check, specs in CHECKS for i, s in enumerate(specs)]
)
def test_kernels(check, spec):
    target = resolve("aarch64-dotprod")
    check((target, build([spec], target)), spec)


@emulated
@pytest.mark.parametrize("spec", [*test_attention.SPECS[:3], test_attention.SPECS[9]], ids=str)
def test_attention_values(spec):
    target = resolve("aarch64-dotprod")
    splits = [FlashAttnSplits(s) for s in test_attention.LONG if s == spec]
    test_attention.test_values((target, build([spec, *splits], target)), spec)


@emulated
@pytest.mark.parametrize("spec", test_sparse.SCORES[:2], ids=lambda s: s.dtype)
def test_scores(spec):
    target = resolve("aarch64-dotprod")
    test_sparse.test_scores_of_visible_entries((target, build([spec], target)), spec, 75)


@emulated
def test_convolutions():
    target = resolve("aarch64-dotprod")
    test_state_kernels.test_convolution((target, build(test_state_kernels.CONVOLUTIONS, target)), 9)


@emulated
@pytest.mark.parametrize("fn", test_vmath.FUNCTIONS)
def test_elementary_functions(fn):
    target = resolve("aarch64-dotprod")
    test_vmath.test_error_bound((target, build([test_vmath.Apply(fn)], target)), fn)


@emulated
@pytest.mark.parametrize("level", ["aarch64", "aarch64-i8mm"])
@pytest.mark.parametrize(("mode", "k"), [("q8_2", 576), ("q8_k", 1024)])
def test_records(mode, k, level):
    spec, target = Quantize(k, mode, False, 0.0), resolve(level)
    x = np.random.default_rng(7).normal(0, 3, (5, k)).astype(np.float32)
    want = records(x, mode)
    got = run(spec, target, [x, k, None, np.zeros_like(want)], len(x), loaded=loaded(spec, target), T=len(x))[3]
    assert (got == want).all()


@dataclass(frozen=True)
class Follow:
    """mine[tile] += 1 if the previous launch is complete in this evaluation, which makes its entries one larger."""

    arg_names: ClassVar[tuple[str, ...]] = ("mine", "previous", "n_previous")

    def emit(self, e: Emitter) -> None:
        b = e.b
        mine, previous, n = e.arg_ptr(0), e.arg_ptr(1), e.arg_int(2)
        total = e.var(I64, e.i64(0))
        with e.for_range(0, n) as i:
            total.set(b.add(total.get(), e.load(I64, e.at(previous, i, 8))))
        slot = e.at(mine, e.tile, 8)
        now = b.add(e.load(I64, slot), e.i64(1))
        with e.if_(b.icmp_signed("==", total.get(), b.mul(n, now))):
            e.store(now, slot)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@emulated
@pytest.mark.parametrize("level", ["aarch64", "aarch64-dotprod"])
@pytest.mark.parametrize("threads", [1, 3])
def test_team(level, threads):
    """The driver functions with threads of the system: compare-and-swap by exclusive loads and by LSE, sleeping and waking."""
    target, spec, rounds, launches, tiles = resolve(level), Follow(), 40, 6, 7
    code, data_at, stack_at, stack = 0x400000, 0x10000000, 0x20000000, 1 << 16
    linked = build([spec], target)
    sizes = {
        "data": launches * tiles,
        "args": launches * 3,
        "table": launches * abi.LAUNCH_WORDS,
        "counters": launches * abi.COUNTER_WORDS,
        "params": len(abi.PARAMS),
        "record": abi.EXEC_WORDS,
        "told": launches,
        "claims": threads * launches * abi.CLAIM_WORDS,
        "pool": abi.POOL_WORDS,
    }
    at, words = {}, 0
    for name, size in sizes.items():
        at[name] = data_at + 8 * words
        words += -(-size // 16) * 16
    memory = np.zeros(words, np.int64)

    def put(name: str, index: int, *values: int) -> None:
        first = (at[name] - data_at) // 8 + index
        memory[first : first + len(values)] = values

    for i in range(launches):
        previous = at["data"] + 8 * tiles * (i - 1) if i else 0
        put("args", 3 * i, at["data"] + 8 * tiles * i, previous, tiles if i else 0)
        put("table", abi.LAUNCH_WORDS * i, code + linked.symbols[symbol(spec)][0], at["args"] + 24 * i, 0, 1, 1, max(0, i - 1))
    put("params", 0, tiles)
    put("record", abi.EXEC_N_LAUNCHES, launches)
    places = {abi.EXEC_LAUNCHES: "table", abi.EXEC_PARAMS: "params", abi.EXEC_COUNTERS: "counters"}
    for word, name in {**places, abi.EXEC_TILES: "told", abi.EXEC_CLAIMS: "claims"}.items():
        put("record", word, at[name])
    put("pool", abi.POOL_THREADS, threads)
    worker, evaluate = (code + linked.symbols[name][0] for name in (driver.WORKER, driver.EVAL))
    calls = [aarch64.spawn(worker, (at["pool"], t), stack_at + stack * t) for t in range(1, threads)]
    calls += [aarch64.Call(evaluate, (at["pool"], at["record"]))] * rounds
    parts = [
        aarch64.Memory(code, linked.code, executable=True),
        aarch64.Memory(data_at, memory.tobytes(), wanted=True),
        aarch64.Memory(stack_at, bytes(stack * threads)),
    ]
    after = np.frombuffer(aarch64.execute(target, parts, calls)[0], np.int64)
    assert (after[: launches * tiles] == rounds).all()


def test_emulated_levels_are_those_of_aarch64():
    assert all(isinstance(t, Target) and t.is_arm and t.lanes == 4 and t.has_fma for t in emulated_targets())
