"""Integer products of 8-bit activation records and interleaved weights.

One output element is, for each block of 32 (or 16) columns in ascending order,

    acc = fma(f32(sum of code * q), scale_w * d, acc);   acc = fma(min_w, s, acc) where the type has minima

with exact integer sums. Formats with integer scales per 16 columns (``integer_scales``) add up both halves first:

    acc = fma(f32(scale_0 * sum_0 + scale_1 * sum_1), d_w * d, acc)
    acc = fma(fma(f32(min_0 * s_0 + min_1 * s_1), low_w, f32(scale_0 * sum_0 + scale_1 * sum_1) * d_w), d, acc)   with minima

Weights are unpacked in registers, or read from an unpacked copy that serves all tokens: same operations, same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from ggufc.codegen.emitter import F32, I32, Emitter, Value, Var, vec
from ggufc.codegen.kernels.matmul_tokens import Done, Tokens, blocks, parts
from ggufc.codegen.weights.activations import q8_record
from ggufc.codegen.weights.base import Cursor, Parts, Unpacked, WeightFormat, load_f32, load_word

_UNROLL = 4
"""Chunks of up to this many blocks are unrolled."""
_AHEAD = 8192


@dataclass
class Int8Product:
    """Emits the accumulation over K for one weight format."""

    format: WeightFormat
    k: int

    @property
    def blocks(self) -> int:
        return self.k // 32

    @property
    def panel(self) -> Panel:
        return Panel(self.format)

    def signed(self, e: Emitter) -> bool:
        """Whether codes are made signed before they are multiplied: where the target has no product of all unsigned bytes."""
        return self.panel.signed(e)

    def row_bytes(self) -> int:
        """Bytes between the records of consecutive tokens."""
        return q8_record(self.k).stride

    def scratch_bytes(self, groups: int) -> int:
        return groups * self.blocks * self.panel.block_bytes

    def prepare(self, e: Emitter, tokens: Tokens, groups: int) -> None:
        """Nothing: activations are multiplied as they are."""

    def run(self, e: Emitter, groups: Sequence[Value], tokens: Tokens, done: Done) -> None:
        """All groups for all tokens.

        Few tokens unpack weights in registers. Of many, the first block unpacks them and leaves a copy in scratch for the blocks after it,
        except where unpacking hides behind the multiplications.
        """
        b = e.b
        size = 8 if e.target.lanes == 16 else 4  # 16 vector registers hold the accumulators of four tokens
        first = tokens.first
        with parts(e) as part:
            if self._unpacks_once(e):
                count = b.sub(tokens.stop, first)
                whole = b.add(first, b.and_(count, e.i64(-size)))
                with e.if_(b.icmp_signed(">", whole, first)):
                    # Where nobody will read it, the copy is one block in size and costs no memory traffic.
                    several = b.icmp_signed(">=", count, e.i64(2 * size))
                    step = b.select(several, e.i64(self.panel.block_bytes), e.i64(0))
                    panels = [e.gep(e.scratch, self.blocks * self.panel.block_bytes * i) for i in range(len(groups))]
                    rows = tokens.rows(first, size)
                    done(part, first, [self._direct(e, g, part, rows, (p, step)) for g, p in zip(groups, panels)])
                    with e.for_range(b.add(first, e.i64(size)), whole, size, name=f"t{size}") as t:
                        rows = tokens.rows(t, size)
                        done(part, t, [self._from_panel(e, p, part, rows) for p in panels])
                first, size = whole, size // 2
            for n, t in blocks(e, first, tokens.stop, size):
                rows = tokens.rows(t, n)
                done(part, t, [self._direct(e, g, part, rows) for g in groups])

    def _unpacks_once(self, e: Emitter) -> bool:
        return not (self.format.light and e.target.lanes == 16)

    def _direct(
        self, e: Emitter, group: Value, part: Value, rows: Sequence[Value], panel: tuple[Value, Value] | None = None
    ) -> list[Value]:
        """Accumulators, one vector of weight rows per activation record at ``rows``; unpacked blocks go to ``panel`` (address, step)."""
        acc = self._accumulators(e, len(rows))
        for i, cursor in self._walk(e, group, part, self.format.together if len(rows) == 1 else 1):
            if self.format.prefetch or len(rows) > 1:
                self._prefetch(e, i, cursor)
            u = self.format.unpack(e, cursor)
            offset = self.format.offset_on(e.target)
            if self.signed(e):
                u.quads, offset = [without_offset(e, q) for q in u.quads], 0
            if panel is not None:
                if self.format.scaled_max:
                    u = scaled_codes(e, u)
                self.panel.write(e, e.gep(panel[0], e.b.mul(i, panel[1])), part, u, offset)
            self._block(e, u, rows, i, acc, offset)
        return [a.get() for a in acc]

    def _prefetch(self, e: Emitter, i: Value, cursor: Cursor) -> None:
        """Ask for what lies ``_AHEAD`` bytes further on, into the second-level cache: more of its misses than of the first's are on their
        way at a time.

        Where several tokens share a block, or unpacking is long, too few loads are on their way; and of the two streams in a chunk, scales
        and codes, the hardware follows one. Where neither holds, asking takes more than it gives.
        """
        m = self.format.chunk_blocks(self.k)
        lines = -(-self.format.chunk_bytes(self.k) // (64 * m))
        ahead = e.at(e.gep(cursor.supers, _AHEAD), e.b.and_(i, e.i64(m - 1)), 64 * lines)
        for line in range(lines):
            e.prefetch(e.gep(ahead, 64 * line), 2)

    def _walk(self, e: Emitter, group: Value, part: int | Value, step: int = 1) -> Iterator[tuple[Value, Cursor]]:
        """Inside emitted loops over the group: (number of the block of 32 columns, its addresses). Loops over the blocks of a chunk take
        ``step`` at a time."""
        m = self.format.chunk_blocks(self.k)
        with e.for_range(0, self.blocks // m, name="chunk") as chunk:
            first = e.b.mul(chunk, e.i64(m))
            if m <= _UNROLL:
                for j in range(m):
                    yield e.b.add(first, e.i64(j)), self.format.cursor(e, group, self.k, chunk, j, part)
            else:
                with e.for_range(0, m, step, name="block") as j:
                    for at in (e.b.add(j, e.i64(i)) if i else j for i in range(step)):
                        yield e.b.add(first, at), self.format.cursor(e, group, self.k, chunk, at, part)

    def _from_panel(self, e: Emitter, panel: Value, part: Value, rows: Sequence[Value]) -> list[Value]:
        """As ``_direct``, from an unpacked group."""
        acc = self._accumulators(e, len(rows))
        with e.for_range(0, self.blocks, name="k") as i:
            u = self.panel.read(e, panel, i, part)
            if self.format.scaled_max and u.parts is not None:
                u.scaled = True
            self._block(e, u, rows, i, acc, self.panel.offset(e))
        return [a.get() for a in acc]

    def _accumulators(self, e: Emitter, tokens: int) -> list[Var]:
        floats = vec(F32, e.target.lanes)
        return [e.var(floats, e.const(floats, 0)) for _ in range(tokens)]

    def _block(self, e: Emitter, u: Unpacked, rows: Sequence[Value], i: Value, acc: list[Var], offset: int) -> None:
        for x, a in zip(rows, acc):
            self._block_of_token(e, u, x, i, a, offset, alone=len(rows) == 1)

    def _block_of_token(self, e: Emitter, u: Unpacked, x: Value, i: Value, acc: Var, offset: int, alone: bool = False) -> None:
        groups = 1 if u.scaled else 32 // self.format.group
        # Eight dot products in a row take longer than unpacking does; a token alone has nothing else to do meanwhile.
        chains = 2 if alone and groups == 1 and e.target.vnni else 1
        self._scaled(e, u, x, i, [self._sum(e, u, x, i, g, offset, groups, chains) for g in range(groups)], acc)

    def _scaled(self, e: Emitter, u: Unpacked, x: Value, i: Value, sums: Sequence[Value], acc: Var) -> None:
        """Add the block whose integer sums are ``sums``, one per group of columns, to ``acc``."""
        b, lanes = e.b, e.target.lanes
        floats, at = vec(F32, lanes), q8_record(self.k)
        d = e.splat(e.load(F32, e.at(e.gep(x, at.off_d), i, 4)), lanes)
        if u.parts is not None:
            total = b.sitofp(sums[0] if u.scaled else _dot(e, sums, u.parts.scales), floats)
            if u.parts.low is None:
                acc.set(e.fma(total, b.fmul(u.parts.d, d), acc.get()))
                return
            # c16 is -128 times the sum of the activations.
            groups = range(len(u.parts.mins))
            c = [e.splat(e.load(I32, e.gep(e.at(e.gep(x, at.off_c16), i, 8), 4 * g)), lanes) for g in groups]
            low = b.fmul(u.parts.low, e.const(floats, 1 / 128))
            both = e.fma(b.sitofp(_dot(e, c, u.parts.mins), floats), low, b.fmul(total, u.parts.d))
            acc.set(e.fma(both, d, acc.get()))
            return
        for total, scale in zip(sums, u.scales):
            acc.set(e.fma(b.sitofp(total, floats), b.fmul(scale, d), acc.get()))
        if len(u.mins) == 1:
            s = e.splat(e.load(F32, e.at(e.gep(x, at.off_s), i, 4)), lanes)
            acc.set(e.fma(u.mins[0], s, acc.get()))
        for g, low in enumerate(u.mins if len(u.mins) > 1 else []):
            # A power of two, so the factor of c16 moves into the minimum without a rounding.
            c16 = e.splat(e.load(I32, e.gep(e.at(e.gep(x, at.off_c16), i, 8), 4 * g)), lanes)
            acc.set(e.fma(b.fmul(low, e.const(floats, -1 / 128)), b.fmul(d, b.sitofp(c16, floats)), acc.get()))

    def _sum(self, e: Emitter, u: Unpacked, x: Value, i: Value, g: int, offset: int, groups: int, chains: int) -> Value:
        """Integer sum of group ``g`` of the block, offset removed, in ``chains`` independent parts."""
        lanes = e.target.lanes
        qs, per = e.at(x, i, 32), 8 // groups
        most = self.format.scaled_max if u.scaled else self.format.u_max
        zero = e.const(vec(I32, lanes), 0)
        totals = [self._start(e, x, i, g, offset) or zero, *([zero] * (chains - 1))]
        for j in range(per * g, per * (g + 1)):
            a, at = _activations(e, qs, j), j % chains
            totals[at] = e.dot4_signed(totals[at], u.quads[j], a) if self.signed(e) else e.dot4(totals[at], u.quads[j], a, most)
        return reduce(e.b.add, totals)

    def _start(self, e: Emitter, x: Value, i: Value, g: int, offset: int) -> Value | None:
        """What the sum of a group starts from so that the codes lose their ``offset``."""
        if not offset:
            return None
        lanes, at = e.target.lanes, q8_record(self.k)
        single = self.format.group == 32
        where = e.at(e.gep(x, at.off_c32), i, 4) if single else e.gep(e.at(e.gep(x, at.off_c16), i, 8), 4 * g)
        total = e.splat(e.load(I32, where), lanes)
        shift = 7 - (offset.bit_length() - 1)
        return e.b.ashr(total, e.const(total.type, shift)) if shift else total


def _activations(e: Emitter, qs: Value, j: int) -> Value:
    """The quad of activations from column 4j on in every lane."""
    if e.target.is_arm:  # NEON multiplies by one lane of a register: one load brings four quads
        return e.shuffle(e.load(vec(I32, 4), e.gep(qs, 16 * (j // 4))), None, [j % 4] * 4)
    return e.splat(e.load(I32, e.gep(qs, 4 * j)), e.target.lanes)


def without_offset(e: Emitter, quad: Value) -> Value:
    """Codes stored with the offset 128 as signed bytes."""
    return e.b.xor(quad, e.const(quad.type, -0x7F7F7F80))


def scaled_codes(e: Emitter, u: Unpacked) -> Unpacked:
    """Codes times their integer scales, which fit a byte: no carry crosses them, and the exact sums are the same."""
    assert u.parts is not None
    per = len(u.quads) // len(u.parts.scales)
    return Unpacked([e.b.mul(quad, u.parts.scales[q // per]) for q, quad in enumerate(u.quads)], u.scales, u.mins, u.parts, scaled=True)


def _dot(e: Emitter, a: Sequence[Value], c: Sequence[Value]) -> Value:
    """Sum of integer products."""
    total = e.b.mul(a[0], c[0])
    for x, y in zip(a[1:], c[1:]):
        total = e.b.add(total, e.b.mul(x, y))
    return total


@dataclass
class Panel:
    """An unpacked group: per block of 32 columns eight code quads of 16 rows, then scales and minima.

    Where ``dot4`` takes all unsigned bytes at full speed, codes are moved to offset 128, so that the accumulator starts from a plain
    load. Where only signed bytes are multiplied, codes with the offset 128 lose it.
    """

    format: WeightFormat

    @property
    def numbers(self) -> int:
        """Words per row after the codes: scales and minima, and the numbers they are multiples of where they are integers."""
        per_group = 32 // self.format.group + (1 if self.format.integer_scales else 0)
        return per_group * (2 if self.format.has_min else 1)

    @property
    def block_bytes(self) -> int:
        return 512 + 64 * self.numbers

    def signed(self, e: Emitter) -> bool:
        return e.target.signed_dot and self.format.u_max > 127 and self.format.offset == 128

    def offset(self, e: Emitter) -> int:
        if self.signed(e):
            return 0
        return 128 if self.format.offset and e.target.vnni else self.format.offset

    def write(self, e: Emitter, block: Value, part: Value, u: Unpacked, offset: int) -> None:
        """Store a block unpacked with ``offset`` at ``block``."""
        at = e.at(block, part, 4 * e.target.lanes)
        move = self.offset(e) - offset
        for q, quad in enumerate(u.quads):
            if move:  # bytes stay below 256, so no carry crosses them
                quad = e.b.add(quad, e.const(quad.type, move * 0x01010101))
            e.store(quad, e.gep(at, 64 * q))
        if u.parts is not None:
            low = [] if u.parts.low is None else [u.parts.low, *u.parts.mins]
            numbers = [u.parts.d, *u.parts.scales, *low]
        else:
            numbers = [*u.scales, *u.mins]
        for j, v in enumerate(numbers):
            e.store(v, e.gep(at, 512 + 64 * j))

    def read(self, e: Emitter, panel: Value, i: Value, part: int | Value) -> Unpacked:
        n = 32 // self.format.group
        cursor = Cursor(e.at(panel, i, self.block_bytes), panel, panel, part)
        quads = [load_word(e, cursor, q) for q in range(8)]
        numbers = [load_f32(e, cursor.codes, 512 + 64 * j, part) for j in range(self.numbers)]
        if not self.format.integer_scales:
            return Unpacked(quads, numbers[:n], numbers[n:])
        scales, mins = ([e.b.bitcast(v, vec(I32, e.target.lanes)) for v in numbers[at : at + n]] for at in (1, n + 2))
        return Unpacked(quads, [], [], Parts(numbers[0], scales, numbers[n + 1] if self.format.has_min else None, mins))
