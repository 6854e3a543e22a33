"""Manifold hyper-connections: a residual of S parallel streams that every sublayer reads through one mixture and writes through another.

The residual is X [E, S, T]. Of its normed flattening one product with ``fn`` gives S read gates, S write gates and an S x S matrix:

    read_s  = sigmoid(scale_0 m_s + base_s) + eps
    write_s = 2 sigmoid(scale_1 m_{S+s} + base_{S+s})
    C[u,c]  = scale_2 m_{2S+uS+c} + base_{2S+uS+c}, made doubly stochastic by Sinkhorn's iterations

A sublayer f turns X into X'_c = write_c f(sum_s read_s X_s) + sum_u C[u,c] X_u: the row of C is the source stream, its column (fastest in
ggml's order) the destination. Sinkhorn: softmax over c, plus eps; columns divided by their sums plus eps; then, iterations - 1 times, rows
and columns likewise. It ends on columns. The merge after the last layer is a read gate alone, without the factor 2 and without a matrix.

Sources: ``deepseek4`` (eps above 0, no norm weight) and ``openpangu`` (eps 0, norm weight gamma) use the same formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufc.ir import Node
from ggufc.ir.dims import IntDim
from ggufc.models.blocks import Builder

_NORM_NODES = 5
"""Flattening, rms_norm, gamma, product with fn and its weight."""
_GATE_NODES = 7
"""Part of the mixture, part of scale and base, product, sum, sigmoid, eps or factor."""
_VECTOR_NODES = 6
"""gamma, scale and base with their casts."""


@dataclass(frozen=True)
class Site:
    """Where a sublayer's gates come from: names of the tensors and how the matrix is normalised. ``gamma`` "" is a norm without weight."""

    name: str
    fn: str
    scale: str
    base: str
    streams: int
    iterations: int
    eps: float
    gamma: str = ""

    @property
    def nodes(self) -> int:
        """The most nodes of ``gates``, ``mix_in`` and ``mix_out`` together."""
        return _NORM_NODES + _VECTOR_NODES + 3 * _GATE_NODES + 4 + 10 * self.iterations + MIX_IN_NODES + MIX_OUT_NODES

    @property
    def merge_nodes(self) -> int:
        """The most nodes of ``merge``."""
        return _NORM_NODES + _VECTOR_NODES + _GATE_NODES + MIX_IN_NODES


MIX_IN_NODES = 6
"""Reshaped gates, product, permute, cont, sum, reshape."""
MIX_OUT_NODES = 8
"""Reshape and repeat of the result, reshaped gates, product; two permutes, product, sum."""
CHOOSE_NODES = 3
"""Reshape, get_rows, reshape."""


@dataclass(frozen=True)
class Gates:
    """What one sublayer reads and writes with: ``read`` and ``write`` [S, T], ``matrix`` [S, S, T] (destination fastest)."""

    read: Node
    write: Node
    matrix: Node


def enter(b: Builder, x: Node, streams: int) -> Node:
    """The embedding [E, T] copied to every stream: [E, S, T]."""
    e, n = x.type.ne
    return b.add("repeat", b.add("reshape", x, name="streams.one", ne=(e, 1, n)), name="streams", ne=(e, streams, n))


def gates(b: Builder, x: Node, site: Site) -> Gates:
    """Gates of one sublayer from the streams x [E, S, T]."""
    s, name = site.streams, site.name
    mixture = _mixture(b, x, site)
    read = b.add("sigmoid", _affine(b, mixture, site, 0, 0, s, "read"), name=f"{name}.read")
    read = _plus(b, read, site.eps, f"{name}.read")
    write = b.add("sigmoid", _affine(b, mixture, site, 1, s, s, "write"), name=f"{name}.write")
    write = b.add("scale", write, name=f"{name}.write.doubled", s=2.0)
    logits = _affine(b, mixture, site, 2, 2 * s, s * s, "matrix")
    logits = b.add("reshape", logits, name=f"{name}.matrix.square", ne=(s, s, x.type.ne[2]))
    return Gates(read, write, _sinkhorn(b, logits, site))


def mix_in(b: Builder, x: Node, read: Node, name: str) -> Node:
    """``sum_s read_s X_s``: x [E, S, T], read [S, T] -> [E, T]."""
    e, s, n = x.type.ne
    weights = b.add("reshape", read, name=f"{name}.in.gates", ne=(1, s, n))
    weighted = b.add("mul", x, weights, name=f"{name}.in.weighted")
    across = b.add("cont", b.add("permute", weighted, name=f"{name}.in.permuted", axes=(1, 0, 2)), name=f"{name}.in.cont")
    return b.add("reshape", b.add("sum_rows", across, name=f"{name}.in.sum"), name=f"{name}.in", ne=(e, n))


