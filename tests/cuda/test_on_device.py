"""The same goldens and bit checks on a real GPU: ``pytest -m gpu tests/cuda/test_on_device.py``. Speed: ``benchmarks/gpu.py``.

Skipped where there is no device; one run takes a few minutes, most of it compilation.
"""

from __future__ import annotations

import numpy as np
import pytest

from fat_models import CASES, compiled
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.nvptx import describe
from ggufc.codegen.weights import activation_mode
from ggufc.formats import cuda as fmt
from ggufc.formats.abi import PARAMS
from ggufc.runtime.cuda import on_device, open_device
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session
from gpu_harness import ptx_of
from products import packed, product, records, weight_rows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    try:
        with open_device() as opened:
            yield opened
    except RuntimeRefusal as why:
        pytest.skip(str(why))


def target_for(device) -> str:
    """The newest architecture the device runs."""
    found = fmt.newest_for(device.capability)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["llama-gqa-tied", *CASES])
def test_goldens(name, device, tmp_path):
    """S75."""
    model = compiled(name, tmp_path, f"cuda:{target_for(device)}")
    model.check(model.run(executor=on_device(device)))


def test_bits_do_not_depend_on_the_batch(device, tmp_path):
    """S65."""
    model = compiled("llama-gqa-tied", tmp_path, f"cuda:{target_for(device)}")
    tokens = np.random.default_rng(0).integers(0, 200, 100)

    def logits(cuts: list[int]) -> bytes:
        with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
            return np.concatenate([s.decode(part, logits="all") for part in np.split(tokens, cuts)]).tobytes()

    assert logits([]) == logits([1, 2, 19, 40, 41]) == logits(list(range(1, 100)))


def launched(device, spec: MatMul, arrays: list[np.ndarray], tokens: int) -> np.ndarray:
    """What one launch of a product makes of weights, activations and outputs."""
    module = device.load(ptx_of(spec, target_for(device)))
    symbols = np.array([tokens if name == "T" else 0 for name in PARAMS], np.int64)
    held = [device.alloc(a.nbytes) for a in [*arrays, symbols]]
    for address, a in zip(held, [*arrays, symbols]):
        device.upload(address, a)
    (entry,) = [e for e in describe(spec).entries if e.low <= tokens and (not e.high or tokens <= e.high)]
    count = fmt.tiles(entry.grid, {"T": tokens})
    words = [*held[:3], spec.k, spec.n, 0, 0, 0, rows_argument("T")]
    assert len(words) == len(spec.arg_names)
    device.launch(device.function(module, entry.symbol), count, entry.block, [*words, held[3], 0, 0, count])
    out = np.empty_like(arrays[2])
    device.download(held[2], out)
    for address in held:
        device.free(address)
    return out


def check_product(device, tokens: int, k: int, n: int) -> None:
    name, few = "q4_k", min(n, 256)  # rows checked against float64
    raw = weight_rows(name, k, n)
    x = np.random.default_rng(1).standard_normal((tokens, k)).astype(np.float32)
    arrays = [packed(name, raw, k), records(x, "q8_2"), np.zeros((tokens, n), np.float32)]
    y = launched(device, MatMul(name, k, n, "none", False, "T"), arrays, tokens)
    want = product(name, raw[:few], k, x)
    assert np.abs(y[:, :few] - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("tokens", [1, 4, 64, 512])
def test_products_of_an_8b_model(tokens, device):
    check_product(device, tokens, 4096, 28672)


@pytest.mark.parametrize("name", ["q4_k", "f16", "bf16"])
def test_products_have_the_same_bits_for_any_number_of_tokens(name, device):
    """S65. For 16-bit weights this asks of tensor cores that a result does not depend on its column in the fragment."""
    k, n, tokens = 4096, 96, 70
    x = np.random.default_rng(2).standard_normal((tokens, k)).astype(np.float32)
    raw, spec = weight_rows(name, k, n), MatMul(name, k, n, "none", False, "T")

    def bits(start: int, stop: int) -> bytes:
        rows = records(x[start:stop], activation_mode(name))
        return launched(device, spec, [packed(name, raw, k), rows, np.zeros((stop - start, n), np.float32)], stop - start).tobytes()

    whole = bits(0, tokens)
    for start, stop in ((0, 1), (5, 6), (3, 12), (40, 69)):
        assert bits(start, stop) == whole[4 * n * start : 4 * n * stop]


@pytest.mark.parametrize("n", [1, 2])
def test_offload(n, device, tmp_path):
    """Some layers on the device: the golden within its tolerance."""
    model = compiled("llama-gqa-tied", tmp_path, f"cuda:{target_for(device)}")
    model.check(model.run(executor=on_device(device, n_gpu_layers=n)))
