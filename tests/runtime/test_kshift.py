"""Rotating stored keys equals storing them at the new positions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import fake_model
from ggufc.formats import artifact as fmt
from ggufc.runtime import kshift
from ggufc.runtime.caches import CacheBuffers
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import KVCells
from ggufc.runtime.session import Session
from ggufc.runtime.sizes import Sizes

HEAD, HEADS, N_DIMS = 64, 2, 48
YARN = dict(freq_scale=0.25, ext_factor=1.0, n_ctx_orig=128, beta_fast=32.0, beta_slow=1.0)


def keys_at(raw: np.ndarray, pos: np.ndarray, rope: dict) -> np.ndarray:
    """Rotation by position written out pair by pair, after the specification of RoPE and YaRN."""
    out = raw.astype(np.float64).copy()
    n, base = rope["n_dims"], rope["base"]
    s, ext = rope.get("freq_scale", 1.0), rope.get("ext_factor", 0.0)
    factors = rope.get("freq_factors") or [1.0] * (n // 2)

    def c(beta: float) -> float:
        return n * np.log(rope["n_ctx_orig"] / (2 * np.pi * beta)) / (2 * np.log(base))

    for i in range(n // 2):
        theta = pos * base ** (-2 * i / n) / factors[i]
        phi = s * theta
        if ext:
            lo, hi = max(0, np.floor(c(rope["beta_fast"]))), min(n - 1, np.ceil(c(rope["beta_slow"])))
            r = 1 - min(1, max(0, (i - lo) / max(0.001, hi - lo)))
            phi = s * theta * (1 - r) + theta * r
        a, b = (2 * i, 2 * i + 1) if rope["mode"] == "norm" else (i, i + n // 2)
        u, v = raw[..., a].astype(np.float64), raw[..., b].astype(np.float64)
        cos, sin = np.cos(phi)[:, None], np.sin(phi)[:, None]
        out[..., a], out[..., b] = u * cos - v * sin, u * sin + v * cos
    return out


STORED = {"f32": 0, "f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2, "q5_1": 0.1, "q5_0": 0.15, "q4_1": 0.2, "q4_0": 0.3, "iq4_nl": 0.4}
"""Types keys are stored in, and how far values around 1 move when they are."""


def cache_of(dtype: str, rope: dict) -> tuple[CacheBuffers, KVCells]:
    caches = [fmt.Cache("k", 0, "k", dtype, HEAD * HEADS, HEAD, rope=rope), fmt.Cache("v", 0, "v", dtype, HEAD * HEADS, HEAD)]
    artifact = SimpleNamespace(manifest=fake_model.manifest(caches=caches), path="toy")
    return CacheBuffers(artifact, Sizes(256)), KVCells(256)


@pytest.mark.parametrize("mode", ["norm", "neox"])
@pytest.mark.parametrize(("dtype", "atol"), [("f32", 1e-5), ("f16", 2e-3), ("bf16", 3e-2), ("q8_0", 4e-2), ("q5_1", 0.3), ("q4_0", 0.8)])
@pytest.mark.parametrize(
    "extra", [{}, YARN, {"freq_factors": [1.0 + 0.1 * i for i in range(N_DIMS // 2)]}], ids=["plain", "yarn", "factors"]
)
def test_shift_equals_rotation_to_the_new_position(mode, dtype, atol, extra):  # S144
    rope = {"mode": mode, "n_dims": N_DIMS, "base": 1000.0, **extra}
    buffers, cells = cache_of(dtype, rope)
    raw = np.random.default_rng(1).standard_normal((10, HEADS, HEAD)).astype(np.float32)
    pos = np.arange(10)
    view = buffers.view("k")
    view[:10] = kshift.from_f32(keys_at(raw, pos, rope).reshape(10, -1).astype(np.float32), dtype)
    buffers.view("v")[:10] = 7
    untouched = view[:4].copy()
    cells.insert(0, pos.astype(np.int32), np.zeros(10, np.int32))
    cells.seq_add(0, 4, -1, 7)
    assert kshift.apply(cells, buffers) == 6
    want = keys_at(raw, np.where(pos >= 4, pos + 7, pos), rope)
    got = kshift.to_f32(view[:10], dtype).reshape(10, HEADS, HEAD)
    assert np.abs(got - want).max() < atol
    assert np.array_equal(view[:4], untouched) and (buffers.view("v")[:10] == 7).all()
    assert not cells.needs_shift and not cells.delta.any()
    assert np.array_equal(
        got[..., N_DIMS:], kshift.to_f32(kshift.from_f32(raw.reshape(10, -1), dtype), dtype).reshape(raw.shape)[..., N_DIMS:]
    ) or dtype.startswith("q")


def test_there_and_back_keeps_lengths():
    rope = {"mode": "neox", "n_dims": N_DIMS, "base": 1000.0, "attn_factor": 1.3, **YARN}
    buffers, cells = cache_of("f32", rope)
    buffers.view("k")[:5] = kshift.from_f32(np.random.default_rng(2).standard_normal((5, HEAD * HEADS)).astype(np.float32), "f32")
    before = kshift.to_f32(buffers.view("k")[:5], "f32")
    cells.insert(0, np.arange(5, dtype=np.int32), np.zeros(5, np.int32))
    for delta in (40, -40):
        cells.seq_add(0, 0, -1, delta)
        kshift.apply(cells, buffers)
    assert np.abs(kshift.to_f32(buffers.view("k")[:5], "f32") - before).max() < 1e-5


@pytest.mark.parametrize(("dtype", "atol"), STORED.items())
def test_stored_forms_round_trip(dtype, atol):
    rows = np.random.default_rng(3).standard_normal((7, 64)).astype(np.float32)
    once = kshift.from_f32(rows, dtype)
    back = kshift.to_f32(once, dtype)
    assert set(STORED) == set(kshift.STORABLE)
    assert np.abs(back - rows).max() <= atol
    if "q" not in dtype:
        assert np.array_equal(kshift.from_f32(back, dtype), once)
    assert np.array_equal(kshift.to_f32(kshift.from_f32(np.zeros((1, 64), np.float32), dtype), dtype), np.zeros((1, 64)))


@pytest.mark.parametrize("change", [{"mode": "mrope"}, {"n_dims": 6}, {"n_dims": 3}, {"n_dims": "4"}, {"base": 0.0}])
def test_unknown_rotations_are_refused_before_anything_changes(tmp_path, change):  # S145
    caches = [
        fmt.Cache("blk.0.k", 0, "k", "f32", 4, 4, rope={"mode": "neox", "n_dims": 4, "base": 10.0} | change),
        fmt.Cache("blk.0.v", 0, "v", "f32", 1, 1),
    ]
    with Session(fake_model.write(tmp_path / "m.ggufc", fake_model.manifest(caches=caches)), n_threads=1) as s:
        s.decode([100, 101])
        with pytest.raises(RuntimeRefusal, match="larger n_ctx") as refusal:
            s.seq_add(0, 0, -1, 5)
        assert refusal.value.soft and s.pos_max(0) == 1 and not s.cells.needs_shift
        s.decode([102])


def test_frequency_factors_by_tensor_name():
    rope = {"mode": "norm", "n_dims": 8, "base": 100.0, "freq_factors": "rope_freqs.weight"}
    factors = np.array([1, 2, 4, 8], np.float32)
    found = kshift.angles(rope, kshift._freq_factors(rope, {"rope_freqs.weight": factors.view(np.uint8)}))
    assert np.allclose(found, 100.0 ** (-np.arange(4) / 4) / factors)
    with pytest.raises(RuntimeRefusal, match=r"rope_freqs\.weight"):
        kshift._freq_factors(rope, {})


def test_a_variant_shifts_by_the_factors_its_own_launches_read():
    long, short, other = (np.array(v, np.float32) for v in ([1, 3, 9, 2], [1, 1.5, 2, 1.25], [4, 4, 4, 4]))
    padded = {name: np.pad(v.view(np.uint8), (0, 48)) for name, v in (("short", short), ("long", long), ("other", other))}

    def program(name: str, factors: str, kernel: int = 0) -> fmt.Program:
        args = [fmt.Arg("input", "positions"), fmt.Arg("weight", factors), fmt.Arg("slot")]
        launches = [fmt.Launch(kernel, args, "blk.0.rope.table"), fmt.Launch(1, [fmt.Arg("weight", "w")], "out")]
        return fmt.Program(name, launches, [], [], {})

    k = fmt.Cache("blk.0.k", 0, "k", "f32", 8, 8, rope={"mode": "neox", "n_dims": 8, "base": 10.0, "freq_factors": short.tolist()})
    v = fmt.Cache("blk.0.v", 0, "v", "f32", 8, 8)
    variants = {name: program(name, *a) for name, a in {"eval": ("short",), "eval@x > 1": ("long",), "eval@x > 2": ("other", 7)}.items()}
    artifact = SimpleNamespace(
        manifest=fake_model.manifest(caches=[k, v]),
        program=variants.__getitem__,
        file=SimpleNamespace(tensors=padded, data=padded.__getitem__),
    )
    assert kshift.specs_for(artifact, variants["eval"]) == [k, v]
    found = kshift.specs_for(artifact, variants["eval@x > 1"])
    assert found[0].rope == {**k.rope, "freq_factors": [1.0, 3.0, 9.0, 2.0]} and found[1] == v
    with pytest.raises(RuntimeRefusal, match=r"does not say how eval@x > 2 rotates the keys of cache blk\.0\.k") as refusal:
        kshift.specs_for(artifact, variants["eval@x > 2"])  # another kernel may rotate in another way altogether
    assert refusal.value.soft
