"""Wrong arguments of the Python interface are refused in a sentence, before anything is done."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufc
from ggufc import GgufcError, Session
from ggufc.runtime import Artifact, SamplingOptions


@pytest.fixture(scope="module")
def session(artifact: Path) -> Iterator[Session]:
    with ggufc.load(artifact, n_ctx=256, n_threads=1) as opened:
        yield opened


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"source": None}, "source is None; give a path"),
        ({"source": ""}, "the name of the model is empty"),
        ({"source": "~no-such-user/model.gguf"}, "no home folder"),
        ({"source": "m" * 5000}, "File name too long; give a path"),
        ({"source": "http://[::1/model.gguf"}, "is not an address"),
        ({"target": ""}, "--target is empty"),
        ({"seed": "a"}, "seed is 'a'; give a whole number"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"n_gpu_layers": "a"}, r"n_gpu_layers\) is 'a'; give a whole number"),
        ({"n_gpu_layers": -5}, r"n_gpu_layers\) is -5"),
        ({"n_gpu_layers": True}, r"n_gpu_layers\) is True"),
        ({"device": 5}, "--device 5 is unknown"),
        ({"type_k": 5}, "type_k is 5; give a text"),
        ({"target": 5}, "target is 5"),
        ({"builder": 5}, "builder is 5; give a mapping"),
        ({"builder": {"mla": None}}, "builder option 'mla' is None"),
        ({"n_threads": "a"}, "n_threads is 'a'; give a whole number"),
        ({"expect_digest": 5}, "expect_digest is 5"),
        ({"defrag_threshold": "a"}, "defrag_threshold is 'a'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_load(artifact: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(GgufcError, match=named):
        ggufc.load(**{"source": artifact, **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"output": None}, "output is None; give a path"),
        ({"type_v": 5}, "type_v is 5"),
        ({"passes": 5}, "passes is 5"),
        ({"keep": 5}, "keep is 5"),
        ({"jobs": 0}, "jobs is 0"),
        ({"jobs": "a"}, "jobs is 'a'"),
        ({"builder": {"mla": 1.5}}, "builder option 'mla' is 1.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_compile(text_model: Path, tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(GgufcError, match=named):
        ggufc.compile(**{"source": text_model, "output": tmp_path / "x.ggufc", **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda s: s.generate(None).text(), "the prompt is None; give a text or token ids"),
        (lambda s: s.generate(5).text(), "the prompt is 5"),
        (lambda s: s.generate(["a"]).text(), r"the prompt is \['a'\]; give token ids"),
        (lambda s: s.generate([1.5]).text(), "whole numbers"),
        (lambda s: s.generate("a", stop=5), "stop is 5"),
        (lambda s: s.generate("a", stop=None), "stop is None"),
        (lambda s: s.generate("a", on_token=5), "on_token is 5; give a function"),
        (lambda s: s.generate("a", sampling={}), "sampling is {}"),
        (lambda s: s.generate_many(None), "the prompts are None"),
        (lambda s: s.generate_many("abc"), "the prompts are 'abc'"),
        (lambda s: s.generate_many([None]), "prompt 0 is None"),
        (lambda s: s.eval(None), "the prompt is None"),
        (lambda s: s.tokenize(None), "the text to tokenize is None"),
        (lambda s: s.detokenize(None), "tokens is None"),
        (lambda s: s.detokenize(["a"]), "give token ids"),
        (lambda s: s.decode([1], seq=None), "seq is None"),
        (lambda s: s.decode([1], seq="a"), "seq is 'a'"),
        (lambda s: s.decode([[1], [1, 2]]), "tokens must be a list of integers"),
        (lambda s: s.decode(embd="a"), "embeddings are 'a'"),
        (lambda s: s.decode(embd=np.zeros((1, s.artifact.manifest.n_embd), complex)), "give an array f32"),
        (lambda s: s.decode([1], seq=1 << 40), "sequence 1099511627776 does not exist"),
        (lambda s: s.decode([1], seq=[1 << 32]), "sequence 4294967296 does not exist"),
        (lambda s: s.decode([1, 2], seq=np.array([0, 1 << 32])), "sequence 4294967296 does not exist"),
        (lambda s: s.generate(b"ab").text(), "the prompt is b'ab'; give token ids"),
        (lambda s: s.decode_view(["a"]), "token 'a'"),
        (lambda s: s.seq_rm("a"), "sequence a does not exist"),
        (lambda s: s.seq_rm(0, "a"), "positions is 'a'"),
        (lambda s: s.seq_add(0, 0, -1, 1.5), "seq_add by 1.5"),
        (lambda s: s.seq_div(0, 0, -1, 1.5), "seq_div by 1.5"),
        (lambda s: s.shift_context(0, "a"), "n_keep is 'a'"),
        (lambda s: s.keep_prefix(None), "the conversation is None"),
        (lambda s: s.state_save(None), "the state is to go to None"),
        (lambda s: s.state_load(None), "the state is None"),
        (lambda s: s.state_save(io.StringIO()), "give a path, or a file opened for writing bytes"),
        (lambda s: s.state_load(io.StringIO("a")), "or a file opened for reading bytes"),
        (lambda s: s.chat_prompt([5], template="x"), "chat message 0 needs a role"),
        (lambda s: Session(None), "the artifact is None; give a path"),
        (lambda s: Artifact.open(5), "the artifact is 5"),
        (lambda s: SamplingOptions(temp="a"), "temp is 'a'"),
    ],
)
def test_sessions(session: Session, call: Callable[[Session], object], named: str) -> None:
    session.reset()
    with pytest.raises(GgufcError, match=named):
        call(session)
