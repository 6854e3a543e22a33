"""Caches split by heads over two memories, in state files and against a model that keeps them whole."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest

from ggufc.formats.artifact import Cache
from ggufc.formats.ggml_types import TYPES
from ggufc.runtime import state, state_load
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import KVCells
from ggufc.runtime.rows import CacheRows, HostPart, head_split
from ggufc.runtime.session import Session
from ggufc.runtime.state_io import CountingSink, FileSink, Source
from split_buffers import SplitBuffers

pytest_plugins = ("runtime_fixtures",)

HEADS, HEAD = 4, 32
SPLITS = (1, HEADS // 2, HEADS - 1)
LONG = 640  # more than one micro-batch of 512
FIRST_LAYER = 16 + 8 * LONG + 8  # magic, version, no tokens, number of cells; cells; v_state and number of layers


def caches(dtype: str, layers: int = 2) -> list[Cache]:
    return [Cache(f"blk.{i}.{part}", i, part, dtype, HEADS * HEAD, HEAD) for i in range(layers) for part in "kv"]


def guarded(specs: list[Cache], n_cells: int, split: dict[int, int]) -> tuple[SplitBuffers, list[np.ndarray]]:
    """A store whose parts lie in arrays of their own with guard bytes around them; the guards."""
    store, guards = SplitBuffers(specs, n_cells, split), []
    for spec in specs:
        parts = []
        for part in store.rows(spec.name).parts:
            memory = np.full(n_cells * part.row_bytes + 128, 0xA5, np.uint8)
            memory[64:-64] = 0
            guards += [memory[:64], memory[-64:]]
            parts.append(HostPart(memory[64:-64].reshape(n_cells, part.row_bytes)))
        store._rows[spec.name] = CacheRows(spec, parts, store.rows(spec.name).split)
    return store, guards


def filled(store: SplitBuffers, n_cells: int, holes: bool) -> tuple[KVCells, dict[str, np.ndarray]]:
    """Cells of sequence 0 (634+ tokens; with holes where another sequence was or is) and the full rows by position."""
    cells = KVCells(n_cells, 2, 1)
    rng = np.random.default_rng(11)
    at = pos = 0
    while pos < LONG:
        n = min(int(rng.integers(20, 140)) if holes else 512, LONG - pos)
        cells.insert(at, np.arange(pos, pos + n, dtype=np.int32), np.zeros(n, np.int32))
        at, pos = at + n, pos + n
        if holes:
            cells.insert(at, np.arange(3, dtype=np.int32) + at, np.ones(3, np.int32))
            at += 3
    rows = {}
    for name in store.specs:
        rows[name] = rng.integers(0, 256, (LONG, store.rows(name).row_bytes), np.uint8)
        store.rows(name).write(cells.list_of(0).cells, rows[name])
    return cells, rows


def saved(cells: KVCells, store: SplitBuffers) -> bytes:
    file, count = io.BytesIO(), CountingSink()
    state.write_sequence(FileSink(file), 0, [], cells, store, 2)
    state.write_sequence(count, 0, [], cells, store, 2)
    assert count.size == len(file.getvalue())
    return file.getvalue()


def loaded(blob: bytes, store: SplitBuffers, cells: KVCells) -> np.ndarray:
    """Restore as sequence 1 into whatever cells are free; the cells in order of position."""
    source = Source(io.BytesIO(blob), "blob")
    found = state_load.parse_sequence(source, cells, store, 2)
    where = cells.place(len(found.pos))
    assert where is not None
    cells.insert_at(where, found.pos, np.full(len(where), 1, np.int32))
    state_load.restore(source, found, where, store)
    return cells.list_of(1).cells


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("g", SPLITS)
@pytest.mark.parametrize("holes", [False, True])
def test_the_writer_goes_part_by_part_over_all_cells(g, dtype, holes):  # S1
    store, guards = guarded(caches(dtype), 1024, {0: g, 1: g})
    cells, rows = filled(store, 1024, holes)
    blob = saved(cells, store)
    first, rest = head_split(caches(dtype)[0], g)
    full = first + rest
    assert full == HEADS * HEAD // TYPES[dtype].block * TYPES[dtype].bytes
    at = FIRST_LAYER
    order = cells.pos[np.sort(cells.list_of(0).cells)]
    for name in ("blk.0.k", "blk.1.k", "blk.0.v", "blk.1.v"):
        kind, row, heads = struct.unpack_from("<iQI", blob, at)
        assert (kind, row, heads) == (TYPES[dtype].id | 1 << 16, full, g)  # the header advertises the full row
        payload = blob[at + 16 : at + 16 + LONG * full]
        assert payload == rows[name][order, :first].tobytes() + rows[name][order, first:].tobytes()
        at += 16 + LONG * full
    assert at + 8 == len(blob)
    assert all((guard == 0xA5).all() for guard in guards)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("g", SPLITS)
@pytest.mark.parametrize(("from_holes", "into_holes"), [(False, False), (True, False), (False, True), (True, True)])
def test_every_row_of_both_parts_comes_back(g, dtype, from_holes, into_holes):  # S2
    store, _ = guarded(caches(dtype), 1024, {0: g, 1: g})
    cells, rows = filled(store, 1024, from_holes)
    blob = saved(cells, store)
    other, guards = guarded(caches(dtype), 2048, {0: g, 1: g})
    target = KVCells(2048, 2, 1)
    if into_holes:
        for at in range(0, 2048, 3):
            target.insert(at, np.array([at], np.int32), np.zeros(1, np.int32))
    where = loaded(blob, other, target)
    assert bool((np.diff(np.sort(where)) > 1).any()) == into_holes
    assert all(np.array_equal(other.rows(name).read(where), rows[name]) for name in rows)
    assert all((guard == 0xA5).all() for guard in guards)


def test_without_a_split_the_bytes_are_the_plain_ones():  # S3
    specs = caches("f16")
    mixed, plain = SplitBuffers(specs, 1024, {1: 2}), SplitBuffers(specs, 1024)
    cells, rows = filled(plain, 1024, True)
    for name in rows:
        mixed.rows(name).write(cells.list_of(0).cells, rows[name])
    a, b = saved(cells, mixed), saved(cells, plain)
    order = cells.pos[np.sort(cells.list_of(0).cells)]
    plain_form = [struct.pack("<iQ", 1, 256) + rows[name][order].tobytes() for name in ("blk.0.k", "blk.1.k", "blk.0.v", "blk.1.v")]
    begin = FIRST_LAYER
    assert b[begin:] == b"".join(plain_form) + struct.pack("<II", 0, 0)
    assert a[:begin] == b[:begin]
    assert a[begin : begin + len(plain_form[0])] == plain_form[0]  # the layer that is not split
    assert plain_form[2] in a and plain_form[1] not in a
    assert len(a) == len(b) + 2 * 4


@pytest.mark.parametrize(
    ("cache", "heads", "why"),
    [
        (Cache("blk.1.k", 1, "k", "f16", 128, 32), 4, "cache blk.1.k: 4 of 4 heads cannot lie apart; choose from 1 to 3"),
        (Cache("blk.1.k", 1, "k", "f16", 128, 32), 0, "0 of 4 heads"),
        (Cache("blk.2.v", 2, "v", "q8_0", 64, 16), 1, "cache blk.2.v: 1 heads of 16 values are not whole q8_0 blocks of 32"),
        (Cache("blk.3.k", 3, "k", "f16", 576, 576), 1, "1 of 1 heads"),
    ],
)
def test_what_cannot_be_split_is_refused(cache, heads, why):  # S4
    with pytest.raises(RuntimeRefusal, match=why):
        head_split(cache, heads)


def test_parts_make_up_rows():
    with pytest.raises(RuntimeRefusal, match=r"parts of 64 \+ 64 bytes do not make up its rows of 256 bytes"):
        CacheRows(caches("f16")[0], [HostPart(np.zeros((4, 64), np.uint8))] * 2, 1)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("saved_as", [0, *SPLITS])
@pytest.mark.parametrize("loaded_as", [0, *SPLITS])
def test_another_split_gets_the_same_rows(saved_as, loaded_as, dtype):  # S5
    store = SplitBuffers(caches(dtype), 1024, {0: saved_as, 1: 0})
    cells, rows = filled(store, 1024, True)
    other = SplitBuffers(caches(dtype), 1024, {0: loaded_as, 1: 2})
    where = loaded(saved(cells, store), other, KVCells(1024, 2, 1))
    assert all(np.array_equal(other.rows(name).read(where), rows[name]) for name in rows)


@pytest.mark.parametrize("heads", [0, 4, 77])
def test_an_impossible_split_is_refused_naming_both(heads):  # S5
    store = SplitBuffers(caches("f16"), 1024, {0: 2})
    cells, _ = filled(store, 1024, False)
    blob = bytearray(saved(cells, store))
    struct.pack_into("<I", blob, FIRST_LAYER + 12, heads)
    with pytest.raises(RuntimeRefusal, match=rf"split of K of layer 0 is {heads} heads in the saved state and 3 here"):
        loaded(bytes(blob), SplitBuffers(caches("f16"), 1024, {0: 3}), KVCells(1024, 2, 1))


def test_logits_after_a_way_through_split_caches_are_those_of_the_unsaved_run(compiled):  # S2, S5
    tokens = np.random.default_rng(9).integers(3, 300, LONG + 8).tolist()
    with Session(compiled("llama-gqa-tied"), n_ctx=1024, n_batch=1024, n_ubatch=512, n_seq_max=2, n_threads=2) as s:
        s.decode(tokens[:100], seq=0, logits="none")
        s.decode(tokens[:7], seq=1, logits="none")
        s.decode(tokens[100:LONG], seq=0, logits="none")
        plain = io.BytesIO()
        s.state_save(plain, 0)
        want = s.decode(tokens[LONG:], seq=0, logits="all")
        specs = list(s.executor.caches.specs.values())
        assert {spec.row // spec.head for spec in specs} == {2}
        split = SplitBuffers(specs, 1024, {0: 1, 1: 1})
        cells = KVCells(1024, 2, 1)
        cells.insert(0, np.arange(200, dtype=np.int32), np.zeros(200, np.int32))
        loaded(plain.getvalue(), split, cells)
        cells.seq_rm(0)
        cells.seq_cp(1, 0)
        s.reset()
        assert s.state_load(saved(cells, split), 1) == LONG
        got = s.decode(tokens[LONG:], seq=1, logits="all")
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
