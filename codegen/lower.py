"""The final graph to launches.

Nodes are visited in order. A *fusion* (``lower_fusions``) claims several nodes and is emitted where its last node stands, so everything
it reads exists by then. Normalisation and rounding of activations become one launch. Other operators have a rule each in
``lower_generic`` and ``lower_sparse``, over what ``lower_operands`` offers to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.keep import expose
from ggufc.codegen.kernels import attention_cpu, cache, get_rows, quantize
from ggufc.codegen.lower_attributes import refuse_unknown_attributes
from ggufc.codegen.lower_conv import CONV_MATCHERS
from ggufc.codegen.lower_experts import emit_experts, match_gated_experts
from ggufc.codegen.lower_fusions import MATCHERS, Fusion, emit_norm
from ggufc.codegen.lower_generic import copy_to_output, lower_generic
from ggufc.codegen.lower_hyper import HYPER_MATCHERS
from ggufc.codegen.lower_operands import item_bytes, rope_table
from ggufc.codegen.lower_pointwise import match_chains
from ggufc.codegen.lower_routing import ROUTING_MATCHERS
from ggufc.codegen.schedule import NULL, Ref, Schedule, Step, fixed, form, input_spec, integer, rows_grid
from ggufc.codegen.weight_plan import WeightPlan
from ggufc.codegen.weights import activation_mode, q8_record
from ggufc.formats.artifact import Affine
from ggufc.formats.ggml_types import TYPES, row_bytes
from ggufc.ir.dims import Dim, IntDim, product
from ggufc.ir.graph import Graph, Node
from ggufc.ir.layout import Layout, layout

_MATCHERS = (*MATCHERS, match_gated_experts, *HYPER_MATCHERS, *ROUTING_MATCHERS, *CONV_MATCHERS)
"""Tried in order on each node that nothing has claimed yet."""


@dataclass
class Lowering:
    """State of one lowering; ``run`` returns the schedule and the weights it needs."""

    graph: Graph
    schedule: Schedule
    weights: WeightPlan
    users: dict[Node, list[Node]] = field(default_factory=dict)
    storage: dict[Node, Ref] = field(default_factory=dict)
    rounded: dict[tuple[Node, int, str], Ref] = field(default_factory=dict)
    anchors: dict[Node, Fusion] = field(default_factory=dict)
    claimed: set[Node] = field(default_factory=set)
    output_of: dict[Node, str] = field(default_factory=dict)

    def run(self) -> None:
        g = self.graph
        self.users = g.users()
        self.output_of = {node: name for name, node in g.outputs.items()}
        for node in g.inputs():
            if node.attrs["region"]:
                raise CodegenError(
                    f"input {node.attrs['name']!r}: compacted caches are a matter of sessions (compact_windows), not of compilation; "
                    "leave out swa_compress"
                )
            self.schedule.inputs.append(input_spec(node))
        for name, node in g.outputs.items():
            self.schedule.outputs[name] = [form(d) for d in node.ne]
        for node in g.nodes:
            refuse_unknown_attributes(node)
        self._match()
        for node in g.nodes:
            fusion = self.anchors.get(node)
            if fusion is not None:
                fusion.emit(self)
            elif node not in self.claimed and not node.is_leaf and not node.is_view:
                self._lower(node)
        for name, node in g.outputs.items():
            if self.storage.get(node, NULL) != Ref("output", name):
                copy_to_output(self, node, name)

    # Matching

    def _match(self) -> None:
        for node in self.graph.nodes:
            if node in self.claimed:
                continue
            for matcher in _MATCHERS:
                fusion = matcher(self, node)
                if fusion is not None:
                    self.anchors[fusion.anchor] = fusion
                    self.claimed.update(fusion.nodes)
                    break
        # A normalised row that only rounded products read is never stored in f32.
        for node in self.graph.nodes:
            if node.op.name == "rms_norm_mul" and node not in self.claimed and self._only_rounded(node):
                self.claimed.add(node)

        for chain in match_chains(self):
            self.anchors[chain.anchor] = chain
            self.claimed.update(chain.nodes)

    def _only_rounded(self, norm: Node) -> bool:
        users = self.users[norm]
        return (
            bool(users)
            and norm not in self.output_of
            and norm.type.rank == 2
            and all(
                u.op.name == "mul_mat" and u in self.claimed and u.operands[1] is norm and activation_mode(u.operands[0].dtype) != "f32"
                for u in users
            )
        )

    def single_user(self, node: Node) -> Node | None:
        users = self.users[node]
        return users[0] if len(users) == 1 and node not in self.output_of else None

    # References

    def ref(self, node: Node) -> tuple[Ref, Layout]:
        """Address of element 0 of ``node`` and its layout."""
        where = layout(node)
        base = self.root_ref(where.root)
        if isinstance(where.offset, Dim):
            raise CodegenError(f"node {node.name!r}: a view at the moving offset {where.offset} can only be the target of cpy")
        return base.at(where.offset * item_bytes(where.root) if where.offset else 0), where

    def root_ref(self, root: Node) -> Ref:
        if root in self.storage:
            return self.storage[root]
        kind = root.op.name
        if kind == "input":
            return Ref("input", root.attrs["name"])
        if kind == "cache":
            return Ref("cache", root.attrs["name"])
        if kind in ("set_rows", "cpy"):
            return self.root_ref(layout(root.operands[0 if kind == "set_rows" else 1]).root)
        if kind == "weight":
            return Ref("weight", self.weights.request(root, "plain").name)
        raise CodegenError(f"internal: node {root.name!r} ({kind}) is used before it is computed")

    def rows(self, node: Node) -> tuple[Ref, int, IntDim]:
        """(address, elements between rows, number of rows) of a matrix whose rows are contiguous."""
        at, where = self.ref(node)
        if not where.row_contiguous or isinstance(where.nb[1] if len(where.nb) > 1 else 0, Dim):
            raise CodegenError(f"node {node.name!r}: rows are not contiguous")
        count = product(where.ne[1:]) if len(where.ne) > 1 else 1
        return at, fixed(where.nb[1]) if len(where.nb) > 1 else fixed(where.ne[0]), count

    def result(self, node: Node) -> Ref:
        """Fresh storage for the result of ``node``: the output buffer if it is an output of f32 or i32; other types are copied there."""
        if node in self.output_of and node not in self.storage and node.dtype in ("f32", "i32"):
            at = Ref("output", self.output_of[node])
        else:
            at = self.schedule.new_value(form(node.type.nbytes), node.name)
        self.storage[node] = at
        return at

    def emit(self, step: Step) -> None:
        self.schedule.steps.append(step)

    # Rounded activations

    def rounded_rows(self, x: Node, mode: str) -> Ref:
        """Rows of ``x`` as q8 records; computed once per (rows, mode), normalisation included where ``x`` is only ever rounded."""
        key_node = layout(x).root
        where = layout(x)
        key = (key_node, fixed(where.offset), mode)
        if key in self.rounded:
            return self.rounded[key]
        norm = key_node.op.name == "rms_norm_mul" and key_node in self.claimed and key_node not in self.storage
        source = key_node.operands[0] if norm else x
        at, ld, count = self.rows(source)
        k = fixed(x.ne[0])
        stride = q8_record(k).stride
        out = self.schedule.new_value(form(count, stride), f"{x.name} (q8)")
        weight = Ref("weight", self.weights.request(key_node.operands[1], "plain").name) if norm else NULL
        spec = quantize.Quantize(k, mode, norm, float(key_node.attrs["eps"]) if norm else 0.0)
        sym, mult = rows_grid([count])
        self.emit(Step(spec, (at, integer(ld), weight, out), (3,), x.name + ".q8", sym, 1, mult, bytes=form(count, 4 * k + stride)))
        self.rounded[key] = out
        return out

    # Single nodes

    def _lower(self, node: Node) -> None:
        kind = node.op.name
        if kind == "get_rows" and node.operands[0].op.name == "weight" and node.operands[0].type.rank == 2 and node.dtype == "f32":
            self._embedding(node)
        elif kind == "rms_norm_mul" and node.type.rank == 2:
            emit_norm(self, node, node, None)
        elif kind == "flash_attn":
            self._flash_attn(node)
        elif kind == "rope_table":
            self._rope_table(node)
        elif kind == "set_rows":
            self._set_rows(node)
        elif kind == "mul_mat_id":
            if node.operands[0].op.name == "weight":
                emit_experts(self, node, node)
            else:
                lower_generic(self, node)
        else:
            lower_generic(self, node)

    def _embedding(self, node: Node) -> None:
        table, ids = node.operands
        k = fixed(table.ne[0])
        weight = self.weights.request(table, "packed")
        at, _ = self.ref(ids)
        sym, mult = rows_grid(node.ne[1:])
        out = self.result(node)
        self.emit(
            Step(
                get_rows.GetRows(table.dtype, k),
                (Ref("weight", weight.name), at, out),
                (2,),
                node.name,
                sym,
                1,
                mult,
                bytes=form(product(node.ne[1:]), 4 * k),
            )
        )

    def _flash_attn(self, node: Node) -> None:
        """Two launches: splits of long lists for a few tokens, then everything else."""
        q, k, v, cells, vis = node.operands[:5]
        a = node.attrs
        at, where = self.ref(q)
        d, heads = fixed(where.ne[0]), fixed(where.ne[1])
        if where.nb[0] != 1 or where.nb[1] != d:
            raise CodegenError(f"node {node.name!r}: query heads are not contiguous")
        dv, groups = fixed(node.ne[0]), int(a["n_head_kv"])
        values = layout(v)
        offset = fixed(values.offset)
        # Values within the keys' rows, or those rows themselves: a cache that is storage alone.
        shared = groups == 1 and values.root is layout(k).root and values.nb == (1, d)
        if not shared and not (offset == 0 and values.contiguous):
            raise CodegenError(f"node {node.name!r}: values that are a view of another cache than the keys' have no kernel")
        if offset % TYPES[v.dtype].block:
            raise CodegenError(f"node {node.name!r}: values that begin inside a {v.dtype} block have no kernel")
        v_at = self.root_ref(values.root).at(row_bytes(v.dtype, offset) if offset else 0)
        sinks = self.ref(node.operands[5])[0] if len(node.operands) > 5 else NULL
        spec = attention_cpu.FlashAttn(
            d, dv, heads, groups, k.dtype, v.dtype, float(a["scale"]), float(a["softcap"]), sinks is not NULL, shared
        )
        (sym, mult) = rows_grid([node.ne[2]])
        if mult != 1:
            raise CodegenError(f"internal: node {node.name!r} has a fixed token count")
        partials = self.schedule.new_value(
            {"R": -(-spec.partials_bytes // attention_cpu.SPLIT), "": spec.partials_bytes}, f"{node.name} (splits)"
        )
        out = self.result(node)
        lists = self.ref(cells)[0], self.ref(vis)[0]
        args = (at, integer(fixed(where.nb[2])), self.root_ref(k), v_at, *lists, out, integer(dv * heads), sinks)
        # Lists of chosen cells are as short as a window.
        listed = fixed(vis.operands[0].ne[0]) if vis.op.name == "list_spans" else 0
        seen = listed or (int(vis.attrs.get("window", 0)) if vis.op.name == "input" else 0)
        lanes = attention_cpu.window_lanes(seen)
        apart = attention_cpu.FlashAttnSplits(spec)
        grid = ("", 1, apart.units * lanes) if lanes else ("R", attention_cpu.LANE, apart.units)
        self.emit(Step(apart, (*args[:6], NULL, *args[7:], partials, integer(lanes)), (9,), f"{node.name}.splits", *grid))
        read = row_bytes(k.dtype, groups * d) + (0 if shared else row_bytes(v.dtype, groups * dv))
        moved: Affine = {"T": seen * read} if seen else {"R": read}
        self.emit(Step(spec, (*args, partials), (6,), node.name, sym, spec.token_block, spec.units, bytes=moved))

    def _rope_table(self, node: Node) -> None:
        rope_table(self, node, node.operands[0], node.operands[1] if len(node.operands) > 1 else None, self.result(node))

    def _set_rows(self, node: Node) -> None:
        target, source, slots = node.operands
        at, ld, count = self.rows(source)
        spec = cache.StoreRows(fixed(target.ne[0]), target.dtype)
        sym, mult = rows_grid([count])
        self.emit(Step(spec, (at, integer(ld), self.root_ref(target), self.ref(slots)[0]), (2,), node.name, sym, 1, mult))


def lower(graph: Graph, name: str = "eval", keep_values: bool = False) -> tuple[Schedule, WeightPlan]:
    """Schedule ``graph``; raises CodegenError naming the node that has no kernel. ``keep_values``: as ``keep.expose``."""
    low = Lowering(graph, Schedule(name), WeightPlan(graph))
    low.run()
    if keep_values:
        expose(low)
    return low.schedule, low.weights
