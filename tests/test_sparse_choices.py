"""What compiled indexers choose: the rows a plain formula chooses from the same queries and stored keys, and always the first row that a
sequence still has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufc.codegen.compile import CompileOptions, compile_file
from ggufc.runtime.executor import Executor
from ggufc.runtime.session import Session
from support import BUNDLED_GOLDEN

K, HEADS, WIDTH = 8, 8, 32
LAYERS = (0, 1, 2)


class Kept(Executor):
    """Results of the micro-batch evaluated last, by node name."""

    found: dict[str, np.ndarray]

    def eval(self, *args: Any, **more: Any) -> None:
        super().eval(*args, **more)
        self.found = {name.removeprefix("keep:"): self.output(name).copy() for name in self.program.outputs}

    def choice(self, layer: int) -> np.ndarray:
        """Chosen cells i32 [tokens, K], -1 where there are no more."""
        return self.found[f"blk.{layer}.indexer.top_k"].view(np.int32).reshape(-1, K)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("choices") / "model.ggufc"
    builder = {"dsa": True, "dsa_top_k": K, "idx_type_k": "f32"}
    compile_file(BUNDLED_GOLDEN / "glm-dsa-topk8" / "model.gguf", path, CompileOptions(jobs=1, builder=builder, keep="stored"))
    return path


@pytest.fixture
def s(artifact: Path) -> Iterator[Session]:
    with Session(artifact, n_ctx=256, n_batch=256, n_ubatch=256, n_seq_max=4, n_threads=1, executor=Kept) as opened:
        yield opened


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, n).tolist()


def kept(s: Session) -> Kept:
    assert isinstance(s.executor, Kept)
    return s.executor


def positions(s: Session, layer: int) -> list[list[int]]:
    """Positions of each token's chosen cells, in the order chosen."""
    return [[int(s.cells.pos[c]) for c in row if c >= 0] for row in kept(s).choice(layer)]


def expected(s: Session, layer: int, t: int, pos: int, seq: int) -> list[int]:
    """Cells the formula chooses for token ``t`` of the micro-batch, in order of position: the first, and the largest sums over heads of
    weight * relu(query . key)."""
    run = kept(s)
    listed = s.cells.list_of(seq)
    seen = listed.cells[listed.pos <= pos]
    keys = run.caches.view(f"blk.{layer}.indexer_k").view(np.float32).reshape(-1, WIDTH)[seen].astype(np.float64)
    q = run.found[f"blk.{layer}.indexer.q.hadamard"].reshape(-1, HEADS, WIDTH)[t].astype(np.float64)
    w = run.found[f"blk.{layer}.indexer.weights"].reshape(-1, HEADS)[t].astype(np.float64)
    score = w @ np.maximum(q @ keys.T, 0)
    score[0] = np.inf
    return seen[np.sort(np.argsort(-score, kind="stable")[:K])].tolist()


def test_the_largest_scores_are_chosen_and_nothing_is_a_nan(s: Session) -> None:  # S108, S137, S138
    """In a prompt and in steps after it, for tokens that see fewer rows than are kept and for such as see many more."""
    for first, n in ((0, 70), (70, 1), (71, 1)):
        s.decode(tokens(72)[first : first + n], logits="all")
        assert all(np.isfinite(values).all() for name, values in kept(s).found.items() if not name.endswith("top_k"))
        for layer in LAYERS:
            choice = kept(s).choice(layer)
            for t in range(n):
                want = expected(s, layer, t, first + t, 0)
                assert len(want) == min(K, first + t + 1)
                assert choice[t].tolist() == want + [-1] * (K - len(want))


def test_layers_without_scores_have_none(s: Session) -> None:  # S151
    s.decode(tokens(20))
    assert sorted(name for name in kept(s).found if name.endswith("indexer.top_k")) == [f"blk.{i}.indexer.top_k" for i in LAYERS]


def test_packed_sequences_choose_among_their_own_and_keep_their_first(s: Session, artifact: Path) -> None:  # S142
    lengths = (30, 24, 18, 9)
    order = [(p, seq) for p in range(max(lengths)) for seq in range(4) if p < lengths[seq]]
    mine = [tokens(n, seq) for seq, n in enumerate(lengths)]
    s.decode([mine[seq][p] for p, seq in order], pos=[p for p, _ in order], seq=[seq for _, seq in order])
    for layer in LAYERS:
        packed = positions(s, layer)
        cells = kept(s).choice(layer)
        for row, (_, seq) in zip(cells, order):
            owned = set(s.cells.list_of(seq).cells.tolist())
            assert {c for c in row.tolist() if c >= 0} <= owned
        for seq, n in enumerate(lengths):
            with Session(artifact, n_ctx=256, n_ubatch=256, n_seq_max=4, n_threads=1, executor=Kept) as alone:
                alone.decode(mine[seq])
                assert positions(alone, layer) == [chosen for chosen, (_, other) in zip(packed, order) if other == seq]
            assert all(chosen[0] == 0 for chosen, (_, other) in zip(packed, order) if other == seq), n


def test_the_first_survivor_is_in_every_choice(s: Session, artifact: Path) -> None:  # S143
    """Ten positions are dropped: the eleventh token takes the first one's place for its sequence, and for no other."""
    s.decode(tokens(40))
    for layer in LAYERS:
        assert not all(10 in chosen for chosen in positions(s, layer)[20:]), "it is not chosen anyway"
    s.seq_rm(0, 0, 10)
    s.decode(tokens(12, 1))
    for layer in LAYERS:
        for t, chosen in enumerate(positions(s, layer)):
            assert chosen[0] == 10 and len(chosen) == K
            assert kept(s).choice(layer)[t].tolist() == expected(s, layer, t, 40 + t, 0)
    fresh = s.decode(tokens(25, 2), seq=1, logits="all")
    for layer in LAYERS:
        assert all(chosen[0] == 0 for chosen in positions(s, layer))
    with Session(artifact, n_ctx=256, n_ubatch=256, n_seq_max=4, n_threads=1) as alone:
        assert np.array_equal(alone.decode(tokens(25, 2), seq=1, logits="all").view(np.uint32), fresh.view(np.uint32))
