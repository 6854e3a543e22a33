"""Tokenizers: the real models' goldens, small vocabularies with known answers, hostile files."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_model
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.runtime.bpe import byte_alphabet
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.tokenizer import load_tokenizer, split_specials

pytest_plugins = ("runtime_fixtures",)

ROOT = Path(__file__).resolve().parents[2]
REAL = [
    ("smollm2-135m-instruct-q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    ("gemma3-270m-q4_k_m", "gemma-3-270m-q4_k_m.gguf"),
]


@pytest.mark.models
@pytest.mark.parametrize(("golden", "name"), REAL)
def test_ids_and_texts_equal_the_goldens(golden, name, real_model, real_golden):
    cases = json.loads(real_golden(golden, "tokenizer.json").read_text())["cases"]
    with GGUFFile.open(real_model(name)) as file:
        tokenizer = load_tokenizer(file.metadata)
        for case in cases:
            text = case["text"]
            assert tokenizer.encode(text) == case["ids_with_special"], text
            assert tokenizer.encode(text, special=False, bos=False) == case["ids_plain"], text
            assert tokenizer.decode(case["ids_plain"]) == case["text_of_ids_plain"], text
    assert len(cases) > 40


@pytest.mark.models
@pytest.mark.parametrize(("golden", "name"), REAL)
def test_a_long_text_round_trips_and_building_is_quick(golden, name, real_model):
    text = (ROOT / "docs" / "architecture.md").read_text() + "日本語 naïve 🙂\n\n\t"
    with GGUFFile.open(real_model(name)) as file:
        file.metadata["tokenizer.ggml.tokens"]
        began = time.perf_counter()
        tokenizer = load_tokenizer(file.metadata)
        tokenizer.encode("Hello")
        assert time.perf_counter() - began < 0.8  # 0.15 s alone; other work on the machine counts too
        ids = tokenizer.encode(text, special=False, bos=False)
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text) / 2
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in ids]
        assert "".join(pieces) + stream.finish() == text and "\ufffd" not in "".join(pieces)


def bpe(pre: str = "smollm", tokens: list[str] | None = None, merges: list[str] | None = None, **extra) -> dict:
    merges = ["Ġ a", "b c", "bc d", "a b", "Ġa b", "1 2", "12 3", "! !", "' s"] if merges is None else merges
    made = ["".join(m.split(" ")) for m in merges]
    tokens = [*byte_alphabet(), *made, "<|x|>", "<|xx|>"] if tokens is None else tokens
    types = np.array([3 if t.startswith("<|") else 1 for t in tokens], np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def pieces(metadata: dict, text: str, **options) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens[i] for i in load_tokenizer(metadata).encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("smollm", "123", ["1", "2", "3"]),
        ("smollm", " 12!!", ["Ġ", "1", "2", "!!"]),
        ("gpt-2", "123!!", ["123", "!!"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("default", "1231", ["123", "1"]),
        ("smollm", "it's", ["i", "t", "'s"]),
        ("smollm", "it'S", ["i", "t", "'", "S"]),
        ("gpt-2", "bcd ab", ["bcd", "Ġab"]),
        ("gpt-2", "a  a", ["a", "Ġ", "Ġa"]),
        ("glm4", "1231", ["123", "1"]),
        ("gpt-4o", "1231", ["123", "1"]),
        ("gpt-4o", "a's", ["a", "'s"]),
        ("tekken", "123", ["1", "2", "3"]),
        ("tekken", "A bc", ["A", "Ġ", "bc"]),
        ("deepseek-llm", "123a", ["123", "a"]),
        ("deepseek-coder", "123a", ["1", "2", "3", "a"]),
        ("deepseek-v3", "1231 a!!", ["123", "1", "Ġa", "!!"]),
        ("deepseek-v3", "!abc", ["!", "a", "bc"]),
    ],
)
def test_how_texts_are_cut(pre, text, want):
    assert pieces(bpe(pre), text) == want


@pytest.mark.parametrize(("pre", "want"), [("glm4", ["bA", "b"]), ("gpt-4o", ["b", "A", "b"]), ("tekken", ["b", "A", "b"])])
def test_words_of_some_models_end_before_a_capital(pre, want):
    assert pieces(bpe(pre, merges=["b A"]), "bAb") == want


def test_lowest_rank_first_and_leftmost_on_ties():
    assert pieces(bpe(merges=["a a"]), "aaaaa") == ["aa", "aa", "a"]
    assert pieces(bpe(merges=["b c", "a b"]), "abc") == ["a", "bc"]
    assert pieces(bpe(merges=["a b", "b c"]), "abc") == ["ab", "c"]


def test_a_merged_piece_without_a_token_falls_apart():
    tokens = [*byte_alphabet(), "abc"]
    assert pieces(bpe(tokens=tokens, merges=["a b", "ab c"]), "ab abc") == ["a", "b", "Ġ", "abc"]


def test_bytes_missing_from_the_vocabulary():
    tokens = ["?", "a", "b"]
    assert pieces(bpe(tokens=tokens, merges=[], unknown_token_id=0), "axb") == ["a", "?", "b"]
    assert pieces(bpe(tokens=tokens, merges=[]), "axb") == ["a", "b"]


def test_special_tokens_longest_first_and_only_when_asked():
    assert pieces(bpe(), "a<|xx|>b<|x|>") == ["a", "<|xx|>", "b", "<|x|>"]
    assert "<|x|>" not in pieces(bpe(), "a<|x|>", special=False)
    assert split_specials("abcdef", [("bcdef", 1), ("abc", 2)]) == ["a", 1]
    assert split_specials("", [("x", 1)]) == [] and split_specials("xx", [("x", 1)]) == [1, 1]


def test_bos_and_eos_rules():
    ids = dict(bos_token_id=5, eos_token_id=6)
    assert load_tokenizer(bpe(**ids)).encode("a")[0] != 5
    assert load_tokenizer(bpe("llama-bpe", **ids)).encode("a")[0] == 5
    assert load_tokenizer(bpe(**ids, add_bos_token=True)).encode("a")[0] == 5
    assert load_tokenizer(bpe(**ids, add_bos_token=True)).encode("a", bos=False)[0] != 5
    assert load_tokenizer(bpe(**ids)).encode("a", bos=True)[0] == 5
    assert load_tokenizer(bpe(**ids, add_eos_token=True)).encode("a")[-1] == 6
    assert load_tokenizer(bpe(bos_token_id=0xFFFFFFFF)).bos is None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("it's 12!!", [105, 116, 264, 32, 49, 50, 263]),
        (" a bc\nbcd", [256, 32, 257, 10, 258]),
        ("ab  ab .", [259, 32, 260, 32, 46]),
    ],
)
def test_openpangu_cuts_as_qwen2_and_begins_with_bos(text, want):  # S84
    """The first 256 ids are bytes: digits stand alone, contractions and runs of signs stay whole, spaces are not cleaned up."""
    metadata = bpe("openpangu", bos_token_id=265, add_bos_token=True)
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode(text) == [265, *want]
    assert tokenizer.decode(tokenizer.encode(text)[1:]) == text
    assert load_tokenizer(bpe("qwen2")).encode(text) == want


def test_turn_ends_are_end_tokens():
    metadata = bpe(tokens=[*byte_alphabet(), "<|im_end|>", "<|endoftext|>"], merges=[], eos_token_id=257)
    assert load_tokenizer(metadata).end_ids == {256, 257}


def spm(tokens: dict[str, float], **extra) -> dict:
    texts = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), *tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.array([0.0] * 258 + list(tokens.values()), np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, *[6] * 256, *[1] * len(tokens)], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def test_highest_score_first_leftmost_on_ties_bytes_for_the_rest():
    plain = spm({"a": -9, "b": -9, "c": -9, "ab": -2, "bc": -1, "abc": -3, "aa": -5}, add_space_prefix=False, add_bos_token=False)
    assert pieces(plain, "bcabc") == ["bc", "abc"]
    assert pieces(plain, "aaa") == ["aa", "a"]
    assert pieces(plain, "aé") == ["a", "<0xC3>", "<0xA9>"]


def test_space_prefix_goes_before_text_and_after_special_tokens():
    metadata = spm({"\u2581": -1, "a": -1, "\u2581a": 0})
    assert pieces(metadata, "a") == ["<s>", "\u2581a"]
    assert pieces(metadata, "a<s>a") == ["<s>", "\u2581a", "<s>", "\u2581a"]
    assert pieces(metadata, "a<s>a", bos=False)[:2] == ["\u2581a", "<s>"]
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.decode(tokenizer.encode("a a"), special=False) == "a a"
    assert tokenizer.decode(tokenizer.encode("a"), special=True) == "<s>a"


def naive_spm(vocab: dict[str, float], text: str) -> list[str]:
    symbols = list(text)
    while True:
        best = max(((vocab[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in vocab), default=None)
        if best is None:
            return symbols
        i = -best[1]
        symbols[i : i + 2] = ["".join(symbols[i : i + 2])]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=2, max_size=5), st.integers(-4, 0).map(float), max_size=12), st.text("abc", max_size=24))
def test_the_heap_agrees_with_merging_pair_by_pair(pairs, text):
    vocab = {"a": -9.0, "b": -9.0, "c": -9.0, **pairs}
    assert pieces(spm(vocab, add_space_prefix=False, add_bos_token=False), text) == naive_spm(vocab, text)


def test_merging_scales_to_long_texts():  # CVE-2025-52566: no length of input may break the counting
    tokenizer = load_tokenizer(spm({"a": -9, "aa": -1, "aaaa": -2}, add_space_prefix=False))
    began = time.perf_counter()
    assert len(tokenizer.encode("a" * 100_000)) == 25_001
    assert time.perf_counter() - began < 5


def test_a_character_over_several_tokens_appears_when_complete():
    tokenizer = load_tokenizer(fake_model.TOKENIZER)
    ids = tokenizer.encode("é🙂", bos=False)
    stream = tokenizer.stream()
    shown = [stream.push(i) for i in ids]
    assert [s for s in shown if s] == ["é", "🙂"] and stream.finish() == ""
    broken = tokenizer.stream()
    assert broken.push(ids[-1]) == "\ufffd"
    cut = tokenizer.stream()
    cut.push(ids[1])
    assert cut.finish() == "\ufffd"


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_both_kinds(text):
    clean = text.encode("utf-8", "replace").decode()
    for metadata in (bpe("gpt-2"), fake_model.TOKENIZER):
        tokenizer = load_tokenizer(metadata)
        ids = tokenizer.encode(text, special=False, bos=False)
        assert tokenizer.decode(ids, special=False).replace("\u2581", " ") == clean.replace("\u2581", " ")
        assert all(0 <= i < len(tokenizer) for i in ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "no tokenizer"),
        ({"model": "wordpiece"}, "gpt2, llama"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokens": []}, r"tokenizer\.ggml\.tokens"),
        ({"tokens": np.arange(3)}, "array of strings"),
        ({"token_type": np.zeros(3, np.int32)}, "3 entries for"),
        ({"token_type": ["a"]}, "array of integers"),
        ({"pre": "martian"}, "'martian'.*smollm"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"bos_token_id": 10**6}, "outside the vocabulary"),  # GHSA-g4cc-763q-h9h6
        ({"eos_token_id": -1}, "outside the vocabulary"),
        ({"unknown_token_id": 1.5}, "must be an integer"),
        ({"add_bos_token": 1}, "must be a boolean"),
    ],
)
def test_malformed_bpe_files_are_refused_by_key(change, message):
    metadata = bpe() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(RuntimeRefusal, match=message):
        load_tokenizer({k: v for k, v in metadata.items() if v is not None}).encode("a")


def test_scores_of_a_wrong_type_are_refused():
    for scores in (np.zeros(258 + 1, np.int8), np.zeros(3, np.float32), None):
        metadata = spm({"a": 0.0}) | {"tokenizer.ggml.scores": scores}
        with pytest.raises(RuntimeRefusal, match="scores"):
            load_tokenizer({k: v for k, v in metadata.items() if v is not None}).encode("a")


def test_a_vocabulary_of_one_token():  # GHSA-g4cc-763q-h9h6
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": np.zeros(1, np.float32)}
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.encode("ab") == [0] and tokenizer.bos is None
    with pytest.raises(RuntimeRefusal, match="vocabulary of 1"):
        tokenizer.decode([1])
