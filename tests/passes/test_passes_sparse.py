"""Sparse attention: the indexer in one operator, attention over lists, sums over any dimension. What fuses, what must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node, Sym, TensorType, interpret, print_graph, verify
from ggufc.ir.dims import evaluate as evaluate_dim
from ggufc.ir.ops.attention import entries_per_token
from ggufc.models import Step, load_model
from ggufc.passes import DEFAULT_PIPELINE, PassManager, compare_counts, fusion_counts
from ggufc.passes.cache_fixups import check_fixups
from support import golden_cases

T, C, KV, R = (Sym(s) for s in ("T", "C", "KV", "R"))
PIPELINE = "canonicalize,fuse-sum-rows-ext,fuse-indexer-topk,fuse-attention,cse,dce"
BASELINE = Path(__file__).with_name("fusion_counts.json")
CASES = [case for case in golden_cases("glm-dsa-") if case.name in ("glm-dsa-topk8", "glm-dsa-idxq8")]


class Sparse:
    """Builds indexer, choice and attention as builders do; arguments may vary, ``broken`` is one thing that is wrong."""

    def __init__(
        self,
        *,
        d: int = 8,
        heads: int = 3,
        k: int = 4,
        sinks: bool = True,
        ext: bool = False,
        swap: bool = False,
        dtype: str = "f16",
        ties: str = "lowest",
        row: int = 16,
        rank: int = 8,
        broken: str = "",
    ) -> None:
        self.d, self.heads, self.k, self.row, self.rank, self.broken = d, heads, k, row, rank, broken
        g = self.g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
        self.x = g.input("embd", "embd", TensorType("f32", (d * heads + heads + 2 * row, T)))
        self.cells = g.input("kv_cells", "kv_cells", TensorType("i32", (R,)))
        self.vis = g.input("visible", "visible", TensorType("i32", (3, T)))
        self.mask = g.add("kq_mask", self.cells, self.vis, name="mask", ne0=KV)
        chosen = self.choice(sinks, ext, swap, dtype, ties)
        hidden = g.add("fill", self.mask, value=-1.0 if broken == "fill" else -1e30)
        selected = g.add("blend", hidden, chosen, value=0.5 if broken == "blend" else 0.0)
        if broken == "rows":
            g.outputs["rows"] = g.add("get_rows", self.keys, g.add("reshape", chosen, ne=(k * T,)))
        g.outputs["y"] = self.attention(g.add("add", self.mask, selected, name="chosen.mask"))
        verify(g)

    def part(self, start: int, *ne: int) -> Node:
        width = int(self.x.ne[0])
        nb = (1, ne[0], width) if len(ne) == 2 else (1, width)
        return self.g.add("cont", self.g.add("view", self.x, ne=(*ne, T), nb=nb, offset=start))

    def choice(self, sinks: bool, ext: bool, swap: bool, dtype: str, ties: str) -> Node:
        g, d, heads = self.g, self.d, self.heads
        q, w = self.part(0, d, heads), self.part(d * heads, heads)
        self.keys = g.cache("blk.0.indexer_k", TensorType(dtype, (d, C)))
        keys = g.add("view", self.keys, ne=(d, KV), nb=(1, d), offset=d if self.broken == "offset" else 0)
        s = g.add("mul_mat", keys, g.add("permute", q, axes=(0, 2, 1, 3)))
        s = g.add("sigmoid" if self.broken == "sigmoid" else "relu", s)
        w = g.add("permute", g.add("reshape", w, ne=(1, heads, T)), axes=(0, 2, 1))
        s = g.add("mul", s, w)
        if self.broken == "scores":
            g.outputs["scores"] = g.add("cont", g.add("permute", s, axes=(1, 0, 2)))
        if ext:
            s = g.add("sum_rows_ext", s, dim=2)
        else:
            s = g.add("sum_rows", g.add("cont", g.add("permute", s, axes=(1, 2, 0))))
        s = g.add("reshape", s, ne=(KV, T))
        mask = self.with_sinks() if sinks else self.mask
        if self.broken == "mask":
            mask = g.add("scale", mask, s=1.0, b=0.5)
        top = g.add("top_k", g.add("add", mask, s) if swap else g.add("add", s, mask), name="top", k=self.k, ties=ties)
        if self.broken == "superseded":
            slots = g.input("kv_slots", "kv_slots", TensorType("i32", (T,)))
            g.nodes.remove(top)
            g.add("set_rows", self.keys, self.part(0, d), slots)
            g.nodes.append(top)
        return top

    def with_sinks(self) -> Node:
        g = self.g
        base = g.add("view", self.vis, ne=(T,), nb=(3,), offset=1 if self.broken == "base" else 0)
        first = g.add("get_rows", g.add("reshape", self.cells, ne=(1, R)), base)
        zeros = g.add("fill", self.mask, value=0.0)
        return g.add("add", self.mask, g.add("blend", zeros, first, value=1.0 if self.broken == "boost" else 1e20))

    def attention(self, mask: Node) -> Node:
        """Two heads on one row of keys, whose first numbers are the values."""
        g, row, rank = self.g, self.row, self.rank
        start = self.d * self.heads + self.heads
        q = g.add("permute", self.part(start, row, 2), axes=(0, 2, 1, 3))
        rows = g.cache("blk.0.k", TensorType("f32", (row, C)))
        kk = g.add("view", rows, ne=(row, KV, 1), nb=(1, row, row))
        vv = g.add("view", rows, ne=(KV, rank, 1), nb=(row, 1, row))
        p = g.add("soft_max", g.add("mul_mat", kk, q), mask, scale=0.3)
        return g.add("cont", g.add("permute", g.add("mul_mat", vv, p), axes=(0, 2, 1, 3)))


def arguments(g: Graph, seed: int, tokens: int = 5) -> Any:
    """No weights, random inputs and caches, and the symbols."""
    rng = np.random.default_rng(seed)
    env = {"T": tokens, "O": 1, "C": 48, "KV": 32, "R": 25}
    inputs: dict[str, Any] = {}
    for node in g.inputs():
        name = node.attrs["name"]
        if name == "embd":
            inputs[name] = rng.normal(size=(tokens, int(node.ne[0]))).astype(np.float32)
        elif name == "kv_slots":
            inputs[name] = np.arange(tokens, dtype=np.int32)
    # Two lists of cells, ascending so that ties fall alike, and a token that sees nothing.
    inputs["kv_cells"] = np.concatenate([np.sort(rng.permutation(32)[:15]), np.sort(rng.permutation(32)[:10])]).astype(np.int32)
    vis = np.array([[0, 0, 15], [15, 0, 10], [0, 2, 9], [15, 0, 1], [0, 4, 4]], np.int32)
    inputs["visible"] = vis[np.arange(tokens) % 5]
    caches = {n.attrs["name"]: rng.normal(size=(48, int(n.ne[0]))).astype(np.float32) for n in g.find("cache")}
    return {}, inputs, caches, env


def evaluate(g: Graph, seed: int) -> dict[str, np.ndarray]:
    return interpret(g, *arguments(g, seed))


def fuse(g: Graph, pipeline: str = PIPELINE) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in PassManager.parse(pipeline).run(g):
        counts |= {k: n for k, n in record.counts.items() if n and k.startswith(("indexer", "flash", "sum"))}
    verify(g)
    return counts


FORMS = st.fixed_dictionaries(
    {
        "d": st.sampled_from([8, 32]),
        "heads": st.integers(1, 5),
        "k": st.integers(1, 31),
        "sinks": st.booleans(),
        "ext": st.booleans(),
        "swap": st.booleans(),
        "dtype": st.sampled_from(["f32", "f16", "bf16"]),
        "ties": st.sampled_from(["lowest", "highest"]),
    }
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FORMS, st.integers(0, 1000))
def test_fused_equals_unfused(form: dict[str, Any], seed: int) -> None:  # S63, S150, S153
    built = Sparse(**form).g
    final = built.clone()
    counts = fuse(final)
    assert counts["indexer-topk"] == counts["flash-attention-chosen"] == 1
    assert not [n for n in final.nodes if "KV" in n.type.symbols]
    np.testing.assert_allclose(evaluate(final, seed)["y"], evaluate(built, seed)["y"], rtol=1e-5, atol=1e-5)


BROKEN = ("sigmoid", "scores", "offset", "mask", "base", "boost", "rows", "superseded")


@pytest.mark.parametrize("broken", BROKEN)
def test_an_indexer_that_is_something_else_is_left_alone(broken: str) -> None:
    built = Sparse(broken=broken).g
    final = built.clone()
    counts = fuse(final)
    assert "indexer-topk" not in counts and final.find("top_k")
    # What was chosen some other way is read off the mask.
    assert counts["flash-attention-chosen"] == 1 and len(final.find("mask_to_index")) == 1
    for name, want in evaluate(built, 3).items():
        np.testing.assert_allclose(evaluate(final, 3)[name], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("broken", ["fill", "blend"])
def test_masks_that_do_not_hide_are_left_alone(broken: str) -> None:
    built = Sparse(broken=broken).g
    final = built.clone()
    counts = fuse(final)
    assert "flash-attention-chosen" not in counts and final.find("soft_max")
    np.testing.assert_allclose(evaluate(final, 4)["y"], evaluate(built, 4)["y"], rtol=1e-5, atol=1e-5)


def test_the_option_forbids_the_fusion() -> None:  # S153
    """Off, the pass leaves the graph as it is; on, what attention gathers by is the choice."""
    g = Sparse().g
    g.analysis["observations"] = {"fidx": False}
    before = print_graph(g)
    assert fuse(g, "fuse-indexer-topk") == {} and print_graph(g) == before
    assert "indexer-topk" not in fuse(g)
    g = Sparse().g
    g.analysis["observations"] = {"fidx": True}
    assert fuse(g)["indexer-topk"] == 1


def test_no_buffer_grows_with_the_number_of_heads() -> None:  # S63, S150
    env = {"T": 7, "O": 1, "C": 4096, "KV": 2048, "R": 2000}
    queries = 7 * 8 * 5  # of five heads, the largest that may grow with their number

    def results(heads: int) -> list[int]:
        g = Sparse(heads=heads).g
        fuse(g)
        return sorted(int(np.prod(n.type.shape(env))) for n in g.nodes if not n.is_leaf and not n.is_view and not n.op.writes_cache)

    few, many = results(2), results(5)
    assert len(few) == len(many) and max(b - a for a, b in zip(few, many)) <= queries
    assert many[-1] < env["KV"], "no result has a number per cell, let alone per cell and head"
    unfused = Sparse(heads=5).g
    assert [n for n in unfused.nodes if n.type.ne == (KV, T, 5)]


def test_memory_of_scores_is_that_of_one_head() -> None:  # S63, S150
    """In what the runtime allocates for the model's programs, scratch of threads included: a score per listed cell and token."""
    from ggufc.codegen.cpu.target import resolve
    from ggufc.codegen.kernels.indexer import IndexerScores
    from ggufc.codegen.lower import lower
    from ggufc.formats.artifact import evaluate as evaluate_form

    env = {"T": 512, "O": 512, "C": 32768, "KV": 32768, "R": 32768, "": 1}
    found = {}
    for heads in (1, 3, 64):
        g = Sparse(heads=heads, k=4).g
        PassManager.parse(DEFAULT_PIPELINE).run(g)
        schedule = lower(g)[0]
        (step,) = (step for step in schedule.steps if isinstance(step.spec, IndexerScores))
        assert step.spec.heads == heads
        sizes = sorted((evaluate_form(value.size, env) for value in schedule.values), reverse=True)
        found[heads] = sizes[0], step.spec.scratch_bytes(resolve("x86-64-v3"))
    assert len(set(found.values())) == 1
    scores, scratch = found[64]
    assert 512 * 32768 * 4 <= scores <= 512 * (32768 + 64) * 4 and scratch < 1 << 16


