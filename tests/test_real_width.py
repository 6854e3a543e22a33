"""One layer of each kind at real width, 32768 cells deep: 2048 values per token, 2048 rows chosen, latent rows of 576 values."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggufc.runtime import Session

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "sparse.py"
DEPTH, MORE = 32768, 70


@pytest.mark.full
def test_wide_layers_have_the_same_bits_in_every_chunking(tmp_path: Path) -> None:  # S100, S111, S154
    """The benchmark makes the model and measures it within 4 GB; then tokens after a full context, in batches of several sizes."""
    command = [
        sys.executable,
        str(BENCHMARK),
        "--family",
        "openpangu",
        "--kind",
        "sparse",
        "--context",
        str(DEPTH),
        "--keep",
        str(tmp_path),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    match = re.search(rf"openpangu sparse +{DEPTH} cells: +[\d.]+ ms per token.* attention reads +4\.42 MB.* peak (\d+) MiB", run.stdout)
    assert match is not None and int(match[1]) < 4096, run.stdout
    spec = importlib.util.spec_from_file_location("sparse_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    tokens, found = np.random.default_rng(1).integers(0, 1000, MORE).tolist(), []
    for n_ubatch, n_threads, call in ((1, 1, 1), (MORE, 2, MORE), (33, 1, 40), (9, 3, MORE)):
        with Session(tmp_path / "openpangu-sparse.ggufc", n_ctx=DEPTH + 256, n_batch=MORE, n_ubatch=n_ubatch, n_threads=n_threads) as s:
            benchmark.fill(s, DEPTH - 31)
            found.append(np.concatenate([s.decode(tokens[at : at + call], logits="all") for at in range(0, MORE, call)]))
    assert np.isfinite(found[0]).all() and found[0].std() > 0.1
    for other in found[1:]:
        assert np.array_equal(other.view(np.uint32), found[0].view(np.uint32))
