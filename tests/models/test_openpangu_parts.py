"""openpangu, one part at a time: whatever is left out or done otherwise moves the logits far beyond the tolerance of the golden.

Each test spoils one thing in the builder and evaluates the first step of a golden case; the case itself passes in ``test_openpangu``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparse_runner
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Node, interpret
from ggufc.models import conv, hyper_connections, load_model, openpangu, openpangu_attention
from ggufc.models.blocks import Builder
from sparse_runner import Runtime, run_case
from support import golden_cases

SWA = next(case for case in golden_cases("openpangu-swa-dsa-ubatch"))
CASE = json.loads((SWA / "case.json").read_text())
with GGUFFile.open(SWA / "model.gguf") as _file:
    MODEL = load_model(_file)
    NAMES = frozenset(_file.tensors)
LAYERS = range(MODEL.n_layer)

SINKHORN, CHOOSE_SINKS, CONV = hyper_connections._sinkhorn, openpangu_attention._sinks, conv.causal_conv
RMS_NORM, MIX_IN = Builder.rms_norm, hyper_connections.mix_in


def without_norm(tensor: str) -> Callable[[Builder, Node, str], Node]:
    """The norm of one tensor left out: what it would norm goes on as it is."""
    return lambda b, x, name: x if name == tensor else RMS_NORM(b, x, name)


def first_stream(b: Builder, x: Node, streams: int) -> Node:
    """The embedding in one stream alone, the others empty."""
    e, n = x.type.ne
    nothing = b.add("fill", x, name="streams.none", value=0.0)
    out = b.add("reshape", x, name="streams.first", ne=(e, 1, n))
    for s in range(1, streams):
        out = b.add("concat", out, b.add("reshape", nothing, name=f"streams.none.{s}", ne=(e, 1, n)), name=f"streams.{s}", dim=1)
    return out


def equal_weights(b: Builder, x: Node, site: Any) -> Node:
    _, s, n = x.type.ne
    read = b.add("fill", b.add("view", x, name="merge.shape", ne=(s, n), nb=(1, 1)), name="merge.half", value=0.5)
    return MIX_IN(b, x, read, "merge")


def last_stream(b: Builder, x: Node, site: Any) -> Node:
    e, s, n = x.type.ne
    part = b.add("view", x, name="merge.last", ne=(e, n), nb=(1, e * s), offset=e * (s - 1))
    return b.add("cont", part, name="merge.cont")


def transposed(b: Builder, logits: Node, site: Any) -> Node:
    m = SINKHORN(b, logits, site)
    return b.add("cont", b.add("permute", m, name=f"{m.name}.t", axes=(1, 0, 2)), name=f"{m.name}.tc")


def raw_sinks(b: Builder, hp: Any, m: Any, i: int) -> Any:
    raw = b.weight(f"blk.{i}.attn_param_sink_kv")
    rows = b.add("concat", raw, b.weight(f"blk.{i}.attn_param_sink_k_pe"), name=f"blk.{i}.sinks", dim=0)
    return openpangu_attention.Sinks(rows, b.add("cont", b.add("transpose", raw, name=f"blk.{i}.st"), name=f"blk.{i}.sc"))


def hidden_sinks(b: Builder, hp: Any, m: Any, i: int) -> Any:
    sinks = CHOOSE_SINKS(b, hp, m, i)
    return openpangu_attention.Sinks(b.add("scale", sinks.rows, name=f"blk.{i}.off", s=-1e4), sinks.values)


def interleaved(b: Builder, x: Node, layer: Any, name: str) -> Node:
    return b.add("rope", x, b.positions, name=name, **(layer.rope.attrs() | {"mode": "norm"}))


def without_identity(site: str) -> Callable[[Builder, Node, str, str], Node]:
    """At one of the three sites the convolution alone, without its input."""

    def bare(b: Builder, x: Node, weight: str, state: str) -> Node:
        y = CONV(b, x, weight, state)
        return b.add("sub", y, x, name=f"{state}.bare") if state.endswith(site) else y

    return bare


def without_convolution(site: str) -> Callable[[Builder, Node, str, str], Node]:
    return lambda b, x, weight, state: x if state.endswith(site) else CONV(b, x, weight, state)


SITES = ("conv_qa", "conv_kv", "conv_o")
NORMS = [
    *(f"blk.{i}.{norm}" for i in LAYERS for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")),
    *(f"blk.{i}.block_post_norm" for i in LAYERS if f"blk.{i}.block_post_norm.weight" in NAMES),
    *(f"blk.{i}.{norm}" for i in LAYERS for norm in ("attn_q_a_norm", "attn_kv_a_norm")),
    "output_norm",
]
SPOILT: dict[str, tuple[Any, str, Any]] = {
    **{f"no {norm}": (Builder, "rms_norm", without_norm(norm)) for norm in NORMS},  # S87
    "streams entered through one": (openpangu, "enter", first_stream),  # S87
    "streams merged with equal weights": (openpangu, "merge", equal_weights),  # S87
    "streams merged into the last": (openpangu, "merge", last_stream),  # S87
    "transposed matrix": (hyper_connections, "_sinkhorn", transposed),  # S86
    "interleaved pairs": (openpangu_attention, "rotate", interleaved),  # S85
    "sinks not normed": (openpangu_attention, "_sinks", raw_sinks),  # S91
    "sinks out of reach": (openpangu_attention, "_sinks", hidden_sinks),  # S91
    **{f"{site} without identity": (openpangu_attention, "causal_conv", without_identity(site)) for site in SITES},  # S89
    **{f"no {site}": (openpangu_attention, "causal_conv", without_convolution(site)) for site in SITES},  # S89
}


def evaluate(first: int, *more: int, edit: Callable[[str, np.ndarray], np.ndarray] | None = None, **options: Any) -> np.ndarray:
    """Logits of the first tokens of the case, in batches of the given lengths; ``edit`` may change weights (f32) by name."""
    tokens, out, at = CASE["steps"][0]["tokens"], [], 0
    with GGUFFile.open(SWA / "model.gguf") as file:
        data = file.data if edit is None else lambda name: edit(name, np.array(file.data(name).view(np.float32)))
        rt = Runtime(load_model(file), data, CASE["options"] | options, sized=False)
        for n in (first, *more):
            out.append(rt.decode(tokens[at : at + n], list(range(at, at + n)), [0] * n))
            at += n
    return np.concatenate(out)


def distance(logits: np.ndarray) -> float:
    """To the golden's rows of the same tokens, in units of the tolerance."""
    golden = np.load(SWA / f"{CASE['steps'][0]['name']}.npy")[: len(logits)]
    return float((np.abs(logits - golden) / (CASE["atol"] + CASE["rtol"] * np.abs(golden))).max())


