"""The schedule: launches over values, before they have addresses.

``lower`` produces a ``Schedule``; ``finish`` assigns slots, finds the launches each one must wait for and yields the manifest's
``Program``. The schedule prints as text (``ggufc dump --stage schedule``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.base import KernelSpec, signature, symbol
from ggufc.formats.artifact import Affine, Arg, Fixup, Input, Launch, Program, Slot
from ggufc.ir.dims import Dim, IntDim, to_form
from ggufc.ir.graph import Node
from ggufc.passes import memory_planner


@dataclass(frozen=True)
class Ref:
    """An argument. ``kind``: ``value`` (id), ``weight``/``input``/``output``/``cache`` (name), ``int`` or ``null``; ``offset`` in bytes."""

    kind: str
    name: str = ""
    value: int = 0
    offset: int = 0

    def at(self, offset: int) -> Ref:
        return Ref(self.kind, self.name, self.value, self.offset + offset)

    @property
    def resource(self) -> tuple[str, str | int] | None:
        """What a dependency is about; None for constants."""
        if self.kind == "value":
            return ("value", self.value)
        return (self.kind, self.name) if self.kind in ("output", "cache") else None


NULL = Ref("null")


def integer(v: int) -> Ref:
    return Ref("int", value=int(v))


@dataclass(frozen=True)
class Step:
    """One launch: ``spec`` over ``mult * ceil(sym / div)`` tiles. ``writes`` are the arguments (by index) it writes; others are read."""

    spec: KernelSpec
    args: tuple[Ref, ...]
    writes: tuple[int, ...]
    node: str
    sym: str = ""
    div: int = 1
    mult: int = 1
    bytes: Affine = field(default_factory=dict)
    flops: Affine = field(default_factory=dict)
    inplace: tuple[int, int] | None = None  # (written argument, read argument) that may share a buffer
    fixup: tuple[int, str, int] | None = None  # (argument, cache, step in bytes)


@dataclass
class Value:
    """Something computed: its size in bytes and the node it belongs to."""

    size: Affine
    label: str


@dataclass
class Schedule:
    """Launches in execution order and the values between them."""

    name: str
    steps: list[Step] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    outputs: dict[str, list[Affine]] = field(default_factory=dict)

    def new_value(self, size: Affine, label: str) -> Ref:
        self.values.append(Value(size, label))
        return Ref("value", label, len(self.values) - 1)

    def kernels(self) -> list[KernelSpec]:
        """Distinct specifications in order of first use."""
        return list(dict.fromkeys(step.spec for step in self.steps))

    def written(self) -> list[dict[int, Affine]]:
        """Per launch the arguments it writes, with the bytes of the value there; nothing for outputs and caches."""
        return [
            {k: dict(self.values[step.args[k].value].size) if step.args[k].kind == "value" else {} for k in step.writes}
            for step in self.steps
        ]

    def __str__(self) -> str:
        lines = [f"schedule @{self.name}: {len(self.steps)} launches, {len(self.kernels())} kernels, {len(self.values)} values"]
        waits = self._waits(lambda ref: ref.resource)
        for i, (step, wait) in enumerate(zip(self.steps, waits)):
            grid = f"{step.mult}" if not step.sym else f"{step.mult}*ceil({step.sym}/{step.div})"
            barrier = f"  wait [{wait}, {i})" if wait < i else ""
            names = ", ".join(f"{n}={_show(a)}" for n, a in zip(step.spec.arg_names, step.args))
            lines.append(f"  {i:4d}  {step.node or '-'}: {signature(step.spec)}\n        grid {grid}{barrier}\n        {names}")
        lines.append("kernels by the names of their code (--stage llvm, --stage asm)")
        lines.extend(f"  {symbol(spec)}: {signature(spec)}" for spec in self.kernels())
        return "\n".join(lines) + "\n"

    def _waits(self, resource: Callable[[Ref], object]) -> list[int]:
        """Per launch the first launch it must wait for (its own index: none).

        A wait completes *all* launches before it, so only launches since the last wait can conflict: read after write, write after read,
        write after write.
        """
        waits: list[int] = []
        since = 0
        written: set[object] = set()
        read: set[object] = set()
        for i, step in enumerate(self.steps):
            writes = {resource(step.args[k]) for k in step.writes} - {None}
            reads = {resource(a) for k, a in enumerate(step.args) if k not in step.writes} - {None}
            if (reads | writes) & written or writes & read:
                waits.append(since)
                since, written, read = i, set(), set()
            else:
                waits.append(i)
            written |= writes
            read |= reads
        return waits

    def finish(
        self,
        kernel_index: dict[KernelSpec, int],
        *,
        nodes: int,
        node_budget: int,
        reuse_key: Sequence[tuple[str, int | str | bool]],
        fusions: dict[str, int],
    ) -> Program:
        """Assign slots and waits; the result is what the artifact stores."""
        plan = memory_planner.plan(self._intervals())
        slot_of = dict(plan.assignment)

        def physical(ref: Ref) -> object:
            return ("slot", slot_of[ref.value]) if ref.kind == "value" else ref.resource

        launches, fixups = [], []
        for i, (step, wait) in enumerate(zip(self.steps, self._waits(physical))):
            args = [
                Arg("slot", "", slot_of[a.value], a.offset) if a.kind == "value" else Arg(a.kind, a.name, a.value, a.offset)
                for a in step.args
            ]
            launches.append(
                Launch(
                    kernel_index[step.spec],
                    args,
                    step.node,
                    step.sym,
                    step.div,
                    step.mult,
                    wait if wait < i else -1,
                    dict(step.bytes),
                    dict(step.flops),
                )
            )
            if step.fixup:
                arg, cache, size = step.fixup
                fixups.append(Fixup(i, arg, cache, size, step.node))
        slots = []
        for slot in plan.slots:
            holders = [self.values[v].label for v in range(len(self.values)) if v in slot.members]
            slots.append(Slot([dict(size) for size in slot.sizes], holders))
        return Program(self.name, launches, slots, self.inputs, self.outputs, fixups, list(reuse_key), node_budget, nodes, fusions)

    def _intervals(self) -> list[memory_planner.Interval]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        inplace: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            for ref in step.args:
                if ref.kind == "value":
                    first.setdefault(ref.value, i)
                    last[ref.value] = i
            if step.inplace:
                to, source = step.args[step.inplace[0]], step.args[step.inplace[1]]
                if to.kind == source.kind == "value" and first[to.value] == i:
                    inplace[to.value] = source.value
        return [
            memory_planner.Interval(
                v,
                self.values[v].size,
                first[v],
                last[v],
                inplace[v] if v in inplace and last[inplace[v]] == first[v] else None,
                self.values[v].label,
            )
            for v in sorted(first)
        ]


def _show(ref: Ref) -> str:
    if ref.kind == "null":
        return "-"
    if ref.kind == "int":
        return str(ref.value)
    name = f"%{ref.value}" if ref.kind == "value" else f"{ref.kind} {ref.name}"
    return f"{name}+{ref.offset}" if ref.offset else name


def fixed(d: IntDim) -> int:
    """A dimension that must be a number; CodegenError where it is symbolic."""
    if isinstance(d, Dim):
        raise CodegenError(f"internal: the dimension {d} must be fixed here")
    return d


def form(d: IntDim, factor: int = 1) -> Affine:
    """A dimension times ``factor`` as the manifest writes it."""
    return {key: coef * factor for key, coef in to_form(d, products=True).items()}


def input_spec(node: Node) -> Input:
    """What the runtime must know to fill an input of a graph."""
    a = node.attrs
    return Input(a["name"], a["kind"], node.dtype, [form(d) for d in node.ne], a["window"], a["ratio"])


def add_forms(*forms: Affine) -> Affine:
    total: dict[str, int] = {}
    for f in forms:
        for key, value in f.items():
            total[key] = total.get(key, 0) + value
    return total


def rows_grid(dims: Iterable[IntDim]) -> tuple[str, int]:
    """(symbol, multiplier) of a product of dimensions that contains at most one plain symbol.

    Raises CodegenError for anything else: the launch table can express ``mult * ceil(symbol / div)`` only.
    """
    sym, mult = "", 1
    for d in dims:
        if not isinstance(d, Dim):
            mult *= d
            continue
        ((mono, coef),) = d.terms if len(d.terms) == 1 else ((("", ""), 0),)
        if len(mono) != 1 or sym:
            raise CodegenError(f"internal: a launch over {d} tiles cannot be expressed")
        sym, mult = mono[0], mult * coef
    return sym, mult
