"""State to and from files: layout, sizes, placement, refusals."""

from __future__ import annotations

import io
import os
import struct
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fake_model
from ggufc.formats.artifact import Cache
from ggufc.runtime import state, state_load
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import KVCells
from ggufc.runtime.session import Session
from ggufc.runtime.state_io import CountingSink, FileSink, Source
from split_buffers import SplitBuffers

pytest_plugins = ("runtime_fixtures",)

TOKENS = [(11 * i * i + 5) % 89 + 100 for i in range(80)]


def blob_of(s: Session, seq: int | None = None, partial: bool = False) -> bytes:
    file = io.BytesIO()
    size = s.state_size(seq, partial)
    assert s.state_save(file, seq, partial) == size == len(file.getvalue())  # S8: the size query is the writer
    return file.getvalue()


def bits(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint32)


def described(caches: list[Cache], n: int, n_cells: int = 8) -> tuple[KVCells, SplitBuffers]:
    """Cells and rows of random bytes: ``n`` tokens of sequence 0 from cell 0."""
    cells, store = KVCells(n_cells, 2, 1), SplitBuffers(caches, n_cells)
    rng = np.random.default_rng(5)
    if n:
        cells.insert(0, np.arange(n, dtype=np.int32), np.zeros(n, np.int32))
        for name in store.specs:
            rows = store.rows(name)
            rows.write(np.arange(n), rng.integers(0, 256, (n, rows.row_bytes), np.uint8))
    return cells, store


def dense(layer: int, dtype: str = "f16", v: bool = True) -> list[Cache]:
    return [Cache(f"blk.{layer}.{part}", layer, part, dtype, 64, 32) for part in ("kv" if v else "k")]


def written(write, *args) -> bytes:
    file, count = io.BytesIO(), CountingSink()
    write(FileSink(file), *args)
    write(count, *args)
    assert count.size == len(file.getvalue())
    return file.getvalue()


# Layout


@pytest.mark.parametrize("v", [True, False])
def test_a_sequence_blob_has_exactly_the_documented_bytes(v):  # S10
    caches = [*dense(0, v=v), *dense(2, "q8_0", v=v), Cache("blk.2.indexer_k", 2, "indexer_k", "f32", 4, 4)]
    cells, store = described(caches, 3)
    rows = {name: store.rows(name).read(np.arange(3)).tobytes() for name in store.specs}
    want = struct.pack("<II", 0x67677371, 4) + struct.pack("<I3i", 3, 7, 8, 9)
    want += struct.pack("<I", 3) + struct.pack("<iIiIiI", 0, 0, 1, 0, 2, 0)
    want += struct.pack("<II", 0 if v else 2, 4)  # v_state, n_layer
    for part in "kv" if v else "k":
        want += struct.pack("<iQ", 1, 128) + rows[f"blk.0.{part}"] + struct.pack("<iQ", -1, 0)
        want += struct.pack("<iQ", 8, 68) + rows[f"blk.2.{part}"] + struct.pack("<iQ", -1, 0)
    want += struct.pack("<II", 0, 1) + struct.pack("<iQ", 0, 16) + rows["blk.2.indexer_k"]
    assert written(state.write_sequence, 0, [7, 8, 9], cells, store, 4) == want
    # So a blob made before any section was added for another family still loads.
    found = state_load.parse_sequence(Source(io.BytesIO(want), "blob"), *described(caches, 0), 4)
    assert found.pos.tolist() == [0, 1, 2] and found.tokens == [7, 8, 9] and len(found.sections) == len(caches)