def mix_out(b: Builder, x: Node, y: Node, g: Gates, name: str) -> Node:
    """``X'_c = write_c y + sum_u C[u,c] X_u``: streams x [E, S, T] and the sublayer's result y [E, T] -> [E, S, T]."""
    e, s, n = x.type.ne
    spread = b.add("repeat", b.add("reshape", y, name=f"{name}.out.one", ne=(e, 1, n)), name=f"{name}.out.spread", ne=(e, s, n))
    written = b.add("mul", spread, b.add("reshape", g.write, name=f"{name}.out.gates", ne=(1, s, n)), name=f"{name}.out.written")
    sources = b.add("permute", x, name=f"{name}.out.sources", axes=(1, 0, 2))
    columns = b.add("permute", g.matrix, name=f"{name}.out.columns", axes=(1, 0, 2))
    return b.add("add", b.add("mul_mat", sources, columns, name=f"{name}.out.mixed"), written, name=f"{name}.out")


def merge(b: Builder, x: Node, site: Site) -> Node:
    """The streams x [E, S, N] read through the model's last gates -> [E, N]."""
    with b.block(site.name, site.merge_nodes):
        read = b.add("sigmoid", _affine(b, _mixture(b, x, site), site, 0, 0, site.streams, "read"), name=f"{site.name}.read")
        return mix_in(b, x, _plus(b, read, site.eps, f"{site.name}.read"), site.name)


def choose(b: Builder, x: Node, rows: Node, name: str) -> Node:
    """The columns ``rows`` [O] of x [.., T], whatever its rank."""
    *inner, n = x.type.ne
    width: IntDim = 1
    for d in inner:
        width = width * d
    flat = x if len(inner) == 1 else b.add("reshape", x, name=f"{name}.flat", ne=(width, n))
    chosen = b.add("get_rows", flat, rows, name=f"{name}.rows")
    return chosen if len(inner) == 1 else b.add("reshape", chosen, name=f"{name}.chosen", ne=(*inner, rows.type.ne[0]))


def choose_gates(b: Builder, g: Gates, rows: Node, name: str) -> Gates:
    """What ``mix_out`` needs, of the wanted rows only."""
    return Gates(g.read, choose(b, g.write, rows, f"{name}.write"), choose(b, g.matrix, rows, f"{name}.matrix"))


def _mixture(b: Builder, x: Node, site: Site) -> Node:
    """``fn rms(flattened X)``: index s*E + e of the flattening is element e of stream s."""
    e, s, n = x.type.ne
    z = b.add("reshape", x, name=f"{site.name}.flat", ne=(e * s, n))
    z = b.add("rms_norm", z, name=f"{site.name}.rms", eps=b.hp.norm_eps)
    if site.gamma:
        z = b.add("mul", z, b.vector(site.gamma), name=f"{site.name}.normed")
    return b.add("mul_mat", b.weight(site.fn), z, name=f"{site.name}.mixture")


def _affine(b: Builder, mixture: Node, site: Site, k: int, offset: int, n: int, part: str) -> Node:
    """``scale_k * mixture + base`` of the entries offset .. offset+n-1 -> [n, T]."""
    name = f"{site.name}.{part}"
    width, columns = mixture.type.ne
    m, base, scale = mixture, b.vector(site.base), b.vector(site.scale)
    if width != n:
        m = b.add("view", mixture, name=f"{name}.part", ne=(n, columns), nb=(1, width), offset=offset)
        base = b.add("view", base, name=f"{name}.base", ne=(n,), nb=(1,), offset=offset)
        scale = b.add("view", scale, name=f"{name}.scale", ne=(1,), nb=(1,), offset=k)
    return b.add("add", b.add("mul", m, scale, name=f"{name}.scaled"), base, name=f"{name}.logits")


def _plus(b: Builder, x: Node, eps: float, name: str) -> Node:
    return b.add("scale", x, name=f"{name}.eps", s=1.0, b=eps) if eps else x


def _sinkhorn(b: Builder, logits: Node, site: Site) -> Node:
    """A doubly stochastic matrix [S, S, T] from logits."""
    name = f"{site.name}.matrix"
    m = b.add("soft_max", logits, name=f"{name}.soft_max", scale=1.0)
    m = _columns(b, _plus(b, m, site.eps, f"{name}.soft_max"), site, f"{name}.0")
    for i in range(1, site.iterations):
        total = _plus(b, b.add("sum_rows", m, name=f"{name}.{i}.row_sums"), site.eps, f"{name}.{i}.row_sums")
        m = _columns(b, b.add("div", m, total, name=f"{name}.{i}.rows"), site, f"{name}.{i}")
    return m


def _columns(b: Builder, m: Node, site: Site, name: str) -> Node:
    """Every column of m [S, S, T] divided by its sum over the rows."""
    s, _, n = m.type.ne
    across = b.add("cont", b.add("permute", m, name=f"{name}.permuted", axes=(1, 0, 2)), name=f"{name}.cont")
    total = b.add("reshape", b.add("sum_rows", across, name=f"{name}.column_sums"), name=f"{name}.column_sums.row", ne=(s, 1, n))
    return b.add("div", m, _plus(b, total, site.eps, f"{name}.column_sums"), name=f"{name}.columns")
