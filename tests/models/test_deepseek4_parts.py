"""deepseek4, one part at a time: what is left out or done otherwise moves the logits far beyond the tolerance of the golden, at the
positions where it must and nowhere before them. Blocks of tokens end anywhere in a batch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufc.codegen.lower import lower
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node, parse_graph, print_graph
from ggufc.models import Step, compressor, deepseek4, deepseek4_attention, load_model
from ggufc.passes import DEFAULT_PIPELINE, PassManager
from sparse_runner import Runtime, excess, run_case
from support import golden_cases

Edit = Callable[[str, np.ndarray], np.ndarray]


def case_named(name: str) -> Path:
    return next(case for case in golden_cases(name) if case.name == name)


SPLIT, PREFILL, LONG_PREFILL = map(case_named, ("deepseek4-split-decode", "deepseek4-prefill", "deepseek4-prefill-140"))

WEIGHTED, GATHER = deepseek4_attention._weighted, compressor._gather


def not_turned_back(b: Any, x: Node, positions: Node, rope: Any, name: str, *, inverse: bool = False) -> Node:
    return x if inverse else compressor.rotate_tail(b, x, positions, rope, name)


def no_limit(layer: Any) -> Any:
    return "silu"


def open_window(b: Any, q: Node, keys: list[Node], masks: list[Node], layer: Any, i: int) -> Node:
    return WEIGHTED(b, q, keys, [b.kq_mask(0), *masks[1:]], layer, i)


def raw_only(b: Any, q: Node, keys: list[Node], masks: list[Node], layer: Any, i: int) -> Node:
    return WEIGHTED(b, q, keys[:1], masks[:1], layer, i)


def halves_swapped(b: Any, source: Node, kind: str, offset: int, c: Any, name: str) -> Node:
    return GATHER(b, source, kind, c.width - offset if c.overlap else offset, c, name)


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "output not turned back": (deepseek4_attention, "rotate_tail", not_turned_back),
    "no clamps": (deepseek4, "clamped", no_limit),  # S49
    "no window": (deepseek4_attention, "_weighted", open_window),
    "no entries": (deepseek4_attention, "_weighted", raw_only),  # S41, S42
    "halves swapped": (compressor, "_gather", halves_swapped),
    "no choice": (deepseek4_attention, "_choice", lambda b, hp, x, qr, mask, rope, i: mask),  # S43
    "no hash table": (deepseek4, "_hashed_experts", lambda b, i: None),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_every_part_matters_far_beyond_the_tolerance(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[what])
    found, _ = run_case(SPLIT, steps=1, sized=False)
    assert excess(SPLIT, found) > 10


def evaluate(folder: Path, *batches: int, edit: Edit | None = None, **options: Any) -> np.ndarray:
    """Logits of the tokens of a case's first step, in batches of these lengths and one of the rest; ``edit`` may change f32 weights."""
    case = json.loads((folder / "case.json").read_text())
    tokens, out, at = case["steps"][0]["tokens"], [], 0
    with GGUFFile.open(folder / "model.gguf") as file:

        def data(name: str) -> np.ndarray:
            raw = np.array(file.data(name))
            return raw if edit is None or file.tensors[name].type.name != "f32" else edit(name, raw.view(np.float32))

        rt = Runtime(load_model(file), data, case["options"] | options, sized=False)
        for n in (*batches, len(tokens) - sum(batches)):
            out.append(rt.decode(tokens[at : at + n], list(range(at, at + n)), [0] * n))
            at += n
    return np.concatenate(out)


def distances(folder: Path, logits: np.ndarray) -> np.ndarray:
    """Of every token's logits to the golden's, in units of the tolerance."""
    case = json.loads((folder / "case.json").read_text())
    golden = np.load(folder / f"{case['steps'][0]['name']}.npy")
    return np.asarray((np.abs(logits - golden) / (case["atol"] + case["rtol"] * np.abs(golden))).max(axis=1))


@pytest.mark.parametrize("batches", [(3, 1, 1, 2, 1, 1), (4, 4), (5, 3, 1), (9,)], ids=str)
def test_blocks_end_anywhere_in_a_batch(batches: tuple[int, ...]) -> None:  # S41
    """Entries are complete at positions 3 and 7, which are the last of a batch, the first, or in its middle."""
    assert distances(PREFILL, evaluate(PREFILL, *batches)).max() <= 1


def scaled(layers: tuple[int, ...], part: str, factor: float) -> Edit:
    names = tuple(f"blk.{i}.{part}" for i in layers)
    return lambda name, w: w * np.float32(factor) if name.startswith(names) else w


@functools.cache
def whole(folder: Path) -> np.ndarray:
    return evaluate(folder)


PARTS = [*((PREFILL, (1, 3), 3, part) for part in ("kv", "gate", "ape")), (LONG_PREFILL, (2,), 127, "kv")]


