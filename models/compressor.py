"""Compressors: blocks of ``ratio`` tokens become one cache entry, block by block as they fill up.

    kv = W_kv x, score = W_gate x + ape[p mod ratio];   entry_c = sum over the block of softmax(score_c) kv_c, per channel c

Overlapping compressors have rows of two halves: an entry mixes the first half of the previous block's rows with the second half of its own
block's. Then the entry is normed, rotated at the first position of its block, and stored.

Rows of tokens whose block is not complete wait in two rings. A block's rows are looked up in [ring before this batch | this batch | one
empty row (kv 0, score minus infinity)], so an entry depends on its tokens only, not on how they were batched. Which entries a batch
completes, and where their rows lie, are inputs (``ggufc.ir.ops.inputs``): the graph is the same for every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ggufc.ir import Node, Sym, TensorType
from ggufc.models.blocks import LINEAR_NODES, NORM_NODES, Builder
from ggufc.models.caches import CacheInfo
from ggufc.models.conv import SEQUENCES
from ggufc.models.hparams import RopeParams
from ggufc.models.weights import TensorSpec

TAIL_NODES = 4
"""Two views, rope, concat."""
COMPRESS_NODES = 2 * LINEAR_NODES + NORM_NODES + 3 + 2 + 2 * 3 + 2 * 2 * 3 + 2 + 2 * 3 + 3 + 3 + TAIL_NODES + 2
"""Two maps, norm; position weights; rings; sources; gathers of both halves; joined; by channel; mixture; rotation; both stores."""


@dataclass(frozen=True)
class Compressor:
    """One compressor of a layer: tensors ``<stem>_kv, _gate, _ape, _norm``, resources ``<state>ring_kv`` and ``<state>ring_score``."""

    stem: str
    state: str
    layer: int
    ratio: int
    width: int
    overlap: bool

    @property
    def row(self) -> int:
        return 2 * self.width if self.overlap else self.width

    @property
    def ring(self) -> int:
        """Rows per sequence."""
        return 2 * self.ratio if self.overlap else self.ratio

    def tensors(self, n_embd: int) -> Iterator[TensorSpec]:
        """The compressor's tensors."""
        shapes: dict[str, tuple[int, ...]] = {
            "kv": (n_embd, self.row),
            "gate": (n_embd, self.row),
            "ape": (self.row, self.ratio),
            "norm": (self.width,),
        }
        for part, ne in shapes.items():
            yield TensorSpec(f"{self.stem}_{part}.weight", ne)

    def caches(self) -> Iterator[CacheInfo]:
        """The rings, f32."""
        for part in ("ring_kv", "ring_score"):
            name = f"{self.state}{part}"
            yield CacheInfo(name, self.layer, name.split(".")[-1], "f32", self.row, self.row, 0, {}, f"{self.ring}*S+1")


def entry_symbols(ratio: int) -> tuple[str, str, str, str]:
    """Symbols of compressed resources: rows (C), entries listed (E), rows that masks cover (V), entries completed by the batch (W)."""
    c, e, v, w = (f"{letter}{ratio}" for letter in "CEVW")
    return c, e, v, w


def entry_input(b: Builder, kind: str, ratio: int) -> Node:
    """The input of ``kind`` for compressed entries of ``ratio``, under the name ``<kind>_<ratio>``."""
    _, entries, _, written = entry_symbols(ratio)
    t = b.step.T
    ne = {
        "phases": (t,), "ring_slots": (t,), "entry_cells": (Sym(entries),), "entry_visible": (3, t), "entry_slots": (Sym(written),),
        "entry_positions": (Sym(written),), "entry_sources": (ratio, Sym(written)), "entry_previous": (ratio, Sym(written)),
    }[kind]  # fmt: skip
    return b.input(f"{kind}_{ratio}", kind, ne, ratio=ratio)


