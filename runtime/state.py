"""Saving the state of a context: tokens, cells, and the rows of every cache.

Little endian. A *session* blob holds the whole context, a *sequence* blob one sequence, which may be restored as any other; a *partial*
blob holds only what dropping cells cannot undo, so it is small and is restored into the sequence it came from.

    session    u32 'ggsn', u32 version, tokens, arch text, RNG text, u32 n + i32 output rows, u64 n + f32 logits, u64 n + f32 embeddings, KV
    sequence   u32 'ggsq', u32 version, tokens, KV
    partial    u32 'ggsq', u32 version, tokens, u32 'PART', i32 last position, u32 cells, then KV from v_state on without K and V rows
    KV         u32 cells; per cell in index order i32 pos, u32 n_ids (0 in a sequence blob), i32 ids[n_ids]; u32 v_state; u32 n_layer;
               per layer K; per layer V unless v_state is 2; u32 recurrent marker; u32 indexer marker, then layers that have indexer keys
    K, V       i32 type (-1: none), u64 bytes of a row (0: none), rows in the order of the cells

Tokens are u32 n + i32[n] as far as they are known; texts are u32 n + n bytes. v_state says how values are kept: 0 row per cell, 1
transposed, 2 not at all; this engine never transposes.

With compacted window caches (one sequence only) ``compacted`` stands before the cells of a sequence blob, and after those of a partial one:
the rows of these caches exist nowhere else, so a partial blob carries them, with all other layers as absent.

    compacted  u32 'SWAC', u32 rows of a cache, u32 live rows, i32 cells without a row, u32 next row
               the payload of such a layer is its live rows, those of the last cells, in order of position

Layers split by heads set ``SPLIT_FLAG`` in the type and add u32 G after the row size. The size is that of the full row; the payload is the
first part's piece of every cell, then the second part's. Layers that are not split have the plain form. Rows stored under a Hadamard
transform set ``TURNED_FLAG`` and add its u32 block, after G if there is one: the same bytes mean something else without it.

The size of a blob comes from the same writer over a sink that counts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.formats.ggml_types import TYPES

from .errors import RuntimeRefusal
from .kvcells import KVCells
from .rows import ROW_PARALLEL, CacheRows, Store
from .state_io import Sink
from .windows import WindowRows

SESSION_MAGIC, SESSION_VERSION = 0x6767736E, 10
SEQUENCE_MAGIC, SEQUENCE_VERSION = 0x67677371, 4
PARTIAL_MARKER, COMPACT_MARKER = 0x54524150, 0x53574143
SPLIT_FLAG, TURNED_FLAG = 1 << 16, 1 << 17
V_ROWS, V_TRANSPOSED, V_ABSENT = 0, 1, 2


def layer_table(store: Store, n_layer: int) -> tuple[list[fmt.Cache | None], list[fmt.Cache | None], list[fmt.Cache]]:
    """K and V caches by layer (None where a layer has none) and the indexer caches in order of layers.

    RuntimeRefusal for a cache whose rows do not belong to cells: such state has no place in these blobs.
    """
    for cache in store.specs.values():
        if cache.part not in ROW_PARALLEL:
            raise RuntimeRefusal(
                f"the state cannot be saved or restored: cache {cache.name} ({cache.part}) holds state that does not belong to cells"
            )
    layers = max([n_layer, *(cache.layer + 1 for cache in store.specs.values())])
    by_place = {(cache.part, cache.layer): cache for cache in store.specs.values()}
    k, v = ([by_place.get((part, layer)) for layer in range(layers)] for part in ("k", "v"))
    indexers = sorted((cache for cache in store.specs.values() if cache.part == "indexer_k"), key=lambda cache: cache.layer)
    return k, v, indexers


def v_state(store: Store) -> int:
    """2 iff there is no V cache, else 0: whether V exists and how attention is computed are independent facts."""
    return V_ROWS if any(cache.part == "v" for cache in store.specs.values()) else V_ABSENT


def saved_order(cells: KVCells, seq: int) -> np.ndarray:
    """i32 [n]: cells of a sequence in the order they are saved: by index, except that cells of equal position keep their order of arrival,
    which attention follows.
    """
    entries = cells.list_of(seq)
    order, pos = entries.cells.copy(), entries.pos
    rank = np.argsort(order, kind="stable")
    out = order[rank]
    if len(pos) and bool((pos[1:] == pos[:-1]).any()):
        where = np.empty(len(rank), np.int64)  # entry -> place among the cells sorted by index
        where[rank] = np.arange(len(rank))
        for value in np.unique(pos[1:][pos[1:] == pos[:-1]]).tolist():
            a, b = entries.span(value, value + 1)
            out[np.sort(where[a:b])] = order[a:b]
    return out


def write_session(sink: Sink, arch: str, tokens: Sequence[int], cells: KVCells, store: Store, n_layer: int) -> None:
    """The whole context. This runtime draws random numbers per generation and keeps no logits, so those fields are empty."""
    sink.put(struct.pack("<II", SESSION_MAGIC, SESSION_VERSION))
    _tokens(sink, tokens)
    text = arch.encode()
    sink.put(struct.pack("<I", len(text)) + text + struct.pack("<IIQQ", 0, 0, 0, 0))
    used = np.flatnonzero(cells.pos >= 0).astype(np.int32)
    sink.put(struct.pack("<I", len(used)) + _cells_with_ids(cells, used))
    _layers(sink, store, n_layer, used)


def write_sequence(
    sink: Sink, seq: int, tokens: Sequence[int], cells: KVCells, store: Store, n_layer: int, windows: WindowRows | None = None
) -> None:
    """One sequence: its cells' positions and rows."""
    mine = saved_order(cells, seq)
    sink.put(struct.pack("<II", SEQUENCE_MAGIC, SEQUENCE_VERSION))
    _tokens(sink, tokens)
    table = np.zeros((len(mine), 2), "<i4")
    table[:, 0] = cells.pos[mine]
    sink.put(_compacted(windows, len(mine)) + struct.pack("<I", len(mine)) + table.tobytes())
    _layers(sink, store, n_layer, mine, windows)