def test_a_session_blob_has_exactly_the_documented_bytes():
    cells, store = described(dense(0), 2)
    cells.seq_cp(0, 1, 1, 2)
    k, v = (store.rows(f"blk.0.{part}").read(np.arange(2)).tobytes() for part in "kv")
    want = struct.pack("<II", 0x6767736E, 10) + struct.pack("<Ii", 1, 5) + struct.pack("<I", 3) + b"toy"
    want += struct.pack("<IIQQ", 0, 0, 0, 0)  # RNG, output rows, logits, embeddings
    want += struct.pack("<I", 2) + struct.pack("<iIi", 0, 1, 0) + struct.pack("<iIii", 1, 2, 0, 1)
    want += struct.pack("<II", 0, 1) + struct.pack("<iQ", 1, 128) + k + struct.pack("<iQ", 1, 128) + v
    want += struct.pack("<II", 0, 0)
    assert written(state.write_session, "toy", [5], cells, store, 1) == want


def test_fields_of_other_engines_are_passed_over():
    cells, store = described(dense(0), 2)
    blob = written(state.write_session, "toy", [], cells, store, 1)
    at = 12 + 4 + 3
    extra = struct.pack("<I", 3) + b"rng" + struct.pack("<Iii", 2, 0, 1) + struct.pack("<Qf", 1, 0.5) + struct.pack("<Qff", 2, 1, 2)
    found = state_load.parse_session(Source(io.BytesIO(blob[:at] + extra + blob[at + 24 :]), "blob"), "toy", cells, store, 1)
    assert found.pos.tolist() == [0, 1] and found.ids == [(0,), (0,)]


# Round trips on the toy model


def test_a_sequence_continues_anywhere_with_the_bits_of_the_unsaved_run(session):
    s = session(n_seq_max=3, n_ubatch=7)
    s.decode(TOKENS[:6], seq=0)
    s.decode(TOKENS[40:45], seq=1)
    s.decode(TOKENS[6:20], seq=0)  # two ranges of cells
    blob = blob_of(s, 0)
    want = s.decode(TOKENS[20:24], seq=0, logits="all")
    s.seq_rm(0)
    s.decode(TOKENS[50:60], seq=1)
    assert s.state_load(blob, 2) == 20
    assert s.pos_max(2) == 19 and s.cells.used == 35
    assert np.array_equal(bits(s.decode(TOKENS[20:24], seq=2, logits="all")), bits(want))
    assert s.keep_prefix(TOKENS[:30], 2) == 24  # its tokens came along


def test_restoring_into_scattered_cells(session):
    s = session(n_ctx=256, n_seq_max=2)
    s.decode(TOKENS[:20], seq=0)
    blob = blob_of(s, 0)
    want = s.decode(TOKENS[20:22], seq=0, logits="all")
    s.reset()
    for i in range(128):  # one cell in two stays occupied
        s.decode([TOKENS[i % 80]], seq=0, logits="none")
        s.decode([TOKENS[i % 80]], seq=1, logits="none")
    s.seq_rm(1)
    neighbour = s.decode([100], seq=0)
    s.seq_rm(0, 128, -1)
    assert s.state_load(blob, 1) == 20
    cells = s.cells.list_of(1).cells
    assert (np.diff(cells) > 1).all()
    assert np.array_equal(s.decode([100], seq=0), neighbour)
    assert np.array_equal(bits(s.decode([TOKENS[20]], seq=1)), bits(want[:1]))


def test_the_whole_context_comes_back(session, tmp_path):
    s = session(n_seq_max=3)
    s.decode(TOKENS[:9], seq=0)
    s.seq_cp(0, 1, 0, 4)
    s.decode(TOKENS[30:33], seq=1)
    s.seq_rm(0, 2, 4)
    path = tmp_path / "whole.state"
    assert s.state_save(path) == s.state_size() == path.stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["whole.state"]
    want = [s.decode([TOKENS[9]], seq=0), s.decode([TOKENS[33]], seq=1)]
    other = session(n_seq_max=4, n_ctx=512)
    other.decode(TOKENS[60:70], seq=3)
    assert other.state_load(path) == 12  # nine cells and three; those shared stay
    assert other.pos_max(3) == -1 and other.cells.member[:2].sum() == s.cells.member[:2].sum() - 2
    assert np.array_equal(other.decode([TOKENS[9]], seq=0), want[0])
    assert np.array_equal(other.decode([TOKENS[33]], seq=1), want[1])