def rotate_tail(b: Builder, x: Node, positions: Node, rope: RopeParams, name: str, *, inverse: bool = False) -> Node:
    """x [D, H, N] with the last ``rope.n_dims`` values of every head turned; contiguous."""
    plain = int(x.type.ne[0]) - rope.n_dims  # type: ignore[arg-type]
    attrs = rope.attrs() | {"inverse": inverse}
    if not plain:
        return b.add("rope", x, positions, name=name, **attrs)
    nope, tail = b.parts(x, (plain, rope.n_dims), (f"{name}.nope", f"{name}.tail"))
    return b.add("concat", nope, b.add("rope", tail, positions, name=f"{name}.turned", **attrs), name=name, dim=0)


def compress(b: Builder, x: Node, c: Compressor, rope: RopeParams) -> Node:
    """The entries [width, W] that the tokens x [E, T] complete, normed and rotated; the rings then hold the batch's rows."""
    name, ratio, width = c.stem, c.ratio, c.width
    with b.block(name, COMPRESS_NODES):
        kv = b.linear(x, f"{name}_kv")
        ape = b.add("get_rows", b.weight(f"{name}_ape.weight"), entry_input(b, "phases", ratio), name=f"{name}_ape")
        score = b.add("add", b.linear(x, f"{name}_gate"), ape, name=f"{name}_score")
        rings = [
            b.graph.cache(f"{c.state}{part}", TensorType("f32", (c.row, SEQUENCES * c.ring + 1))) for part in ("ring_kv", "ring_score")
        ]
        values, scores = (
            _block_rows(b, ring, rows, empty, c, f"{name}.{what}")
            for ring, rows, empty, what in zip(rings, (kv, score), (0.0, -math.inf), ("values", "scores"))
        )
        p = b.add("soft_max", scores, name=f"{name}.soft_max", scale=1.0)
        mixed = b.add("sum_rows", b.add("mul", p, values, name=f"{name}.weighted"), name=f"{name}.sum")
        entry = b.add("reshape", mixed, name=f"{name}.mixed", ne=(width, mixed.type.ne[2]))
        entry = b.rms_norm(entry, f"{name}_norm")
        entry = b.add("reshape", entry, name=f"{name}.head", ne=(width, 1, entry.type.ne[1]))
        entry = rotate_tail(b, entry, entry_input(b, "entry_positions", ratio), rope, f"{name}.rope")
        for ring, rows in zip(rings, (kv, score)):
            b.add("set_rows", ring, rows, entry_input(b, "ring_slots", ratio), name=f"{ring.name}.store")
        return b.add("reshape", entry, name=f"{name}.entries", ne=(width, entry.type.ne[2]))


def _block_rows(b: Builder, ring: Node, rows: Node, empty: float, c: Compressor, name: str) -> Node:
    """The rows each entry is made of, by channel: [ratio or 2*ratio, width, W]."""
    source = b.add("concat", ring, rows, name=f"{name}.known", dim=1)
    if c.overlap:
        one = b.add("view", rows, name=f"{name}.first", ne=(c.row, 1), nb=(1, c.row), offset=0)
        source = b.add("concat", source, b.add("fill", one, name=f"{name}.empty", value=empty), name=f"{name}.source", dim=1)
    block = _gather(b, source, "entry_sources", c.row - c.width, c, f"{name}.block")
    if c.overlap:
        block = b.add("concat", _gather(b, source, "entry_previous", 0, c, f"{name}.previous"), block, name=f"{name}.both", dim=1)
    return b.add("cont", b.add("permute", block, name=f"{name}.permuted", axes=(1, 0, 2)), name=f"{name}.cont")


def _gather(b: Builder, source: Node, kind: str, offset: int, c: Compressor, name: str) -> Node:
    """``width`` values from ``offset`` on of the source rows that an input lists -> [width, ratio, W]."""
    wanted = entry_input(b, kind, c.ratio)
    n = wanted.type.ne[1]
    flat = b.shared(f"{wanted.name}.flat", lambda flat_name: b.add("reshape", wanted, name=flat_name, ne=(c.ratio * n,)))
    if offset or c.overlap:
        source = b.add("view", source, name=f"{name}.half", ne=(c.width, source.type.ne[1]), nb=(1, c.row), offset=offset)
    return b.add("reshape", b.add("get_rows", source, flat, name=f"{name}.rows"), name=name, ne=(c.width, c.ratio, n))
