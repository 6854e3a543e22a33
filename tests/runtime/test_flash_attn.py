"""Attention as one kernel or as the builder writes it (option ``flash_attn``): the same logits within rounding, the same state files."""

from __future__ import annotations

import io

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

OFF = {"flash_attn": False}
TOKENS = np.random.default_rng(6).integers(3, 250, 40).tolist()
WITHIN = 1e-3


def test_the_option_decides_which_kernels_there_are(compiled):
    from ggufc.runtime.artifact import Artifact

    for builder, fused in (({}, True), (OFF, False)):
        with Artifact.open(compiled("llama-gqa-tied", builder=builder)) as artifact:
            kernels = {kernel.symbol.rsplit("_", 1)[0] for kernel in artifact.manifest.kernels}
            assert {"flash_attn", "flash_attn_splits"} <= kernels if fused else "soft_max" in kernels and "flash_attn" not in kernels


@pytest.mark.parametrize("case", ["llama-gqa-tied", "gemma3-7"])
def test_a_block_after_context_beside_another_sequence(compiled, case):  # S80
    """Non-causal rows see all of their block and the context before it; nobody sees the other sequence."""
    rows: dict[tuple[bool, int], np.ndarray] = {}
    for fused in (True, False):
        for other in (0, 1):
            with Session(compiled(case, builder={} if fused else OFF), n_ctx=256, n_seq_max=2, n_threads=1) as s:
                s.decode(TOKENS[20 + other : 31 + other], seq=1, logits="none")
                s.decode(TOKENS[:9], seq=0, logits="none")
                s.causal = False
                embd = np.random.default_rng(2).normal(size=(12, s.artifact.manifest.n_embd)).astype(np.float32)
                rows[fused, other] = s.decode(embd=embd, pos=np.arange(9, 21), seq=0, logits="all")
                s.causal = True
                rows[fused, other] = np.concatenate([rows[fused, other], s.decode(TOKENS[9:12], seq=0, logits="all")])
    assert np.isfinite(rows[True, 0]).all() and np.isfinite(rows[False, 0]).all()  # no row sees nothing
    for fused in (True, False):
        assert np.array_equal(rows[fused, 0], rows[fused, 1])  # what another sequence holds does not matter
    np.testing.assert_allclose(rows[False, 0], rows[True, 0], atol=WITHIN)
    assert not np.array_equal(rows[False, 0], rows[True, 0])  # two ways of computing it, not one twice


@pytest.mark.parametrize("case", ["llama-gqa-tied", "gemma3-7"])
def test_chunks_threads_and_room_do_not_matter_without_it(compiled, case):
    """Only where the cells of a sequence lie does: it has them side by side here, each time the same ones."""
    tokens = np.random.default_rng(3).integers(3, 250, 300).tolist()
    runs = []
    for n_ctx, n_ubatch, threads, reuse in ((512, 300, 1, True), (512, 7, 2, True), (1024, 64, 1, False)):
        with Session(compiled(case, builder=OFF), n_ctx=n_ctx, n_batch=512, n_ubatch=n_ubatch, n_threads=threads, graph_reuse=reuse) as s:
            runs.append(np.concatenate([s.decode(tokens[:280], logits="all"), *[s.decode([token]) for token in tokens[280:]]]))
    for run in runs[1:]:
        assert np.array_equal(run.view(np.uint32), runs[0].view(np.uint32))


LATENT = "glm-dsa-topk8"
WRITERS = [("llama-gqa-tied", {}), *[(LATENT, {"mla": mla}) for mla in range(4)]]


def blob(s: Session) -> bytes:
    file = io.BytesIO()
    assert s.state_save(file, 0) == s.state_size(0) == len(file.getvalue())
    return file.getvalue()


@pytest.mark.full
@pytest.mark.parametrize(("case", "builder"), WRITERS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values())))
@pytest.mark.parametrize("saved_fused", [True, False])
def test_states_pass_between_both_ways(compiled, case, builder, saved_fused):  # S7
    """Rows are kept per cell either way: whether V exists and how attention is computed are independent facts, K-only caches included."""
    paths = {fused: compiled(case, builder={**builder, **({} if fused else OFF)}) for fused in (True, False)}
    with Session(paths[saved_fused], n_ctx=256, n_threads=1) as s:
        s.decode(TOKENS[:30], logits="none")
        saved = blob(s)
        v_state = 2 if builder.get("mla") else 0
        assert v_state == (2 if not any(cache.part == "v" for cache in s.artifact.manifest.caches) else 0)
        want = s.decode(TOKENS[30:], logits="all")
    for fused in (True, False):
        with Session(paths[fused], n_ctx=256, n_threads=1) as s:
            assert s.state_load(saved, 0) == 30
            assert blob(s) == saved
            got = s.decode(TOKENS[30:], logits="all")
        if fused == saved_fused:
            assert np.array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, atol=5 * WITHIN)


@pytest.mark.parametrize("saved_fused", [True, False])
def test_a_missing_v_cache_is_refused_either_way(compiled, saved_fused):  # S7
    paths = [compiled(LATENT, builder={"mla": mla, **({} if saved_fused else OFF)}) for mla in (0, 3)]
    for writer, reader in (paths, reversed(paths)):
        with Session(writer, n_ctx=256, n_threads=1) as s:
            s.decode(TOKENS[:5], logits="none")
            saved = blob(s)
        with Session(reader, n_ctx=256, n_threads=1) as s:
            with pytest.raises(RuntimeRefusal, match=r"the V cache is (there|absent) in the saved state and (there|absent) here"):
                s.state_load(saved, 0)
            assert s.pos_max(0) == -1


def test_quantised_values_need_it(compiled):
    with pytest.raises(CodegenError, match=r"'type_v': without flash attention values are read column by column, which q8_0 cannot be"):
        compiled("llama-fa-q8", type_v="q8_0", builder=OFF)