def test_moved_positions_are_rotated_before_they_are_saved(session):
    s, plain = session(), session()
    for one in (s, plain):
        one.decode(TOKENS[:8])
        one.seq_add(0, 0, -1, 5)
    blob = blob_of(s, 0)
    assert not s.cells.needs_shift
    want = plain.decode([TOKENS[8]])
    other = session()
    other.state_load(blob, 0)
    assert np.array_equal(other.decode([TOKENS[8]]), want)
    assert np.array_equal(s.decode([TOKENS[8]]), want)


def test_cells_of_equal_position_keep_their_order(session):
    s = session(n_seq_max=2)
    s.decode(TOKENS[:12], seq=0)
    s.decode(TOKENS[20:23], [0, 1, 2], seq=1)
    s.seq_rm(0, 0, 3)
    parts = np.random.default_rng(5).normal(size=(3, s.artifact.manifest.n_embd)).astype(np.float32)
    s.decode(embd=parts, pos=[2, 2, 2], seq=1)  # from cell 0 on, though they arrived last
    blob = blob_of(s, 1)
    want = s.decode([TOKENS[30]], [3], seq=1)
    other = session(n_seq_max=2)
    other.state_load(blob, 0)
    assert other.cells.list_of(0).pos.tolist() == [0, 1, 2, 2, 2, 2]
    assert np.array_equal(other.decode([TOKENS[30]], [3], seq=0), want)


def test_a_partial_state_cuts_the_sequence_and_moves_nothing(session):
    s = session(n_seq_max=2, n_ubatch=4)
    s.decode(TOKENS[:10], seq=0)
    s.decode(TOKENS[50:54], seq=1)
    s.decode(TOKENS[10:14], seq=0)
    blob = blob_of(s, 0, partial=True)
    assert len(blob) < 150  # no rows
    want = s.decode(TOKENS[14:18], seq=0, logits="all")
    cells = s.cells.list_of(0).cells[:14].copy()
    assert s.state_load(blob, 0, partial=True) == 14
    assert np.array_equal(s.cells.list_of(0).cells, cells)
    assert np.array_equal(s.decode(TOKENS[14:18], seq=0, logits="all"), want)
    s.seq_rm(0, 5, -1)
    with pytest.raises(RuntimeRefusal, match="ends at position 13 after 14 cells, sequence 0 has 5 cells"):
        s.state_load(blob, 0, partial=True)
    s.decode(TOKENS[20:40], seq=0)
    with pytest.raises(RuntimeRefusal, match="other tokens"):
        s.state_load(blob, 0, partial=True)
    assert s.pos_max(0) == 24 and s.pos_max(1) == 3  # a refused partial state changes nothing


def test_a_partial_state_of_nothing_does_not_match_a_checkpoint_at_0(session):
    s = session()
    empty = blob_of(s, 0, partial=True)
    s.decode([TOKENS[0]])
    first = blob_of(s, 0, partial=True)
    s.reset()
    with pytest.raises(RuntimeRefusal, match="position 0"):
        s.state_load(first, 0, partial=True)
    s.decode([TOKENS[0]])
    assert s.state_load(empty, 0, partial=True) == 0 and s.pos_max(0) == -1


def test_an_empty_sequence_is_a_state_too(session):
    s = session()
    blob = blob_of(s, 0)
    s.decode(TOKENS[:5])
    assert s.state_load(blob, 0) == 0 and s.cells.used == 0
    whole = blob_of(s)
    s.decode(TOKENS[:5])
    assert s.state_load(whole) == 0 and s.cells.used == 0