SHORT = 24
"""Tokens that fill the windows and overflow the indexer's choice."""


def test_the_first_tokens_alone_equal_the_golden() -> None:
    assert distance(evaluate(SHORT)) <= 1


@pytest.mark.parametrize("what", SPOILT)
def test_every_part_matters_far_beyond_the_tolerance(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*SPOILT[what])
    assert distance(evaluate(SHORT)) > 10


def traced(monkeypatch: pytest.MonkeyPatch, *ends: str) -> dict[str, list[np.ndarray]]:
    """Values of nodes whose names have one of these ends, by name and in the order of evaluation."""
    found: dict[str, list[np.ndarray]] = {}

    def trace(node: Node, value: Any) -> None:
        if node.name.endswith(ends):
            found.setdefault(node.name, []).append(np.array(value))

    monkeypatch.setattr(sparse_runner, "interpret", lambda *args, **kwargs: interpret(*args, **(kwargs | {"trace": trace})))
    return found


BIAS = "exp_probs_b.bias"


def test_selection_bias_chooses_but_does_not_weigh(monkeypatch: pytest.MonkeyPatch) -> None:  # S88
    """Equal biases for all experts change nothing. A large one brings its expert into every choice, with the weight of its own score."""
    assert distance(evaluate(SHORT, edit=lambda name, w: w + np.float32(0.75) if BIAS in name else w)) <= 1

    def favour(name: str, w: np.ndarray) -> np.ndarray:
        if BIAS in name:
            w[:] = 0
            w[2] = 8
        return w

    found = traced(monkeypatch, "ffn_moe_ids", "ffn_moe_probs", "ffn_moe_weights", "ffn_moe_weights.scaled", ".ffn_gate_inp")
    assert distance(evaluate(SHORT, edit=favour)) > 10
    moe = [i for i in LAYERS if f"blk.{i}.{BIAS}" in NAMES]
    assert moe
    for i in moe:
        name, routing = f"blk.{i}.ffn_moe", MODEL.hparams.layers[i].routing
        assert routing.normalise and routing.gate == "sigmoid"
        for scores, ids, weights in zip(found[f"blk.{i}.ffn_gate_inp"], found[f"{name}_ids"], found[f"{name}_weights.scaled"], strict=True):
            assert (ids == 2).any(axis=1).all()
            p = 1 / (1 + np.exp(-np.take_along_axis(scores.astype(np.float64), ids.astype(int), axis=1)))
            np.testing.assert_allclose(weights, routing.scale * p / p.sum(axis=1, keepdims=True), rtol=0, atol=1e-6)


