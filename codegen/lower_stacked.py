"""Products of a stack of quantised matrices, one per head, with each head's activations (latent attention's K and V maps)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import elementwise, lists, matmul_id, quantize
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.lower_operands import launch, strided
from ggufc.codegen.schedule import NULL, Ref, Step, fixed, form, integer, rows_grid
from ggufc.codegen.weights import activation_mode, q8_record
from ggufc.formats.ggml_types import row_bytes
from ggufc.ir.dims import product
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


def stacked_product(low: Lowering, node: Node) -> None:
    """w [K, N, H], or a matrix [K, N*H] reshaped, times x [K, T, H]: the product with experts in which every token chose all of them, in
    order.

    Activations are copied to [K, H, T], rounded, multiplied, and the result is turned back to [N, T, H].
    """
    w, x = node.operands
    k, n, heads = (fixed(d) for d in w.type.ne4[:3])
    tokens = x.type.ne4[1]
    sym, mult = rows_grid([tokens])
    mode = activation_mode(w.dtype)
    if mode == "f32" or (sym and mult != 1):
        raise CodegenError(f"node {node.name!r}: a stack of {w.dtype} matrices over {tokens} rows has no kernel")
    at, source = strided(low, x)
    by_token = Strided(source.dtype, (k, heads, tokens), (source.nb[0], source.nb[2], source.nb[1]), source.offset)
    flat = low.schedule.new_value(form(x.type.numel, 4), f"{x.name} (by token)")
    launch(low, elementwise.Copy(by_token, contiguous("f32", by_token.ne[:3])), (at, flat), (1,), x)
    rounded = low.schedule.new_value(form(product(x.ne[1:]), q8_record(k).stride), f"{x.name} (q8)")
    all_sym, all_mult = rows_grid([product(x.ne[1:])])
    low.emit(Step(quantize.Quantize(k, mode, False, 0.0), (flat, integer(k), NULL, rounded), (3,), x.name + ".q8", all_sym, 1, all_mult))
    ids = low.schedule.new_value(form(tokens, 4 * heads), f"{node.name} (heads)")
    low.emit(Step(lists.Counting(heads), (ids,), (0,), f"{node.name}.heads", sym, 1, mult))
    spec = matmul_id.MatMulId(w.dtype, k, n, heads, heads, False, sym or str(mult))
    tiles = matmul_id.tiles(spec) * (1 if sym else -(-mult // matmul_id.TOKENS))
    weight = Ref("weight", low.weights.request(layout(w).root, "packed", shape=w.ne).name)
    by_head = low.schedule.new_value(form(node.type.numel, 4), f"{node.name} (by token)")
    moved = {"": heads * n * row_bytes(w.dtype, k)}
    flops = form(node.type.numel, 2 * k)
    args = (weight, rounded, by_head, ids, integer(rows_argument(spec.rows)))
    low.emit(Step(spec, args, (2,), f"{node.name}.product", sym, matmul_id.TOKENS, tiles, moved, flops))
    turned = Strided("f32", (n, tokens, heads), (1, n * heads, n))
    launch(low, elementwise.Copy(turned, contiguous("f32", node.ne)), (by_head, low.result(node)), (1,), node)
