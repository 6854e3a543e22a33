"""The performance model: its counts are the model's own, and the page shows what it computes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from ggufc.codegen import frontend
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.lower import lower
from ggufc.codegen.nvptx import assembler, describe, emit_ptx, roofline
from ggufc.codegen.nvptx.occupancy import occupancy
from ggufc.codegen.options import CompileOptions
from ggufc.codegen.schedule import Step
from ggufc.codegen.weights import q8_record
from ggufc.formats import cuda as fmt
from ggufc.formats.ggml_types import row_bytes
from ggufc.models.registry import load_model
from model_files import ModelFile

LAYERS, EMBD, FFN, HEADS, GROUPS, VOCAB = 32, 4096, 14336, 32, 8, 128256
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def eight_billion() -> ModelFile:
    """Llama 3.1 8B as a Q4_K_M file describes it: half of the value and down projections are Q6_K."""
    keys = {
        "block_count": LAYERS, "context_length": 131072, "embedding_length": EMBD,
        "feed_forward_length": FFN, "attention.head_count": HEADS,
        "attention.head_count_kv": GROUPS, "rope.freq_base": 500000.0, "rope.dimension_count": 128, "vocab_size": VOCAB,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    file = ModelFile({"general.architecture": "llama", **{f"llama.{k}": v for k, v in keys.items()}})
    file.add("token_embd.weight", EMBD, VOCAB, dtype="q4_k")
    file.add("output.weight", EMBD, VOCAB, dtype="q6_k")
    file.add("output_norm.weight", EMBD)
    file.add("rope_freqs.weight", 64)
    for i in range(LAYERS):
        better = "q6_k" if i < LAYERS // 8 or i >= 7 * LAYERS // 8 or (i - LAYERS // 8) % 3 == 2 else "q4_k"
        for name, k, n, dtype in (
            ("attn_q", EMBD, EMBD, "q4_k"), ("attn_k", EMBD, 1024, "q4_k"), ("attn_v", EMBD, 1024, better),
            ("attn_output", EMBD, EMBD, "q4_k"),
            ("ffn_gate", EMBD, FFN, "q4_k"), ("ffn_up", EMBD, FFN, "q4_k"), ("ffn_down", FFN, EMBD, better),
        ):  # fmt: skip
            file.add(f"blk.{i}.{name}.weight", k, n, dtype=dtype)
        file.add(f"blk.{i}.attn_norm.weight", EMBD)
        file.add(f"blk.{i}.ffn_norm.weight", EMBD)
    return file


MOE_LAYERS, EXPERTS, USED, EXPERT_FFN = 48, 128, 8, 768


def thirty_billion() -> ModelFile:
    """Qwen3 30B-A3B as a Q4_K_M file describes it."""
    embd, head, heads, groups, vocab = 2048, 128, 32, 4, 151936
    keys = {
        "block_count": MOE_LAYERS, "context_length": 40960, "embedding_length": embd, "feed_forward_length": 6144,
        "attention.head_count": heads, "attention.head_count_kv": groups, "attention.key_length": head, "attention.value_length": head,
        "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": vocab, "expert_count": EXPERTS,
        "expert_used_count": USED, "expert_feed_forward_length": EXPERT_FFN,
    }  # fmt: skip
    file = ModelFile({"general.architecture": "qwen3moe", **{f"qwen3moe.{k}": v for k, v in keys.items()}})
    file.add("token_embd.weight", embd, vocab, dtype="q4_k")
    file.add("output.weight", embd, vocab, dtype="q6_k")
    file.add("output_norm.weight", embd)
    for i in range(MOE_LAYERS):
        better = "q6_k" if i < MOE_LAYERS // 8 or i >= 7 * MOE_LAYERS // 8 or (i - MOE_LAYERS // 8) % 3 == 2 else "q4_k"
        for name, k, n, dtype in (
            ("attn_q", embd, heads * head, "q4_k"), ("attn_k", embd, groups * head, "q4_k"), ("attn_v", embd, groups * head, better),
            ("attn_output", heads * head, embd, "q4_k"), ("ffn_gate_inp", embd, EXPERTS, "f32"),
        ):  # fmt: skip
            file.add(f"blk.{i}.{name}.weight", k, n, dtype=dtype)
        for name, *ne, dtype in (
            ("ffn_gate_exps", embd, EXPERT_FFN, "q4_k"), ("ffn_up_exps", embd, EXPERT_FFN, "q4_k"),
            ("ffn_down_exps", EXPERT_FFN, embd, better),
        ):  # fmt: skip
            file.add(f"blk.{i}.{name}.weight", *ne, EXPERTS, dtype=dtype)
        for name, k in (("attn_norm", embd), ("ffn_norm", embd), ("attn_q_norm", head), ("attn_k_norm", head)):
            file.add(f"blk.{i}.{name}.weight", k)
    return file


def lowered(file: ModelFile):
    options = CompileOptions()
    graph = frontend.build_graph(load_model(file), options, "eval")
    frontend.run_passes(graph, options)
    return lower(graph, "eval")[0]


@lru_cache(maxsize=1)
def schedule():
    return lowered(eight_billion())


@lru_cache(maxsize=1)
def expert_schedule():
    return lowered(thirty_billion())


def test_a_decoded_token_reads_every_weight_once():
    file = eight_billion()
    matrices = {n: t for n, t in file.tensors.items() if len(t.ne) == 2 and n != "token_embd.weight"}
    stored = sum(row_bytes(t.type.name, t.ne[0]) * t.ne[1] for t in matrices.values())
    parameters = sum(t.ne[0] * t.ne[1] for t in matrices.values())
    shares = [s for s in roofline.estimate(schedule(), roofline.H200, 1, 1024) if s.kind.startswith("products")]
    assert sum(s.bytes for s in shares) == pytest.approx(stored, rel=0.002)
    assert sum(s.operations for s in shares) == pytest.approx(2 * parameters, rel=1e-9)


def test_attention_counts():
    (one,) = [s for s in roofline.estimate(schedule(), roofline.H200, 1, 1000) if s.kind == "attention"]
    assert one.operations == LAYERS * HEADS * 1000 * 4 * 128
    assert one.bytes == pytest.approx(LAYERS * 1000 * 2 * 2 * GROUPS * 128, rel=0.02)


def test_a_decoded_token_reads_the_experts_it_chose():
    """A token reads eight of 128; many tokens read all, once."""
    one, many = (
        {s.kind: s for s in roofline.estimate(expert_schedule(), roofline.H200, tokens, 4096) if s.kind.startswith("expert")}
        for tokens in (1, 4096)
    )
    parameters = 3 * MOE_LAYERS * USED * 2048 * EXPERT_FFN
    assert sum(s.operations for s in one.values()) == 2 * parameters
    stored = sum(
        row_bytes(t.type.name, t.ne[0]) * t.ne[1] * t.ne[2] for n, t in thirty_billion().tensors.items() if n.endswith("exps.weight")
    )
    assert sum(s.bytes for s in one.values()) == pytest.approx(stored * USED / EXPERTS, rel=0.04)
    read = q8_record(2048).stride + USED * q8_record(EXPERT_FFN).stride
    passing = 4096 * (MOE_LAYERS - 1) * (read + 4 * USED * (EXPERT_FFN + 2048))  # the last layer has one row
    assert sum(s.bytes for s in many.values()) == pytest.approx(stored * (MOE_LAYERS - 1) / MOE_LAYERS + passing, rel=0.04)


@pytest.mark.parametrize("tokens, context", [(1, 1024), (512, 512)])
def test_the_page_shows_what_experts_take(tokens, context):
    assert roofline.table(roofline.estimate(expert_schedule(), roofline.H200, tokens, context)) in PAGE.read_text()


@pytest.mark.parametrize("tokens, context", [(1, 1024), (512, 512)])
def test_the_page_shows_what_the_model_computes(tokens, context):
    """Change the page together with the kernels: the expected text is the assertion's left side."""
    text = roofline.table(roofline.estimate(schedule(), roofline.H200, tokens, context))
    assert text in PAGE.read_text()


