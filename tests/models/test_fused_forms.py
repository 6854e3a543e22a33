"""What builders compose and what one fused operator computes are the same numbers, on the values of real evaluations.

These are the equations passes rewrite by: gates, reading and writing of residual streams; an indexer's choice; attention over lists.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparse_runner
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Node, interpret
from ggufc.models import load_model
from sparse_runner import Runtime
from support import golden_cases
from test_ops import apply

PANGU = next(case for case in golden_cases("openpangu-swa-dsa-ubatch"))
DEEPSEEK = next(case for case in golden_cases("deepseek4-split-decode"))


def values_of(folder: Path, prefill: int, n: int) -> dict[str, np.ndarray]:
    """Values by node name of an evaluation of ``n`` tokens after a prefill."""
    values: dict[str, np.ndarray] = {}

    def traced(*args: Any, **kwargs: Any) -> Any:
        def trace(node: Node, value: Any) -> None:
            values[node.name] = np.array(value.array if hasattr(value, "array") else value)

        return interpret(*args, **(kwargs | {"trace": trace}))

    case = json.loads((folder / "case.json").read_text())
    tokens = [t for step in case["steps"] for t in step.get("tokens", [])][: prefill + n]
    with GGUFFile.open(folder / "model.gguf") as file, pytest.MonkeyPatch.context() as patch:
        rt = Runtime(load_model(file), file.data, case["options"] | {"n_ubatch": 512}, sized=False)
        rt.decode(tokens[:prefill], list(range(prefill)), [0] * prefill)
        patch.setattr(sparse_runner, "interpret", traced)
        rt.decode(tokens[prefill:], list(range(prefill, prefill + n)), [0] * n)
        rt.weights.clear()
    return values


@pytest.fixture(scope="module")
def pangu() -> dict[str, np.ndarray]:
    return values_of(PANGU, 40, 6)


@pytest.fixture(scope="module")
def deepseek() -> dict[str, np.ndarray]:
    return values_of(DEEPSEEK, 126, 6)


def close(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def gates(v: dict[str, np.ndarray], site: str, scale: str, base: str, iterations: int, eps: float) -> np.ndarray:
    s = v[f"{site}.read"].shape[-1]
    return apply("hc_pre", v[f"{site}.mixture"], v[scale], v[base], streams=s, iterations=iterations, eps=eps)


@pytest.mark.parametrize("sub", ["attn", "mlp"])
def test_streams_without_epsilon(pangu: dict[str, np.ndarray], sub: str) -> None:  # S47, S61
    v, site = pangu, f"blk.1.{sub}_mhc"
    g = gates(v, site, f"{site}_alpha", f"{site}_beta", 20, 0.0)
    s = 4
    close(g[:, :s], v[f"{site}.read"])
    close(g[:, s : 2 * s], v[f"{site}.write.doubled"])
    close(g[:, 2 * s :].reshape(-1, s, s), v[f"{site}.matrix.19.columns"])
    x = v["blk.0.mlp_mhc.out"] if sub == "attn" else v["blk.1.attn_mhc.out"]
    close(apply("hc_mix", x, g), v[f"{site}.in"])
    y = v["blk.1.post_attention_norm"] if sub == "attn" else v["blk.1.post_ffw_norm"]
    close(apply("hc_post", x, y, g), v[f"{site}.out"])


def test_streams_with_epsilon(deepseek: dict[str, np.ndarray]) -> None:  # S47, S61
    v, site = deepseek, "blk.1.hc_attn"
    g = gates(v, site, f"{site}_scale.weight", f"{site}_base.weight", 4, 9.999999974752427e-07)
    close(g[:, :4], v[f"{site}.read.eps"])
    close(g[:, 8:].reshape(-1, 4, 4), v[f"{site}.matrix.3.columns"])
    close(apply("hc_mix", v["blk.0.hc_ffn.out"], g), v[f"{site}.in"])


@pytest.mark.parametrize("layer", [0, 1])
def test_attention_over_a_window_with_learned_sinks(pangu: dict[str, np.ndarray], layer: int) -> None:  # S91
    v, name = pangu, f"blk.{layer}"
    q = v[f"{name}.attn_q.rows"].transpose(1, 0, 2)
    out = apply(
        "sparse_attn", q, v[f"{name}.k.store"], v["kv_cells"], v["visible_w8"], v[f"{name}.attn_param_sink.rows"],
        scale=32**-0.5, n_value=48,
    )  # fmt: skip
    close(out.transpose(1, 0, 2), v[f"{name}.kqv.latents"])


def chosen_rows(v: dict[str, np.ndarray], q: str, weights: str, keys: str, cells: str, vis: str, **attrs: Any) -> np.ndarray:
    return apply("indexer_topk", v[q], v[weights], v[keys], v[cells], v[vis], **attrs)


def test_attention_over_chosen_rows_with_learned_sinks(pangu: dict[str, np.ndarray]) -> None:  # S56, S63
    v, name = pangu, "blk.2"
    rows = chosen_rows(
        v,
        f"{name}.indexer.q.rope",
        f"{name}.attn_indexer_weights_proj",
        f"{name}.indexer_k.store",
        "kv_cells",
        "visible",
        k=10,
        ties="highest",
    )
    for mine, composed in zip(rows, v[f"{name}.indexer.top_k"]):
        assert set(mine.tolist()) == set(composed.tolist())
    q = v[f"{name}.attn_q.rows"].transpose(1, 0, 2)
    out = apply(
        "sparse_attn", q, v[f"{name}.k.store"], rows.reshape(-1), apply("list_spans", rows),
        v[f"{name}.attn_param_sink.rows"], scale=32**-0.5, n_value=48,
    )  # fmt: skip
    close(out.transpose(1, 0, 2), v[f"{name}.kqv.latents"])


@pytest.mark.parametrize("ratio", [4, 128])
def test_attention_over_raw_rows_and_entries(deepseek: dict[str, np.ndarray], ratio: int) -> None:  # S41, S42, S56
    v = deepseek
    stores = [name for name in v if name.endswith(".entries.store")]
    name = next(n[: -len(".entries.store")] for n in stores if (f"{n[:-14]}.indexer.top_k" in v) == (ratio == 4))
    cells, spans = v[f"entry_cells_{ratio}"], v[f"entry_visible_{ratio}"]
    if ratio == 4:
        index = f"{name}.indexer"
        rows = chosen_rows(
            v,
            f"{index}.q.hadamard",
            f"{index}.weights",
            f"{index}_k.store",
            "entry_cells_4",
            "entry_visible_4",
            k=v[f"{index}.top_k"].shape[1],
        )
        assert [set(r) for r in rows.tolist()] == [set(r) for r in v[f"{index}.top_k"].tolist()]
        cells, spans = rows.reshape(-1), apply("list_spans", rows)
    q = v[f"{name}.attn_q.permuted"].transpose(1, 0, 2)
    out = apply(
        "sparse_attn", q, v[f"{name}.k.store"], v["kv_cells"], v["visible_w24"], v[f"{name}.entries.store"],
        cells, spans, v[f"{name}.attn_sinks.weight"], scale=q.shape[2] ** -0.5, n_value=q.shape[2],
    )  # fmt: skip
    close(out.transpose(1, 0, 2), v[f"{name}.kqv.sum"])
    assert spans[:, 2].max() > 0
