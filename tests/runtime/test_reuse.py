"""Reusing bound graphs: what 40 steps on one binding leave in every cache is what newly bound graphs leave, and what it takes shows when it
is missing (spec: runtime-cache, 2.5 and 3.5).
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import fake_model
from ggufc.formats import artifact as fmt
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.executor import Executor
from ggufc.runtime.session import Session

pytest_plugins = ("runtime_fixtures",)

SPARSE = {"builder": {"dsa": True, "dsa_top_k": 8}}
CASES = [("llama-gqa-tied", {}), ("glm-dsa-topk8", SPARSE)]
STEPS = 40


def caches(s: Session) -> dict[str, bytes]:
    return {name: s.executor.caches.view(name).tobytes() for name in s.executor.caches.specs}


@pytest.mark.parametrize(("case", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_forty_reused_steps_leave_the_rows_and_logits_of_new_graphs(compiled, case, options):
    tokens = np.random.default_rng(8).integers(3, 250, 24 + STEPS).tolist()
    runs = []
    for reuse in (True, False):
        with Session(compiled(case, **options), n_ctx=256, n_ubatch=8, n_seq_max=2, n_threads=1, graph_reuse=reuse) as s:
            s.decode(tokens[:24], logits="none")
            s.stats.reset()
            rows = [s.decode([token], seq=0)[0] for token in tokens[24:]]
            assert (s.stats.reuse_rate > 0.9) == reuse
            assert set(s.stats.miss_reasons) <= {"first evaluation", "reuse is off"}
            runs.append((np.array(rows), caches(s)))
    assert len(runs[0][1]) == (4 if case.startswith("llama") else len(runs[1][1]))
    assert runs[0][1] == runs[1][1]
    assert np.array_equal(runs[0][0].view(np.uint32), runs[1][0].view(np.uint32))


@pytest.mark.parametrize("registered", [True, False])
def test_a_write_at_a_moving_offset_needs_its_fixup(tmp_path, registered):  # S146
    """Mutation: without the registration every step writes the row of the first one."""
    fix = fmt.Fixup(0, 3, "blk.0.k", 16, "blk.0.k_store")
    program = msgspec.structs.replace(fake_model.program(), fixups=[fix] if registered else [])
    path = fake_model.write(tmp_path / "a", fake_model.manifest(programs=[program]))
    with Artifact.open(path) as artifact, Executor(artifact, n_threads=1, n_ctx=64, n_ubatch=8) as executor:
        for head in range(5):
            executor.eval(1, 0, 0, 256, head=head)
        written = executor.caches.view("blk.0.k")[:5].any(axis=1).tolist()
    assert written == ([True] * 5 if registered else [True, False, False, False, False])