def test_the_page_shows_every_launch():
    assert roofline.launches(schedule(), [(1, 1024), (512, 512)]) in PAGE.read_text()


def test_launches_add_up():
    """Launches of one size times their number are the totals of the tables by kind."""
    for tokens, context in ((1, 1024), (512, 512)):
        total = sum(s.bytes for s in roofline.estimate(schedule(), roofline.H200, tokens, context))
        rows = [r.strip("| ").split(" | ") for r in roofline.launches(schedule(), [(tokens, context)]).splitlines()[2:]]
        assert sum(int(count) * float(moved) * 1e6 for _, count, moved, _ in rows) == pytest.approx(total, rel=1e-3)


def taken() -> list[tuple[str, int, int, int]]:
    """Rows of the page's table of resources: entry, threads, registers, bytes of shared memory."""
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+) \| (\d+) \| \d+ % \|$", PAGE.read_text(), re.MULTILINE)
    return [(name, int(threads), int(registers), int(shared)) for name, threads, registers, shared in rows]


def page_steps() -> list[tuple[str, Step]]:
    """Steps whose kernels the page describes, and what precedes their names: those of the dense model, then the other's products with
    experts and with F32 weights.
    """

    def is_new(spec: object) -> bool:
        return isinstance(spec, MatMulId) or (isinstance(spec, MatMul) and spec.format == "f32")

    return [*(("", step) for step in schedule().steps), *(("moe/", step) for step in expert_schedule().steps if is_new(step.spec))]


def entries() -> dict[str, fmt.Entry]:
    """Entries of the kernels by the name the page gives them: where a kernel first stands, and which of its entries. The last layer's
    products of chosen rows are those of all rows.
    """
    found: dict[str, fmt.Entry] = {}
    seen = set()
    for model, step in page_steps():
        kernel = replace(step.spec, rows="T") if isinstance(step.spec, MatMul | MatMulId) else step.spec
        if kernel not in seen:
            seen.add(kernel)
            for entry in describe(step.spec).entries:
                found[f"{model}{step.node}{entry.symbol.removeprefix(symbol(step.spec))}"] = entry
    return found


@pytest.mark.full
@pytest.mark.skipif("sm_90" not in assembler.architectures(), reason="no ptxas for sm_90; the package nvidia-cuda-nvcc has one")
def test_the_page_shows_what_kernels_take():
    """Registers are the assembler's choice and may differ a little between its versions; the rest is what we emit."""
    found, specs = entries(), list(dict.fromkeys(step.spec for _, step in page_steps()))
    used = assembler.assemble(emit_ptx(specs, "sm_90"), "sm_90")
    table = [
        f"| `{name}` | {entry.block} | {used[entry.symbol].registers} | {used[entry.symbol].shared} | "
        f"{100 * occupancy('sm_90', entry.block, used[entry.symbol].registers, used[entry.symbol].shared):.0f} % |"
        for name, entry in found.items()
    ]
    shown = taken()
    assert [row[0] for row in shown] == list(found), "\n".join(table)
    for name, threads, registers, shared in shown:
        u = used[found[name].symbol]
        assert (threads, shared) == (found[name].block, u.shared) and abs(registers - u.registers) <= 16, "\n".join(table)
