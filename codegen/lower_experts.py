"""Products with chosen experts, and the gated pair of them that becomes one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import matmul_id
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.lower_fusions import Fusion
from ggufc.codegen.lower_operands import refuse_holes
from ggufc.codegen.schedule import NULL, Ref, Step, fixed, form, integer, rows_grid
from ggufc.codegen.weights import activation_mode, weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.ir.dims import product
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


def emit_experts(low: Lowering, node: Node, anchor: Node, up: Node | None = None, act: str = "") -> None:
    """``mul_mat_id`` by weights into ``anchor``; with ``act`` act(gate) * up, where ``up`` is a second one, or the upper half of ``node``'s
    rows if None.
    """
    experts, x, ids = node.operands
    refuse_holes(node, ids)
    k, stored, n_expert = (fixed(d) for d in experts.ne)
    n = fixed(anchor.ne[0])
    mode = activation_mode(experts.dtype)
    at = low.rows(x)[0] if mode == "f32" else low.rounded_rows(x, mode)
    sym, mult = rows_grid([node.type.ne4[2]])
    if sym and mult != 1:
        raise CodegenError(f"node {node.name!r}: products over {node.type.ne4[2]} rows are not supported")
    used, broadcast = fixed(node.ne[1]), bool(x.type.ne4[1] == 1)
    epilogue, pitch = f"{act}_glu" if act else "none", stored if stored != n else 0
    spec = matmul_id.MatMulId(experts.dtype, k, n, n_expert, used, broadcast, sym or str(mult), epilogue, pitch)
    tiles = matmul_id.tiles(spec) * (1 if sym else -(-mult // matmul_id.TOKENS))
    weight = Ref("weight", low.weights.request(experts, "packed").name)
    second = NULL
    if up is not None:
        second = Ref("weight", low.weights.request(up.operands[0], "packed").name)
    elif act:
        second = weight.at(weight_format(experts.dtype).packed_bytes(k, n))
    out = low.result(anchor)
    args = (weight, at, out, low.ref(ids)[0], integer(rows_argument(spec.rows)), second)
    flops = form(product(anchor.type.ne), 2 * k * spec.unit)
    low.emit(Step(spec, args, (2,), node.name, sym, matmul_id.TOKENS, tiles, flops=flops))


@dataclass
class GatedExperts(Fusion):
    """``glu`` of two products with the same experts of the same activations, or of the halves of one, in one launch."""

    gate: Node
    up: Node | None

    def emit(self, low: Lowering) -> None:
        emit_experts(low, self.gate, self.anchor, self.up, self.anchor.attrs["fn"])


def match_gated_experts(low: Lowering, node: Node) -> GatedExperts | None:
    if node.op.name != "glu":
        return None
    gate, up = node.operands
    if not all(low.single_user(v) is node for v in (gate, up)):
        return None
    if gate.op.name == up.op.name == "mul_mat_id":
        same = gate.operands[1:] == up.operands[1:] and gate.operands[0].type == up.operands[0].type
        weights = all(p.operands[0].op.name == "weight" for p in (gate, up))
        return GatedExperts(node, (node, gate, up), gate, up) if same and weights else None
    return _halves(low, node, gate, up)


def _halves(low: Lowering, node: Node, gate: Node, up: Node) -> GatedExperts | None:
    """Gate and up as the two halves of the rows of one product."""
    if not (gate.is_view and up.is_view):
        return None
    first, second = layout(gate), layout(up)
    both = first.root
    if both is not second.root or both.op.name != "mul_mat_id" or both.operands[0].op.name != "weight" or both in low.output_of:
        return None
    n, used, tokens = *(fixed(d) for d in both.ne[:2]), both.ne[2]
    half = ((n // 2, used, tokens), (1, n, n * used))
    fits = n % (2 * ROWS) == 0 and all((tuple(v.ne), tuple(v.nb)) == half for v in (first, second))
    if not fits or (first.offset, second.offset) != (0, n // 2) or set(low.users[both]) != {gate, up}:
        return None
    return GatedExperts(node, (node, gate, up, both), both, None)
