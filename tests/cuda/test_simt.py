"""Tests of the tester: the interpreter computes what PTX says, and finds what a GPU would punish."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.rowwise import RmsNorm
from gpu_harness import ptx_of, run
from products import packed, product, records, weight_rows
from simt import GlobalMemory, Simt, SimtError

HEAD = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry k(
  .param .u64 k_param_0,
  .param .u64 k_param_1
)
{
  .shared .align 16 .b8 sh[256];
  .shared .align 16 .b8 other[64];
  .shared .align 16 .b8 big[512];
  ld.param.b64 %rd1, [k_param_0];
  ld.param.b64 %rd2, [k_param_1];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  mov.b64 %rd10, sh;
  add.s64 %rd11, %rd10, %rd3;
"""


def execute(body: str, n: int = 64, grid: int = 1, block: int = 64, size: int | None = None) -> np.ndarray:
    """Run ``body`` with a buffer of ``n`` words 0, 1, ...; returns it."""
    memory = GlobalMemory()
    data = memory.store(np.arange(n, dtype=np.uint32), "data")
    Simt(HEAD + body + "\n  ret;\n}\n", memory, limit=10_000).launch("k", grid, block, [data, n])
    return memory.read(data, (n,), np.uint32)


def fails(body: str, why: str, **options) -> None:
    with pytest.raises(SimtError, match=why):
        execute(body, **options)


EXCHANGE = """
  ld.global.b32 %r3, [%rd4];
  st.shared.b32 [%rd11], %r3;
  {barrier}
  xor.b32 %r4, %r1, 32;
  mul.wide.u32 %rd5, %r4, 4;
  add.s64 %rd6, %rd10, %rd5;
  ld.shared.b32 %r5, [%rd6];
  st.global.b32 [%rd4], %r5;
"""


def test_threads_exchange_through_shared_memory():
    got = execute(EXCHANGE.format(barrier="bar.sync 0;"))
    assert (got == np.arange(64) ^ 32).all()


def test_a_missing_barrier_is_a_race():
    """The value was written in this order of execution; the interpreter must object nevertheless."""
    fails(EXCHANGE.format(barrier=""), "race on shared memory")


def test_a_warp_barrier_orders_a_warp_only():
    within = EXCHANGE.replace("xor.b32 %r4, %r1, 32", "xor.b32 %r4, %r1, 1")
    assert (execute(within.format(barrier="bar.warp.sync -1;")) == np.arange(64) ^ 1).all()
    fails(EXCHANGE.format(barrier="bar.warp.sync -1;"), "race on shared memory .* between warps")
    fails(within.format(barrier=""), "race on shared memory .* between threads")


def test_two_blocks_that_write_one_word_race():
    fails("  st.global.b32 [%rd4], %r1;", "race on global memory .* between blocks", grid=2)


@pytest.mark.parametrize("what, size", [("  st.global.b32 [%rd4+4], %r1;", 64), ("  ld.global.b32 %r3, [%rd4+-4];", 64)])
def test_an_overrun_by_one_word_is_found(what, size):
    fails(what, "outside every allocation", n=size)


def test_overruns_of_shared_memory():
    fails("  st.shared.b32 [%rd11+4], %r1;", "outside every variable")
    fails("  st.shared.b32 [%rd11+4096], %r1;", "outside its")


def test_misaligned_and_unwritten_memory():
    fails("  ld.global.b64 %rd7, [%rd4];", "misaligned", n=80)
    fails("  ld.shared.b32 %r3, [%rd11];", "never written")


def test_a_barrier_that_some_threads_skip():
    fails("  setp.lt.u32 %p1, %r1, 32;\n  @%p1 bra $SKIP;\n  bar.sync 0;\n$SKIP:\n", "wait at a barrier the others never reach")


def test_a_shuffle_that_some_lanes_skip():
    body = "  setp.lt.u32 %p1, %r1, 7;\n  @%p1 bra $SKIP;\n  shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;\n$SKIP:\n"
    fails(body, "wait at a shuffle or warp barrier")


def test_diverged_lanes_meet_at_a_shuffle():
    """Lanes that take different paths wait for each other, wherever the paths lie in the text."""
    body = """
  setp.lt.u32 %p1, %r1, 40;
  @%p1 bra $A;
  add.s32 %r3, %r1, 1000;
  bra.uni $B;
$A:
  add.s32 %r3, %r1, 2000;
$B:
  shfl.sync.bfly.b32 %r5, %r3, 8, 31, -1;
  st.global.b32 [%rd4], %r5;
"""
    lanes = np.arange(64)
    assert (execute(body) == np.where((lanes ^ 8) < 40, 2000, 1000) + (lanes ^ 8)).all()