@pytest.mark.parametrize(("folder", "layers", "first", "part"), PARTS, ids=lambda v: v.name if isinstance(v, Path) else str(v))
def test_compressors_matter_from_the_end_of_the_first_block_on(folder: Path, layers: tuple[int, ...], first: int, part: str) -> None:
    # S41, S42: the token that completes a block sees its entry, no token before it does.
    with GGUFFile.open(folder / "model.gguf") as file:
        ratios = file.metadata["deepseek4.attention.compress_ratios"]
        assert {int(ratios[i]) for i in layers} == {first + 1}
    without = evaluate(folder, edit=scaled(layers, f"attn_compressor_{part}", 0.0))
    assert np.array_equal(without[:first], whole(folder)[:first])
    assert distances(folder, without)[first] > 10
    assert (np.abs(without - whole(folder))[first:].max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("part", ["attn_sinks", "indexer.proj", "indexer_compressor_kv", "indexer_compressor_gate"])
def test_sinks_and_indexer_matter(part: str) -> None:
    assert distances(PREFILL, evaluate(PREFILL, edit=scaled((0, 1, 2, 3), part, -1.0))).max() > 10


@pytest.mark.parametrize("k", [3, 5])
def test_one_entry_more_or_less_is_seen(k: int) -> None:  # S43: the golden's k is tight
    assert distances(PREFILL, evaluate(PREFILL, dsa_top_k=k)).max() > 10


# What the graph says.


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    """As built and after the passes, read back from their text."""
    with GGUFFile.open(SPLIT / "model.gguf") as file:
        built = load_model(file).build(Step())
    final = built.clone()
    PassManager.parse(DEFAULT_PIPELINE).run(final)
    return {"built": parse_graph(print_graph(built)), "final": parse_graph(print_graph(final))}


RATIOS = (4, 128, 0)
"""Of the layers of ``SPLIT``."""


def readers(graph: Graph, node: Node, ends: tuple[str, ...]) -> set[str]:
    """Names of the first operators ``ends`` that the values of ``node`` reach."""
    users, todo, found = graph.users(), [node], set()
    while todo:
        for user in users[todo.pop()]:
            if user.op.name in ends:
                found.add(user.name)
            else:
                todo.append(user)
    return found


def test_a_choice_is_used_by_the_attention_of_its_layer(graphs: dict[str, Graph]) -> None:  # S43
    csa = [i for i, ratio in enumerate(RATIOS) if ratio == 4]
    built, final = graphs["built"], graphs["final"]
    chosen = [n for n in built.find("top_k") if "indexer" in n.name]
    assert [n.name for n in chosen] == [f"blk.{i}.indexer.top_k" for i in csa]
    assert [readers(built, n, ("soft_max",)) for n in chosen] == [{f"blk.{i}.kq_soft_max"} for i in csa]
    fused = final.find("indexer_topk")
    assert [n.name for n in fused] == [f"blk.{i}.indexer.top_k" for i in csa]
    for i, n in zip(csa, fused):
        (attention,) = readers(final, n, ("sparse_attn", "flash_attn"))
        assert attention.startswith(f"blk.{i}.")
        assert [o.attrs["name"] for o in n.operands[3:5]] == ["entry_cells_4", "entry_visible_4"]
    assert not [n for n in final.find("top_k") if "indexer" in n.name]


def test_gates_are_projected_once_per_sublayer_after_the_passes(graphs: dict[str, Graph]) -> None:  # S47
    products = [str(n.operands[0].attrs.get("tensor")) for n in graphs["final"].find("mul_mat") if n.operands[0].op.name == "weight"]
    assert sorted(name for name in products if "hc_" in name) == sorted(
        ["output_hc_fn.weight", *(f"blk.{i}.hc_{sub}_fn.weight" for i in range(len(RATIOS)) for sub in ("attn", "ffn"))]
    )


def test_rings_are_read_before_they_are_written(graphs: dict[str, Graph]) -> None:  # S44
    """In the graph's order after the passes, and in that of the launches."""
    final = graphs["final"]
    rings = {n.attrs["name"] for n in final.find("cache") if "ring_" in n.attrs["name"]}
    assert len(rings) == 2 * (2 + 1), "keys and indexer keys of ratio 4, keys of ratio 128"
    for write in final.find("set_rows"):
        if write.operands[0].op.name == "cache" and write.operands[0].attrs["name"] in rings:
            reads = [n for n in final.users()[write.operands[0]] if n is not write]
            assert reads and all(final.index(n) < final.index(write) for n in reads)
    read: dict[str, list[int]] = {}
    written: dict[str, list[int]] = {}
    for at, step in enumerate(lower(final)[0].steps):
        for i, ref in enumerate(step.args):
            if ref.kind == "cache" and ref.name in rings:
                (written if i in step.writes else read).setdefault(ref.name, []).append(at)
    assert read.keys() == written.keys() == rings
    for name in rings:
        assert max(read[name]) < min(written[name])