def test_the_shared_expert_is_added(monkeypatch: pytest.MonkeyPatch) -> None:  # S88
    assert distance(evaluate(SHORT, edit=lambda name, w: w * np.float32("ffn_down_shexp" not in name))) > 10


@pytest.mark.parametrize(("case", "exceptions"), [("openpangu-prefill-window", 0.0), ("openpangu-swa-dsa-ubatch", 0.05)])
def test_mixing_matrices_are_doubly_stochastic(case: str, exceptions: float, monkeypatch: pytest.MonkeyPatch) -> None:  # S86
    """Twenty iterations end on columns; where logits lie ten apart, as random weights have it for a few tokens, rows are not done by then:
    those matrices are what twenty iterations in float64 make of their logits, as all are."""
    folder = next(found for found in golden_cases(case) if found.name == case)
    found = traced(monkeypatch, ".matrix.square", ".matrix.1.columns", ".matrix.19.columns", ".matrix.20.columns")
    run_case(folder, steps=1)
    sites = sorted(name.removesuffix(".square") for name in found if name.endswith(".square"))
    assert sites == sorted(f"blk.{i}.{sub}_mhc.matrix" for i in LAYERS for sub in ("attn", "mlp"))
    assert not any(name.endswith(".20.columns") for name in found)
    logits, early, last = (np.concatenate([m for s in sites for m in found[s + end]]) for end in (".square", ".1.columns", ".19.columns"))
    exact = np.exp(logits.astype(np.float64))
    for _ in range(20):
        exact /= exact.sum(axis=2, keepdims=True)
        exact /= exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(last, exact, rtol=0, atol=1e-6)
    assert np.abs(last.sum(axis=1) - 1).max() < 1e-5, "columns: the destinations"
    off = np.abs(last.sum(axis=2) - 1).max(axis=1)
    assert (off > 1e-3).mean() <= exceptions and np.median(off) < 1e-5, "rows: the sources"
    assert np.abs(early.sum(axis=2) - 1).max() > 1e-2, "two iterations are not enough, so it is the others that are seen here"
    assert np.abs(last - last.swapaxes(1, 2)).max() > 1e-2, "a symmetric matrix could hide its orientation"


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
def test_histories_cross_batches(first: int) -> None:  # S89, S90
    whole = evaluate(12)
    assert distance(whole) <= 1
    assert np.abs(evaluate(first, 12 - first) - whole).max() < 1e-4
    assert np.abs(evaluate(first, *[1] * (12 - first)) - whole).max() < 1e-4


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("first", [0, 3])
def test_the_history_of_a_site_is_read_at_every_position_but_the_first(site: str, first: int) -> None:  # S90
    """Whatever lies in the slot: batches that begin at position 0 do not see it, all others do."""
    tokens = CASE["steps"][0]["tokens"]

    def after(poison: float) -> np.ndarray:
        with GGUFFile.open(SWA / "model.gguf") as file:
            rt = Runtime(load_model(file), file.data, CASE["options"], sized=False)
            if first:
                rt.decode(tokens[:first], list(range(first)), [0] * first)
            slot = f"blk.1.{site}"
            rows = rt.rows(slot).copy()
            rows.view(np.float32)[0] += np.float32(poison)
            rt.caches[slot] = rows
            return rt.decode(tokens[first : first + 4], list(range(first, first + 4)), [0] * 4)

    clean, poisoned = after(0.0), after(3.0)
    assert np.array_equal(clean, poisoned) if first == 0 else np.abs(clean - poisoned).max() > 1e-2
