"""Families with state per sequence: the same bits in any chunking, with any thread count, beside other sequences, after save and restore;
what their state cannot follow is refused before anything changes."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import compiled, golden_cases, one_by_one, random_tokens

NAMES = ("openpangu-swa-dsa-ubatch", "deepseek4-split-decode")
LENGTH = 150
SHARED = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=[case for case in golden_cases(*NAMES) if case.name in NAMES], ids=lambda p: p.name)
def artifact(request):
    from ggufc.runtime.logits import graph_options

    options = json.loads((request.param / "case.json").read_text())["options"]
    with compiled(request.param, builder=graph_options(options)) as opened:
        yield opened


def sequences(artifact) -> int:
    return 1 if artifact.manifest.arch == "openpangu" else 3


def session(artifact, **options):
    from ggufc.runtime.session import Session

    return Session(artifact, **{"n_ctx": 768, "n_batch": 256, "n_seq_max": sequences(artifact), **options})


def tokens_of(artifact) -> list[int]:
    return random_tokens(artifact, LENGTH)


@pytest.fixture(scope="module")
def reference(artifact):
    """Logits of every position, one token at a time on one thread."""
    with session(artifact, n_threads=1, n_ubatch=1) as s:
        return one_by_one(s, tokens_of(artifact))


@SHARED
@given(data=st.data(), threads=st.integers(1, 3), n_ubatch=st.sampled_from([1, 3, 8, 17, 64, 150]), reuse=st.booleans())
def test_chunks_threads_and_reuse(artifact, reference, data, threads, n_ubatch, reuse):
    tokens = tokens_of(artifact)
    with session(artifact, n_threads=threads, n_ubatch=n_ubatch, graph_reuse=reuse, n_ctx=data.draw(st.sampled_from([768, 1536]))) as s:
        at, rows = 0, []
        while at < LENGTH:
            n = data.draw(st.integers(1, 90))
            rows.append(s.decode(tokens[at : at + n], logits="all"))
            at += n
    assert np.array_equal(np.concatenate(rows).view(np.uint32), reference.view(np.uint32))


def test_a_prompt_is_cut_after_any_of_its_first_tokens(artifact, reference):  # S41, S90
    """Convolutions look back two tokens, blocks end at positions 3 and 7."""
    tokens = tokens_of(artifact)
    for cut in range(1, 10):
        with session(artifact, n_threads=1) as s:
            rows = np.concatenate([s.decode(part, logits="all") for part in (tokens[:cut], tokens[cut:14])])
        assert np.array_equal(rows.view(np.uint32), reference[:14].view(np.uint32)), cut


def test_histories_of_convolutions_are_read_at_every_position_but_the_first(artifact, reference):  # S90
    """Whatever lies in the slot: a batch from position 0 on does not see it, any other does."""
    if artifact.manifest.arch != "openpangu":
        pytest.skip("no other family here has convolutions")
    tokens = tokens_of(artifact)
    for site in ("conv_qa", "conv_kv", "conv_o"):
        with session(artifact, n_threads=1) as s:
            slot = s.executor.caches.view(f"blk.1.{site}")
            slot[0].view(np.float32)[:] = 3
            assert np.array_equal(s.decode(tokens[:5], logits="all"), reference[:5])
            slot[0].view(np.float32)[:] = 3
            assert np.abs(s.decode(tokens[5:9], logits="all") - reference[5:9]).max() > 1e-2, site


@SHARED
@given(seed=st.integers(0, 1 << 30), me=st.integers(0, 2), n_ubatch=st.sampled_from([4, 16, 64]))
def test_other_sequences_do_not_matter(artifact, reference, seed, me, n_ubatch):  # S40 S52
    if sequences(artifact) == 1:
        pytest.skip("one sequence only")
    tokens, rng = tokens_of(artifact), np.random.default_rng(seed)
    at, got, others = 0, [], {seq: 0 for seq in range(3) if seq != me}
    with session(artifact, n_threads=2, n_ubatch=n_ubatch) as s:
        while at < LENGTH:
            batch, pos, seq, mine = [], [], [], []
            for _ in range(int(rng.integers(1, 24))):
                who = int(rng.integers(0, 3))
                if who == me and at < LENGTH:
                    mine.append(len(batch))
                    batch.append(tokens[at])
                    pos.append(at)
                    at += 1
                elif who != me and others[who] < 140:
                    batch.append(int(rng.integers(3, artifact.manifest.n_vocab - 1)))
                    pos.append(others[who])
                    others[who] += 1
                else:
                    continue
                seq.append(who)
            if batch:
                got.append(s.decode(batch, pos, seq, logits="all")[mine])
    assert np.array_equal(np.concatenate(got).view(np.uint32), reference.view(np.uint32))


def saved(s, *args, **options) -> bytes:
    file = io.BytesIO()
    assert s.state_save(file, *args, **options) == s.state_size(*args, **options) == len(file.getvalue())
    return file.getvalue()


def test_saved_states_go_on_with_the_same_bits(artifact, reference):  # S8
    from ggufc.runtime.errors import RuntimeRefusal

    tokens, cut = tokens_of(artifact), 70
    want = reference[cut:]
    with session(artifact, n_threads=2, n_ubatch=16) as s:
        s.decode(tokens[:cut])
        full, part = saved(s, 0), saved(s, 0, partial=True)
        assert len(part) < len(full)
        assert np.array_equal(s.decode(tokens[cut:], logits="all"), want)
        if s.states.rows_per_sequence:
            s.seq_rm(0, cut, -1)
        s.state_load(part, 0, partial=True)
        assert np.array_equal(s.decode(tokens[cut:], logits="all"), want)
        s.state_load(full, 0)
        if sequences(artifact) > 1:
            whole = saved(s)
            s.decode(tokens[3:9], seq=1)
            s.state_load(full, 2)
            assert np.array_equal(s.decode(tokens[cut:], seq=2, logits="all"), want)
            s.state_load(whole)
            assert s.pos_max(2) == -1
        assert np.array_equal(s.decode(tokens[cut:], logits="all"), want)
        with pytest.raises(RuntimeRefusal, match="the state is truncated"):
            s.state_load(full[:-5], 0)
        assert s.pos_max(0) == -1
    with session(artifact, n_ubatch=64) as s:
        s.state_load(full, 0)
        assert np.array_equal(s.decode(tokens[cut:], logits="all"), want)


def test_a_partial_state_needs_the_sequence_it_was_cut_from(artifact, reference):  # S105
    """It holds no rows of cells: a sequence that ends before its position, or holds other tokens, refuses it and goes on as before."""
    from ggufc.runtime.errors import RuntimeRefusal

    tokens, cut = tokens_of(artifact), 70
    with session(artifact, n_ubatch=16) as s:
        s.decode(tokens[:cut])
        part = saved(s, 0, partial=True)
        assert s.state_load(part, 0, partial=True) == cut
        assert np.array_equal(s.decode(tokens[cut : cut + 5], logits="all"), reference[cut : cut + 5])
        s.seq_rm(0)
        with pytest.raises(RuntimeRefusal, match=f"ends at position {cut - 1} after {cut} cells, sequence 0 has 0 cells"):
            s.state_load(part, 0, partial=True)
        s.decode(tokens[: cut - 1])
        with pytest.raises(RuntimeRefusal, match=f"ends at position {cut - 1} after {cut} cells, sequence 0 has {cut - 1} cells"):
            s.state_load(part, 0, partial=True)
        assert np.array_equal(s.decode(tokens[cut - 1 :], logits="all"), reference[cut - 1 :])
        s.seq_rm(0)
        s.decode([tokens[1], *tokens[1:cut]])
        with pytest.raises(RuntimeRefusal, match="saved after other tokens"):
            s.state_load(part, 0, partial=True)
        assert s.pos_max(0) == cut - 1


def test_a_longer_sequence_refuses_a_partial_state_unless_it_can_be_cut(artifact, reference):  # S105
    """One row of convolution inputs serves a whole sequence, so its checkpoint needs the sequence's end; rings are kept by position."""
    from ggufc.runtime.errors import RuntimeRefusal

    tokens, cut, at = tokens_of(artifact), 70, 80
    with session(artifact) as s:
        s.decode(tokens[:cut])
        part, full = saved(s, 0, partial=True), saved(s, 0)
        s.decode(tokens[cut:at])
        if s.states.rows_per_sequence:
            before = {name: s.executor.caches.view(name).tobytes() for name in s.executor.caches.specs}
            with pytest.raises(RuntimeRefusal, match=rf"is that of position {cut - 1}, sequence 0 goes on to position {at - 1}; .*seq_rm"):
                s.state_load(part, 0, partial=True)
            assert before == {name: s.executor.caches.view(name).tobytes() for name in s.executor.caches.specs}
            assert np.array_equal(s.decode(tokens[at:], logits="all"), reference[at:]), "as if nothing had been asked"
            s.seq_rm(0, cut, -1)
        assert s.state_load(part, 0, partial=True) == cut
        assert np.array_equal(s.decode(tokens[cut:], logits="all"), reference[cut:])
        assert s.state_load(full, 0) == cut  # whatever the sequence holds
        assert np.array_equal(s.decode(tokens[cut:], logits="all"), reference[cut:])


