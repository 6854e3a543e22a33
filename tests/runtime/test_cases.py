"""Golden-case steps, perplexity and stop texts on the toy model."""

from __future__ import annotations

import numpy as np
import pytest

import fake_model
from ggufc.runtime import logits
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.generation import StopFilter
from ggufc.runtime.perplexity import nll, perplexity
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
TOKENS = [(5 * i * i + 1) % 89 + 100 for i in range(40)]
OPTIONS = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 4, "n_seq_max": 2, "threads": 1, "fa": 0, "type_k": "f32"}


@pytest.fixture
def run(toy, tmp_path):
    def go(steps: list[dict], **options):
        return logits.run_case(
            lambda o: Session(toy, **logits.session_options(o)), {"options": OPTIONS | options, "steps": steps}, tmp_path
        )

    return go


def expected(tokens: list[int], rows) -> np.ndarray:
    return np.array([fake_model.reference(tokens, list(range(len(tokens))), r) for r in rows])


def decode(name: str, tokens: list[int], first: int, seq: int = 0, op: str = "decode") -> dict:
    return {"op": op, "name": name, "tokens": tokens, "pos": list(range(first, first + len(tokens))), "seq": [seq] * len(tokens)}


@pytest.mark.parametrize("form", ["named", "args"])
def test_cache_steps_in_both_forms(run, form):
    def step(op: str, **fields):
        return {"op": op, **fields} if form == "named" else {"op": op, "args": [str(v) for v in fields.values()]}

    got = run(
        [
            decode("a", TOKENS[:8], 0),
            step("seq_cp", src=0, dst=1, p0=0, p1=-1),
            decode("b", TOKENS[8:10], 8, seq=1),
            step("seq_rm", seq=0, p0=4, p1=-1),
            decode("c", TOKENS[20:22], 4, op="decode_last"),
            step("clear"),
            decode("d", TOKENS[:3], 0),
            step("seq_add", seq=0, p0=0, p1=-1, delta=2),
            decode("e", TOKENS[3:4], 5),
        ]
    )
    assert list(got) == ["a", "b", "c", "d", "e"]
    assert np.array_equal(got["a"], expected(TOKENS[:8], range(8)))
    assert np.array_equal(got["b"], expected(TOKENS[:10], [8, 9]))
    assert np.array_equal(got["c"], expected(TOKENS[:4] + TOKENS[20:22], [5]))
    assert np.array_equal(got["d"], expected(TOKENS[:3], range(3)))
    assert np.abs(got["e"][0] - fake_model.reference(TOKENS[:4], [2, 3, 4, 5], 3)).max() < 5e-3


@pytest.mark.parametrize("form", ["named", "args"])
def test_state_steps_continue_in_another_sequence(run, form):  # S8
    def step(op: str, seq: int) -> dict:
        return {"op": op, "file": "st.bin", "seq": seq} if form == "named" else {"op": op, "args": ["st.bin", str(seq)]}

    got = run(
        [
            decode("a", TOKENS[:6], 0),
            step("state_save", 0),
            decode("b", TOKENS[20:24], 6),
            step("state_load", 1),
            decode("c", TOKENS[6:9], 6, seq=1),
            step("state_load", 0),
            decode("d", TOKENS[6:9], 6),
        ]
    )
    assert np.array_equal(got["c"], expected(TOKENS[:9], [6, 7, 8]))
    assert np.array_equal(got["d"], got["c"])