def test_other_lists_than_the_masks_go_through_the_mask() -> None:
    """A choice among other cells than the mask shows may hold hidden ones."""
    built = Sparse()
    g = built.g
    fuse(g, "canonicalize,fuse-sum-rows-ext,fuse-indexer-topk,dce")
    (chosen,) = g.find("indexer_topk")
    other = g.input("visible_all", "visible", TensorType("i32", (3, T)))
    g.nodes.remove(other)
    g.nodes.insert(0, other)
    chosen.operands = (*chosen.operands[:4], other)
    counts = fuse(g, "fuse-attention,dce")
    assert counts["flash-attention-chosen"] == 1 and len(g.find("mask_to_index")) == 1


def _sum(axes: tuple[int, ...], copied: bool, width: int) -> Graph:
    g = Graph("g", symbols=("T",))
    x = g.input("embd", "embd", TensorType("f32", (width * 6, T)))
    x = g.add("relu", g.add("reshape", x, ne=(width, 2, 3, T)))
    p = g.add("permute", x, axes=axes)
    g.outputs["y"] = g.add("cont", g.add("sum_rows", g.add("cont", p) if copied else p))
    verify(g)
    return g


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.booleans(), st.integers(1, 5), st.integers(0, 99))
def test_sums_of_permutations(axes: list[int], copied: bool, width: int, seed: int) -> None:  # S60
    built = _sum(tuple(axes), copied, width)
    final = built.clone()
    counts = fuse(final, "fuse-sum-rows-ext")
    assert bool(counts) is (axes[0] != 0)
    assert len(final.find("sum_rows_ext")) == len(counts)
    x = np.random.default_rng(seed).normal(size=(4, width * 6)).astype(np.float32)
    a, b = (interpret(g, {}, {"embd": x}, {}, {"T": 4})["y"] for g in (built, final))
    assert a.shape == b.shape
    np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6)