def test_a_compiled_model_continues_with_equal_bits(compiled, tmp_path):  # S8
    path = compiled("llama-gqa-tied")
    tokens = np.random.default_rng(3).integers(3, 300, 60).tolist()
    with Session(path, n_ctx=256, n_seq_max=2, n_ubatch=16, n_threads=2) as s:
        s.decode(tokens[:20], seq=0)
        s.decode(tokens[5:12], seq=1)
        s.decode(tokens[20:40], seq=0)
        s.state_save(tmp_path / "one", 0)
        s.state_save(tmp_path / "all")
        want = s.decode(tokens[40:], seq=0, logits="all")
    with Session(path, n_ctx=512, n_seq_max=2, n_threads=1) as s:
        s.decode(tokens[:3], seq=0)
        assert s.state_load(tmp_path / "one", 1) == 40
        assert np.array_equal(bits(s.decode(tokens[40:], seq=1, logits="all")), bits(want))
        assert s.stats.miss_reasons["state was restored"] == 1
        assert s.state_load(tmp_path / "all") == 47
        assert np.array_equal(bits(s.decode(tokens[40:], seq=0, logits="all")), bits(want))


# Refusals


def test_truncated_anywhere_a_blob_is_refused_and_leaves_nothing_behind(session):  # S12
    s = session(n_seq_max=2)
    s.decode(TOKENS[:30], seq=0)
    s.decode(TOKENS[40:46], seq=1)
    want = s.decode([TOKENS[46]], seq=1)
    s.seq_rm(1, 6, -1)
    blob = blob_of(s, 0)
    assert len(blob) > 400
    for cut in np.linspace(0, len(blob) - 1, 200).astype(int).tolist():
        s.decode(TOKENS[:2], seq=0, logits="none")
        with pytest.raises(RuntimeRefusal, match=f"at byte [0-9]+ of {cut}; save the state again"):
            s.state_load(blob[:cut], 0)
        assert s.pos_max(0) == -1 and s.cells.used == 6
        assert np.array_equal(s.decode([TOKENS[46]], seq=1), want)
        s.seq_rm(1, 6, -1)
    assert s.state_load(blob, 0) == 30


def test_a_truncated_context_empties_the_cache(session):  # S12
    s = session(n_seq_max=2)
    s.decode(TOKENS[:7], seq=1)
    blob = blob_of(s)
    for cut in range(0, len(blob), 7):
        s.decode(TOKENS[:2], seq=0, logits="none")
        with pytest.raises(RuntimeRefusal):
            s.state_load(blob[:cut])
        assert s.cells.used == 0 and not s.cells.member.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_are_refused_or_read_as_a_state(toy, data):  # S12
    """Whatever a blob holds, it is refused as a whole or leaves books and rows that agree."""
    with Session(toy, n_threads=1, n_ctx=256, n_seq_max=2) as s:
        s.decode(TOKENS[:6], seq=0)
        s.decode(TOKENS[20:23], seq=1)
        seq = data.draw(st.sampled_from([None, 0]))
        blob = bytearray(blob_of(s, seq))
        want = s.decode([100], seq=1)
        s.seq_rm(1, 3, -1)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(blob) - 4) | st.integers(0, 60))
            struct.pack_into("<I", blob, at, data.draw(st.sampled_from([0, 1, 2, 3, 255, 1 << 16, 1 << 31, (1 << 32) - 1])))
        try:
            s.state_load(bytes(blob), seq)
        except RuntimeRefusal:
            assert s.pos_max(0) == -1 and s.cells.used == (0 if seq is None else 3)
        if seq is not None:
            assert np.array_equal(s.decode([100], seq=1), want)
        assert s.cells.used == int((s.cells.pos >= 0).sum())
        if s.pos_max(0) < 1 << 30:
            assert s.decode([101], seq=0).shape == (1, s.n_vocab)  # rows are only numbers: a flipped bit in one is not noticed


def test_bytes_after_the_last_section_are_refused(session):
    s = session()
    s.decode(TOKENS[:3])
    with pytest.raises(RuntimeRefusal, match="4 bytes after its last section"):
        s.state_load(blob_of(s, 0) + b"more", 0)


