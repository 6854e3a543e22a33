"""The same goldens on a real GPU, and timings beside the performance model. Run with ``pytest -m gpu tests/cuda/test_on_device.py -s``.

Skipped where there is no device; one run takes a few minutes, most of it compilation.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from fat_models import CASES, compiled
from ggufc.codegen.kernels.base import KernelSpec
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.nvptx import PTX_VERSIONS, describe, roofline
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
    known = sorted(int(sm.removeprefix("sm_")) for sm in PTX_VERSIONS)
    return f"sm_{max(c for c in known if c <= device.capability)}"


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


def timed(device, spec: KernelSpec, arrays: list, tokens: int) -> tuple[float, np.ndarray]:
    """Seconds of one launch (the best of several), and its result (argument 2)."""
    module = device.load(ptx_of(spec, target_for(device)))
    words, held = [], []
    for a in arrays:
        if isinstance(a, np.ndarray):
            held.append(device.alloc(a.nbytes))
            device.upload(held[-1], a)
            words.append(held[-1])
        else:
            words.append(a or 0)
    symbols = np.array([tokens if name == "T" else 0 for name in PARAMS], np.int64)
    held.append(device.alloc(symbols.nbytes))
    device.upload(held[-1], symbols)
    (entry,) = [e for e in describe(spec).entries if e.low <= tokens and (not e.high or tokens <= e.high)]
    count = fmt.tiles(entry.grid, {"T": tokens})
    function = device.function(module, entry.symbol)
    best = float("inf")
    for _ in range(10):
        start = device.mark()
        device.launch(function, count, entry.block, [*words, held[-1], 0, 0, count])
        stop = device.mark()
        device.synchronize()
        best = min(best, device.elapsed(start, stop) / 1e3)
    out = np.empty_like(arrays[2])
    device.download(words[2], out)
    for address in held:
        device.free(address)
    return best, out


@pytest.mark.parametrize("tokens", [1, 4, 64, 512])
def test_products_of_an_8b_model(tokens, device):
    """Right, and how far from the roofline; prints the figures for docs/gpu.md."""
    name, k, n = "q4_k", 4096, 28672
    few = 256  # rows checked against float64
    raw = weight_rows(name, k, n)
    x = np.random.default_rng(1).standard_normal((tokens, k)).astype(np.float32)
    spec = MatMul(name, k, n, "none", False, "T")
    weights = packed(name, raw, k)
    seconds, y = timed(device, spec, [weights, records(x, "q8_2"), np.zeros((tokens, n), np.float32), k, n, None, n, None], tokens)
    want = product(name, raw[:few], k, x)
    assert np.abs(y[:, :few] - want).max() <= 1e-5 * np.abs(want).max()
    machine = roofline.H200
    limit = max(weights.nbytes / machine.bandwidth, 2.0 * k * n * tokens / (machine.tensor if tokens >= 17 else machine.dp4a))
    print(f"\n{device.name}: {name} {n}x{k}, {tokens} tokens: {1e6 * seconds:.1f} us, roofline of {machine.name} {1e6 * limit:.1f} us")


def test_decode_and_prefill_times(device, tmp_path):
    """Whole steps of a small model, for the cost of launches."""
    model = compiled("quant-q4_k", tmp_path, f"cuda:{target_for(device)}")
    with Session(model.path, n_ctx=256, profile=True, executor=on_device(device)) as s:
        for n in (64, 1, 1):
            began = time.perf_counter()
            s.decode(list(range(n)))
            launches = s.executor.profile()[:, 1]
            print(f"\n{n} tokens: {1e3 * (time.perf_counter() - began):.2f} ms, {len(launches)} launches of {launches.mean() / 1e3:.1f} us")
