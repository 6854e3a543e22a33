"""Weights computed at compile time are stored with the values the interpreter gives them, whatever form launches ask for."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.artifact_writer import stored_bytes, stored_chunks
from ggufc.codegen.lower import lower
from ggufc.codegen.weights import weight_format
from ggufc.formats.quants import quantize
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym
from ggufc.passes import PassManager

K, N = 64, 40


class File:
    """What writing needs of a model file."""

    def __init__(self, **tensors: np.ndarray) -> None:
        self.tensors = tensors

    def data(self, name: str) -> np.ndarray:
        return self.tensors[name].reshape(-1).view(np.uint8)


def stored(turned: bool, dtype: str, values: np.ndarray) -> np.ndarray:
    """Bytes stored for the transpose of a tensor, as the weight of a product or of a sum."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    w = g.add("cont", g.add("transpose", g.weight("w", TensorType(dtype, (N, K)))))
    if turned:
        g.outputs["o"] = g.add("mul_mat", w, g.input("x", "embd", TensorType("f32", (K, Sym("T")))), name="y")
    else:
        g.outputs["o"] = g.add("add", g.input("x", "embd", TensorType("f32", (K, N))), w, name="y")
    PassManager.parse("hoist,dce").run(g)
    _, plan = lower(g)
    (weight,) = plan.stored.values()
    assert weight.derived and not weight.sources
    found = np.concatenate(list(stored_chunks(g, weight, File(w=quantize(dtype, values)))))
    assert found.nbytes == stored_bytes(weight)
    return found


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_transposed_weight(dtype):
    values = np.random.default_rng(3).normal(size=(K, N)).astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        values = np.float32([1.5, -2.0, 0.25, 3.0])[np.arange(K * N).reshape(K, N) % 4]
    packed = weight_format(dtype).repack(quantize(dtype, values.T), K)
    assert np.array_equal(stored(True, dtype, values), packed)
    assert np.array_equal(stored(False, dtype, values).view(np.float32).reshape(N, K), values.T)
