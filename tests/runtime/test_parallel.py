"""Several sequences at once: continuous batching, perplexity, gathered cells. Everything equals one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.perplexity import perplexity
from ggufc.runtime.sampling import GREEDY, SamplingOptions
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

TOKENS = [(13 * i * i + 7) % 89 + 100 for i in range(400)]
PROMPTS = [TOKENS[:5], TOKENS[50:51], TOKENS[60:92], TOKENS[7:19], TOKENS[100:117], TOKENS[3:6], TOKENS[200:203]]
WARM = SamplingOptions(temp=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=11)


def alone(toy, prompts, n_predict, sampling=GREEDY, **options) -> list[tuple[list[int], str, str]]:
    done = []
    for prompt in prompts:
        with Session(toy, n_threads=1, n_ctx=256) as s:
            g = s.generate(prompt, n_predict, sampling, ignore_eos=True, **options)
            done.append((g.tokens, g.text(), g.finish_reason))
    return [(tokens, text, reason) for tokens, text, reason in done]


def together(s: Session, prompts, n_predict, sampling=GREEDY, **options) -> list[tuple[list[int], str, str]]:
    g = s.generate_many(prompts, n_predict, sampling, ignore_eos=True, **options)
    texts = g.texts()
    return list(zip(g.tokens, texts, g.finish_reasons))


@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 8])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_every_text_is_the_one_its_prompt_gives_alone(toy, session, n_seq_max, sampling):
    s = session(n_seq_max=n_seq_max, n_ctx=512, n_ubatch=9, n_batch=16)
    assert together(s, PROMPTS, 14, sampling) == alone(toy, PROMPTS, 14, sampling)
    assert s.cells.used == 0


def test_prompts_enter_as_others_leave(session):
    s = session(n_seq_max=2, n_ctx=256)
    g = s.generate_many(PROMPTS, 6, GREEDY, ignore_eos=True)
    seen: list[int] = []
    for index, _ in g:
        seen.append(index)
        assert s.cells.used <= 2 * (32 + 6)
    assert set(seen[:4]) == {0, 1} and seen.index(2) < len(seen) - seen[::-1].index(1) + 3
    assert [len(tokens) for tokens in g.tokens] == [6] * 7
    assert s.stats.decode_tokens > 20  # steps of two texts count as decoding


@pytest.mark.parametrize(("n_prompts", "n_predict"), [(5, 70), (2, -1)])
def test_a_full_cache_makes_texts_start_over_and_changes_none(toy, session, n_prompts, n_predict):
    prompts = [TOKENS[i : i + 100 if n_predict < 0 else i + 9] for i in range(n_prompts)]
    s = session(n_seq_max=4, n_ctx=256)
    g = s.generate_many(prompts, n_predict, GREEDY, ignore_eos=True)
    texts = g.texts()
    assert list(zip(g.tokens, texts, g.finish_reasons)) == alone(toy, prompts, n_predict)
    assert g.n_restarts > 0 and set(g.finish_reasons) == {"length" if n_predict > 0 else "context"}


def test_other_sequences_of_the_session_stay(session):
    s = session(n_seq_max=3, n_ctx=256)
    s.decode(TOKENS[:30], seq=1)
    want = s.decode([100], seq=1)
    s.seq_rm(1, 30, -1)
    assert len(together(s, PROMPTS, 5)) == 7
    assert np.array_equal(s.decode([100], seq=1), want)
    with pytest.raises(RuntimeRefusal, match="3 texts at once need as many empty sequences; 2 of 3 are empty"):
        s.generate_many(PROMPTS, n_parallel=3)


def test_stop_texts_and_options_of_each(toy, session):
    stop = alone(toy, PROMPTS[:1], 20)[0][1][4:7]
    options = [GREEDY, WARM, SamplingOptions(temp=0.7, seed=3)]
    s = session(n_seq_max=3)
    got = together(s, PROMPTS[:3], 20, options, stop=(stop,))
    assert got == [alone(toy, [p], 20, o, stop=(stop,))[0] for p, o in zip(PROMPTS, options)]
    assert got[0][2] == "stop"


def test_tokens_are_told_with_the_index_of_their_prompt(session):
    seen: dict[int, list[int]] = {0: [], 1: []}
    g = session(n_seq_max=2).generate_many(PROMPTS[:2], 5, GREEDY, on_token=lambda i, token, piece: seen[i].append(token), ignore_eos=True)
    g.texts()
    assert [seen[0], seen[1]] == g.tokens


def test_stopping_early_frees_the_sequences(session):
    s = session(n_seq_max=3)
    g = s.generate_many(PROMPTS, 20, GREEDY, ignore_eos=True)
    next(g)
    assert s.cells.used > 0
    g.close()
    assert s.cells.used == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([[]], "prompt 0 is empty"), ([[100], [10**6]], "prompt 1 holds tokens outside"), ([[100] * 300], "prompt 0 has 300 tokens and 256")],
)
def test_bad_prompts_are_refused_before_anything_is_evaluated(session, prompts, message):
    s = session(n_seq_max=2, n_ctx=256)
    with pytest.raises(RuntimeRefusal, match=message):
        s.generate_many(prompts)
    assert s.executor.n_evals == 0
    with pytest.raises(RuntimeRefusal, match="1 prompts but 2 sampling options"):
        s.generate_many([[100]], sampling=[GREEDY, GREEDY])


def test_texts_of_a_compiled_model(compiled):
    path = compiled("llama-gqa-tied")
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 300, n).tolist() for n in (5, 40, 1, 17, 9)]
    with Session(path, n_ctx=256, n_threads=1) as s:
        want = []
        for prompt in prompts:
            s.reset()
            g = s.generate(prompt, 24, GREEDY, ignore_eos=True)
            g.text()
            want.append(g.tokens)
    with Session(path, n_ctx=256, n_seq_max=3, n_ubatch=16, n_threads=2) as s:
        g = s.generate_many(prompts, 24, GREEDY, ignore_eos=True)
        g.texts()
        assert g.tokens == want and s.stats.reuse_rate > 0.9


@pytest.mark.parametrize("n_parallel", [2, 3, 4])
def test_perplexity_of_several_chunks_at_once_is_the_same_figure(session, n_parallel):
    one = session(n_ctx=256, n_ubatch=7)
    want_seen: list[tuple] = []
    want = perplexity(one, TOKENS[:150], n_ctx=20, on_chunk=lambda *a: want_seen.append(a))
    s = session(n_ctx=256, n_seq_max=4, n_ubatch=7)
    seen: list[tuple] = []
    got = perplexity(s, TOKENS[:150], n_ctx=20, on_chunk=lambda *a: seen.append(a), n_parallel=n_parallel)
    assert got == want and seen == want_seen and got.n_chunks == 7
    assert perplexity(s, TOKENS[:150], n_ctx=20) == want  # all four by default
    with pytest.raises(RuntimeRefusal, match="5 chunks of 20 tokens at once do not fit; 4 do"):
        perplexity(s, TOKENS[:150], n_ctx=20, n_parallel=5)
    assert perplexity(s, TOKENS[:400], n_ctx=128, n_chunks=2).n_chunks == 2  # two of 128 fit 256 cells


# Gathering cells


def recount(s: Session) -> int:
    return int((s.cells.pos >= 0).sum())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_gathering_cells_changes_no_logits(toy, data):
    with Session(toy, n_threads=1, n_ctx=256, n_seq_max=3) as s, Session(toy, n_threads=1, n_ctx=256, n_seq_max=3) as still:
        for one in (s, still):
            for i in range(6):
                one.decode(TOKENS[10 * i : 10 * i + 5 + i], seq=i % 3)
            one.seq_cp(0, 2, 0, 3)
        for _ in range(data.draw(st.integers(1, 4))):
            seq, p0, n = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 15), st.integers(1, 9)))
            for one in (s, still):
                one.seq_rm(seq, p0, p0 + n)
        if data.draw(st.booleans()):
            for one in (s, still):
                one.seq_add(1, 0, -1, 2)  # pending rotations move along
        moved = s.defrag()
        assert moved == int((still.cells.pos[still.cells.used :] >= 0).sum())
        assert s.cells.used == recount(s) == still.cells.used and s.cells.head == s.cells.used
        assert (s.cells.pos[: s.cells.used] >= 0).all() and s.cells.n_kv() == 256
        assert s.defrag() == 0
        for seq in range(3):
            assert np.array_equal(s.decode([150], seq=seq), still.decode([150], seq=seq))


def test_a_prompt_finds_room_in_scattered_cells(session):
    s = session(n_ctx=256, n_seq_max=3)
    for i in range(120):
        s.decode([TOKENS[i]], seq=0, logits="none")
        s.decode([TOKENS[i]], seq=1, logits="none")
    s.seq_rm(1)
    with pytest.raises(RuntimeRefusal, match=r"do not lie side by side, defrag\(\) gathers them"):
        s.decode(TOKENS[:40], seq=2)
    g = s.generate(TOKENS[:40], 5, GREEDY, seq=2, ignore_eos=True)
    g.text()
    alone = session(n_ctx=256).generate(TOKENS[:40], 5, GREEDY, ignore_eos=True)
    alone.text()
    assert g.tokens == alone.tokens and s.pos_max(2) == 43


def test_the_threshold_gathers_before_a_batch(session):
    s = session(n_ctx=512, n_seq_max=2, defrag_threshold=0.4)
    for i in range(150):
        s.decode([TOKENS[i]], seq=0, logits="none")
        s.decode([TOKENS[i + 100]], seq=1, logits="none")
    s.decode([TOKENS[150]], seq=0)
    assert s.cells.n_kv() == 512 and "cells were moved" not in s.stats.miss_reasons
    s.seq_rm(1)
    want_list = s.cells.list_of(0).pos.copy()
    got = s.decode([TOKENS[151]], seq=0)
    assert s.stats.miss_reasons["cells were moved"] == 1
    assert s.cells.n_kv() == 256 and np.array_equal(s.cells.list_of(0).pos[:-1], want_list)
    plain = session(n_ctx=512)
    plain.decode(TOKENS[:151], logits="none")
    assert np.array_equal(plain.decode([TOKENS[151]]), got)


def test_a_cache_that_does_not_follow_cells_is_left_alone(tmp_path):
    import fake_model
    from ggufc.formats.artifact import Cache

    state = Cache("blk.0.conv", 0, "conv", "f32", 8, 8)
    path = fake_model.write(tmp_path / "conv.ggufc", fake_model.manifest(caches=[*fake_model.manifest().caches, state]))
    with Session(path, n_threads=1, defrag_threshold=0.1) as s:
        s.decode(TOKENS[:10])
        s.seq_rm(0, 0, 9)
        with pytest.warns(RuntimeWarning, match=r"blk.0.conv does not follow"):
            s.decode([100])
        assert s.cells.list_of(0).cells[0] == 9
        s.decode([100])  # said once
