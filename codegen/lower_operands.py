"""What rules of lowering share: operands as strided tensors, contiguous copies, launches over the rows of a result.

A view costs nothing. Static offsets go into the argument's address so that equal shapes share a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import decode, rope
from ggufc.codegen.kernels.cache import SIZES
from ggufc.codegen.kernels.cache_blocks import BLOCKS
from ggufc.codegen.kernels.elementwise import Copy
from ggufc.codegen.kernels.strided import Grid, Strided, contiguous
from ggufc.codegen.schedule import NULL, Ref, Step, fixed, form, rows_grid
from ggufc.formats.abi import PARAMS
from ggufc.formats.ggml_types import row_bytes
from ggufc.ir.dims import Dim, IntDim, product
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering

Emit = Callable[["Lowering", Node], None]
"""A rule: emits the launches of one node."""


def stored_dtype(root: Node) -> str:
    """Type of a plain tensor in memory: weights in half precision are stored as f32 where no product reads them."""
    return "f32" if root.op.name == "weight" and root.dtype in ("f16", "bf16") else root.dtype


def covers(node: Node) -> bool:
    """Whether the node is all of its storage, in order, so that an in-place result may take it over."""
    where = layout(node)
    return where.contiguous and where.offset == 0 and product(where.ne) == where.root.type.numel


def item_bytes(root: Node) -> int:
    """Bytes of one element of a plain tensor; CodegenError for blocks, inside which nothing has an address."""
    dtype = stored_dtype(root)
    if dtype not in SIZES:
        raise CodegenError(f"node {root.name!r}: a view into the middle of {dtype} data has no kernel")
    return SIZES[dtype]


def strided(low: Lowering, node: Node) -> tuple[Ref, Strided]:
    """Address and strided form of a node."""
    where = layout(node)
    dtype = stored_dtype(where.root)
    base = low.root_ref(where.root)
    if dtype in BLOCKS and where.root.op.name != "weight":
        base, dtype = _decoded(low, where.root), "f32"
    if isinstance(where.offset, Dim):
        return base, Strided(dtype, where.ne, where.nb, where.offset)
    return base.at(where.offset * SIZES.get(dtype, 4)), Strided(dtype, where.ne, where.nb)


def _decoded(low: Lowering, root: Node) -> Ref:
    """A tensor of blocks, most of all a cache, as f32, once per version: only unfused graphs look at blocks across rows."""
    key = (root, 0, "decoded")
    if key not in low.rounded:
        rows = product(root.ne[1:])
        if isinstance(rows, Dim) and (len(rows.terms) != 1 or len(rows.terms[0][0]) != 1):
            raise CodegenError(
                f"node {root.name!r}: {rows} rows of {root.dtype} have no kernel that decodes them; rows must be counted by one symbol"
            )
        out = low.schedule.new_value(form(root.type.numel, 4), f"{root.name} (f32)")
        sym, mult = rows_grid([rows])
        low.emit(Step(decode.DecodeRows(fixed(root.ne[0]), root.dtype), (low.root_ref(root), out), (1,), root.name, sym, 1, mult))
        low.rounded[key] = out
    return low.rounded[key]


def stored_blocks(low: Lowering, node: Node) -> tuple[Ref, tuple[IntDim, ...]]:
    """Address of a whole tensor of blocks as it lies in memory, and its shape in words of two bytes (blocks have an even number of bytes).

    CodegenError for types whose blocks no kernel moves, and for weights, which are stored in the forms products read.
    """
    if node.dtype not in BLOCKS:
        raise CodegenError(f"node {node.name!r}: {node.dtype} data has no kernel that moves its blocks; known are {', '.join(BLOCKS)}")
    root = layout(node).root
    if root.op.name == "weight":
        raise CodegenError(
            f"tensor {root.attrs['tensor'] or root.name}: a {node.dtype} weight is stored as products read it, so its blocks cannot be "
            "joined with what each step computes; join weights with weights (pass hoist), or store it as f16"
        )
    ne = node.type.ne4
    return low.root_ref(root), (row_bytes(node.dtype, fixed(ne[0])) // 2, *ne[1:])


def contiguous_copy(low: Lowering, node: Node) -> Ref:
    """The node's values side by side, i32 or f32, in storage of their own."""
    at, source = strided(low, node)
    target = contiguous("i32" if node.dtype == "i32" else "f32", node.ne)
    whole = low.schedule.new_value(form(node.type.numel, 4), f"{node.name} (contiguous)")
    launch(low, Copy(source, target), (at, whole), (1,), node)
    return whole


def whole(low: Lowering, node: Node, dtype: str = "f32") -> Ref:
    """Address of the node's values side by side, copied first where they are not, or are of another type."""
    at, s = strided(low, node)
    return at if layout(node).contiguous and s.dtype == dtype and s.offset == 0 else contiguous_copy(low, node)


LISTS_WITH_HOLES = ("top_k", "indexer_topk", "mask_to_index")
"""Operators whose lists end in -1 where there is less to choose from than asked for."""


def refuse_holes(node: Node, indices: Node) -> None:
    """CodegenError where the indices that ``node`` trusts may end in -1."""
    origin = layout(indices).root
    if origin.op.name in LISTS_WITH_HOLES and (origin.op.name != "top_k" or isinstance(origin.operands[0].ne[0], Dim)):
        raise CodegenError(f"node {node.name!r}: rows of a list that may end in -1 ({origin.op.name} {origin.name!r}) have no kernel")


def launch(
    low: Lowering,
    spec: Any,
    args: tuple[Ref, ...],
    writes: tuple[int, ...],
    node: Node,
    inplace: tuple[int, int] | None = None,
    moved: IntDim | None = None,
    fixup: tuple[int, str, int] | None = None,
) -> None:
    """One launch over ``spec.grid()``; ``moved``: bytes read and written, by default one value in and one out per element; ``fixup``: as in
    ``Step``.
    """
    unknown = node.type.symbols.difference(PARAMS)
    if unknown:
        raise CodegenError(f"node {node.name!r}: sizes with the symbol {min(unknown)} have no kernel; known are {', '.join(PARAMS)}")
    grid: Grid = spec.grid()
    traffic = form(node.type.numel * 8 if moved is None else moved)
    low.emit(Step(spec, args, writes, node.name, grid.sym or "", grid.div, grid.mult, bytes=traffic, inplace=inplace, fixup=fixup))


def rope_table(low: Lowering, node: Node, pos: Node, factors: Node | None, table: Ref) -> None:
    """The launch that fills ``table`` f32[n_dims, T] with the angles ``node`` (``rope`` or ``rope_table``) asks for."""
    a = node.attrs
    spec = rope.RopeTable(
        a["n_dims"],
        a["base"],
        a["freq_scale"],
        a["ext_factor"],
        a["attn_factor"],
        a["beta_fast"],
        a["beta_slow"],
        a["n_ctx_orig"],
        factors is not None,
        bool(a["inverse"]),
    )
    ff = Ref("weight", low.weights.request(factors, "plain").name) if factors is not None else NULL
    sym, mult = rows_grid([pos.type.numel])
    low.emit(Step(spec, (low.ref(pos)[0], ff, table), (2,), node.name, sym, 1, mult))
