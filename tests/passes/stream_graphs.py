"""Graphs of hyper-connections as builders compose them, with one thing that may be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggufc.ir import Graph, Node, Sym, TensorType, interpret, verify

T, O = Sym("T"), Sym("O")


class Streams:
    """One sublayer on S streams: gates from a mixture, reading, a result, writing; ``chosen`` writes wanted tokens only."""

    def __init__(self, e: int = 8, s: int = 2, iterations: int = 2, eps: float = 0.0, chosen: bool = False, broken: str = "") -> None:
        self.e, self.s, self.iterations, self.eps, self.broken = e, s, iterations, eps, broken
        width = s * s + 2 * s
        g = self.g = Graph("example", symbols=("T", "O"))
        embd = g.input("embd", "embd", TensorType("f32", (e * s, T)))
        flat = g.add("relu", embd, name="streams.flat")
        x = g.add("reshape", flat, name="streams", ne=(e, s, T))
        self.mixture = g.add("mul_mat", g.weight("fn", TensorType("f32", (e * s, width))), flat, name="site.mixture")
        self.base, self.scale = g.weight("base", TensorType("f32", (width,))), g.weight("scale", TensorType("f32", (3,)))
        read = self.plus(g.add("sigmoid", self.affine(0, 0, s), name="site.read"))
        write = g.add("scale", g.add("sigmoid", self.affine(1, s, s)), name="site.write", s=1.0 if broken == "doubled" else 2.0)
        matrix = self.matrix()
        weighted = g.add("mul", x, g.add("reshape", read, ne=(1, s, T)))
        across = g.add("cont", g.add("permute", weighted, axes=(1, 0, 2)))
        y = g.add("reshape", g.add("sum_rows", across), name="site.in", ne=(e, T))
        y = g.add("tanh", y, name="sublayer")
        n: Any = T
        if chosen:
            n, rows = O, g.input("out_ids", "out_ids", TensorType("i32", (O,)))
            y = g.add("get_rows", y, rows)
            x = g.add("reshape", g.add("get_rows", flat, rows), ne=(e, s, O))
            write = g.add("get_rows", write, rows)
            others = g.input("positions", "positions", TensorType("i32", (O,))) if broken == "others" else rows
            matrix = g.add("reshape", g.add("get_rows", g.add("reshape", matrix, ne=(s * s, T)), others), ne=(s, s, O))
        spread = g.add("repeat", g.add("reshape", y, ne=(e, 1, n)), ne=(e, s, n))
        written = g.add("mul", spread, g.add("reshape", write, ne=(1, s, n)))
        columns = matrix if broken == "rows" else g.add("permute", matrix, axes=(1, 0, 2))
        mixed = g.add("mul_mat", g.add("permute", x, axes=(1, 0, 2)), columns)
        g.outputs["y"] = g.add("add", mixed, written, name="site.out")
        verify(g)

    def plus(self, x: Node) -> Node:
        return self.g.add("scale", x, s=1.0, b=self.eps) if self.eps else x

    def affine(self, part: int, offset: int, n: int) -> Node:
        g, width = self.g, self.s * self.s + 2 * self.s
        start = offset if self.broken != "offset" or part else offset + 1
        m = g.add("view", self.mixture, ne=(n, T), nb=(1, width), offset=start)
        scale = g.add("view", self.scale, ne=(1,), nb=(1,), offset=0 if self.broken == "scale" else part)
        return g.add("add", g.add("mul", m, scale), g.add("view", self.base, ne=(n,), nb=(1,), offset=offset))

    def matrix(self) -> Node:
        g, s = self.g, self.s
        logits = g.add("reshape", self.affine(2, 2 * s, s * s), ne=(s, s, T))
        m = self.columns(self.plus(g.add("soft_max", logits, scale=0.5 if self.broken == "softmax" else 1.0)))
        for i in range(1, self.iterations):
            rows = g.add("div", m, self.plus(g.add("sum_rows", m)))
            if self.broken == "between" and i == 1:
                g.outputs["between"] = rows
            m = self.columns(rows)
        return m

    def columns(self, m: Node) -> Node:
        g, s = self.g, self.s
        across = g.add("cont", g.add("permute", m, axes=(1, 0, 2)))
        total = g.add("reshape", g.add("sum_rows", across), ne=(s, 1, T))
        return g.add("div", m, self.plus(total))


def arguments(g: Graph, seed: int, tokens: int = 3) -> Any:
    """Random weights and inputs, no caches, and the symbols."""
    rng = np.random.default_rng(seed)
    weights = {n.attrs["tensor"]: rng.normal(size=tuple(reversed(n.type.ne))).astype(np.float32) for n in g.find("weight")}
    inputs: dict[str, np.ndarray] = {}
    for node in g.inputs():
        name = node.attrs["name"]
        inputs[name] = rng.normal(size=(tokens, int(node.ne[0]))).astype(np.float32) if name == "embd" else np.array([2, 0], np.int32)
    if "positions" in inputs:
        inputs["positions"] = np.array([1, 1], np.int32)
    return weights, inputs, {}, {"T": tokens, "O": 2}


def evaluate(g: Graph, seed: int) -> dict[str, np.ndarray]:
    """Outputs for random weights and inputs."""
    return interpret(g, *arguments(g, seed))