def test_a_copy_that_others_read_stays() -> None:
    g = _sum((1, 0, 2, 3), True, 4)
    g.outputs["copy"] = next(n for n in g.find("cont") if n.operands[0].op.name == "permute")
    assert fuse(g, "fuse-sum-rows-ext") == {}


def _build(folder: Path, **options: Any) -> Graph:
    with GGUFFile.open(folder / "model.gguf") as file:
        return load_model(file).build(Step(options))


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.name)
@pytest.mark.parametrize("options", [{}, {"dsa": True}, {"dsa": True, "fidx": False}], ids=["dense", "sparse", "separate"])
def test_fusion_counts_of_the_family_equal_the_baseline(case: Path, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    g = _build(case, **options)
    counts = fusion_counts(PassManager.parse(DEFAULT_PIPELINE).run(g))
    check_fixups(g)  # S146: index keys are written by rows, no write is left to a fixup
    key = " ".join([case.name, *(f"{name}={value}" for name, value in options.items())])
    baseline = json.loads(BASELINE.read_text())
    if request.config.getoption("--update-golden"):
        baseline[key] = counts
        BASELINE.write_text(json.dumps(dict(sorted(baseline.items())), indent=1) + "\n")
    assert key in baseline, f"{BASELINE.name} has no entry for {key}; run pytest with --update-golden"
    assert compare_counts(baseline[key], counts) == []


@pytest.mark.parametrize("k", [8, 2048])
def test_attention_reads_as_much_from_a_long_cache_as_from_a_short_one(k: int) -> None:  # S154
    def read(cells: int) -> int:
        g = _build(CASES[0], dsa=True, dsa_top_k=k)
        PassManager.parse(DEFAULT_PIPELINE).run(g)
        env = {"T": 1, "O": 1, "C": cells, "KV": cells, "R": cells}
        nodes = g.find("flash_attn")
        assert nodes and not g.find("kq_mask")
        bytes_of = [evaluate_dim(entries_per_token(node), env) * int(node.operands[1].ne[0]) * 2 for node in nodes]
        assert bytes_of == [k * 48 * 2] * len(nodes)
        return sum(bytes_of)

    assert read(8192) == read(32768)
    dense = _build(CASES[0])
    PassManager.parse(DEFAULT_PIPELINE).run(dense)
    assert {entries_per_token(node) for node in dense.find("flash_attn")} == {C}
