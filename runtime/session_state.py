"""State of a session to and from files: which blob, what becomes of the sequences, what a refusal leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import state, state_load, state_rows
from .errors import RuntimeRefusal
from .rows import Store
from .state_inputs import CELL_BLOCK
from .state_io import BlobSource, CountingSink, FileSink, Sink, Source, Target, open_source, open_target

if TYPE_CHECKING:
    from .session import Session


def _check(session: Session, seq: int | None, partial: bool, what: str) -> None:
    if seq is not None:
        session.cells.list_of(seq)  # refuses an id that does not exist
    elif partial:
        raise RuntimeRefusal(f"{what}: a partial state belongs to one sequence; give its id")
    elif session.states.rows_per_sequence:
        raise RuntimeRefusal(
            f"{what}: this model keeps the state of its convolutions for one sequence, so the state is that of sequence 0, not of the "
            "whole context; give its id"
        )
    elif session.window_rows is not None:
        raise RuntimeRefusal(f"{what}: with compacted window caches the state is that of sequence 0, not of the whole context; give its id")


def _cell_store(session: Session) -> Store:
    """The caches whose rows are cells."""
    store = session.executor.caches
    return state_rows.CellStore(store, session.states) if session.states else store


def _parse_states(session: Session, seq: int | None, partial: bool) -> state_load.ParseStates:
    if not session.states:
        return None
    return lambda source: state_rows.parse(source, session.executor.caches, session.states, seq, partial)


def _restore_states(session: Session, source: Source, blob: state_load.Blob, seq: int | None) -> None:
    """Copy what belongs to sequences; the cells are in place already, and must end where the states continue."""
    saved = blob.states
    if saved is None:
        return
    for one, following in zip(range(session.n_seq_max) if seq is None else (seq,), saved.next):
        if following != session.cells.pos_max(one) + 1:
            raise RuntimeRefusal(
                f"{source.name}: the states of sequence {one} continue at position {following}, its cells end at "
                f"{session.cells.pos_max(one)}; the state is damaged, save it again"
            )
        session.states.next[one] = following
    state_rows.restore(source, session.executor.caches, saved)


def _write(session: Session, sink: Sink, seq: int | None, partial: bool) -> None:
    cells, store = session.cells, _cell_store(session)
    n_layer = session.artifact.manifest.n_layer
    tokens = session.history.tokens(0 if seq is None else seq)
    if seq is None:
        state.write_session(sink, session.artifact.manifest.arch, tokens, cells, store, n_layer)
    elif partial:
        state.write_partial(sink, seq, tokens, cells, store, n_layer, session.window_rows)
    else:
        state.write_sequence(sink, seq, tokens, cells, store, n_layer, session.window_rows)
    if session.states:
        state_rows.write(sink, session.executor.caches, session.states, seq, partial)


def size(session: Session, seq: int | None, partial: bool) -> int:
    """Bytes ``save`` would write, from the same writer."""
    _check(session, seq, partial, "state_size")
    sink = CountingSink()
    _write(session, sink, seq, partial)
    return sink.size


def save(session: Session, target: Target, seq: int | None, partial: bool) -> int:
    """Write the state; returns the bytes written. Pending rotations are applied first: rows are saved as they will be read."""
    _check(session, seq, partial, "state_save")
    state.layer_table(_cell_store(session), session.artifact.manifest.n_layer)
    if session.states:
        session.states.check_save(seq, session.cells)
    session.apply_shift()
    with open_target(target) as file:
        sink = FileSink(file)
        _write(session, sink, seq, partial)
    return sink.size


def load(session: Session, blob: BlobSource, seq: int | None, partial: bool) -> int:
    """Restore a state; returns the number of cells the restored sequence or context has.

    A blob that does not fit empties the destination (the sequence, or the whole cache) and nothing else; a partial one changes nothing.
    """
    _check(session, seq, partial, "state_load")
    with open_source(blob) as source:
        if partial and seq is not None:
            return _load_partial(session, source, seq)
        try:
            return _load_context(session, source) if seq is None else _load_sequence(session, source, seq)
        except BaseException:
            if seq is None:
                session.reset()
            else:
                session.seq_rm(seq)
            raise


def _own_cells(session: Session, source: Source, seqs: np.ndarray | int, pos: np.ndarray) -> np.ndarray:
    """Free cells for restored tokens of a model that keeps state per sequence."""
    states, cells = session.states, session.cells
    owners = np.broadcast_to(seqs, pos.shape).astype(np.int64)
    if len(np.unique(owners << 32 | pos.astype(np.int64))) != len(pos):
        raise RuntimeRefusal(f"{source.name}: two cells of a sequence have the same position; the state is damaged, save it again")
    of = {seq: pos[owners == seq] for seq in np.unique(owners).tolist()}
    blocks = {seq: len(np.unique(mine // CELL_BLOCK)) for seq, mine in of.items()}
    try:
        states.check_room(blocks, {seq: int(mine.max()) for seq, mine in of.items()}, cells)
    except RuntimeRefusal as refusal:
        raise RuntimeRefusal(f"{source.name}: {refusal}", soft=True) from None
    return states.cells(seqs, pos, cells)


def _load_context(session: Session, source: Source) -> int:
    manifest, store = session.artifact.manifest, _cell_store(session)
    blob = state_load.parse_session(source, manifest.arch, session.cells, store, manifest.n_layer, _parse_states(session, None, False))
    session.reset()
    where = np.arange(len(blob.pos), dtype=np.int32)
    if session.states:
        where = _own_cells(session, source, np.array([ids[0] for ids in blob.ids or []], np.int64), blob.pos)
    if len(where):
        session.cells.insert_at(where, blob.pos, blob.ids or [])
        state_load.restore(source, blob, where, store)
    _restore_states(session, source, blob, None)
    session.restored(0, blob.tokens)
    return len(where)


def _load_sequence(session: Session, source: Source, seq: int) -> int:
    manifest, store, cells = session.artifact.manifest, _cell_store(session), session.cells
    windows = session.window_rows
    blob = state_load.parse_sequence(source, cells, store, manifest.n_layer, windows=windows, states=_parse_states(session, seq, False))
    session.seq_rm(seq)
    where = _own_cells(session, source, seq, blob.pos) if session.states else cells.place(len(blob.pos))
    if where is None:
        raise RuntimeRefusal(
            f"{source.name}: no room for {len(blob.pos)} cells: {cells.used} of {cells.size} are in use by other sequences; free some "
            "(seq_rm), or use a larger n_ctx",
            soft=True,
        )
    if len(where):
        cells.insert_at(where, blob.pos, np.full(len(where), seq, np.int32))
        rows = None if windows is None else windows.restored(cells.list_of(seq).cells, blob.live)
        state_load.restore(source, blob, where, store, rows)
    _restore_states(session, source, blob, seq)
    session.restored(seq, blob.tokens)
    return len(where)


def _load_partial(session: Session, source: Source, seq: int) -> int:
    """Rows are in the cells still, and cells stay where they are: the sequence is cut where it was saved.

    Of a model with one row of state for a whole sequence it must end there already. Its tail can be removed beforehand, so a longer
    sequence is a mistake, unless compacted windows gave rows away: those sequences cannot be cut far back, and their blob has the rows.
    """
    cells, store, n_layer = session.cells, _cell_store(session), session.artifact.manifest.n_layer
    parse_states = _parse_states(session, seq, True)
    blob = state_load.parse_sequence(source, cells, store, n_layer, partial=True, windows=session.window_rows, states=parse_states)
    pos = cells.list_of(seq).pos
    kept = int(np.searchsorted(pos, blob.last, side="right"))
    ends = int(pos[kept - 1]) if kept else -1
    if kept != blob.n_cells or ends != blob.last:
        raise RuntimeRefusal(
            f"{source.name}: the partial state ends at position {blob.last} after {blob.n_cells} cells, sequence {seq} has {kept} cells "
            f"up to {ends}; evaluate its tokens again, or load a full state"
        )
    known = session.history.tokens(seq)[: len(blob.tokens)]
    if known != blob.tokens[: len(known)]:
        raise RuntimeRefusal(f"{source.name}: the partial state was saved after other tokens than sequence {seq} holds; load a full state")
    windows = session.window_rows
    if windows is None and session.states.rows_per_sequence and cells.pos_max(seq) != blob.last:
        raise RuntimeRefusal(
            f"{source.name}: the partial state is that of position {blob.last}, sequence {seq} goes on to position {cells.pos_max(seq)}; "
            f"remove what follows first (seq_rm from position {blob.last + 1} on), or load a full state"
        )
    if blob.states is None and windows is None:
        session.seq_rm(seq, blob.last + 1, -1)
        return kept
    # What a cut alone would leave behind, and rows that were given away since, come from the blob: it may be cut anywhere.
    cells.seq_rm(seq, blob.last + 1, -1)
    session.history.removed(seq, blob.last + 1, -1)
    try:
        if windows is not None:
            state_load.restore(source, blob, np.empty(0, np.int32), store, windows.restored(cells.list_of(seq).cells, blob.live))
        if blob.states is not None:
            _restore_states(session, source, blob, seq)
    except BaseException:
        session.seq_rm(seq)
        raise
    session.restored(seq, session.history.tokens(seq))
    return kept
