"""Which way each layer of openpangu reads its cache in one step, and how many nodes that takes.

All ways give the same logits up to rounding; they bound memory and work. The builder and the node estimate read the same plan, so neither
can drift from the other. A step without sizes gets the plan that serves all of them: one block, masked, no view of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufc.ir.dims import IntDim
from ggufc.models.indexer import CHOICE_NODES, SCORE_NODES, SELECTION_NODES
from ggufc.models.openpangu_hparams import OpenPanguLayer, OpenPanguParams
from ggufc.models.regions import compacted
from ggufc.models.step import Step

SCORE_CHUNK = 256
"""Queries whose indexer scores are computed at a time."""
ATTENTION_CHUNK = 256
"""Queries that attend at a time once all scores together would exceed ``SCORE_BYTES``."""
SCORE_BYTES = 1024 << 20
GATHER_ROWS = 65535
"""Rows one gather may have: the limit of a launch grid's y dimension on GPUs, where each row is one step of y."""
GATHER_RATIO = 2
"""Gathering k rows pays from this many times k cached rows on."""
GATHER_TOKENS = 14
"""The largest batch that decodes on gathered rows."""
PAD = 32
"""Cells are counted in multiples of this; a gather allows for as many unused ones at the end."""

DENSE_BLOCK_NODES = 15
"""Views of queries and mask; scores of sinks and rows; both masks; softmax; two parts, two products, their sum."""
GATHER_BLOCK_NODES = 20
"""Views of queries and choice, flat choice, gather, reshape, queries by token; as in a dense block; the result by head."""


@dataclass(frozen=True)
class Block:
    """Queries ``first .. first+n-1``; with ``gather`` they attend to their chosen rows only, without a mask."""

    first: int
    n: IntDim
    gather: bool = False


@dataclass(frozen=True)
class Plan:
    """How one layer reads its cache. ``score_blocks`` is empty where the indexer makes no choice."""

    score_blocks: tuple[Block, ...]
    blocks: tuple[Block, ...]
    window_view: bool = False

    @property
    def nodes(self) -> int:
        """The most nodes of scores, choice, selection, attention blocks and what joins them."""
        scores = len(self.score_blocks) * (SCORE_NODES + CHOICE_NODES + 4)
        dense = sum(DENSE_BLOCK_NODES + (SELECTION_NODES + 1 if self.score_blocks else 0) + 1 for blk in self.blocks if not blk.gather)
        return scores + dense + sum(GATHER_BLOCK_NODES + 1 for blk in self.blocks if blk.gather)


def top_k(layer: OpenPanguLayer, step: Step) -> int:
    """Rows the indexer keeps: the option ``dsa_top_k``, or the model's number."""
    override = int(step.observe("dsa_top_k"))
    return override or (layer.indexer.top_k if layer.indexer is not None else 0)


def plan(hp: OpenPanguParams, layer: OpenPanguLayer, step: Step) -> Plan:
    """The plan of ``layer`` for ``step`` (spec/openpangu.md, section 5). What is looked at is recorded as the step's observations."""
    if not (step.says("T") and step.says("KV")):
        whole = (Block(0, step.T),)
        return Plan(whole if layer.indexer is not None else (), whole)
    k = top_k(layer, step)
    selects = layer.indexer is not None and bool(step.observe(f"KV > {k}"))
    view = layer.window > 0 and not compacted(layer, step) and step.says("WV") and bool(step.observe("WV < KV"))
    score_blocks = tuple(_blocks(step, SCORE_CHUNK)) if selects else ()
    if not step.observe(f"T > {ATTENTION_CHUNK}"):
        return Plan(score_blocks, (Block(0, step.T, selects and _decode_gathers(step, k)),), view)
    visible = int(step.observe("KVW" if compacted(layer, step) else "WV" if view else "KV"))
    if not step.observe(f"T > {SCORE_BYTES // ((visible + hp.n_sink) * layer.n_head * 4)}"):
        return Plan(score_blocks, (Block(0, step.T),), view)
    blocks = tuple(_blocks(step, ATTENTION_CHUNK))
    if selects:
        blocks = tuple(part for blk in blocks for part in _prefill_parts(step, blk, k))
    return Plan(score_blocks, blocks, view)


def _blocks(step: Step, size: int) -> list[Block]:
    """The step's queries in blocks of ``size``, the last one what remains."""
    out = []
    first = 0
    while step.observe(f"T > {first + size}"):
        out.append(Block(first, size))
        first += size
    return [*out, Block(first, step.T - first)]


def _decode_gathers(step: Step, k: int) -> bool:
    """Whether a small batch gathers: every query then surely sees k rows, so that no mask is needed."""
    if not step.observe(f"T <= {GATHER_TOKENS}") or k * GATHER_TOKENS > GATHER_ROWS:
        return False
    return bool(step.observe(f"KV >= {GATHER_RATIO * k + PAD + GATHER_TOKENS}"))


def _prefill_parts(step: Step, blk: Block, k: int) -> list[Block]:
    """A block of a long batch as it is, or in parts whose gathers stay within ``GATHER_ROWS``, where the cache is deep enough."""
    tokens, visible = int(step.observe("T")), int(step.observe("KV"))
    if k > GATHER_ROWS or visible < tokens or visible - tokens + blk.first < GATHER_RATIO * k + PAD:
        return [blk]
    size, end = max(1, GATHER_ROWS // k), min(blk.first + ATTENTION_CHUNK, tokens)
    return [Block(at, min(size, end - at), True) for at in range(blk.first, end, size)]
