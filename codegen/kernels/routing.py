"""Expert routing in one kernel: gated scores, the choice of the best, and the weights of the chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I32, Emitter, Value, vec
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.strided import Grid, for_rows, for_vectors, row_grid
from ggufc.ir.dims import IntDim

_LOWEST = -3.4028234663852886e38


@dataclass(frozen=True)
class Route:
    """ids i32[k, T] of the largest ``gate(scores) + bias``, largest first; weights f32[k, T] = ``scale * gate(scores)`` of the chosen.

    ``normalise``: "sum" divides the weights by their sum, "softmax" is a softmax of them. ``scores`` f32[n, T] with leading dimension
    ``lds``; ``bias`` f32[n] with ``bias``; ``work`` f32[n, T] holds what is compared. Without ``choose`` the ids are given, without
    ``weigh`` the weights are left out. Of equals the lowest number is chosen. One tile per block of tokens, see ``grid``. A token's
    numbers depend on its scores alone: entry i belongs to lane i mod lanes, lanes are added by halving.
    """

    n: int
    k: int
    tokens: IntDim
    gate: str
    bias: bool = False
    choose: bool = True
    weigh: bool = True
    normalise: str = "none"
    scale: float = 1.0
    arg_names: ClassVar[tuple[str, ...]] = ("scores", "lds", "bias", "work", "ids", "weights")

    def grid(self) -> Grid:
        return row_grid(self.tokens, self.n)

    def emit(self, e: Emitter) -> None:
        def row(index: list[Value]) -> None:
            _Row(self, e, index[0]).emit()

        for_rows(e, (self.tokens, 1, 1), self.n, row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


class _Row:
    """One token."""

    def __init__(self, spec: Route, e: Emitter, t: Value) -> None:
        self.spec, self.e = spec, e
        self.lanes = 1 if e.spmd else e.target.lanes
        self.type = vec(F32, self.lanes)
        self.scores = e.at(e.arg_ptr(0), e.b.mul(t, e.arg_int(1)), 4)
        self.work = e.at(e.arg_ptr(3), t, 4 * spec.n)
        self.ids, self.weights = (e.at(e.arg_ptr(i), t, 4 * spec.k) for i in (4, 5))
        self.top, self.total = e.f32(0.0), e.f32(1.0)

    def emit(self) -> None:
        if self.spec.gate == "softmax":
            self.measure()
        if self.spec.choose:
            self.compare()
            self.choose()
        if self.spec.weigh:
            # Where lanes are threads, the one that has stored the ids reads them.
            with self.e.one_lane():
                self.weigh()

    def gated(self, v: Value) -> Value:
        """Scores, vectors or single ones, through the gate."""
        e, b, gate = self.e, self.e.b, self.spec.gate
        if gate == "sigmoid":
            return vmath.sigmoid(e, v)
        if gate == "sqrt_softplus":
            return e.fsqrt(vmath.softplus(e, v))
        if gate == "softmax":
            n = v.type.count if hasattr(v.type, "count") else 1
            return b.fdiv(vmath.exp_flushed(e, b.fsub(v, e.splat(self.top, n))), e.splat(self.total, n))
        return v

    def load(self, p: Value, i: Value, mask: Value | None, lanes: int) -> Value:
        at = self.e.at(p, i, 4)
        return self.e.load(vec(F32, lanes), at) if mask is None else self.e.load_lanes(F32, lanes, at, mask)

    def measure(self) -> None:
        """The largest score and the sum of the softmax."""
        e, b = self.e, self.e.b
        most, sums = e.var(self.type, e.const(self.type, _LOWEST)), e.var(self.type, e.const(self.type, 0.0))

        def largest(i: Value, lanes: int, mask: Value | None) -> None:
            v = self.load(self.scores, i, mask, lanes)
            most.set(e.fmax(most.get(), v if mask is None else b.select(mask, v, e.const(v.type, _LOWEST))))

        def add(i: Value, lanes: int, mask: Value | None) -> None:
            p = vmath.exp_flushed(e, b.fsub(self.load(self.scores, i, mask, lanes), e.splat(self.top, lanes)))
            sums.set(b.fadd(sums.get(), p if mask is None else b.select(mask, p, e.const(p.type, 0.0))))

        for_vectors(e, self.spec.n, largest)
        self.top = e.reduce(most.get(), "max")
        for_vectors(e, self.spec.n, add)
        self.total = e.reduce(sums.get(), "add")

    def compare(self) -> None:
        """What is compared, to ``work``; every lane later reads what it has written itself."""
        e = self.e

        def put(i: Value, lanes: int, mask: Value | None) -> None:
            v = self.gated(self.load(self.scores, i, mask, lanes))
            if self.spec.bias:
                v = e.b.fadd(v, self.load(e.arg_ptr(2), i, mask, lanes))
            if mask is None:
                e.store(v, e.at(self.work, i, 4))
            else:
                e.store_lanes(v, e.at(self.work, i, 4), mask)

        for_vectors(e, self.spec.n, put)

    def choose(self) -> None:
        """Each time the best of those behind the one chosen before: smaller, or equal with a larger number."""
        e, b = self.e, self.e.b
        before, at = e.var(F32, e.f32(float("inf"))), e.var(F32, e.f32(-1.0))
        best, first = e.var(self.type), e.var(self.type)
        nothing = e.const(self.type, float("-inf"))

        def number(i: Value, lanes: int) -> Value:
            """Numbers of the lanes as f32, exact below 2^24."""
            start = e.splat(b.sitofp(i, F32), lanes)
            return b.fadd(start, e.const_vec(F32, range(lanes))) if lanes > 1 else start

        def behind(i: Value, lanes: int, mask: Value | None) -> tuple[Value, Value]:
            v = self.load(self.work, i, mask, lanes)
            last, place = e.splat(before.get(), lanes), e.splat(at.get(), lanes)
            later = b.and_(b.fcmp_ordered("==", v, last), b.fcmp_ordered(">", number(i, lanes), place))
            open_ = b.or_(b.fcmp_ordered("<", v, last), later)
            return v, open_ if mask is None else b.and_(open_, mask)

        def largest(i: Value, lanes: int, mask: Value | None) -> None:
            v, open_ = behind(i, lanes, mask)
            best.set(e.fmax(best.get(), b.select(open_, v, nothing)))

        with e.for_range(0, self.spec.k, name="round") as j:
            best.set(nothing)
            for_vectors(e, self.spec.n, largest)
            most = e.reduce(best.get(), "max")
            # The largest of the negated numbers; where nothing compares (NaN), the last expert.
            first.set(e.const(self.type, float(1 - self.spec.n)))

            def lowest(i: Value, lanes: int, mask: Value | None, most: Value = most) -> None:
                v, open_ = behind(i, lanes, mask)
                hit = b.and_(open_, b.fcmp_ordered("==", v, e.splat(most, lanes)))
                first.set(e.fmax(first.get(), b.select(hit, b.fneg(number(i, lanes)), nothing)))

            for_vectors(e, self.spec.n, lowest)
            place = b.fneg(e.reduce(first.get(), "max"))
            with e.one_lane():
                e.store(b.fptosi(place, I32), e.at(self.ids, j, 4))
            before.set(most)
            at.set(place)

    def weigh(self) -> None:
        """Weights of the chosen, in the order of the choice."""
        e, b, spec = self.e, self.e.b, self.spec
        top = e.var(F32, e.f32(_LOWEST))
        total = e.var(F32, e.f32(0.0))

        def chosen(j: Value) -> Value:
            return self.gated(e.load(F32, e.at(self.scores, e.sext64(e.load(I32, e.at(self.ids, j, 4))), 4)))

        if spec.normalise == "softmax":
            with e.for_range(0, spec.k) as j:
                top.set(e.fmax(top.get(), chosen(j)))

        def weight(j: Value) -> Value:
            return vmath.exp_flushed(e, b.fsub(chosen(j), top.get())) if spec.normalise == "softmax" else chosen(j)

        if spec.normalise != "none":
            with e.for_range(0, spec.k) as j:
                total.set(b.fadd(total.get(), weight(j)))
        with e.for_range(0, spec.k) as j:
            w = weight(j)
            if spec.normalise != "none":
                w = b.fdiv(w, total.get())
            e.store(b.fmul(w, e.f32(spec.scale)) if spec.scale != 1.0 else w, e.at(self.weights, j, 4))