def test_a_context_with_one_row_of_state_is_saved_by_sequence_only(artifact):  # S105
    from ggufc.runtime.errors import RuntimeRefusal

    with session(artifact) as s:
        s.decode(tokens_of(artifact)[:20])
        blob = saved(s, 0)
        if not s.states.rows_per_sequence:
            assert saved(s)
            return
        before = (s.pos_max(0), s.cells.used)
        for call in (lambda: s.state_save(io.BytesIO()), s.state_size, lambda: s.state_load(blob)):
            with pytest.raises(RuntimeRefusal, match="the state is that of sequence 0, not of the whole context; give its id"):
                call()
        assert (s.pos_max(0), s.cells.used) == before


def test_a_token_then_single_steps_reuse_the_graph(artifact, reference):  # S109, S110
    """From a prompt of one token on, more than nine steps of ten run on a kept graph, and reuse changes no bit."""
    tokens, n = tokens_of(artifact), 61
    for reuse in (True, False):
        with session(artifact, n_threads=1, graph_reuse=reuse) as s:
            first = s.decode(tokens[:1], logits="all")
            hits, misses = s.stats.reuse_hits, s.stats.reuse_misses
            rows = one_by_one(s, tokens[1:n])
            hits, misses = s.stats.reuse_hits - hits, s.stats.reuse_misses - misses
        assert hits + misses == n - 1 if reuse else hits == 0
        assert not reuse or hits > 0.9 * (n - 1)
        assert np.array_equal(np.concatenate([first, rows]).view(np.uint32), reference[:n].view(np.uint32))


