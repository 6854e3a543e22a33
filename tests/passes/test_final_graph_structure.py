"""Graphs of all families after the default pipeline: no copy of a cache, no norm computed twice, products with names, no stray leaf.

Compilation uses graphs that serve steps of any size ("any"). Families whose builders look at sizes are also built for a decode step and
for a prompt over a long cache, where they choose gathers and blocks of queries.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest

from family_files import FAMILIES, family_file
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node, TensorType, parse_graph, print_graph
from ggufc.ir.dims import Sym, evaluate
from ggufc.ir.layout import is_contiguous, layout
from ggufc.models import ARCHITECTURES, Model, Step, load_model
from ggufc.passes import DEFAULT_PIPELINE, PassManager
from support import golden_cases

FILES = {
    "llama": "llama-moe-split", "gemma3": "gemma3-7", "deepseek4": "deepseek4-split-decode", "openpangu": "openpangu-swa-dsa-ubatch",
    "openpangu-q8": "openpangu-q8", "glm-dsa-shared": "glm-dsa-topk8",
}  # fmt: skip
"""Golden cases of families without an in-memory file; of glm-dsa, one whose layers share indexers."""
GOLDEN = {name: case for name, wanted in FILES.items() for case in golden_cases(wanted) if case.name == wanted}

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "deepseek2": [{"mla": 0}, {"mla": 3}],
    "glm-dsa": [{}, {"dsa": True, "dsa_top_k": 8}, {"dsa": True, "dsa_top_k": 8, "fidx": False}],
    "deepseek4": [{}, {"fidx": False}, {"type_k": "q8_0"}],
    "openpangu-q8": [{"dsa_top_k": 16, "type_k": "q8_0"}],
    "openpangu": [{"dsa_top_k": 16}, {"dsa_top_k": 16, "fidx": False}, {"dsa_top_k": 16, "swa_compress": True}],
}
SPARSE = ("glm-dsa", "deepseek4", "openpangu")


def env(n_ctx: int, tokens: int) -> dict[str, int]:
    """Values of every symbol in a context that is full."""
    sizes = {"C": n_ctx, "KV": n_ctx, "R": n_ctx, "S": 1, "WV": 320, "WO": n_ctx - 320, "CW": 512, "KVW": 320, "RW": 300}
    for ratio in (4, 128):
        sizes |= {f"C{ratio}": n_ctx // ratio, f"V{ratio}": n_ctx // ratio, f"E{ratio}": n_ctx // ratio, f"W{ratio}": tokens // ratio}
    return sizes | {"T": tokens, "O": 1}


SHAPES = {"any": None, "decode": env(4096, 1), "prefill": env(4096, 600)}


def of_family(name: str, kinds: tuple[str, ...]) -> bool:
    return any(name == kind or name.startswith(f"{kind}-") for kind in kinds)


def cases() -> list[Any]:
    out = []
    for name in [n for n in FAMILIES if n != "deepseek2-lite"] + list(GOLDEN):
        sparse = of_family(name, SPARSE)
        options = next((found for family, found in OPTIONS.items() if of_family(name, (family,))), [{}])
        for chosen in options:
            for shape in SHAPES if sparse else ("any",):
                words = [f"{key}={value}" for key, value in chosen.items()]
                out.append(pytest.param(name, tuple(chosen.items()), shape, id="-".join([name, *words, shape])))
    return out


CASES = cases()


@cache
def model_of(name: str) -> Model:
    if name not in GOLDEN:
        return load_model(family_file(name))
    with GGUFFile.open(GOLDEN[name] / "model.gguf") as file:
        return load_model(file)


@cache
def final(name: str, options: tuple[tuple[str, Any], ...], shape: str) -> Graph:
    graph = model_of(name).build(Step(dict(options), SHAPES[shape]))
    PassManager.parse(DEFAULT_PIPELINE).run(graph)
    return graph


def root(node: Node) -> Node:
    return layout(node).root if node.is_view else node


def persistent(node: Node) -> Node | None:
    """The cache leaf whose rows a node shows, if any."""
    node = root(node)
    while node.op.writes_cache:
        node = root(node.operands[0])
    return node if node.op.name == "cache" else None


def grows(kind: TensorType) -> bool:
    """Whether a result has more elements in a longer context."""
    return evaluate(kind.numel, env(8192, 600)) != evaluate(kind.numel, env(32768, 600))


def copies_of_caches(graph: Graph, most: int) -> list[str]:
    """Nodes that copy what grows with the context, but for gathers of at most ``most`` rows for each token."""
    out = []
    for node in graph.nodes:
        if node.is_leaf or node.is_view or node.op.writes_cache:
            continue
        if node.op.name in ("cont", "cast", "cpy", "concat", "repeat") and (
            grows(node.type) or any(found and grows(found.type) for found in map(persistent, node.operands))
        ):
            out.append(node.name)
        if node.op.name == "get_rows" and persistent(node.operands[0]):
            rows = math.prod(evaluate(n, env(32768, 600)) for n in node.type.ne[1:])
            if grows(node.type) or rows > max(most, 1) * 600:
                out.append(node.name)
    return out


def repeated_norms(graph: Graph) -> list[str]:
    """Inputs that are normalised more than once with one epsilon."""
    norms = Counter((n.operands[0], n.attrs["eps"]) for n in graph.nodes if n.op.name in ("rms_norm", "rms_norm_mul"))
    return [source.name for (source, _), count in norms.items() if count > 1]


def products(graph: Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op.name in ("mul_mat", "mul_mat_id")]


def of_weights(graph: Graph) -> dict[str, str]:
    """Name and tensor of each product of a weight in the file."""
    weights = {n.name: root(n.operands[0]) for n in graph.find("mul_mat")}
    return {name: w.attrs["tensor"] for name, w in weights.items() if w.op.name == "weight" and not w.attrs["derived"]}


def stray_leaves(graph: Graph) -> list[str]:
    """Leaves nobody reads, that are no weight, cache or declared input, or that another leaf repeats."""
    users = graph.users()
    leaves = [n for n in graph.nodes if n.is_leaf]
    known = Counter(
        (n.op.name, n.attrs.get("derived") or n.attrs.get("tensor") or n.attrs["name"]) if n.op.name in ("weight", "cache", "input") else n
        for n in leaves
    )
    return [n.name for n in leaves if not users[n] or n.op.name == "const"] + [str(key) for key, count in known.items() if count > 1]


def redundant_copies(graph: Graph) -> list[str]:
    return [n.name for n in graph.find("cont") if is_contiguous(n.operands[0])]


def test_every_family_has_a_case() -> None:
    built = {model_of(case.values[0]).arch for case in CASES}
    assert built == set(ARCHITECTURES)


@pytest.mark.parametrize("name, options, shape", CASES)
def test_no_cache_is_copied(name: str, options: tuple[tuple[str, Any], ...], shape: str) -> None:  # S57
    graph = final(name, options, shape)
    assert copies_of_caches(graph, dict(options).get("dsa_top_k", 0)) == []
    # Where scores and choice are one operator, nothing at all has a size that follows the context: not even a mask.
    if shape == "any" and dict(options).get("fidx", True):
        assert [n for n in graph.nodes if not n.is_leaf and not n.is_view and not n.op.writes_cache and grows(n.type)] == []


@pytest.mark.parametrize("name, options, shape", CASES)
def test_norms_are_shared_and_products_have_names(name: str, options: tuple[tuple[str, Any], ...], shape: str) -> None:  # S58
    graph = final(name, options, shape)
    assert repeated_norms(graph) == []
    names = products(graph)
    assert names and all(names) and len(names) == len(set(names))
    # The same names in a second build, and in the text an artifact holds.
    again = model_of(name).build(Step(dict(options), SHAPES[shape]))
    PassManager.parse(DEFAULT_PIPELINE).run(again)
    assert products(again) == names == products(parse_graph(print_graph(graph)))
    # Products of the file's weights are called the same whatever the step's size.
    assert of_weights(graph) == of_weights(final(name, options, "any"))


@pytest.mark.parametrize("name, options, shape", CASES)
def test_leaves_are_weights_caches_and_declared_inputs(name: str, options: tuple[tuple[str, Any], ...], shape: str) -> None:  # S74
    model, graph = model_of(name), final(name, options, shape)
    leaves = [n for n in graph.nodes if n.is_leaf]
    assert len(leaves) == len(graph.find("weight")) + len(graph.find("cache")) + len(graph.inputs())
    assert stray_leaves(graph) == [] and redundant_copies(graph) == []
    assert {n.attrs["name"] for n in graph.find("cache")} == {info.name for info in model.caches(dict(options))}
    for weight in graph.find("weight"):
        assert weight.attrs["derived"] in graph.derived if weight.attrs["derived"] else weight.attrs["tensor"] in model.weights


TURNING = [case for case in CASES if of_family(case.values[0], ("glm-dsa", "deepseek4", "openpangu")) and case.values[2] == "any"]


@pytest.mark.parametrize("name, options, shape", TURNING)
def test_indexers_share_one_transform_and_rotations_one_operator(name: str, options: tuple[tuple[str, Any], ...], shape: str) -> None:
    """S51: queries and keys of every indexer of glm-dsa and deepseek4 pass through ``hadamard``, those of openpangu through nothing. S50:
    what turns forth and what turns back is the same operator, which reads a table."""
    graph = final(name, options, shape)
    choices = graph.find("indexer_topk") + [n for n in graph.find("top_k") if ".indexer." in n.name]
    expected = of_family(name, ("deepseek4",)) or (of_family(name, ("glm-dsa",)) and dict(options).get("dsa", False))
    assert len(graph.find("hadamard")) == (2 * len(choices) if expected else 0)
    assert bool(choices) is (expected or name.startswith("openpangu"))
    back = [n for n in graph.nodes if n.attrs.get("inverse")]
    assert {n.op.name for n in back} == ({"rope_table"} if of_family(name, ("deepseek4",)) else set())
    users = graph.users()
    assert {user.op.name for n in graph.find("rope_table") for user in users[n]} == {"rope_apply"} and not graph.find("rope")
    if back:
        assert sum(len(users[n]) for n in back) == model_of(name).n_layer, "the result of each layer's attention"


def test_a_graph_with_each_fault_is_caught() -> None:
    """What the tests above look for, put into a graph that has none of it."""
    graph = final("openpangu", tuple(OPTIONS["openpangu"][0].items()), "any").clone()
    rows = next(n for n in graph.find("set_rows") if n.name.startswith("blk.0") and grows(n.type))
    copied = graph.add("cast", rows, name="copied", dtype="f32")
    gathered = graph.add("get_rows", rows, graph.input("all", "kv_cells", TensorType("i32", (Sym("R"),))), name="gathered")
    assert copies_of_caches(graph, 16) == [copied.name, gathered.name]
    norm = next(n for n in graph.nodes if n.op.name == "rms_norm_mul")
    graph.add("rms_norm", norm.operands[0], name="again", eps=norm.attrs["eps"])
    assert repeated_norms(graph) == [norm.operands[0].name]
    assert stray_leaves(graph) == []
    graph.weight("output.weight", next(n for n in graph.find("weight") if n.name == "output.weight").type)
    assert len(stray_leaves(graph)) == 2
    redundant = graph.add("cont", norm, name="redundant")
    assert redundant_copies(graph) == [redundant.name]
