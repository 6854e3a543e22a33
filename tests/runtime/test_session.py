"""Decoding, sequences and generation on the toy model, against its reference."""

from __future__ import annotations

import contextlib
import io
import threading

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


def test_full_cache_is_refused_softly_and_nothing_changes(session):
    s = session(n_ctx=256)
    tokens = [(i % 90) + 100 for i in range(260)]
    s.decode(tokens[:200], logits="none")
    before = (s.cells.used, s.cells.head, s.cells.pos.copy(), s.cells.list_of(0).cells.copy())
    with pytest.raises(RuntimeRefusal, match="no room for 60 tokens") as refusal:
        s.decode(tokens[200:260])
    assert refusal.value.soft
    after = (s.cells.used, s.cells.head, s.cells.pos, s.cells.list_of(0).cells)
    assert all(np.array_equal(a, b) for a, b in zip(before, after))
    s.seq_rm(0, 0, 100)
    got = s.decode(tokens[200:260])
    want = toy_model.reference(tokens[100:260], list(range(100, 260)), 159)
    assert np.array_equal(got[0], want)


def test_a_batch_that_fits_only_in_part_is_refused_whole(session):
    s = session(n_ctx=256, n_ubatch=16)
    s.decode([100] * 240, logits="none")
    evaluations = s.executor.n_evals
    with pytest.raises(RuntimeRefusal) as refusal:
        s.decode([100] * 20)
    assert refusal.value.soft and s.cells.used == 240 and s.executor.n_evals == evaluations


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


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": [toy_model.N_VOCAB]}, "outside the vocabulary"),
        ({"tokens": [-1]}, "outside the vocabulary"),
        ({"tokens": []}, "empty"),
        ({"tokens": [1.5]}, "integers"),
        ({}, "either tokens or embeddings"),
        ({"tokens": [1, 2], "pos": [0]}, "1 positions"),
        ({"tokens": [1], "pos": [-1]}, "positions must be"),
        ({"tokens": [1], "pos": [2**31 - 1]}, "positions must be"),
        ({"tokens": [1], "seq": 1}, "sequence 1 does not exist"),
        ({"tokens": [1], "seq": -1}, "sequence -1 does not exist"),
        ({"tokens": [1, 2], "seq": [0]}, "1 sequence entries"),
        ({"tokens": [1], "seq": [(0, 4)]}, "ids run from 0"),
        ({"tokens": [1], "logits": "some"}, "'last', 'all'"),
        ({"tokens": [1], "logits": [1]}, "ascending"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(session, kwargs, message):
    s = session()
    with pytest.raises(RuntimeRefusal, match=message):
        s.decode(**kwargs)
    assert s.cells.used == 0 and s.executor.n_evals == 0


@pytest.mark.parametrize(
    ("pos", "seq", "named"),
    [
        ([4], 0, "position 4 of sequence 0 is taken; leave pos out to go on at 5, or remove"),
        ([2], 0, "position 2 of sequence 0 is taken"),
        ([5, 5], 0, "position 5 of sequence 0 is taken; leave pos out to go on at 6"),
        ([6, 5], 0, "position 5 of sequence 0 comes after position 6; leave pos out to go on at 7, or put the batch in order"),
        ([9, 3, 3], [1, 2, 2], "position 3 of sequence 2 is taken"),
        (None, [(0, 3)], "position 5 of sequence 3 is taken"),
    ],
)
def test_positions_are_free_and_in_order(session, pos, seq, named):
    s = session(n_seq_max=4)
    s.decode(TOKENS[:5])
    s.decode(TOKENS[:3], [0, 1, 5], seq=3)
    n = len(pos or [5])
    with pytest.raises(RuntimeRefusal, match=named):
        s.decode(TOKENS[5 : 5 + n], pos, seq)
    assert s.cells.used == 8 and s.pos_max(0) == 4
    assert np.array_equal(s.decode(TOKENS[5:6], [5]), expected(TOKENS[:6], [5]))


def test_a_gap_may_be_left_and_filled(session):
    """Whatever the order in which positions came, a token sees those before its own."""
    s = session()
    s.decode(TOKENS[:5])
    s.decode(TOKENS[8:10], [8, 9])
    s.decode(TOKENS[5:8], [5, 6, 7])
    s.seq_rm(0, 8, -1)
    assert np.array_equal(s.decode(TOKENS[8:9]), expected(TOKENS[:9], [8]))


def test_an_empty_sequence_begins_anywhere(session):
    s = session(n_seq_max=2)
    s.decode(TOKENS[:5])
    assert np.array_equal(s.decode([TOKENS[5]], [5], [(0, 1)]), expected(TOKENS[:6], [5]))
    assert s.pos_min(1) == s.pos_max(1) == 5


def test_embeddings_may_share_a_position(session):
    s = session()
    s.decode(TOKENS[:5])
    rows = np.ones((3, s.artifact.manifest.n_embd), np.float32)
    s.decode(embd=rows, pos=[5, 5, 5])
    s.decode(embd=rows, pos=[5, 6, 6])  # the rest of an image, then another
    assert s.cells.list_of(0).pos.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5, 6, 6]
    with pytest.raises(RuntimeRefusal, match="position 7 of sequence 0 comes after position 8"):
        s.decode(embd=rows, pos=[7, 8, 7])