def load(blob: bytes, cells: KVCells, store: SplitBuffers, n_layer: int = 2) -> None:
    state_load.parse_sequence(Source(io.BytesIO(blob), "blob"), cells, store, n_layer)


@pytest.mark.parametrize("writer", ["dense", "k-only", "transposed"])
@pytest.mark.parametrize("reader", ["dense", "k-only"])
def test_v_presence_decides_before_transposition(writer, reader):  # S7
    cells, store = described([*dense(0, v=writer != "k-only"), *dense(1, v=writer != "k-only")], 3)
    blob = bytearray(written(state.write_sequence, 0, [], cells, store, 2))
    if writer == "transposed":
        at = 12 + 4 + 3 * 8
        assert struct.unpack_from("<I", blob, at)[0] == 0
        struct.pack_into("<I", blob, at, 1)
    target = described([*dense(0, v=reader != "k-only"), *dense(1, v=reader != "k-only")], 0)
    if writer == reader:
        load(bytes(blob), *target)
    elif "k-only" in (writer, reader):
        with pytest.raises(RuntimeRefusal, match=r"the V cache is (there|absent) in the saved state and (there|absent) here"):
            load(bytes(blob), *target)
    else:
        with pytest.raises(RuntimeRefusal, match=r"transposed \(v_state 1\) in the saved state and row-major"):
            load(bytes(blob), *target)


@pytest.mark.parametrize(
    ("caches", "n_layer", "message"),
    [
        ([*dense(0, "f32"), *dense(1)], 2, "K of layer 0 is f16 in the saved state and f32 here"),
        ([*dense(0), Cache("blk.1.k", 1, "k", "f16", 32, 32), dense(1)[1]], 2, "row of K of layer 1 is 128 bytes .* 64 bytes here"),
        ([*dense(0), dense(1)[0]], 2, "V of layer 1 is f16 in the saved state and absent here"),
        ([*dense(0), *dense(1)], 3, "the number of layers is 2 in the saved state and 3 here"),
        ([*dense(0), *dense(1), Cache("i", 0, "indexer_k", "f16", 8, 8)], 2, "the indexer marker is 0 in the saved state and 1 here"),
    ],
)
def test_what_does_not_fit_is_named_with_both_sides(caches, n_layer, message):
    cells, store = described([*dense(0), *dense(1)], 3)
    blob = written(state.write_sequence, 0, [], cells, store, 2)
    with pytest.raises(RuntimeRefusal, match=message):
        load(blob, *described(caches, 0), n_layer)


def test_more_cells_sequences_and_other_architectures_are_refused(session):
    s = session(n_ctx=512, n_seq_max=3)
    for _ in range(5):
        s.decode(TOKENS[:60], seq=2, logits="none")
    one, whole = blob_of(s, 2), blob_of(s)
    small = session(n_ctx=256, n_seq_max=2)
    with pytest.raises(RuntimeRefusal, match="number of cells is 300 in the saved state and 256 here; use a larger n_ctx"):
        small.state_load(one, 0)
    with pytest.raises(RuntimeRefusal, match=r"sequences of cell 0 is \[2\] in the saved state and 0 to 1 here"):
        session(n_ctx=512, n_seq_max=2).state_load(whole)
    with pytest.raises(RuntimeRefusal, match="architecture is tox in the saved state and toy here"):
        s.state_load(whole.replace(b"toy", b"tox", 1))
    s.reset()
    s.decode(TOKENS[:60] * 4, seq=0, logits="none")
    with pytest.raises(RuntimeRefusal, match="no room for 300 cells: 240 of 512") as refusal:
        s.state_load(one, 1)
    assert refusal.value.soft and s.cells.used == 240


