"""What tokens see: non-causal blocks on causal models, windows, encoder-style batches, positions. On compiled models and to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.runtime.batch import make_batch, visibility
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.kvcells import KVCells
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

MODELS = ("llama-gqa-tied", "gemma3-7")  # the second has layers with a window
RNG = np.random.default_rng(21)
TEXT = RNG.integers(3, 250, 40).tolist()


@pytest.fixture(params=MODELS)
def opened(request, compiled):
    path = compiled(request.param)
    sessions: list[Session] = []

    def go(**options) -> Session:
        sessions.append(Session(path, **{"n_ctx": 256, "n_seq_max": 3, "n_threads": 1, **options}))
        return sessions[-1]

    yield go
    for s in sessions:
        s.close()


def image(s: Session, n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, s.artifact.manifest.n_embd)).astype(np.float32)


def block(s: Session, rows: np.ndarray, pos, seq: int = 0) -> np.ndarray:
    """Decode embeddings that see each other."""
    s.causal = False
    try:
        return s.decode(embd=rows, pos=pos, seq=seq, logits="all")
    finally:
        s.causal = True


def test_a_second_sequence_does_not_matter_to_a_block(opened):  # S80
    alone, beside = opened(), opened()
    alone.decode(TEXT[:9], seq=0)
    beside.decode(TEXT[20:31], seq=1)
    beside.decode(TEXT[:9], seq=0)
    beside.decode(TEXT[31:33], seq=1)
    rows = image(alone, 12)
    want, got = (block(s, rows, np.arange(9, 21)) for s in (alone, beside))
    assert np.isfinite(want).all()  # no row sees nothing
    assert np.array_equal(got, want)
    assert np.array_equal(beside.decode([TEXT[9]], seq=0), alone.decode([TEXT[9]], seq=0))


def test_the_order_of_a_block_only_orders_its_rows(opened):  # S80
    a, b = opened(), opened()
    rows, order = image(a, 12), np.random.default_rng(1).permutation(12)
    for s in (a, b):
        s.decode(TEXT[:5])
    want = block(a, rows, np.arange(5, 17))
    got = block(b, rows[order], np.arange(5, 17)[order])
    assert np.array_equal(got, want[order])
    assert np.array_equal(a.decode([TEXT[7]]), b.decode([TEXT[7]]))


def test_a_block_sees_what_came_before_and_itself(opened):  # S80
    s = opened()
    rows = image(s, 8)

    def run(context: list[int], rows: np.ndarray) -> np.ndarray:
        s.reset()
        s.decode(context)
        return block(s, rows, np.arange(len(context), len(context) + 8))

    want = run(TEXT[:6], rows)
    assert np.array_equal(run(TEXT[:6], rows), want)
    assert (run([*TEXT[:5], TEXT[9]], rows) != want).any(axis=1).all()  # every row sees the last token before the block
    changed = rows.copy()
    changed[7] = -changed[7]
    assert (run(TEXT[:6], changed) != want).any(axis=1).all()  # and the first row the last of the block
    s.reset()
    s.decode(TEXT[:6])
    causal = s.decode(embd=rows, logits="all")
    assert (causal[:7] != want[:7]).any(axis=1).all()


def test_later_text_depends_on_the_block_alone(opened):
    """Causal decoding after a block: in one batch or token by token, equal bits."""
    a, b = opened(), opened(n_ubatch=16)
    rows = image(a, 10)
    for s in (a, b):
        s.decode(TEXT[:4])
        block(s, rows, np.arange(4, 14))
    one = a.decode(TEXT[4:12], logits="all")
    assert np.array_equal(np.concatenate([b.decode([token]) for token in TEXT[4:12]]), one)


def test_a_block_survives_saving(opened, tmp_path):
    s = opened()
    s.decode(TEXT[:4])
    block(s, image(s, 10), np.arange(4, 14))
    s.state_save(tmp_path / "x", 0)
    want = s.decode([TEXT[4]])
    assert s.state_load(tmp_path / "x", 1) == 14
    assert np.array_equal(s.decode([TEXT[4]], seq=1), want)


def test_tokens_of_equal_position_see_each_other(opened):
    """An image's embeddings share one temporal position, so they see each other even in causal mode."""
    s = opened()
    s.decode(TEXT[:4])
    rows = image(s, 6)
    causal = s.decode(embd=rows, pos=[4] * 6, logits="all")
    s.seq_rm(0, 4, -1)
    assert np.array_equal(block(s, rows, [4] * 6), causal)
    order = np.array([3, 1, 0, 5, 4, 2])
    s.seq_rm(0, 4, -1)
    permuted = s.decode(embd=rows[order], pos=[4] * 6, logits="all")
    # Equal positions are read in order of arrival, so sums are formed in another order.
    assert np.allclose(permuted, causal[order], atol=1e-3)


def test_an_encoder_batch_sees_its_own_sequence_only(opened):
    s, alone = opened(), opened()
    s.causal = alone.causal = False
    got = s.decode([*TEXT[:5], *TEXT[10:17]], pos=[*range(5), *range(7)], seq=[0] * 5 + [2] * 7, logits="all")
    assert np.array_equal(got[:5], alone.decode(TEXT[:5], logits="all"))
    alone.reset()
    assert np.array_equal(got[5:], alone.decode(TEXT[10:17], logits="all"))


def test_a_block_larger_than_a_micro_batch_is_refused(opened):
    s = opened(n_ubatch=8)
    s.decode(TEXT[:3])
    with pytest.raises(RuntimeRefusal, match=r"9 tokens that see each other must fit in one micro-batch; raise n_ubatch \(8\)"):
        block(s, image(s, 9), np.arange(3, 12))
    assert s.pos_max(0) == 2


def test_positions_left_out_are_the_next_ones(opened):
    s = opened()
    s.decode(TEXT[:7])
    want = s.decode(TEXT[7:12], pos=range(7, 12), logits="all")
    for _ in range(5):
        s.seq_rm(0, 7, -1)
        assert np.array_equal(s.decode(TEXT[7:12], logits="all"), want)


@pytest.mark.parametrize("window", [0, 1, 4, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_visible_ranges_equal_the_rule(window, causal):
    """Against the definition: same sequence, not later (if causal), less than a window earlier."""
    rng = np.random.default_rng(window)
    cells = KVCells(256, 3, 256)
    for _ in range(30):
        n = int(rng.integers(1, 9))
        seqs = rng.integers(0, 3, n)
        pos = rng.integers(0, 40, n)
        batch = make_batch(cells, [1] * n, pos, seqs, "none", 10)
        start = cells.plan([n])
        if start is None:
            cells.seq_rm(int(rng.integers(0, 3)))
            continue
        cells.insert(start[0], batch.pos, batch.seqs)
        seen = visibility(cells, batch, causal)
        for i, (base, lo, hi) in enumerate(seen.rows(window).tolist()):
            mine = set(seen.cells[base + lo : base + hi].tolist())
            q = int(pos[i])
            rule = {
                c
                for c in np.flatnonzero(cells.member[seqs[i]]).tolist()
                if (not causal or cells.pos[c] <= q) and (window == 0 or q - cells.pos[c] < window)
            }
            assert mine == rule and start[0] + i in mine