def test_embeddings_and_the_causal_flag(run, tmp_path):
    np.save(tmp_path / "img.npy", np.array([[60.0, 61.0], [70.0, 72.0]], np.float32))
    steps = [
        decode("a", TOKENS[:2], 0),
        {"op": "causal", "value": 0},
        {"op": "decode_embd", "name": "img", "embd": "img.npy", "pos": [2, 3], "seq": [0, 0]},
        {"op": "causal", "value": 1},
        decode("b", TOKENS[2:3], 4),
    ]
    got = run(steps)
    tokens = [*TOKENS[:2], 121, 142]
    entries = [(float(t), fake_model.rotated(1.0 + t % 3, i)) for i, t in enumerate(tokens)]
    assert np.array_equal(got["img"][0], fake_model.head(fake_model.mix(entries, 2), fake_model.mix(entries, 2)))
    assert np.array_equal(got["b"], expected([*tokens, TOKENS[2]], [4]))


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        ([], {"n_gpu_layers": 3}, "'n_gpu_layers'"),
        ([], {"mtp": 1}, "'mtp' .* not supported by this version"),
        ([{"op": "teleport"}], {}, "'teleport'"),
        ([{"op": "state_load", "file": "x", "seq": 0}], {}, r"step 0 \(state_load\).*no earlier step"),
        ([{"op": "state_save", "seq": 0}], {}, "lacks file"),
        ([decode("a", [100], 0), {"op": "mtp_draft"}], {}, r"step 1 \(mtp_draft\)"),
        ([{"op": "decode", "name": "a"}], {}, "lacks tokens"),
        ([{"op": "seq_rm", "seq": 0}], {}, "lacks p0, p1"),
        ([decode("a", [10**6], 0)], {}, r"step 0 \(decode\).*vocabulary"),
        ([{"op": "decode_embd", "name": "a", "embd": "../img.npy"}], {}, "beside the case"),
        ([{"op": "decode_embd", "name": "a", "embd": "none.npy"}], {}, "cannot be read"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(run, steps, options, message):
    with pytest.raises(RuntimeRefusal, match=message):
        run(steps, **options)


def test_perplexity_scores_the_second_half_of_each_chunk(session):
    s = session(n_ubatch=4)
    seen: list[int] = []
    got = perplexity(s, TOKENS[:30], n_ctx=10, on_chunk=lambda done, total, so_far: seen.append(done))
    scores = []
    for chunk in range(3):
        part = TOKENS[chunk * 10 : chunk * 10 + 10]
        for i in range(5, 9):
            row = fake_model.reference(part, list(range(10)), i).astype(np.float64)
            scores.append(np.log(np.exp(row).sum()) - row[part[i + 1]])
    assert got.value == pytest.approx(np.exp(np.mean(scores)), rel=1e-9)
    assert (got.n_tokens, got.n_chunks, seen) == (12, 3, [1, 2, 3])
    assert got.error == pytest.approx(got.value * np.std(scores, ddof=1) / np.sqrt(12))
    assert perplexity(s, TOKENS[:30], n_ctx=10, n_chunks=1).n_chunks == 1


def test_perplexity_of_text_begins_each_chunk_with_bos(session):
    s = session()
    text = "ab a ba b aab b a ab ab b a"
    tokens = s.tokenize(text)
    first = [1, *tokens[1:6]]
    row = fake_model.reference(first, list(range(6)), 4).astype(np.float64)
    want = np.log(np.exp(row).sum()) - row[tokens[5]]
    second = [1, *tokens[7:12]]
    row = fake_model.reference(second, list(range(6)), 4).astype(np.float64)
    got = perplexity(s, text, n_ctx=6, n_chunks=2)
    row3 = fake_model.reference(first, list(range(6)), 3).astype(np.float64)
    row4 = fake_model.reference(second, list(range(6)), 3).astype(np.float64)
    scores = [
        np.log(np.exp(row3).sum()) - row3[tokens[4]],
        want,
        np.log(np.exp(row4).sum()) - row4[tokens[10]],
        np.log(np.exp(row).sum()) - row[tokens[11]],
    ]
    assert got.value == pytest.approx(np.exp(np.mean(scores)), rel=1e-9)


def test_perplexity_of_a_short_text_is_refused(session):
    with pytest.raises(RuntimeRefusal, match="at least 20"):
        perplexity(session(), TOKENS[:15], n_ctx=10)
    with pytest.raises(RuntimeRefusal, match="from 4 to"):
        perplexity(session(n_ctx=256), TOKENS, n_ctx=1000)


def test_nll_is_stable_for_large_logits():
    rows = np.array([[1000.0, 0.0], [0.0, 0.0]], np.float32)
    assert np.allclose(nll(rows, np.array([1, 0])), [1000.0, np.log(2)])


def test_stop_texts_hold_back_only_what_may_belong_to_them():
    stop = StopFilter(["</s>", "STOP"])
    assert [stop.push(p) for p in ("ab", "c<", "/", "x", "ST", "O", "q")] == ["ab", "c", "", "</x", "", "", "STOq"]
    assert stop.push("y</") == "y" and stop.finish() == "</"
    stop = StopFilter("STOP")
    assert [stop.push("aS"), stop.push("TOPb")] == ["a", ""] and stop.hit == "STOP"


def test_generation_ends_at_a_stop_text(session):
    free = session().generate(TOKENS[:4], 30, logits_greedy(), ignore_eos=True)
    whole = free.text()
    stop = whole[5:8]
    assert len(stop) == 3
    g = session().generate(TOKENS[:4], 30, logits_greedy(), stop=(stop,), ignore_eos=True)
    assert g.text() == whole[: whole.index(stop)] and g.finish_reason == "stop"


def logits_greedy():
    from ggufc.runtime.sampling import GREEDY

    return GREEDY


def test_steps_of_layers_that_predict_ahead_are_left_out_and_named():
    steps = [decode("a", TOKENS[:2], 0), {"op": "mtp_draft", "name": "d"}, decode("b", TOKENS[2:3], 2), {"op": "mtp_rm", "p0": 3, "p1": -1}]
    case = {"options": OPTIONS | {"mtp": 1, "mtp_heads": 3}, "steps": steps}
    rest, skipped = logits.without_prediction(case)
    assert skipped == ["1 (mtp_draft)", "3 (mtp_rm)"]
    assert rest == {"options": OPTIONS, "steps": [steps[0], steps[2]]} and len(case["steps"]) == 4
    logits.check_case(rest)


@pytest.mark.parametrize("op", ["mtp", "rows", "tgt", "trm", "draft", "dappend", "drm", "ckpt_init", "mtp_warmup"])
def test_steps_others_depend_on_are_refused_by_name(op):
    """Hidden rows, drafts and checkpoints; and a case of nothing but predictions."""
    case = {"options": {}, "steps": [{"op": op, "name": "x"}]}
    rest, skipped = logits.without_prediction(case)
    assert rest == case and not skipped
    with pytest.raises(RuntimeRefusal, match=rf"step 0 \({op}\) of the case is not supported by this version"):
        logits.check_case(rest)


@pytest.mark.parametrize(
    "case", [{"options": {"mtp": 1}, "steps": []}, {"options": [], "steps": [{"op": "mtp_rm"}]}, {"steps": {"op": []}}]
)
def test_cases_that_are_no_cases_are_still_refused(case):
    rest, skipped = logits.without_prediction(case)
    assert rest == case and not skipped
    with pytest.raises(RuntimeRefusal):
        logits.check_case(rest)
