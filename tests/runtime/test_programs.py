"""Variants of a program for the size of the session, and why a graph was not reused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import fake_model
from ggufc.formats.artifact import Program
from ggufc.formats.errors import ArtifactError
from ggufc.runtime import programs
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

LONG = "n_ctx_seq > 300"
TOKENS = [(3 * i * i + 1) % 89 + 100 for i in range(30)]


def variant(base: str, name: str, *observed: tuple[str, int | bool | str]) -> Program:
    return msgspec.structs.replace(fake_model.program(base), name=name, reuse_key=[("type_k", "f16"), *observed])


@pytest.fixture
def varied(tmp_path):
    """``varied(programs, **session options)``: a session on an artifact with these programs; ``rope`` gives its keys frequency factors."""
    opened: list[Session] = []

    def go(*described: Program, rope: bool = False, **options) -> Session:
        manifest = fake_model.manifest(programs=list(described))
        if rope:
            k = msgspec.structs.replace(manifest.caches[0], rope=fake_model.ROPE | {"freq_factors": [1.0, 2.0]})
            manifest = msgspec.structs.replace(manifest, caches=[k, manifest.caches[1]])
        path = fake_model.write(tmp_path / f"{len(opened)}.ggufc", manifest)
        opened.append(Session(path, n_threads=1, **options))
        return opened[-1]

    yield go
    for s in opened:
        s.close()


BOTH = (
    variant("eval", "eval", (LONG, False)),
    variant("eval", f"eval@{LONG}", (LONG, True)),
    variant("eval_embd", "eval_embd", (LONG, False)),
    variant("eval_embd", f"eval_embd@{LONG}", (LONG, True)),
)


@pytest.mark.parametrize(
    ("n_ctx", "n_seq_max", "long"), [(256, 1, False), (300, 1, False), (301, 1, True), (600, 2, False), (602, 2, True), (1000, 4, False)]
)
def test_the_context_of_a_sequence_chooses_as_it_was_asked_for(varied, n_ctx, n_seq_max, long):
    """300 cells are padded to 512, but 300 positions were asked for."""
    s = varied(*BOTH, n_ctx=n_ctx, n_seq_max=n_seq_max)
    assert s.executor.program.name == (f"eval@{LONG}" if long else "eval")
    got = s.decode(TOKENS[:4])
    assert np.array_equal(got[0], fake_model.reference(TOKENS[:4], [0, 1, 2, 3], 3))
    s.decode(embd=np.ones((1, 2), np.float32))
    suffix = f"@{LONG}" if long else ""
    assert s.stats.miss_reasons == {"first evaluation": 1, f"program eval{suffix} -> eval_embd{suffix}": 1}


def test_no_fitting_program_is_refused_with_what_there_is(varied):
    with pytest.raises(
        RuntimeRefusal, match=r"n_ctx_seq = 512 \(eval: n_ctx_seq > 300 is True, compiled for False\); choose another n_ctx"
    ):
        varied(BOTH[0], n_ctx=512)
    s = varied(BOTH[0], BOTH[1], BOTH[2], n_ctx=512)
    with pytest.raises(RuntimeRefusal, match="eval_embd: n_ctx_seq > 300 is True"):
        s.decode(embd=np.ones((1, 2), np.float32))
    assert s.cells.used == 0
    with pytest.raises(RuntimeRefusal, match="does not take embeddings"):
        varied(BOTH[0], n_ctx=256).decode(embd=np.ones((1, 2), np.float32))


@pytest.mark.parametrize(
    ("observed", "n", "holds"),
    [
        (("n_ctx_seq > 300", True), 300, False),
        (("n_ctx_seq >= 300", True), 300, True),
        (("300 < n_ctx_seq", False), 300, True),
        (("n_ctx_seq == 300", True), 300, True),
        (("n_ctx_seq != 300", True), 300, False),
        (("n_ctx_seq <= 8", True), 9, False),
        (("n_ctx_seq", 300), 300, True),
        (("n_ctx_seq", 300), 301, False),
        (("mla != 0", True), 1, True),  # about options: settled when the model was compiled
        (("type_v", "f16"), 1, True),
    ],
)
def test_observations_about_sizes_are_checked_and_others_are_not(observed, n, holds):
    assert (programs.unmet(variant("eval", "eval", observed), {"n_ctx_seq": n}) == []) == holds


@pytest.mark.parametrize("forgetful", [0, 1])
def test_a_forgotten_observation_is_found_when_the_session_opens(varied, forgetful):
    """Mutation: one variant does not say what its builder looked at, so it would serve sessions it was not built for."""
    mutated = list(BOTH[:2])
    mutated[forgetful] = variant("eval", mutated[forgetful].name)
    with pytest.raises(ArtifactError, match=r"the programs eval and eval@n_ctx_seq > 300 differ in nothing"):
        varied(*mutated, n_ctx=512 if forgetful == 0 else 256)


def test_a_comparison_with_an_unknown_size_is_a_damaged_artifact():
    with pytest.raises(ArtifactError, match="unknown size 'n_moon'"):
        programs.unmet(variant("eval", "eval", ("n_ctx_seq > n_moon", True)), {"n_ctx_seq": 1})


def test_keys_of_a_variant_with_other_factors_are_not_shifted_by_the_wrong_ones(varied):
    s = varied(*BOTH, rope=True, n_ctx=512)
    s.decode(TOKENS[:4])
    with pytest.raises(RuntimeRefusal, match="does not say how eval@n_ctx_seq > 300 rotates") as refusal:
        s.seq_add(0, 0, -1, 3)
    assert refusal.value.soft and s.pos_max(0) == 3
    s = varied(*BOTH, rope=True, n_ctx=256)
    s.decode(TOKENS[:4])
    s.seq_add(0, 0, -1, 3)
    assert s.pos_max(0) == 6


def test_what_a_bound_graph_is_not_carried_across_is_named(session, tmp_path):
    s = session(n_seq_max=2)
    for token in TOKENS[:20]:
        s.decode([token])
    assert s.stats.reuse_rate == 19 / 20
    s.seq_add(0, 0, -1, 2)
    s.decode([100])
    s.state_save(tmp_path / "x", 0)
    s.decode([100])  # saving changes nothing
    s.state_load(tmp_path / "x", 1)
    s.decode([100], seq=1)
    s.seq_rm(0)
    assert s.defrag() > 0
    s.decode([100], seq=1)
    assert s.stats.miss_reasons == {"first evaluation": 1, "keys were rotated": 1, "state was restored": 1, "cells were moved": 1}
    assert s.stats.reuse_lines()[:2] == ["reused 20 of 24 graphs (83.3 %)", "not reused 1 times: first evaluation"]
    off = session(graph_reuse=False)
    off.decode([100])
    off.decode([100])
    assert off.stats.miss_reasons == {"reuse is off": 2} and off.stats.reuse_rate == 0