def test_cleared_and_removed_sequences_start_anew(artifact, reference):  # S44
    tokens = tokens_of(artifact)
    with session(artifact, n_ubatch=32) as s:
        for forget in (lambda: s.seq_rm(0), s.reset, *((lambda: s.seq_keep(1),) if s.n_seq_max > 1 else ())):
            s.decode(tokens[20:111])
            forget()
            assert np.array_equal(s.decode(tokens[:50], logits="all"), reference[:50])
            forget()


def test_clearing_zeroes_the_states_of_that_sequence_alone(artifact):  # S44
    """Rings, entries and histories of a removed sequence hold nothing of it; those of its neighbours keep every byte."""
    n = sequences(artifact)
    with session(artifact, n_ubatch=16) as s:
        for seq in range(n):
            s.decode(tokens_of(artifact)[seq : 140 + seq], seq=seq)
        states = s.states
        held = {seq: {spec.name: state_bytes(s, spec, seq) for spec in states.specs} for seq in range(n)}
        assert all(any(rows) for parts in held.values() for rows in parts.values())
        s.seq_rm(n // 2)
        for seq, parts in held.items():
            for spec in states.specs:
                now = state_bytes(s, spec, seq)
                assert not any(now) if seq == n // 2 else now == parts[spec.name], (spec.name, seq)


def test_the_prefix_kept_is_one_the_state_can_go_on_from(artifact, reference):
    tokens = tokens_of(artifact)
    with session(artifact) as s:
        s.decode(tokens[:100])
        kept = s.keep_prefix([*tokens[:60], 5, 6])
        assert kept == s.pos_max(0) + 1
        assert np.array_equal(s.decode(tokens[kept:110], logits="all"), reference[kept:110])


def test_sequences_share_the_context_unevenly(artifact):  # S9, S40
    """One sequence may take nearly all of ``n_ctx``, around cells of another, and move to where that one was."""
    if sequences(artifact) == 1:
        pytest.skip("one sequence only")
    tokens = random_tokens(artifact, 400)
    with session(artifact, n_ctx=512, n_seq_max=1) as s:
        alone = s.decode(tokens, logits="all")
    with session(artifact, n_ctx=512, n_seq_max=2, n_ubatch=64) as s:
        first = s.decode(tokens[:60], seq=1, logits="all")
        long = s.decode(tokens, seq=0, logits="all")
        first = np.concatenate([first, s.decode(tokens[60:100], seq=1, logits="all")])
        saved = io.BytesIO()
        s.state_save(saved, 0)
        s.seq_rm(0)
        first = np.concatenate([first, s.decode(tokens[100:395], seq=1, logits="all")])
        s.seq_rm(1)
        s.state_load(saved.getvalue(), 1)
        moved = s.decode(tokens[:8], seq=1, logits="all")
    with session(artifact, n_ctx=512, n_seq_max=1) as s:
        s.decode(tokens)
        assert np.array_equal(moved.view(np.uint32), s.decode(tokens[:8], logits="all").view(np.uint32))
    assert np.array_equal(long.view(np.uint32), alone.view(np.uint32))
    assert np.array_equal(first.view(np.uint32), alone[:395].view(np.uint32))


def test_what_the_state_cannot_follow_is_refused_before_cells_change(artifact, reference):  # S54, S106
    """After each refusal the sequence goes on as if nothing had been asked."""
    from ggufc.runtime.errors import RuntimeRefusal

    tokens = tokens_of(artifact)
    with session(artifact, n_ubatch=32) as s:
        at = 100
        s.decode(tokens[:at])
        calls = {
            "cannot be copied": lambda: s.seq_cp(0, 1) if s.n_seq_max > 1 else s.states.refuse_copy(),
            "positions cannot be moved": lambda: s.seq_add(0, 0, -1, 3),
            "positions cannot be moved: keys": lambda: s.seq_div(0, 0, -1, 2),
            "cannot be moved": s.shift_context,
            "from the middle": lambda: s.seq_rm(0, 3, 5),
            r"position \d+ of sequence 0 is next": lambda: s.decode([5], [148]),
            "no room for position": lambda: s.decode([5] * (s.n_ctx - 99)),
        }
        for message, call in calls.items():
            with pytest.raises(RuntimeRefusal, match=message):
                call()
            assert np.array_equal(s.decode(tokens[at : at + 3], logits="all"), reference[at : at + 3])
            at += 3
        with pytest.warns(RuntimeWarning, match="stays fragmented"):
            s.defrag()
        assert np.array_equal(s.decode(tokens[at:], logits="all"), reference[at:])


def test_openpangu_keeps_one_sequence_and_no_whole_context(artifact):  # S104, S105
    from ggufc.runtime.errors import RuntimeRefusal

    if artifact.manifest.arch != "openpangu":
        pytest.skip("fences of openpangu")
    with pytest.raises(RuntimeRefusal, match="n_seq_max is 2"):
        session(artifact, n_seq_max=2)
    with session(artifact) as s:
        s.decode([5] * 20)
        with pytest.raises(RuntimeRefusal, match="give its id"):
            s.state_save(io.BytesIO())
        s.seq_rm(0, 10, -1)
        for call in (lambda: s.decode([5]), lambda: s.state_save(io.BytesIO(), 0)):
            with pytest.raises(RuntimeRefusal, match="that of position 20"):
                call()


def test_deepseek4_is_cut_only_inside_its_current_block(artifact, reference):  # S54
    from ggufc.runtime.errors import RuntimeRefusal

    if artifact.manifest.arch != "deepseek4":
        pytest.skip("fences of deepseek4")
    tokens = tokens_of(artifact)
    with session(artifact) as s:
        s.decode(tokens[:47])
        with pytest.raises(RuntimeRefusal, match="cannot be cut at position 43"):
            s.seq_rm(0, 43, -1)
        s.seq_rm(0, 45, -1)
        assert np.array_equal(s.decode(tokens[45:90], logits="all"), reference[45:90])


def state_bytes(s, spec, seq: int) -> bytes:
    """A sequence's part of one state."""
    first, n = s.states.part(spec, seq)
    return s.executor.caches.view(spec.name)[first : first + n].tobytes()


def stream_bytes(s, seq: int) -> dict[str, bytes]:
    """Everything that is a sequence's: the rows of its cells, and its part of every state."""
    store, states = s.executor.caches, s.states
    found = {}
    for name, spec in store.specs.items():
        if spec in states.specs:
            found[name] = state_bytes(s, spec, seq)
        else:
            found[name] = store.view(name)[s.cells.list_of(seq).cells].tobytes()
    return found


def test_restoring_a_sequence_changes_nothing_of_another(artifact, reference):  # S9
    if sequences(artifact) == 1:
        pytest.skip("one sequence only")
    tokens = tokens_of(artifact)

    def advance(s) -> bytes:
        s.decode(tokens[:70], seq=0)
        s.decode(tokens[20:65], seq=1)
        blob = saved(s, 0)
        s.decode(tokens[90:133], seq=0)
        s.decode(tokens[65:101], seq=1)
        return blob

    with session(artifact, n_ubatch=16) as untouched:
        advance(untouched)
        want = untouched.decode(tokens[101:120], seq=1, logits="all")
    with session(artifact, n_ubatch=16) as s:
        blob = advance(s)
        before = stream_bytes(s, 1)
        assert len(before) == len(artifact.manifest.caches)
        written = {name for name, content in before.items() if len(set(content)) > 1}
        assert {name.split(".")[2] for name in written} >= {"k", "entries", "ring_kv", "ring_score", "indexer_ring_kv"}, sorted(before)
        s.state_load(blob, 0)
        assert stream_bytes(s, 1) == before
        assert np.array_equal(s.decode(tokens[101:120], seq=1, logits="all").view(np.uint32), want.view(np.uint32))
        assert np.array_equal(s.decode(tokens[70:], seq=0, logits="all").view(np.uint32), reference[70:].view(np.uint32))


BAD_STREAMS = """
import io, struct, sys
from ggufc.runtime import RuntimeRefusal, Session
from ggufc.runtime.state_rows import MARKER

def refused(call):
    try:
        call()
    except RuntimeRefusal as refusal:
        return str(refusal)
    raise SystemExit("not refused")

def saved(s, seq=None):
    s.state_save(file := io.BytesIO(), seq)
    return file.getvalue()

def changed(blob, at, value):
    start = blob.rindex(struct.pack("<I", MARKER)) + 4 * at
    return blob[:start] + struct.pack("<I", value) + blob[start + 4 :]

with Session(sys.argv[1], n_ctx=768, n_seq_max=3) as s:
    s.decode([5] * 30, seq=0)
    s.decode([7] * 9, seq=2)
    for seq in (3, -1, 99):  # the writer
        assert "does not exist" in refused(lambda: saved(s, seq)) and "does not exist" in refused(lambda: s.state_size(seq))
    one, whole = saved(s, 0), saved(s)
    for blob, seq, what in (
        (one, None, "one sequence, not a whole context"),
        (whole, 1, "a whole context, not one sequence"),
        (changed(one, 1, 3), 1, "the number of sequences is 3 in the saved state and 1 here"),
        (changed(one, 1, 0), 1, "the number of sequences is 0"),
        (changed(whole, 1, 1), None, "the number of sequences is 1 in the saved state and 3 here"),
        (changed(one, 2, 29), 1, "continue at position 29, its cells end at 29"),
        (changed(one, 3, 1), 1, "the number of state caches is 1"),
    ):
        assert what in (message := refused(lambda: s.state_load(blob, seq))), message
        assert s.pos_max(1) == -1
        if seq is None:
            s.state_load(whole)
        assert (s.pos_max(0), s.pos_max(2)) == (29, 8)
    assert "does not exist" in refused(lambda: s.state_load(one, 3))
with Session(sys.argv[1], n_ctx=768, n_seq_max=2) as s:
    assert "sequences" in refused(lambda: s.state_load(whole)) and s.pos_max(0) == -1
print("all refused, asserts", "on" if __debug__ else "off")
"""


@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["plain", "optimised"])
def test_wrong_streams_are_refused_by_writer_and_reader(artifact, flags):  # S11
    """Checks at run time: they hold without asserts, too (those of the script itself then say nothing; its refusals do)."""
    if sequences(artifact) == 1:
        pytest.skip("one sequence only")
    run = subprocess.run([sys.executable, *flags, "-c", BAD_STREAMS, str(artifact.path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == f"all refused, asserts {'off' if flags else 'on'}"


def test_positions_are_those_that_follow(artifact, reference):  # S107
    """A batch that does not begin where the sequence ends is refused before anything is evaluated; sizes are asked without positions."""
    from ggufc.runtime.errors import RuntimeRefusal

    tokens = tokens_of(artifact)
    with session(artifact, n_ubatch=16) as s:
        with pytest.raises(RuntimeRefusal, match="position 0 of sequence 0 is next, the batch has 4 to 4"):
            s.decode([tokens[0]], [4])
        s.decode(tokens[:20])
        for pos, words in (([19], "is taken"), ([21], "is next"), ([20, 22], "is next"), ([21, 20], "comes after position 21")):
            with pytest.raises(RuntimeRefusal, match=words):
                s.decode(tokens[: len(pos)], pos)
        assert np.array_equal(s.decode(tokens[20:40], list(range(20, 40)), logits="all"), reference[20:40])
