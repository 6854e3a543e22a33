"""Decoding, sequences and generation on the toy model, against its reference."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fake_model as toy_model
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.sampling import GREEDY, SamplingOptions
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # an exception inside a toy kernel

TOKENS = [(7 * i * i + 3) % 97 + 100 for i in range(60)]


def expected(tokens: list[int], rows) -> np.ndarray:
    return np.array([toy_model.reference(tokens, list(range(len(tokens))), r) for r in rows])


def test_logits_of_all_rows_equal_the_reference(session):
    got = session().decode(TOKENS[:20], logits="all")
    assert got.dtype == np.float32 and got.shape == (20, toy_model.N_VOCAB)
    assert np.array_equal(got, expected(TOKENS[:20], range(20)))


def test_row_selection(session):
    whole = expected(TOKENS[:20], range(20))
    assert np.array_equal(session(n_ubatch=6).decode(TOKENS[:20]), whole[19:])
    assert np.array_equal(session(n_ubatch=6).decode(TOKENS[:20], logits=[2, 5, 6, 17]), whole[[2, 5, 6, 17]])
    assert session().decode(TOKENS[:20], logits="none").shape == (0, toy_model.N_VOCAB)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 16), st.booleans())
def test_any_chunking_gives_the_same_bits(toy, chunks, n_ubatch, reuse):  # S109
    with Session(toy, n_ubatch=n_ubatch, n_threads=1, graph_reuse=reuse) as s:
        rows = []
        at = 0
        for n in chunks:
            rows.append(s.decode(TOKENS[at : at + n], logits="all"))
            at += n
    assert np.array_equal(np.concatenate(rows), expected(TOKENS[:at], range(at)))


def test_interleaved_sequences_equal_each_alone(session):
    s = session(n_seq_max=3)
    s.decode(TOKENS[:5], seq=0)
    s.decode(TOKENS[20:23], seq=2)
    mixed = s.decode([TOKENS[5], TOKENS[23], TOKENS[6], TOKENS[24]], seq=[0, 2, 0, 2], logits="all")
    assert np.array_equal(mixed[[0, 2]], expected(TOKENS[:7], [5, 6]))
    assert np.array_equal(mixed[[1, 3]], expected(TOKENS[20:25], [3, 4]))


def test_a_copied_sequence_continues_like_the_original(session):
    s = session(n_seq_max=2)
    s.decode(TOKENS[:8])
    s.seq_cp(0, 1)
    assert s.cells.used == 8
    on_copy = s.decode(TOKENS[30:32], seq=1, logits="all")
    assert np.array_equal(on_copy, expected(TOKENS[:8] + TOKENS[30:32], [8, 9]))
    assert np.array_equal(s.decode(TOKENS[8:9], seq=0), expected(TOKENS[:9], [8]))


def test_a_shared_token_is_stored_once_for_its_sequences(session):
    s = session(n_seq_max=2)
    s.decode(TOKENS[:4], seq=[(0, 1)] * 4)
    assert s.cells.used == 4 and s.pos_max(0) == s.pos_max(1) == 3
    assert np.array_equal(s.decode([150], seq=1), expected([*TOKENS[:4], 150], [4]))


def test_removed_tail_is_forgotten(session):
    s = session()
    s.decode(TOKENS[:10])
    s.decode(TOKENS[40:50])
    s.seq_rm(0, 10, -1)
    assert np.array_equal(s.decode(TOKENS[10:12], logits="all"), expected(TOKENS[:12], [10, 11]))


def test_more_tokens_than_cells_is_a_hard_refusal(session):
    with pytest.raises(RuntimeRefusal, match="cache of 256 cells") as refusal:
        session(n_ctx=256).decode([100] * 257)
    assert not refusal.value.soft


def test_logits_do_not_depend_on_the_size_of_the_cache(session):
    assert np.array_equal(session(n_ctx=300).decode(TOKENS[:20]), session(n_ctx=1024).decode(TOKENS[:20]))
    assert session(n_ctx=300).cells.size == 512


def test_shifted_positions_give_the_logits_of_the_new_positions(session):
    s = session()
    s.decode(TOKENS[:10])
    s.seq_add(0, 0, -1, 7)
    got = s.decode(TOKENS[10:11])
    want = toy_model.reference(TOKENS[:11], list(range(7, 18)), 10)
    assert s.pos_min(0) == 7 and not s.cells.needs_shift
    assert np.abs(got[0] - want).max() < 5e-3
    assert np.abs(got[0] - toy_model.reference(TOKENS[:11], [*range(10), 17], 10)).max() > 0.05


def test_non_causal_tokens_see_their_whole_block_and_its_context(session):  # S80
    s = session()
    s.decode(TOKENS[:4])
    s.causal = False
    got = s.decode(TOKENS[4:7], logits="all")
    want = [toy_model.mix([(float(t), toy_model.rotated(1.0 + t % 3, i)) for i, t in enumerate(TOKENS[:7])], p) for p in (4, 5, 6)]
    first = toy_model.head(want[0], toy_model.mix([(float(t), toy_model.rotated(1.0 + t % 3, i)) for i, t in enumerate(TOKENS[:7])], 4))
    assert np.array_equal(got[0], first)
    small = session(n_ubatch=4)
    small.causal = False
    with pytest.raises(RuntimeRefusal, match="n_ubatch"):
        small.decode(TOKENS[:5])
    assert small.cells.used == 0


def test_embeddings_as_input(session):
    s = session()
    s.decode(TOKENS[:3])
    rows = np.array([[100.0, 21.0], [40.0, 2.0]], np.float32)
    got = s.decode(embd=rows, logits="all")
    assert np.array_equal(got, expected([*TOKENS[:3], 121, 42], [3, 4]))
    assert np.array_equal(s.decode(TOKENS[5:6]), expected([*TOKENS[:3], 121, 42, TOKENS[5]], [5]))
    assert s.stats.miss_reasons == {"first evaluation": 1, "program eval -> eval_embd": 1, "program eval_embd -> eval": 1}
    with pytest.raises(RuntimeRefusal, match=r"\[n, 2\]"):
        s.decode(embd=np.zeros((2, 3)))


def test_batch_sizes_are_clamped(session):
    s = session(n_ctx=64, n_batch=4096, n_ubatch=512)
    assert (s.n_batch, s.n_ubatch) == (64, 64)
    assert session(n_batch=1, n_ubatch=1).n_batch == 16


def test_steady_decoding_reuses_the_graph(session):  # S109
    s = session()
    for token in TOKENS[:20]:
        s.decode([token])
    assert (s.stats.reuse_hits, s.stats.reuse_misses) == (19, 1)
    assert s.stats.decode_tokens == 20 and s.stats.decode_rate > 0


def test_reset_forgets_everything(session):
    s = session()
    s.decode(TOKENS[:10])
    s.reset()
    assert s.cells.used == 0 and not s.executor.caches.view("blk.0.k").any()
    assert np.array_equal(s.decode(TOKENS[:3], logits="all"), expected(TOKENS[:3], range(3)))


def test_a_prompt_of_one_token_is_a_prompt(session):
    s = session()
    s.generate([100], n_predict=4, sampling=GREEDY, ignore_eos=True).text()
    assert (s.stats.prompt_tokens, s.stats.decode_tokens) == (1, 3) and s.stats.prompt_rate > 0


def greedy_ids(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + n:
        tokens.append(int(np.argmax(toy_model.reference(tokens, list(range(len(tokens))), len(tokens) - 1))))
    return tokens[len(prompt) :]


def test_greedy_generation_follows_the_reference(session):
    seen: list[int] = []
    s = session()
    g = s.generate(TOKENS[:5], 12, GREEDY, on_token=lambda token, piece: seen.append(token), ignore_eos=True)
    text = g.text()
    assert g.tokens == seen == greedy_ids(TOKENS[:5], 12)
    assert g.finish_reason == "length" and g.n_prompt == 5
    stream = s.tokenizer.stream(special=False, at_start=False)
    assert text == "".join(stream.push(t) for t in seen) + stream.finish()


def test_generation_is_reproducible_by_seed(session):
    options = SamplingOptions(temp=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=7)
    a, b = (session().generate(TOKENS[:5], 12, options, ignore_eos=True) for _ in range(2))
    assert a.text() == b.text() and a.tokens == b.tokens
    c = session().generate(TOKENS[:5], 12, SamplingOptions(temp=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=8), ignore_eos=True)
    c.text()
    assert c.tokens != a.tokens


def test_prompt_reuse_evaluates_only_what_differs(session):
    s = session()
    first = s.generate(TOKENS[:10], 5, GREEDY, ignore_eos=True)
    first.text()
    prompt = [*TOKENS[:10], *first.tokens, *TOKENS[20:23]]
    again = s.generate(prompt, 4, GREEDY, ignore_eos=True, reuse_prefix=True)
    again.text()
    assert again.n_reused == 14 and again.n_prompt == 4  # the last generated token was sampled, not evaluated
    fresh = session().generate(prompt, 4, GREEDY, ignore_eos=True)
    fresh.text()
    assert fresh.tokens == again.tokens
    other = [*TOKENS[:6], *TOKENS[40:44]]
    third = s.generate(other, 4, GREEDY, ignore_eos=True, reuse_prefix=True)
    third.text()
    assert third.n_reused == 6 and third.tokens == greedy_ids(other, 4)


def test_context_end_and_context_shift(session):
    prompt = [100 + i % 50 for i in range(250)]
    g = session(n_ctx=256).generate(prompt, -1, GREEDY, ignore_eos=True)
    g.text()
    assert g.finish_reason == "context" and len(g.tokens) == 7
    s = session(n_ctx=256)
    g = s.generate(prompt, 20, GREEDY, ignore_eos=True, context_shift=True, n_keep=4)
    g.text()
    assert g.finish_reason == "length" and len(g.tokens) == 20
    assert s.pos_max(0) < 250 and list(s.cells.list_of(0).pos) == list(range(s.pos_max(0) + 1))


def test_prompt_longer_than_the_context_is_refused(session):
    with pytest.raises(RuntimeRefusal, match="larger n_ctx"):
        session(n_ctx=256).generate([100] * 300, 5, GREEDY).text()


def test_text_in_text_out(session):
    s = session()
    ids = s.tokenize("ab a")
    assert [toy_model.TEXTS[i] for i in ids] == ["<s>", "\u2581ab", "\u2581a"]
    assert s.detokenize(ids, special=False) == "ab a"
    assert s.eval("ab a").shape == (toy_model.N_VOCAB,)
    assert s.pos_max(0) == 2
    s.eval("b")
    assert s.pos_max(0) == 4  # no second BOS: space piece and letter


STEP = st.one_of(
    st.tuples(st.just("decode"), st.integers(0, 1), st.integers(1, 4), st.integers(0, 2)),
    st.tuples(st.just("at"), st.integers(0, 1), st.integers(0, 6), st.integers(0, 2)),
    st.tuples(st.just("seq_rm"), st.integers(-1, 1), st.integers(-1, 6), st.integers(-1, 6)),
    st.tuples(st.just("seq_cp"), st.integers(0, 1), st.integers(0, 1), st.integers(-1, 3), st.integers(-1, 6)),
    st.tuples(st.just("seq_keep"), st.integers(0, 1)),
    st.tuples(st.just("seq_add"), st.integers(0, 1), st.integers(0, 6), st.integers(-1, 6), st.integers(-2, 2)),
    st.tuples(st.just("generate"), st.integers(0, 1), st.lists(st.sampled_from([100, 101]), min_size=1, max_size=8)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=8), st.lists(st.sampled_from([100, 101]), min_size=1, max_size=8))
def test_a_reused_prefix_never_changes_the_logits(toy, steps, prompt):  # S112
    with Session(toy, n_threads=1, n_seq_max=2, n_ctx=256) as s:
        for op, *args in steps:
            if op == "decode":
                s.decode([100 + args[2] % 2] * args[1], seq=args[0])
            elif op == "at":
                with contextlib.suppress(RuntimeRefusal):  # it may be taken
                    s.decode([100 + args[2] % 2], pos=[args[1]], seq=args[0])
            elif op == "generate":
                s.keep_prefix(args[1], args[0])
                s.decode(args[1][s.pos_max(args[0]) + 1 :], seq=args[0])
            else:
                getattr(s, op)(*args)
        kept = s.keep_prefix(prompt, 0)
        assert kept < len(prompt) and s.pos_max(0) == kept - 1
        got = s.decode(prompt[kept:], seq=0)
    want = toy_model.reference(prompt, list(range(len(prompt))), len(prompt) - 1)
    assert np.abs(got[0] - want).max() < 5e-3  # a context moved and moved back has been rotated twice
