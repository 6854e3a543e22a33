"""Reusing bound graphs: what 40 steps on one binding leave in every cache is what newly bound graphs leave, and what it takes shows when it
is missing (spec: runtime-cache, 2.5 and 3.5).
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import fake_model
from ggufc.formats import artifact as fmt
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym
from ggufc.passes.cache_fixups import HEAD
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.executor import Executor
from ggufc.runtime.session import Session
from ggufc.runtime.sizes import Sizes
from support import BUNDLED_GOLDEN

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


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def moving_case(request):
    """A case, options of its compilation, and the caches that hold a row per cell."""
    case, options = request.param
    names = ["blk.0.k", "blk.0.v", "blk.1.k", "blk.1.v"] if case.startswith("llama") else []
    return case, options, names or sorted([f"blk.{i}.k" for i in range(5)] + [f"blk.{i}.indexer_k" for i in range(3)])


@pytest.fixture(scope="module")
def written_at_head(tmp_path_factory, moving_case):
    """A model whose builder writes cached rows in one piece from row ``head`` on, instead of row by row at the cells an input names."""
    from ggufc.codegen.child import compile_here
    from ggufc.codegen.options import CompileOptions
    from ggufc.models import attention
    from ggufc.models.blocks import Builder

    plain = Builder.add

    def add(self, op, *operands, **attrs):
        if op != "set_rows":
            return plain(self, op, *operands, **attrs)
        cache, rows, _ = operands
        self.graph.symbols = tuple(dict.fromkeys((*self.graph.symbols, HEAD)))
        width, n = rows.type.ne
        place = plain(self, "view", cache, name=f"{cache.name}.place", ne=(width, n), nb=(1, width), offset=Sym(HEAD) * width)
        return plain(self, "cpy", rows, place, **attrs)

    path = tmp_path_factory.mktemp("head") / "model.ggufc"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.Builder, "add", add)
        case, options, _ = moving_case
        compile_here(BUNDLED_GOLDEN / case / "model.gguf", path, CompileOptions(jobs=1, **options))
    return path


def walk(artifact: Artifact) -> tuple[np.ndarray, dict[str, bytes]]:
    """Logits and caches of two sequences that grow in turn, on reused graphs."""
    rng = np.random.default_rng(12)
    with Session(artifact, n_ctx=256, n_ubatch=8, n_seq_max=2, n_threads=1) as s:
        rows = [s.decode(rng.integers(3, 250, n).tolist(), seq=i % 2, logits="all") for i, n in enumerate([11, 5, *[1] * 20, 9])]
        assert s.stats.reuse_rate > 0.9
        return np.concatenate(rows), caches(s)


def test_writes_that_move_with_head_equal_writes_by_slots(compiled, written_at_head, moving_case):
    case, options, names = moving_case
    with Artifact.open(written_at_head) as moving, Artifact.open(compiled(case, **options)) as plain:
        assert sorted(fixup.cache for fixup in moving.program("eval").fixups) == names
        got, want = walk(moving), walk(plain)
    assert got[1] == want[1]
    assert np.array_equal(got[0].view(np.uint32), want[0].view(np.uint32))


def test_each_of_them_needs_its_registration(compiled, written_at_head, moving_case):  # S146
    """Mutation: one cache's fixup is missing, and its rows, then the logits, differ; of index keys, too."""
    case, options, names = moving_case
    with Artifact.open(compiled(case, **options)) as plain:
        want = walk(plain)
    for dropped in names:
        with Artifact.open(written_at_head) as moving:
            for program in moving.manifest.programs:
                program.fixups[:] = [fixup for fixup in program.fixups if fixup.cache != dropped]
            got = walk(moving)
        assert not np.array_equal(got[0], want[0]) and got[1][dropped] != want[1][dropped], dropped


def test_a_pipeline_that_forgot_the_pass_is_refused():
    from ggufc.codegen.errors import CodegenError
    from ggufc.codegen.lower import lower

    g = Graph("decode", "test", ("T", "O", "C", "KV", "R", HEAD))
    place = g.add("view", g.cache("blk.0.k", TensorType("f16", (64, Sym("C")))), ne=(64, Sym("T")), nb=(1, 64), offset=Sym(HEAD) * 64)
    g.outputs["k"] = g.add("cpy", g.input("embd", "embd", TensorType("f32", (64, Sym("T")))), place, name="store")
    with pytest.raises(CodegenError, match="node 'store' writes at the moving offset 64\\*head, but has no fixup"):
        lower(g)


@pytest.mark.parametrize("registered", [True, False])
def test_a_write_at_a_moving_offset_needs_its_fixup(tmp_path, registered):  # S146
    """Mutation: without the registration every step writes the row of the first one."""
    fix = fmt.Fixup(0, 3, "blk.0.k", 16, "blk.0.k_store")
    program = msgspec.structs.replace(fake_model.program(), fixups=[fix] if registered else [])
    path = fake_model.write(tmp_path / "a", fake_model.manifest(programs=[program]))
    with Artifact.open(path) as artifact, Executor(artifact, "eval", Sizes(64, 8, n_threads=1)) as executor:
        for head in range(5):
            executor.eval(1, 0, 0, 256, head=head)
        written = executor.caches.view("blk.0.k")[:5].any(axis=1).tolist()
    assert written == ([True] * 5 if registered else [True, False, False, False, False])