def test_the_last_position_is_not_passed(session):
    s = session()
    s.decode([5], pos=[2**31 - 2])
    with pytest.raises(RuntimeRefusal, match="positions must be from 0 to 2147483646, got 2147483648"):
        s.decode([5, 6])


@pytest.mark.parametrize("options", [{"n_ctx": -1}, {"n_ubatch": 0}, {"n_seq_max": 0}, {"n_threads": 0}, {"n_threads": 10**6}])
def test_impossible_options_are_refused_by_name(toy, options):
    with pytest.raises(RuntimeRefusal, match=next(iter(options))):
        Session(toy, **options)


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


def test_a_closed_session_refuses(toy):
    s = Session(toy, n_threads=2, n_seq_max=2)
    s.decode([1])
    blob = io.BytesIO()
    s.state_save(blob)
    many = s.generate_many([[100]], n_predict=4)
    next(many)
    s.close()
    s.close()
    many.close()  # its sequences are gone already
    for name, args in {
        "decode": ([1],), "decode_view": ([1],), "decode_rows": (None,), "keep_prefix": ([1],), "seq_rm": (0,), "seq_cp": (0, 0),
        "seq_keep": (0,), "seq_add": (0, 0, -1, 1), "seq_div": (0, 0, -1, 2), "shift_context": (), "defrag": (), "apply_shift": (),
        "state_size": (), "state_save": (blob,), "state_load": (blob.getvalue(),), "reset": (), "clear": (),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeRefusal, match="this session is closed; open a new one"):
            getattr(s, name)(*args)
    with pytest.raises(RuntimeRefusal, match="closed"):
        s.generate([1]).text()


def test_a_second_thread_is_refused_and_changes_nothing(session, monkeypatch):
    s = session(n_seq_max=2)
    s.decode(TOKENS[:4])
    entered, leave, rows = threading.Event(), threading.Event(), []
    evaluate = s.executor.eval

    def slow(*args, **kwargs):
        entered.set()
        leave.wait(30)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(s.executor, "eval", slow)
    first = threading.Thread(target=lambda: rows.append(s.decode(TOKENS[4:6])))
    first.start()
    assert entered.wait(30)
    try:
        for call in (lambda: s.decode([5], seq=1), lambda: s.seq_rm(0), s.reset, lambda: s.state_save(io.BytesIO(), 0), s.defrag):
            with pytest.raises(RuntimeRefusal, match="another thread is using this session"):
                call()
    finally:
        leave.set()
        first.join()
    assert np.array_equal(rows[0], expected(TOKENS[:6], [5]))
    assert np.array_equal(s.decode(TOKENS[6:7]), expected(TOKENS[:7], [6]))  # one after another they may


def test_closing_waits_for_the_evaluation_of_another_thread(toy, monkeypatch):
    s = Session(toy, n_threads=1)
    entered, rows = threading.Event(), []
    evaluate = s.executor.eval

    def slow(*args, **kwargs):
        entered.set()
        threading.Event().wait(0.3)
        assert not s.closed
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(s.executor, "eval", slow)
    other = threading.Thread(target=lambda: rows.append(s.decode(TOKENS[:3])))
    other.start()
    assert entered.wait(30)
    s.close()
    other.join()
    assert np.array_equal(rows[0], expected(TOKENS[:3], [2]))


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