COPY = """
  cp.async.ca.shared.global [%rd11], [%rd4], 4;
  {close}
  xor.b32 %r4, %r1, 32;
  mul.wide.u32 %rd5, %r4, 4;
  add.s64 %rd6, %rd10, %rd5;
  {wait}
  {barrier}
  ld.shared.b32 %r5, [%rd6];
  bar.sync 0;
  st.global.b32 [%rd4], %r5;
"""
PARTS = {"close": "cp.async.commit_group;", "wait": "cp.async.wait_group 0;", "barrier": "bar.sync 0;"}


def test_a_copy_arrives_when_it_was_waited_for():
    assert (execute(COPY.format(**PARTS)) == np.arange(64) ^ 32).all()


@pytest.mark.parametrize(
    "part, instead, why",
    [("wait", "", "still on its way"), ("wait", "cp.async.wait_group 1;", "still on its way"), ("close", "", "still on its way"),
     ("barrier", "", "race on shared memory")],
)  # fmt: skip
def test_what_a_copy_needs(part, instead, why):
    """Waiting, for the right number of groups, of a group that was closed; and a barrier for the other threads."""
    fails(COPY.format(**{**PARTS, part: instead}), why)


def test_two_groups_on_their_way():
    """The older of two groups has arrived, the younger has not."""
    body = """
  mov.b64 %rd13, big;
  add.s64 %rd12, %rd13, %rd3;
  cp.async.ca.shared.global [%rd11], [%rd4], 4;
  cp.async.commit_group;
  cp.async.ca.shared.global [%rd12], [%rd4], 4;
  cp.async.commit_group;
  cp.async.wait_group 1;
"""
    assert (execute(body + "  ld.shared.b32 %r5, [%rd11];\n  st.global.b32 [%rd4], %r5;") == np.arange(64)).all()
    fails(body + "  ld.shared.b32 %r5, [%rd12];\n", "still on its way")


def test_transposed_matrices():
    """Lane l gets, of matrix i, rows 2t and 2t + 1 of column g."""
    rng = np.random.default_rng(3)
    matrices = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    body = """
  shl.b64 %rd7, %rd3, 2;
  add.s64 %rd8, %rd1, %rd7;
  mov.b64 %rd12, big;
  add.s64 %rd9, %rd12, %rd7;
  ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd8];
  st.shared.v4.b32 [%rd9], {%r10, %r11, %r12, %r13};
  bar.warp.sync -1;
  ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r20, %r21, %r22, %r23}, [%rd9];
  st.global.v4.b32 [%rd8], {%r20, %r21, %r22, %r23};
  ret;
}
"""
    memory = GlobalMemory()
    data = memory.store(matrices, "data")
    Simt(HEAD + body, memory).launch("k", 1, 32, [data, 0])
    got = memory.read(data, (32, 4, 2), np.uint16)
    for lane in range(32):
        g, t = lane >> 2, lane & 3
        for i in range(4):
            assert got[lane, i].tolist() == [matrices[i, 2 * t, g], matrices[i, 2 * t + 1, g]]


COUNTING = """
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra $ZEROED;
  st.shared.b32 [%rd11], %r1;
$ZEROED:
  bar.sync 0;
  atom.shared.add.u32 %r3, [%rd10], 3;
  {barrier}
  ld.shared.b32 %r5, [%rd10];
  st.global.b32 [%rd4], %r5;
"""


def test_atomics_do_not_race_with_each_other_but_with_plain_accesses():
    assert (execute(COUNTING.format(barrier="bar.sync 0;")) == 3 * 64).all()
    fails(COUNTING.format(barrier=""), "race on shared memory")


