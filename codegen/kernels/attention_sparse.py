"""Attention over listed rows of two kinds under one softmax, for CPUs: the walk of ``attention_cpu``, first over one kind, then the other.

Both kinds are cut into splits of a token's list. A row's splits are merged in ascending order, those of the first kind
before those of the second, by whoever computed them; so the bits depend on a token's lists alone, as in ``attention_cpu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import I32, I64, Emitter, Value
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.attention_cpu import LANE, SPLIT, Attention, FlashAttn
from ggufc.codegen.kernels.attention_rows import Scratch
from ggufc.codegen.kernels.base import KernelSpec


@dataclass(frozen=True)
class SparseAttn:
    """out f32[n_value * n_head, T]: attention of all heads over rows of ``d`` numbers whose first ``n_value`` are their values.

    ``q`` f32[d * n_head, T] (leading dimension ``ldq``); rows ``k`` of ``type_k`` listed by ``cells``, ``visible`` (as in ``FlashAttn``);
    rows ``more`` of ``type_more``. ``entries`` says which of these are seen: a number means that many, by all tokens; the name of a symbol
    means lists ``more_cells``, ``more_visible`` of that many entries together, and "" lists of up to ``most`` entries each. ``v`` is
    the address of ``k`` again, ``sinks`` as in ``FlashAttn``.

    Tiles and partial results as in ``FlashAttn``; the entries of both kinds together decide whether splits are computed apart.
    """

    d: int
    n_value: int
    n_head: int
    type_k: str
    type_more: str
    scale: float
    entries: int | str
    most: int = 0
    sinks: bool = False
    arg_names: ClassVar[tuple[str, ...]] = (*FlashAttn.arg_names, "more", "more_cells", "more_visible")

    def __post_init__(self) -> None:
        if not self.entries and not self.most:
            raise CodegenError("attention: a second kind of rows needs a number, a symbol that counts its lists or a bound of their length")
        if self.type_more != self.type_k:
            self.walk(self.type_more)

    def walk(self, dtype: str) -> FlashAttn:
        """The walk over rows of one kind."""
        return FlashAttn(self.d, self.n_value, self.n_head, 1, dtype, dtype, self.scale, 0.0, self.sinks, True)

    @property
    def first(self) -> FlashAttn:
        return self.walk(self.type_k)

    def parts(self, target: Target) -> tuple[KernelSpec, ...]:
        return (*self.walk(self.type_k).parts(target), *self.walk(self.type_more).parts(target))

    def emit(self, e: Emitter) -> None:
        _SparseAttention(self, e).emit_blocks()

    def scratch_bytes(self, target: Target) -> int:
        return max(Scratch(self.walk(dtype)).size for dtype in (self.type_k, self.type_more))


@dataclass(frozen=True)
class SparseAttnSplits:
    """The partial results of ``attention`` for a few tokens with long lists, as ``FlashAttnSplits`` computes them."""

    attention: SparseAttn
    arg_names: ClassVar[tuple[str, ...]] = (*SparseAttn.arg_names, "lanes")

    def parts(self, target: Target) -> tuple[KernelSpec, ...]:
        return self.attention.parts(target)

    def emit(self, e: Emitter) -> None:
        _SparseAttention(self.attention, e).emit_splits()

    def scratch_bytes(self, target: Target) -> int:
        return self.attention.scratch_bytes(target)


class _More(Attention):
    """The walk over rows of the second kind, on the state that the walk over the first has left."""

    def __init__(self, spec: SparseAttn, e: Emitter) -> None:
        super().__init__(spec.walk(spec.type_more), e)
        self.k = self.v = e.arg_ptr(10)
        self.seen_by_all = spec.entries if isinstance(spec.entries, int) else 0
        if self.seen_by_all:
            self.cells = e.global_const(I32, range(self.seen_by_all), f"first_{self.seen_by_all}")
        else:
            self.cells, self.visible = e.arg_ptr(11), e.arg_ptr(12)

    def triple(self, t: Value, part: int) -> Value:
        return self.e.i64((0, 0, self.seen_by_all)[part]) if self.seen_by_all else super().triple(t, part)


class _SparseAttention(Attention):
    def __init__(self, spec: SparseAttn, e: Emitter) -> None:
        super().__init__(spec.first, e)
        b = e.b
        self.lanes_at = 13
        self.more = _More(spec, e)
        self.first_splits = self.splits
        number = spec.most or spec.entries
        most = e.i64(number) if isinstance(number, int) else e.param(number)
        self.splits = b.add(self.first_splits, e.ceil_div(most, SPLIT))
        entries = b.add(e.param("R"), most)
        few = b.icmp_signed("<=", self.tokens, e.i64(self.spec.decode_tokens))
        several = b.and_(b.icmp_signed(">", self.tokens, e.i64(1)), b.icmp_signed(">", entries, e.i64(LANE)))
        self.apart = b.and_(few, b.or_(several, b.icmp_signed(">", entries, e.i64(SPLIT))))

    def kinds(self) -> Iterator[tuple[Attention, Value]]:
        """The walks over both kinds, and the number of the first split of each in a token's records."""
        yield self, self.e.i64(0)
        yield self.more, self.first_splits

    @contextmanager
    def runs(self, first: Value, last: Value) -> Iterator[tuple[Value, Value]]:
        """(begin, end) of each run of tokens with the same lists of both kinds."""
        with super().runs(first, last) as (begin, end):
            if self.more.seen_by_all:
                yield begin, end
            else:
                with self.more.runs(begin, end) as (inner, stop):
                    yield inner, stop

    def attend(self, begin: Value, end: Value) -> None:
        """The splits of a run one after the other, those of the first kind first."""
        e, b = self.e, self.e.b
        rows = self.start(begin, end)
        walked = e.var(I64, e.i64(0))
        for walk, _ in self.kinds():
            if walk is not self:
                with self.each_row(begin, end) as (t, _h, r):
                    self.bound(r, walk.triple(t, 1), walk.triple(t, 2))
            span = walk.span(begin, end)
            first, stop = walk.splits_of(span.low, span.high)
            with e.for_range(first, stop, name="split") as split:
                with e.if_(b.icmp_signed("!=", walked.get(), e.i64(0)), likely=False), e.for_range(0, rows, name="row") as r:
                    self.merge_open(r)
                    self.clear(r)
                walked.set(e.i64(1))
                walk.walk(walk.clip(span, split), rows)
        with self.each_row(begin, end) as (t, h, r):
            self.close(t, h, r)

    def attend_apart(self, begin: Value, end: Value, lanes: Value) -> None:
        """The splits of a run that fall to this tile's lane, to records; the kinds' splits are dealt out as if they were one row."""
        e, b = self.e, self.e.b
        before = begin
        for walk, number in self.kinds():
            span = walk.span(begin, end)
            first, stop = walk.splits_of(span.low, span.high)
            with self.own_splits(first, stop, before, lanes) as split:
                rows = walk.start(begin, end)
                walk.walk(walk.clip(span, split), rows)
                with self.each_row(begin, end) as (t, h, r):
                    self.record(r, self.record_at(t, b.add(number, split), h))
            before = b.add(before, e.imax(b.sub(stop, first), e.i64(0)))

    def merge_records(self, t: Value, h: Value) -> None:
        e = self.e
        row = e.i64(0)
        self.clear_merged(row)
        for walk, number in self.kinds():
            first, stop = walk.splits_of(walk.triple(t, 1), walk.triple(t, 2))
            with e.for_range(first, stop, name="split") as split:
                self.merge_record(row, self.record_at(t, e.b.add(number, split), h))
        self.close_merged(t, h, row)