def write_partial(
    sink: Sink, seq: int, tokens: Sequence[int], cells: KVCells, store: Store, n_layer: int, windows: WindowRows | None = None
) -> None:
    """What of a sequence cannot be rolled back by dropping cells; with rows for every cell, that is only where it ended."""
    n = len(cells.list_of(seq))
    sink.put(struct.pack("<II", SEQUENCE_MAGIC, SEQUENCE_VERSION))
    _tokens(sink, tokens)
    sink.put(struct.pack("<IiI", PARTIAL_MARKER, cells.pos_max(seq), n) + _compacted(windows, n))
    if windows is not None:
        _layers(sink, store, n_layer, None, windows)
    else:
        sink.put(struct.pack("<IIII", v_state(store), len(layer_table(store, n_layer)[0]), 0, 0))


def _compacted(windows: WindowRows | None, n_cells: int) -> bytes:
    if windows is None:
        return b""
    live = len(windows.live())
    return struct.pack("<IIIiI", COMPACT_MARKER, windows.rows, live, n_cells - live, live)


def _tokens(sink: Sink, tokens: Sequence[int]) -> None:
    sink.put(struct.pack("<I", len(tokens)) + np.asarray(tokens, "<i4").tobytes())


def _cells_with_ids(cells: KVCells, used: np.ndarray) -> bytes:
    """pos, n_ids, ids of each cell, one after another."""
    member = cells.member[:, used].T
    counts = member.sum(axis=1)
    flat = np.empty(2 * len(used) + int(counts.sum()), "<i4")
    begin = np.cumsum(counts + 2) - counts - 2
    flat[begin], flat[begin + 1] = cells.pos[used], counts
    ids = np.ones(len(flat), bool)
    ids[begin] = ids[begin + 1] = False
    flat[ids] = np.nonzero(member)[1]
    return flat.tobytes()


def _layers(sink: Sink, store: Store, n_layer: int, cells: np.ndarray | None, windows: WindowRows | None = None) -> None:
    """All layers' rows of ``cells``; with None, those of compacted caches only."""
    k, v, indexers = layer_table(store, n_layer)
    presence = v_state(store)
    sink.put(struct.pack("<II", presence, len(k)))
    for cache in [*k, *([] if presence == V_ABSENT else v)]:
        where = windows.live() if windows is not None and cache is not None and cache.window else cells
        if cache is None or where is None:
            sink.put(struct.pack("<iQ", -1, 0))
        else:
            _rows(sink, store.rows(cache.name), where)
    sink.put(struct.pack("<II", 0, 1 if indexers and cells is not None else 0))
    if cells is not None:
        for cache in indexers:
            _rows(sink, store.rows(cache.name), cells)


def _rows(sink: Sink, rows: CacheRows, cells: np.ndarray) -> None:
    kind = TYPES[rows.spec.dtype].id
    block = rows.spec.hadamard
    flags = (SPLIT_FLAG if rows.split else 0) | (TURNED_FLAG if block else 0)
    sink.put(struct.pack("<iQ", kind | flags, rows.row_bytes))
    sink.put(b"".join(struct.pack("<I", fact) for fact in (rows.split, block) if fact))
    for part in rows.parts:
        sink.rows(part, cells)