def test_shuffles_up_and_by_index():
    got = execute("  shfl.sync.up.b32 %r5, %r1, 3, 0, -1;\n  st.global.b32 [%rd4], %r5;")
    lanes = np.arange(64)
    assert (got == np.where(lanes % 32 >= 3, lanes - 3, lanes)).all()
    got = execute("  shr.u32 %r3, %r1, 1;\n  shfl.sync.idx.b32 %r5, %r1, %r3, 31, -1;\n  st.global.b32 [%rd4], %r5;")
    assert (got == lanes // 32 * 32 + lanes // 2 % 32).all()
    fails("  shfl.sync.down.b32 %r5, %r1, 3, 31, -1;", "outside the subset")


def test_endless_loops_end():
    fails("$L:\n  bra.uni $L;\n", "does not end")


def test_instructions_outside_the_subset_are_refused():
    fails("  sin.approx.f32 %r3, %r1;", "outside the subset")
    fails("  div.full.f32 %r3, %r1, %r1;", "not correctly rounded")


ARITHMETIC = [
    ("dp4a.u32.s32 %r5, 0xFF02FF01, 0x80FF7F03, 7;", 255 * -128 + 2 * -1 + 255 * 127 + 3 + 7),
    ("prmt.b32 %r5, 0x33221100, 0x77665544, 0x7041;", 0x77004411),
    ("shl.b32 %r5, 1, 32;", 0),
    ("shr.s32 %r5, -8, 40;", 0xFFFFFFFF),
    ("bfe.u32 %r5, 0x12345678, 8, 12;", 0x456),
    ("bfe.s32 %r5, 0x12345F78, 8, 4;", 0xFFFFFFFF),
    ("mul.hi.u32 %r5, 0xFFFFFFFF, 0xFFFFFFFF;", 0xFFFFFFFE),
    ("mov.u16 %rs1, 40000;\n  mul.hi.u16 %rs2, %rs1, 1000;\n  cvt.u32.u16 %r5, %rs2;", 40000 * 1000 >> 16),
    ("cvt.rn.f32.s32 %r5, -3;", 0xC0400000),
    ("cvt.rzi.s32.f32 %r5, 0fC0700000;", 0xFFFFFFFD),
    ("fma.rn.f32 %r5, 0f3F800001, 0f3F800001, 0fBF800002;", 0x28800000),
    ("setp.ne.f32 %p1, 0f7FC00000, 0f3F800000;\n  selp.b32 %r5, 1, 2, %p1;", 2),
    ("setp.neu.f32 %p1, 0f7FC00000, 0f3F800000;\n  selp.b32 %r5, 1, 2, %p1;", 1),
    ("cvt.rn.f16.f32 %rs1, 0f3F803000;\n  cvt.f32.f16 %r5, %rs1;", 0x3F804000),
    ("cvt.rn.f16x2.f32 %r5, 0f3F800000, 0fC0000000;", 0x3C00C000),
    ("mov.b64 %rd7, {%r1, 5};\n  shr.u64 %rd7, %rd7, 32;\n  cvt.u32.u64 %r5, %rd7;", 5),
]


@pytest.mark.parametrize("code, want", ARITHMETIC, ids=[c.split()[0] for c, _ in ARITHMETIC])
def test_arithmetic(code, want):
    got = execute(f"  {code}\n  st.global.b32 [%rd4], %r5;")
    assert (got == want % (1 << 32)).all(), hex(int(got[0]))


def test_tensor_core_products():
    """One warp, 16 x 32 unsigned by 32 x 8 signed bytes; each byte placed as the PTX manual's formulas for m16n8k32 say."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 256, (16, 32)), rng.integers(-128, 128, (32, 8))
    words = np.zeros((6, 32), np.uint32)
    for lane in range(32):
        group, thread = lane >> 2, lane & 3
        for i in range(16):  # a0..a15 of the manual
            row = group if i < 4 or 8 <= i < 12 else group + 8
            words[i // 4, lane] |= np.uint32(int(a[row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)]) << 8 * (i & 3))
        for i in range(8):
            words[4 + i // 4, lane] |= np.uint32((int(b[thread * 4 + (i & 3) + (16 if i >= 4 else 0), group]) & 255) << 8 * (i & 3))
    loads = "".join(f"  ld.global.b32 %r{10 + i}, [%rd4+{128 * i}];\n" for i in range(6))
    mma = "  mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32\n {%r20, %r21, %r22, %r23},\n {%r10, %r11, %r12, %r13},\n {%r14, %r15},\n"
    stores = "".join(f"  st.global.b32 [%rd4+{128 * i}], %r{20 + i};\n" for i in range(4))
    memory = GlobalMemory()
    data = memory.store(words, "data")
    Simt(HEAD + loads + mma + " {5, 6, 7, 8};\n" + stores + "  ret;\n}\n", memory).launch("k", 1, 32, [data, 0])
    got = memory.read(data, (6, 32), np.uint32).view(np.int32)
    product_ = a @ b
    for lane in range(32):
        group, thread = lane >> 2, lane & 3
        for i in range(4):
            assert got[i, lane] == product_[group + (8 if i >= 2 else 0), thread * 2 + (i & 1)] + 5 + i


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_tensor_core_products_of_halves(kind):
    """16 x 16 by 16 x 8; each value placed as the PTX manual's formulas for m16n8k16 say."""
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-8, 8, shape).astype(np.float32) / 4 for shape in ((16, 16), (16, 8)))
    code = (lambda v: int(np.float16(v).view(np.uint16))) if kind == "f16" else (lambda v: int(np.float32(v).view(np.uint32)) >> 16)
    words = np.zeros((6, 32), np.uint32)
    for lane in range(32):
        group, thread = lane >> 2, lane & 3
        for i in range(8):  # a0..a7 of the manual
            row = group if i in (0, 1, 4, 5) else group + 8
            words[i // 2, lane] |= np.uint32(code(a[row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)]) << 16 * (i & 1))
        for i in range(4):
            words[4 + i // 2, lane] |= np.uint32(code(b[thread * 2 + (i & 1) + (8 if i >= 2 else 0), group]) << 16 * (i & 1))
    loads = "".join(f"  ld.global.b32 %r{10 + i}, [%rd4+{128 * i}];\n" for i in range(6))
    mma = f"  mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32\n {{%r20, %r21, %r22, %r23}},\n {{%r10, %r11, %r12, %r13}},\n"
    stores = "".join(f"  st.global.b32 [%rd4+{128 * i}], %r{20 + i};\n" for i in range(4))
    memory = GlobalMemory()
    data = memory.store(words, "data")
    mma = "  mov.b32 %r30, 0f3F000000;\n" + mma + " {%r14, %r15}, {%r30, %r30, %r30, %r30};\n"
    Simt(HEAD + loads + mma + stores + "  ret;\n}\n", memory).launch("k", 1, 32, [data, 0])
    got = memory.read(data, (6, 32), np.float32)
    product_ = a @ b
    for lane in range(32):
        group, thread = lane >> 2, lane & 3
        for i in range(4):
            assert got[i, lane] == product_[group + (8 if i >= 2 else 0), thread * 2 + (i & 1)] + 0.5


# Planted errors in real kernels


def launch(text: str, spec: RmsNorm, rows: int = 2, shrink: int = 0) -> None:
    n = spec.ne0
    memory = GlobalMemory()
    x = memory.store(np.ones((rows, n), np.float32), "x", read_only=True)
    w = memory.store(np.ones(n, np.float32), "w", read_only=True)
    y = memory.alloc(4 * rows * n - shrink, "y")
    params = memory.store(np.zeros(5, np.int64), "params", read_only=True)
    (name,) = re.findall(r"\.entry (\w+)\(", text)
    Simt(text, memory).launch(name, rows, 256, [x, n, w, 0, 0, y, n, params, 0, 0, rows])


def test_a_planted_race_in_a_kernel_is_found():
    spec = RmsNorm(512, 1e-5, True, False)
    text = ptx_of(spec)
    block = int(re.findall(r"\.maxntid (\d+)", text)[0])
    assert block == 256
    launch(text, spec)
    first = text.index("bar.sync")
    planted = text[:first] + text[first:].replace("bar.sync \t0;", "", 1)
    assert planted != text
    with pytest.raises(SimtError, match=r"never written|race on shared memory"):
        launch(planted, spec)


def test_a_planted_overrun_in_a_kernel_is_found():
    spec = RmsNorm(512, 1e-5, True, False)
    with pytest.raises(SimtError, match="outside every allocation"):
        launch(ptx_of(spec), spec, shrink=4)


def test_a_weight_that_is_too_short_is_found():
    """Reads are checked as writes are: the last group of rows is cut off."""
    name, k, n = "q4_0", 64, 32
    raw, x = weight_rows(name, k, n), np.ones((1, k), np.float32)
    spec, weights = MatMul(name, k, n, "none", False, "T"), packed(name, raw, k)
    args = [weights, records(x, "q8_2"), np.zeros((1, n), np.float32), k, n, None, n, None]
    assert np.abs(run(spec, args, [2], 1, T=1)[2] - product(name, raw, k, x)).max() < 1e-4
    args[0] = weights[:-4]
    with pytest.raises(SimtError, match="outside every allocation"):
        run(spec, args, [2], 1, T=1)
