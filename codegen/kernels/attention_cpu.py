"""Attention over the cell list of a cache, with online softmax, for CPUs.

One tile of work is a block of tokens and a group of query heads that share a KV head. The list of a token's cells is walked in steps of
16 entries and in splits of 256, both counted from entry 0. For each step the K rows are converted to f32 and transposed, the V rows
converted, once for all query heads of the group and all tokens of the block that share the list; a lone token with few heads reads the
rows as they lie. Per row (token, query head) and step:

    s_j = tree_r(sum_i q_i K_ij)         fused chains over i = r, r + lanes, ..., added in the tree of ``attention_cells.joined``
    m'  = max s if max s > m + 8, else m; acc, l *= e^(m - m') if m' > m
    p_j = e^(s_j - m'); l_j += p_j       l keeps 16 partial sums, added by halving at the end
    acc += p_j V_j                       one fused chain over j ascending; lanes hold the value's elements

Caches of block types keep codes and scales apart: keys meet queries rounded to 8 bits in sums of integers (``attention_rounded``), and the
scales of values go into what they are weighed with (``attention_weights``).

Each split starts anew and the splits of a row are merged in ascending order (``attention_rows``). So the splits of a few tokens with
long lists can be computed by many threads (``FlashAttnSplits``), while a block of many tokens walks them one after the other, and both
give the same bits. A list of one split needs no merging.

Entries a token does not see get p = 0 and take no part in the chains of acc, so a result depends on the token's visible entries and
their places in the list alone: not on other tokens, on cells, on the grouping of rows (which only interleaves independent chains) or
on the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import I32, I64, Emitter, Value
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import cache
from ggufc.codegen.kernels.attention_results import Results
from ggufc.codegen.kernels.attention_rows import RECORD, Scratch, direct
from ggufc.codegen.kernels.attention_scores import Span
from ggufc.codegen.kernels.attention_walk import AttentionWalk
from ggufc.codegen.kernels.base import KernelSpec, symbol

SPLIT = 256
"""Entries of the cell list per split."""

LANE = 256
"""Entries of all cell lists together per lane of ``FlashAttnSplits``."""

_SPLIT_BITS = 8
_ROWS = 64
"""Rows of a tile: enough to repay the conversion of a step, few enough for the second-level cache."""
_CELL_BYTES = 2048
"""Bytes of a cell up to which a tile may take all KV heads: what they share the prefetch of must stay in the second-level cache."""
_RECORDS = 1 << 18
"""Bytes of partial results per split, all tokens and heads together."""


@dataclass(frozen=True)
class FlashAttn:
    """out f32[dv * n_head, T] = softmax(softcap(scale * q K^T)) V over each token's visible cells; zeros for a token that sees none.

    ``q`` f32[d * n_head, T] (leading dimension ``ldq``); ``k``, ``v`` caches with rows of ``d * n_head_kv`` and ``dv * n_head_kv`` values
    of ``type_k``, ``type_v``; ``cells`` i32[R]; ``visible`` i32[3, T]: (base, lo, hi), the token sees ``cells[base + lo : base + hi]``.
    Query head h reads KV head h / (n_head / n_head_kv). ``sinks``: f32[n_head], one more logit per head, whose probability is dropped.
    ``shared``: values are part of the keys' rows (latent attention); ``v`` then points at the first value of cell 0.

    Tiles: ``units * ceil(T / token_block)``, the group of heads fastest. A few tokens (``decode_tokens``) with more than ``SPLIT`` list
    entries (R), or with more than ``LANE`` of several tokens, only merge ``partials``, which a launch of ``FlashAttnSplits`` has written.
    """

    d: int
    dv: int
    n_head: int
    n_head_kv: int
    type_k: str
    type_v: str
    scale: float
    softcap: float = 0.0
    sinks: bool = False
    shared: bool = False
    arg_names: ClassVar[tuple[str, ...]] = ("q", "ldq", "k", "v", "cells", "visible", "out", "ldo", "sinks", "partials")

    def __post_init__(self) -> None:
        cache.check_storage(self.type_k, self.d, "attention: head of the K cache")
        cache.check_storage(self.type_v, self.dv, "attention: head of the V cache")
        if self.n_head % self.n_head_kv:
            raise CodegenError(f"attention: {self.n_head} query heads are not a multiple of {self.n_head_kv} KV heads")
        if self.shared and (self.n_head_kv != 1 or self.type_k != self.type_v or self.dv > self.d):
            raise CodegenError(
                f"attention: values of {self.dv} {self.type_v} cannot be part of {self.n_head_kv} rows of {self.d} {self.type_k} keys"
            )

    @property
    def cells_of(self) -> tuple[int, int]:
        """Values per cell of the K and of the V cache."""
        return self.d * self.n_head_kv, self.d if self.shared else self.dv * self.n_head_kv

    @property
    def head_block(self) -> int:
        """Query heads per tile: those of a KV head, or an even part of them."""
        group = self.n_head // self.n_head_kv
        return next(n for n in range(min(group, _ROWS // 2), 0, -1) if group % n == 0)

    @property
    def tile_heads(self) -> int:
        """KV heads per tile of ``FlashAttnSplits``: all where a lone token reads the cache directly and cells are small."""
        few = self.head_block <= 4 and self.head_block == self.n_head // self.n_head_kv
        largest = max(cache.row_bytes(t, n) for t, n in zip((self.type_k, self.type_v), self.cells_of))
        return self.n_head_kv if few and not self.shared and largest <= _CELL_BYTES and self.n_head_kv <= self.token_block else 1

    @property
    def token_block(self) -> int:
        """Tokens per tile."""
        return max(1, min(16, _ROWS // self.head_block))

    @property
    def units(self) -> int:
        """Groups of query heads."""
        return self.n_head // self.head_block

    @property
    def padded(self) -> int:
        """Values of a row of acc."""
        return -(-self.dv // 16) * 16

    @property
    def record_bytes(self) -> int:
        return 4 * (RECORD + self.padded)

    @property
    def decode_tokens(self) -> int:
        """Largest number of tokens whose splits are computed apart."""
        return max(1, min(8, _RECORDS // (self.n_head * self.record_bytes)))

    @property
    def partials_bytes(self) -> int:
        """Bytes of ``partials`` per started ``SPLIT`` of R."""
        return self.decode_tokens * self.n_head * self.record_bytes

    def walk(self, alone: int) -> AttentionWalk:
        """The walk over rows of this shape, of a lone token under ``alone`` KV heads or of several (0)."""
        return AttentionWalk(replace(self, scale=1.0, sinks=False), alone)

    def parts(self, target: Target) -> tuple[KernelSpec, ...]:
        return (self.walk(0), self.walk(1)) if direct(self, target.lanes) else (self.walk(0),)

    def emit(self, e: Emitter) -> None:
        Attention(self, e).emit_blocks()

    def scratch_bytes(self, target: Target) -> int:
        return Scratch(self).size


@dataclass(frozen=True)
class FlashAttnSplits:
    """The partial results of ``attention`` for a few tokens with long lists; does nothing otherwise.

    Tiles: ``units`` x lanes, the group of heads fastest. The splits that the tokens see are dealt out to the lanes in turn, each token
    starting with another lane. Lanes are ``ceil(R / LANE)``, or ``lanes`` where that is not 0: a window bounds what is visible. The other
    arguments are those of ``attention``; ``out`` is not touched. Record (t, split, head) of ``partials`` holds m, l and acc.
    """

    attention: FlashAttn
    arg_names: ClassVar[tuple[str, ...]] = (*FlashAttn.arg_names, "lanes")

    @property
    def units(self) -> int:
        """Groups of query heads: tiles per lane."""
        return self.attention.units // self.attention.tile_heads

    def parts(self, target: Target) -> tuple[KernelSpec, ...]:
        heads = self.attention.tile_heads
        return self.attention.parts(target) if heads == 1 else (self.attention.walk(0), self.attention.walk(heads))

    def emit(self, e: Emitter) -> None:
        Attention(self.attention, e, self.attention.tile_heads).emit_splits()

    def scratch_bytes(self, target: Target) -> int:
        return Scratch(self.attention).size


def window_lanes(window: int) -> int:
    """Lanes for a layer that sees up to ``window`` cells, 0 for none: the splits these can touch, and some for several sequences."""
    return max(8, -(-window // SPLIT) + 1) if window else 0


class Attention(Results):
    """One tile of ``FlashAttn`` or ``FlashAttnSplits``; ``block``: KV heads per tile, whose rows lie side by side."""

    lanes_at = 10
    """The argument that holds the number of lanes."""

    def __init__(self, spec: FlashAttn, e: Emitter, block: int = 1) -> None:
        units = spec.units // block
        unit = e.b.mul(e.b.urem(e.tile, e.i64(units)), e.i64(block))
        per_head = spec.n_head // spec.n_head_kv // spec.head_block
        super().__init__(spec, e, e.b.mul(unit, e.i64(spec.head_block)))
        kv_head = e.b.udiv(unit, e.i64(per_head))
        self.block = block
        self.k_row, self.v_row = cache.row_bytes(spec.type_k, spec.d), cache.row_bytes(spec.type_v, spec.dv)
        self.k, self.v = e.at(e.arg_ptr(2), kv_head, self.k_row), e.at(e.arg_ptr(3), kv_head, self.v_row)
        self.cells = e.arg_ptr(4)
        self.place = e.b.udiv(e.tile, e.i64(units))
        self.visible, self.partials = e.arg_ptr(5), e.arg_ptr(9)
        self.tokens = e.param("T")
        self.splits = e.ceil_div(e.param("R"), SPLIT)
        b, entries = e.b, e.param("R")
        few = b.icmp_signed("<=", self.tokens, e.i64(spec.decode_tokens))
        several = b.and_(b.icmp_signed(">", self.tokens, e.i64(1)), b.icmp_signed(">", entries, e.i64(LANE)))
        self.apart = b.and_(few, b.or_(several, b.icmp_signed(">", entries, e.i64(SPLIT))))

    def walk(self, span: Span, rows: Value) -> None:
        """All steps of the span for the first ``rows`` rows."""
        e, b = self.e, self.e.b
        if not direct(self.spec, self.lanes):
            self.call(0, span, rows)
            return
        with e.if_else(b.icmp_signed("==", rows, e.i64(self.spec.head_block))) as (one, several):
            with one:
                self.call(1, span, rows)
            with several:
                self.call(0, span, rows)

    def call(self, alone: int, span: Span, rows: Value, unit: Value | None = None) -> None:
        """``AttentionWalk`` under the first KV head of the tile, or under head ``unit`` of the tile."""
        e, b = self.e, self.e.b
        k, v = self.k, self.v
        if unit is not None:
            k, v = e.gep(k, b.mul(unit, e.i64(self.k_row))), e.gep(v, b.mul(unit, e.i64(self.v_row)))
        e.call(symbol(self.spec.walk(alone)), (k, v, rows, *span))

    def triple(self, t: Value, part: int) -> Value:
        e = self.e
        return e.sext64(e.load(I32, e.gep(e.at(self.visible, t, 12), 4 * part)))

    def record_at(self, t: Value, split: Value, h: Value) -> Value:
        e, b = self.e, self.e.b
        index = b.add(b.mul(b.add(b.mul(t, self.splits), split), e.i64(self.spec.n_head)), self.head(h))
        return e.at(self.partials, index, self.spec.record_bytes)

    # Tiles

    def emit_blocks(self) -> None:
        e, b = self.e, self.e.b
        first = b.mul(self.place, e.i64(self.spec.token_block))
        last = e.imin(b.add(first, e.i64(self.spec.token_block)), self.tokens)
        with e.if_else(self.apart) as (merging, walking):
            with merging, e.for_range(first, last, name="token") as t, e.for_range(0, self.spec.head_block, name="head") as h:
                self.merge_records(t, h)
            with walking, self.runs(first, last) as (begin, end):
                self.attend(begin, end)
        e.ret()

    def emit_splits(self) -> None:
        e, b = self.e, self.e.b
        given = e.arg_int(self.lanes_at)
        lanes = b.select(b.icmp_signed("==", given, e.i64(0)), e.ceil_div(e.param("R"), LANE), given)
        with e.if_(self.apart), e.for_range(0, self.tokens, self.spec.token_block, name="block") as first:
            last = e.imin(b.add(first, e.i64(self.spec.token_block)), self.tokens)
            with self.runs(first, last) as (begin, end):
                self.attend_apart(begin, end, lanes)
        e.ret()

    @contextmanager
    def runs(self, first: Value, last: Value) -> Iterator[tuple[Value, Value]]:
        """(begin, end) of each run of tokens with the same list."""
        e, b = self.e, self.e.b
        start = e.var(I64, first)
        with e.while_loop("run") as runs:
            runs.break_if(b.icmp_signed(">=", start.get(), last))
            begin = start.get()
            base = self.triple(begin, 0)
            end = e.var(I64, b.add(begin, e.i64(1)))
            with e.while_loop("extend") as extend:
                extend.break_if(b.icmp_signed(">=", end.get(), last))
                extend.break_if(b.icmp_signed("!=", self.triple(end.get(), 0), base))
                end.set(b.add(end.get(), e.i64(1)))
            yield begin, end.get()
            start.set(end.get())

    # Runs

    def span(self, begin: Value, end: Value) -> Span:
        """What the tokens of a run see; ``low >= high`` if that is nothing."""
        e, b = self.e, self.e.b
        huge = 1 << 40
        low, high = e.var(I64, e.i64(huge)), e.var(I64, e.i64(0))
        all_low, all_high = e.var(I64, e.i64(0)), e.var(I64, e.i64(huge))
        with e.for_range(begin, end, name="token") as t:
            lo, hi = self.triple(t, 1), self.triple(t, 2)
            with e.if_(b.icmp_signed("<", lo, hi)):
                low.set(e.imin(low.get(), lo))
                high.set(e.imax(high.get(), hi))
            all_low.set(e.imax(all_low.get(), lo))
            all_high.set(e.imin(all_high.get(), hi))
        return Span(e.at(self.cells, self.triple(begin, 0), 4), low.get(), high.get(), all_low.get(), all_high.get(), high.get())

    def clip(self, span: Span, split: Value) -> Span:
        """The part of a span that lies in a split."""
        e, b = self.e, self.e.b
        start = b.shl(split, e.i64(_SPLIT_BITS))
        return span._replace(low=e.imax(span.low, start), high=e.imin(span.high, b.add(start, e.i64(SPLIT))))

    def splits_of(self, low: Value, high: Value) -> tuple[Value, Value]:
        """First split of low..high-1, and the one after the last."""
        e, b = self.e, self.e.b
        stop = b.add(b.ashr(b.sub(high, e.i64(1)), e.i64(_SPLIT_BITS)), e.i64(1))
        return b.ashr(low, e.i64(_SPLIT_BITS)), b.select(b.icmp_signed("<", low, high), stop, e.i64(0))

    def start(self, begin: Value, end: Value, heads: int = 0) -> Value:
        """Queries, bounds and empty states of a run's rows; their number. ``heads`` = 0 stands for those of one KV head's group."""
        e, heads = self.e, heads or self.spec.head_block
        with self.each_row(begin, end, heads) as (t, h, r):
            self.load_query(t, h, r)
            self.bound(r, self.triple(t, 1), self.triple(t, 2))
            self.clear(r)
            self.clear_merged(r)
        return e.b.mul(e.b.sub(end, begin), e.i64(heads))

    @contextmanager
    def each_row(self, begin: Value, end: Value, heads: int = 0) -> Iterator[tuple[Value, Value, Value]]:
        """(token, head, row); ``heads`` as for ``start``."""
        e, b, heads = self.e, self.e.b, heads or self.spec.head_block
        with e.for_range(begin, end, name="token") as t, e.for_range(0, heads, name="head") as h:
            yield t, h, b.add(b.mul(b.sub(t, begin), e.i64(heads)), h)

    def attend(self, begin: Value, end: Value) -> None:
        """The splits of a run one after the other."""
        e, b = self.e, self.e.b
        rows = self.start(begin, end)
        span = self.span(begin, end)
        first, stop = self.splits_of(span.low, span.high)
        with e.for_range(first, stop, name="split") as split:
            with e.if_(b.icmp_signed(">", split, first), likely=False), e.for_range(0, rows, name="row") as r:
                self.merge_open(r)
                self.clear(r)
            self.walk(self.clip(span, split), rows)
        with self.each_row(begin, end) as (t, h, r):
            self.close(t, h, r)

    def attend_apart(self, begin: Value, end: Value, lanes: Value) -> None:
        """The splits of a run that fall to this tile's lane, to records."""
        span = self.span(begin, end)
        first, stop = self.splits_of(span.low, span.high)
        with self.own_splits(first, stop, begin, lanes) as split:
            self.walk_split(span, split, begin, end)

    @contextmanager
    def own_splits(self, first: Value, stop: Value, before: Value, lanes: Value) -> Iterator[Value]:
        """Those of the splits first..stop-1 that fall to this tile, where ``before`` others have been dealt out to the ``lanes``."""
        e, b = self.e, self.e.b
        ahead = b.sub(self.place, b.urem(before, lanes))
        own = e.var(I64, b.add(first, b.select(b.icmp_signed("<", ahead, e.i64(0)), b.add(ahead, lanes), ahead)))
        with e.while_loop("split") as splits:
            splits.break_if(b.icmp_signed(">=", own.get(), stop))
            split = own.get()
            yield split
            own.set(b.add(split, lanes))

    def walk_split(self, span: Span, split: Value, begin: Value, end: Value) -> None:
        """A split of a run to records: of a lone token under all KV heads of the tile at once, of several under one after the other."""
        e, b = self.e, self.e.b
        part = self.clip(span, split)

        def walked(walk: Callable[[Value], None], heads: int = 0) -> None:
            walk(self.start(begin, end, heads))
            with self.each_row(begin, end, heads) as (t, h, r):
                self.record(r, self.record_at(t, split, h))

        if self.block == 1:
            walked(lambda rows: self.walk(part, rows))
            return
        with e.if_else(b.icmp_signed("==", b.sub(end, begin), e.i64(1))) as (one, several):
            with one:
                walked(lambda rows: self.call(self.block, part, rows), self.spec.head_block * self.block)
            with several, e.for_range(0, self.block, name="unit") as unit:
                self.first_head = b.mul(unit, e.i64(self.spec.head_block))
                walked(lambda rows: self.call(0, part, rows, unit))
                self.first_head = e.i64(0)

    def merge_records(self, t: Value, h: Value) -> None:
        e = self.e
        row = e.i64(0)
        self.clear_merged(row)
        first, stop = self.splits_of(self.triple(t, 1), self.triple(t, 2))
        with e.for_range(first, stop, name="split") as split:
            self.merge_record(row, self.record_at(t, split, h))
        self.close_merged(t, h, row)