@pytest.mark.parametrize(
    ("seq", "partial", "change", "message"),
    [
        (None, False, None, "holds one sequence, not a whole context"),
        (0, True, None, "a full state, not a partial state; load it with partial=False"),
        (0, False, (0, 0x46554747), "something else .magic number 0x46554747"),
        (0, False, (4, 3), "format version is 3 in the saved state and 4 here"),
        (0, False, (8, 1 << 30), "truncated: the tokens needs 4294967296 bytes"),
        (7, False, None, "sequence 7 does not exist"),
        (None, True, None, "belongs to one sequence"),
    ],
)
def test_the_wrong_kind_of_state_is_refused_by_name(session, seq, partial, change, message):
    s = session()
    s.decode(TOKENS[:4])
    blob = bytearray(blob_of(s, 0))
    if change:
        struct.pack_into("<I", blob, *change)
    with pytest.raises(RuntimeRefusal, match=message):
        s.state_load(bytes(blob), seq, partial)


def test_damaged_cells_are_refused(session):
    s = session(n_seq_max=2)
    s.decode([TOKENS[0]])
    one, whole = bytearray(blob_of(s, 0)), bytearray(blob_of(s))
    struct.pack_into("<i", one, 20, -4)
    with pytest.raises(RuntimeRefusal, match="positions run from -4 to -4"):
        s.state_load(bytes(one), 0)
    struct.pack_into("<ii", one, 20, 0, 1)
    with pytest.raises(RuntimeRefusal, match="carry sequence ids"):
        s.state_load(bytes(one), 0)
    struct.pack_into("<I", whole, 8 + 8 + 4 + 3 + 24 + 4 + 4, 9)
    with pytest.raises(RuntimeRefusal, match="number of sequences of cell 0 is 9 in the saved state and 1 to 2 here"):
        s.state_load(bytes(whole))


def test_caches_that_are_not_kept_per_cell_are_refused(toy, tmp_path):
    conv = Cache("blk.0.conv", 0, "conv", "f32", 8, 8)
    path = fake_model.write(tmp_path / "conv.ggufc", fake_model.manifest(caches=[*fake_model.manifest().caches, conv]))
    with Session(path, n_threads=1) as s:
        s.decode(TOKENS[:3])
        for call in (lambda: s.state_save(tmp_path / "x"), lambda: s.state_size(0)):
            with pytest.raises(RuntimeRefusal, match=r"cache blk.0.conv \(conv\) holds state that does not belong to cells"):
                call()
    assert not (tmp_path / "x").exists()


def test_files_that_cannot_be_opened_are_named(session, tmp_path):
    s = session()
    with pytest.raises(RuntimeRefusal, match="nowhere cannot be read"):
        s.state_load(tmp_path / "nowhere", 0)
    with pytest.raises(RuntimeRefusal, match="cannot be written"):
        s.state_save(tmp_path / "no" / "such" / "folder", 0)
    assert list(tmp_path.iterdir()) == []


def test_links_and_devices_are_written_through(toy, tmp_path):
    """What a path names is written to; it is not replaced by a file of that name."""
    with Session(toy) as session:
        session.decode(TOKENS[:3])
        (tmp_path / "link").symlink_to(tmp_path / "file")
        size = session.state_save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").stat().st_size == size
        os.mkfifo(tmp_path / "pipe")
        reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
        read: list[bytes] = []
        reader.start()
        session.state_save(tmp_path / "pipe")
        reader.join(10)
        assert read == [(tmp_path / "file").read_bytes()] and (tmp_path / "pipe").is_fifo()


def test_files_without_a_buffer_get_all_of_it(session):
    """They may take less than they are given, or nothing."""

    class Slow(io.RawIOBase):
        def __init__(self, most: int | None) -> None:
            self.most, self.taken = most, bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data) -> int | None:
            if self.most is None:
                return None
            self.taken += data[: self.most]
            return min(len(data), self.most)

    s = session()
    s.decode(TOKENS[:3])
    file = Slow(7)
    assert s.state_save(file) == len(file.taken)
    assert bytes(file.taken) == blob_of(s)
    with pytest.raises(RuntimeRefusal, match="takes no bytes just now"):
        s.state_save(Slow(None))
