"""Sparse attention in compiled models: bits that depend on nothing but the sequence; a choice of everything is dense attention."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.passes import DEFAULT_PIPELINE
from ggufc.passes.split_heads import with_split
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.perplexity import perplexity
from ggufc.runtime.session import Session
from support import artifact_of, fill_results, golden_cases

CASE = next(case for case in golden_cases("glm-dsa-topk8") if case.name == "glm-dsa-topk8")
LENGTH = 60
SPARSE = {"dsa": True, "dsa_top_k": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "sparse": {"builder": SPARSE},
    "dense": {},
    "all": {"builder": SPARSE | {"dsa_top_k": 4096}},
    "unfused": {"builder": SPARSE, "pipeline": "hoist,dce", "keep": "blk.*.indexer.mask"},
}

Open = Callable[..., Session]


@pytest.fixture(scope="module")
def artifacts() -> Callable[[str], Path]:
    return lambda kind: artifact_of(CASE / "model.gguf", CompileOptions(jobs=1, **OPTIONS[kind]))


@pytest.fixture(scope="module")
def opened(artifacts: Callable[[str], Path]) -> Open:
    def make(kind: str = "sparse", **options: Any) -> Session:
        return Session(artifacts(kind), **{"n_ctx": 256, "n_batch": 256, "n_seq_max": 4, "n_threads": 1, **options})

    return make


def tokens(n: int = LENGTH, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, n).tolist()


def one_by_one(session: Session, mine: list[int], seq: int = 0) -> np.ndarray:
    return np.concatenate([session.decode([t], seq=seq, logits="all") for t in mine])


@pytest.fixture(scope="module")
def reference(opened: Open) -> Iterator[np.ndarray]:
    with opened(n_ubatch=1) as s:
        yield one_by_one(s, tokens())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(1, 3), st.sampled_from([1, 5, 64]), st.booleans())
def test_chunks_threads_and_reuse(opened: Open, reference: np.ndarray, sizes: list[int], threads: int, n_ubatch: int, reuse: bool) -> None:
    # S138: keys of the indexer persist, so a prefill and decoding choose what one batch chooses.
    with opened(n_threads=threads, n_ubatch=n_ubatch, graph_reuse=reuse) as s:
        rows, at = [], 0
        while at < LENGTH:
            size = sizes[len(rows) % len(sizes)]
            rows.append(s.decode(tokens()[at : at + size], logits="all"))
            at += size
    assert np.array_equal(np.concatenate(rows), reference)


def test_a_choice_of_everything_has_the_bits_of_dense_attention(opened: Open, reference: np.ndarray) -> None:  # S137
    logits = {}
    for kind in ("dense", "all"):
        with opened(kind) as s:
            logits[kind] = np.concatenate([s.decode(tokens()[:50], logits="all"), one_by_one(s, tokens()[50:])])
    assert np.array_equal(logits["dense"], logits["all"])
    assert np.array_equal(logits["dense"][:8], reference[:8])  # up to eight cells are all chosen
    assert np.abs(logits["dense"][8:] - reference[8:]).max() > 1


def test_fused_and_unfused_agree(opened: Open, reference: np.ndarray) -> None:  # S141, S153
    with opened("unfused", n_ubatch=16) as s:
        np.testing.assert_allclose(s.decode(tokens(), logits="all"), reference, atol=5e-3)


def test_every_column_of_the_mask_is_written_each_step(opened: Open) -> None:  # S140
    """Masks and all that lies between launches begin as NaN or as large numbers; a mask is 0 in what is seen and chosen, else hidden."""
    names = [f"keep:blk.{i}.indexer.mask" for i in (0, 1, 2)]
    found = {}
    for byte in (0x00, 0xFF, 0x7B):
        with opened("unfused", n_ubatch=16) as s:
            masks: list[np.ndarray] = []
            for at, n in [(0, 16), (16, 11), *((p, 1) for p in range(27, 36)), (36, 16)]:
                fill_results(s, byte)
                logits = s.decode(tokens()[at : at + n], logits="all")
                for name in names:
                    mask = s.executor.output(name)
                    assert mask.shape == (n, 256) and ((mask == 0) | (mask <= -1e30)).all(), (byte, at, name)
                    assert ((mask == 0).sum(axis=1) == np.minimum(8, at + 1 + np.arange(n))).all()
                    masks.append(mask.copy())
            found[byte] = [*masks, logits.copy()]
    for byte, arrays in found.items():
        assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(arrays, found[0], strict=True)), byte


def test_packed_sequences_have_the_bits_of_each_alone(opened: Open) -> None:  # S142
    lengths = (40, 33, 27, 12)
    alone = {}
    for seq, n in enumerate(lengths):
        with opened() as s:
            alone[seq] = s.decode(tokens(n, seq), logits="all")
    order = [(p, seq) for p in range(max(lengths)) for seq in range(4) if p < lengths[seq]]
    with opened() as s:
        mine = [tokens(n, seq) for seq, n in enumerate(lengths)]
        rows = s.decode([mine[seq][p] for p, seq in order], pos=[p for p, _ in order], seq=[seq for _, seq in order], logits="all")
        for seq in range(4):
            assert np.array_equal(rows[[i for i, (_, q) in enumerate(order) if q == seq]], alone[seq])


def test_perplexity_is_the_same_of_one_chunk_and_of_four_at_once(opened: Open) -> None:  # S142
    """Chunk for chunk, and to the bit; chunks are far longer than what the indexer keeps, and their number is no multiple of four."""
    seen: dict[int, list[float]] = {1: [], 4: []}
    for n_seq, values in seen.items():
        with opened(n_seq_max=n_seq, n_ubatch=32) as s:
            whole = perplexity(s, tokens(6 * 40 + 3, 7), n_ctx=40, on_chunk=lambda _, n, p, to=values: to.append(p.value))
            assert whole.n_chunks == 6 and whole.value == values[-1]
    assert seen[4] == seen[1] and len(set(seen[1])) == 6
    with opened("dense", n_seq_max=1) as s:
        assert abs(perplexity(s, tokens(6 * 40 + 3, 7), n_ctx=40).value / seen[1][-1] - 1) > 1e-3


def test_dropped_positions_move_the_sink(opened: Open) -> None:  # S143
    """After the first ten positions are gone, the first survivor is in every choice: what it holds keeps mattering."""

    def run(drop: int) -> np.ndarray:
        with opened() as s:
            s.decode(tokens(30), seq=0, logits="none")
            s.seq_cp(0, 1, 0, -1)
            s.seq_rm(0, 0, drop)
            return s.decode(tokens(6, 9), seq=0, logits="all")

    first, second = run(10), run(10)
    assert np.array_equal(first, second)
    assert np.abs(first - run(9)).max() > 1e-3


def test_cells_copies_and_saved_state_do_not_matter(opened: Open, reference: np.ndarray) -> None:  # S144
    mine = tokens()
    with opened(n_ubatch=16) as s:
        s.decode(tokens(20, 5), seq=1, logits="none")
        s.decode(mine[:25], seq=0, logits="none")
        s.decode(tokens(15, 6), seq=2, logits="none")
        s.decode(mine[25:40], seq=0, logits="none")
        s.seq_rm(1)
        s.decode(mine[40:45], seq=0, logits="none")
        s.seq_cp(0, 3)
        saved = io.BytesIO()
        s.state_save(saved, 0)
        assert np.array_equal(s.decode(mine[45:], seq=0, logits="all"), reference[45:])
        s.seq_rm(2)
        assert s.defrag() > 0
        assert np.array_equal(s.decode(mine[45:], seq=3, logits="all"), reference[45:])
        s.state_load(saved.getvalue(), 2)
        assert np.array_equal(s.decode(mine[45:], seq=2, logits="all"), reference[45:])


def index_keys(session: Session) -> dict[str, np.ndarray]:
    caches = session._executor.caches
    return {name: caches.view(name).copy() for name in caches.specs if name.endswith("indexer_k")}


def test_reused_graphs_write_the_same_index_keys(opened: Open) -> None:  # S146
    """There is no fixup to forget: rows are written where an input says. A step that writes elsewhere shows in the bytes."""
    kept = {}
    for reuse in (True, False):
        with opened(graph_reuse=reuse) as s:
            one_by_one(s, tokens(40))
            assert s._executor.program.fixups == []
            kept[reuse] = index_keys(s)
    assert len(kept[True]) == 3
    for name, rows in kept[True].items():
        assert np.array_equal(rows, kept[False][name])
        assert len(np.unique(rows[:40], axis=0)) == 40 and not rows[40:].any()


def test_shifts_of_positions_are_refused(opened: Open, reference: np.ndarray) -> None:  # S145
    """Before anything changes, with a hint; the sequence goes on with the bits it has without the request."""
    with opened() as s:
        s.decode(tokens()[:20], logits="none")
        for call in (lambda: s.seq_add(0, 0, -1, 3), lambda: s.seq_add(0, 5, 9, -1), lambda: s.seq_div(0, 0, -1, 2), s.shift_context):
            with pytest.raises(RuntimeRefusal, match=r"'latent'.*turn context shift off or use a larger n_ctx") as refusal:
                call()
            assert refusal.value.soft and s.pos_min(0) == 0 and s.pos_max(0) == 19 and not s.cells.needs_shift
        assert np.array_equal(s.decode(tokens()[20:], logits="all"), reference[20:])


def test_the_end_of_the_context_ends_a_generation(opened: Open) -> None:  # S145
    """With ``context_shift`` the refusal tells why; without it the text ends. Both leave a sequence that can be cut and continued."""
    with opened(n_seq_max=1) as s:
        s.decode(tokens(250), logits="none")
        text = s.generate(tokens(2, 1), n_predict=50, reuse_prefix=False, ignore_eos=True)
        text.text()
        assert text.finish_reason == "context" and len(text.tokens) < 50 and s.pos_max(0) == 255
        with pytest.raises(RuntimeRefusal, match="use a larger n_ctx") as refusal:
            s.decode(tokens(1))
        assert refusal.value.soft
        s.seq_rm(0, 250, -1)
        with pytest.raises(RuntimeRefusal, match="turn context shift off"):
            s.generate(tokens(2, 1), n_predict=50, reuse_prefix=False, ignore_eos=True, context_shift=True).text()
        assert (s.pos_min(0), s.pos_max(0)) == (0, 255)
        s.seq_rm(0, 100, -1)
        after = s.decode(tokens(4, 2), logits="all")
    with opened(n_seq_max=1) as s:
        s.decode(tokens(250)[:100], logits="none")
        assert np.array_equal(s.decode(tokens(4, 2), logits="all"), after)


def test_attention_reads_by_the_choice_and_not_by_the_context(artifacts: Callable[[str], Path]) -> None:  # S154
    from ggufc.runtime.artifact import Artifact

    with Artifact.open(artifacts("sparse")) as artifact:
        (program,) = [p for p in artifact.manifest.programs if p.name == "eval"]
        reads = {launch.node: launch.bytes for launch in program.launches if launch.node.endswith("kqv.fused")}
        scores = {launch.node: launch.bytes for launch in program.launches if launch.node.endswith("top_k.scores")}
    assert len(reads) == 5 and all(moved == {"T": 8 * 48 * 2} for moved in reads.values())
    assert len(scores) == 3 and all(moved == {"R": 32 * 2} for moved in scores.values())


def test_quantised_maps_of_heads(tmp_path: Path) -> None:
    """Files of this family hold K and V maps as stacks of quantised matrices; compiled products round like the reference."""
    from ggufc.formats.gguf_reader import GGUFFile
    from ggufc.formats.gguf_writer import GGUFWriter
    from ggufc.ir import interpret
    from ggufc.models import Step, load_model
    from ggufc.models.glm_dsa import GLM_DSA

    sizes = {"block_count": 3, "context_length": 512, "embedding_length": 64, "feed_forward_length": 64, "vocab_size": 64,
             "attention.head_count": 4, "attention.key_length": 96, "attention.value_length": 32, "rope.dimension_count": 32,
             "attention.kv_lora_rank": 64, "attention.q_lora_rank": 64, "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 4,
             "leading_dense_block_count": 2, "expert_used_count": 2, "expert_shared_count": 1, "expert_feed_forward_length": 32,
             "expert_weights_scale": 1.5, "attention.indexer.head_count": 4, "attention.indexer.key_length": 32,
             "attention.indexer.top_k": 6}  # fmt: skip
    metadata = {f"glm-dsa.{key}": value for key, value in sizes.items()} | {"general.architecture": "glm-dsa"}
    rng = np.random.default_rng(0)
    source, artifact = tmp_path / "model.gguf", tmp_path / "model.ggufc"
    with GGUFWriter(source) as out:
        for key, value in metadata.items():
            out.add(key, value)
        for spec in GLM_DSA.tensors(GLM_DSA.read(metadata), ()):
            if spec.vector:
                out.add_tensor(spec.name, spec.ne, "f32", rng.normal(1, 0.1, spec.ne[0]).astype(np.float32))
                continue
            blocks = np.empty((int(np.prod(spec.ne)) // 32, 34), np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(1.5e-2 / np.sqrt(spec.ne[0])).tobytes(), np.uint8)
            blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 32), np.uint8)
            out.add_tensor(spec.name, spec.ne, "q8_0", blocks.reshape(-1))
    compile_file(source, artifact, CompileOptions(jobs=1, builder={"dsa": True}))
    mine = rng.integers(0, 64, 24).tolist()
    with Session(artifact, n_ctx=256, n_threads=1) as s:
        together = s.decode(mine, logits="all")
    with Session(artifact, n_ctx=256, n_threads=2) as s:
        assert np.array_equal(one_by_one(s, mine), together)
    n = len(mine)
    inputs = {"tokens": mine, "positions": range(n), "out_ids": range(n), "kv_slots": range(n), "kv_cells": range(n)}
    inputs["visible"] = [(0, 0, t + 1) for t in range(n)]
    with GGUFFile.open(source) as file:
        model = load_model(file)
        graph = model.build(Step({"dsa": True}))
        data = {name: np.array(value, np.int32) for name, value in inputs.items()}
        env = {"T": n, "O": n, "C": 256, "KV": 32, "R": n}
        want = interpret(graph, {name: file.data(name) for name in model.weights}, data, {}, env, activations="rounded")["logits"]
    np.testing.assert_allclose(together, want, atol=2e-3)


def test_attention_reads_as_much_from_a_long_cache_as_from_a_short_one(opened: Open) -> None:  # S154
    """Counted from the launches of the artifact, as ``ggufc inspect`` shows them."""
    from ggufc.inspection import attention_reads

    def reads(kind: str) -> tuple[list[int], list[int]]:
        with opened(kind) as s:
            manifest = s.artifact.manifest
            (program,) = (p for p in manifest.programs if p.name == "eval")
            rows = attention_reads(manifest, program)
        return [row["attention"] for row in rows], [row["scoring"] for row in rows]

    (short, long), (few, many) = reads("sparse")
    assert short == long == 5 * 8 * 48 * 2  # layers x chosen rows x bytes of a row
    assert many == 4 * few > 0
    (short, long), scoring = reads("dense")
    assert long == 4 * short == 5 * 32768 * 48 * 2 and scoring == [0, 0]


def test_where_heads_are_divided_nothing_is_chosen(tmp_path: Path) -> None:  # S148
    """Exactly one note, and the logits of dense attention to the bit; decompressed latents have heads that can be divided."""
    divided = with_split(DEFAULT_PIPELINE, ["0-4:2"])
    logits = {}
    for kind, pipeline, builder in (("dense", None, {}), ("divided", divided, {}), ("asked for", divided, SPARSE)):
        path = tmp_path / f"{kind}.ggufc"
        report = compile_file(CASE / "model.gguf", path, CompileOptions(jobs=1, pipeline=pipeline, builder={"mla": 0} | builder))
        assert len(report.notes) == (kind == "asked for"), report.notes
        with Session(path, n_ctx=256, n_threads=1) as s:
            assert not any("indexer" in cache.name for cache in s.artifact.manifest.caches)
            logits[kind] = s.decode(list(range(20, 60)), logits="all")
    assert report.notes == ["dsa is off: caches are divided by heads (split-heads), and divided attention is dense"]
    assert np.array_equal(logits["dense"], logits["divided"]) and np.array_equal(logits["divided"], logits["asked for"])
