"""``ggufc diff``: equal sides have no difference, and an error planted in one of them is found at the node where it was planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ggufc.codegen.child import compile_here
from ggufc.codegen.options import CompileOptions
from ggufc.diff import CodeSide, InterpreterSide, Report, Tolerances, compare_sides
from ggufc.diff.recording import Recording
from ggufc.errors import DriverError
from ggufc.ir import Graph
from ggufc.runtime.logits import graph_options, session_options
from nan_trap import with_nan
from support import BUNDLED_GOLDEN

LLAMA = BUNDLED_GOLDEN / "llama-gqa-tied"


def node_of(graph: Graph, name: str):
    return next(node for node in graph.nodes if node.name == name)


def with_attr(name: str, **attrs: object) -> Callable[[Graph], None]:
    """Another value of a node's attributes."""

    def edit(graph: Graph) -> None:
        node_of(graph, name).attrs.update(attrs)

    return edit


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, CompileOptions]]:
    """The artifact of a model with results kept, compiled once per (model, keep)."""
    folder = tmp_path_factory.mktemp("kept")
    made: dict[tuple[Path, str], tuple[Path, CompileOptions]] = {}

    def get(model: Path, keep: str = "stored", **options: object) -> tuple[Path, CompileOptions]:
        if (model, keep) not in made:
            chosen = CompileOptions(jobs=1, keep=keep, **options)
            output = folder / f"{len(made)}.ggufc"
            compile_here(model, output, chosen)
            made[model, keep] = output, chosen
        return made[model, keep]

    return get


def no_nan(step: str, number: int, recording: Recording) -> None:  # S72
    """Generated code leaves no NaN in any result it keeps, nor in a cache."""
    assert with_nan(recording) == [], f"step {step}, micro-batch {number}"


def diff(
    folder: Path, code: tuple[Path, CompileOptions], edit: Callable[[Graph], None] | None = None, steps: int | None = None, **more: bool
) -> Report:
    """The code of a golden case against the interpreter, whose graph ``edit`` has spoilt."""
    case = json.loads((folder / "case.json").read_text())
    case["steps"] = case["steps"][:steps]
    left = CodeSide(*code, "code")
    right = InterpreterSide(folder / "model.gguf", code[1], "interpreter", edit=edit)
    return compare_sides(left, right, case, folder, session_options(case["options"]), Tolerances(**more), watch=no_nan)


@pytest.mark.parametrize(
    ("case", "steps"),
    [("llama-gqa-tied", None), ("llama-fa-q8", None), ("gemma3-7", 5), ("llama-cacheops", None), ("llama-moe-split", 3), ("quant-q4_k", 2)],
)  # fmt: skip
def test_code_equals_the_interpreter_node_by_node(compiled, case: str, steps: int | None) -> None:
    folder = BUNDLED_GOLDEN / case
    options = json.loads((folder / "case.json").read_text())["options"]
    types = {key: options[key] for key in ("type_k", "type_v") if key in options}
    report = diff(folder, compiled(folder / "model.gguf", builder=graph_options(options), **types), steps=steps)
    assert report.first is None, report.first
    assert sum(len(batch.entries) for batch in report.batches) > 20 * len(report.batches)
    compared = {entry.name for batch in report.batches for entry in batch.entries}
    assert "logits" in compared, "the logits are compared as well"
    assert any(entry.op == "set_rows" for batch in report.batches for entry in batch.entries), "caches are compared as well"


def test_a_wrong_epsilon_is_found(compiled) -> None:
    report = diff(LLAMA, compiled(LLAMA / "model.gguf"), with_attr("blk.1.ffn_norm.rms", eps=1e-3), steps=1)
    assert report.first is not None
    batch, entry = report.first
    assert (batch.step, entry.name) == ("a", "blk.1.ffn_norm")
    assert entry.inside == ("blk.1.ffn_norm.rms",), "the node at fault never left its launch, and is named all the same"
    assert [e.name for b in report.batches for e in b.differing if b is batch] == ["blk.1.ffn_norm"], "nothing that follows is blamed"


def test_a_swapped_rope_mode_is_found(compiled) -> None:
    report = diff(LLAMA, compiled(LLAMA / "model.gguf"), with_attr("blk.0.attn_k.rope", mode="neox"), steps=1)
    assert report.first is not None and report.first[1].name == "blk.0.k.store"
    assert report.first[1].inside == ("blk.0.attn_k.rope",)
    report = diff(LLAMA, compiled(LLAMA / "model.gguf"), with_attr("blk.1.attn_q.rope", mode="neox"), steps=1)
    assert {entry.name for batch in report.batches for entry in batch.differing} == {"blk.1.attn_q.rope"}


def changed_weight(folder: Path, name: str, output: Path) -> Path:
    """The model of a golden case with one value of a tensor changed."""
    from ggufc.formats.gguf_reader import GGUFFile
    from ggufc.formats.gguf_writer import GGUFWriter

    with GGUFFile.open(folder / "model.gguf") as source, GGUFWriter(output) as writer:
        writer.copy_metadata(source)
        for tensor, info in source.tensors.items():
            data = np.array(source.data(tensor))
            if tensor == name:
                data.view(np.float32)[7] += 0.25
            writer.add_tensor(tensor, info.ne, info.type.name, data)
        writer.finish()
    return output


def test_one_changed_weight_is_found(compiled, tmp_path: Path) -> None:
    model = changed_weight(LLAMA, "blk.1.ffn_down.weight", tmp_path / "changed.gguf")
    report = diff(LLAMA, compiled(model), steps=1)
    assert report.first is not None and report.first[1].name == "blk.1.ffn_residual"
    assert report.first[1].inside == ("blk.1.ffn_down",)
    kept = diff(LLAMA, compiled(model, "stored,blk.1.ffn_down"), steps=1)
    assert kept.first is not None
    assert (kept.first[1].name, kept.first[1].op, kept.first[1].inside) == ("blk.1.ffn_down", "mul_mat", ())
    distance = kept.first[1].distance
    assert distance is not None and distance.index[0] == 0, "value 7 of the tensor belongs to row 0"
    assert {entry.name for batch in kept.batches for entry in batch.differing} == {"blk.1.ffn_down"}


def test_without_following_errors_spread(compiled) -> None:
    report = diff(LLAMA, compiled(LLAMA / "model.gguf"), with_attr("blk.0.attn_q.rope", mode="neox"), steps=1, following=False)
    assert report.first is not None and report.first[1].name == "blk.0.attn_q.rope"
    differing = [entry.name for entry in report.batches[0].differing]
    assert "blk.1.ffn_residual" in differing and len(differing) > 5


def test_every_node_can_be_kept(compiled) -> None:
    """Kept nodes are results of their own, whatever passes and lowering would have made of them."""
    report = diff(LLAMA, compiled(LLAMA / "model.gguf", "stored,*"), steps=2)
    assert report.first is None
    known = {entry.name for batch in report.batches for entry in batch.entries}
    assert {"blk.0.attn_norm.rms", "blk.0.kq", "blk.0.kq_soft_max", "blk.1.ffn_gate.silu", "blk.1.ffn_down"} <= known
    assert not any(entry.inside for batch in report.batches for entry in batch.entries)


def test_keeping_changes_no_bit(compiled, tmp_path: Path) -> None:
    """What a comparison looks at is what would have run: the same launches, the same logits."""
    from ggufc.runtime import Artifact, Session
    from ggufc.runtime.logits import run_case

    folder = BUNDLED_GOLDEN / "gemma3-7"
    case = json.loads((folder / "case.json").read_text())
    plain = tmp_path / "plain.ggufc"
    compile_here(folder / "model.gguf", plain, CompileOptions(jobs=1))
    kept, _ = compiled(folder / "model.gguf")
    results, launches = [], []
    for path in (plain, kept):
        results.append(run_case(lambda o, path=path: Session(path, **session_options(o)), case, folder))
        with Artifact.open(path) as artifact:
            program = artifact.program("eval")
            launches.append([(launch.kernel, launch.node, launch.sym, launch.div, launch.mult) for launch in program.launches])
            outputs = list(program.outputs)
    assert launches[0] == launches[1] and len(outputs) > 20
    assert all(results[0][name].tobytes() == results[1][name].tobytes() for name in results[0])


# The command.


@pytest.fixture
def short_case(tmp_path: Path) -> Path:
    case = {
        "options": {"n_ctx": 256, "n_ubatch": 4, "threads": 1},
        "steps": [
            {"op": "decode", "name": "a", "tokens": [5, 9, 1, 30, 2, 7]},
            {"op": "seq_rm", "seq": 0, "p0": 4, "p1": -1},
            {"op": "decode_last", "name": "b", "tokens": [8]},
        ],
    }
    (path := tmp_path / "case.json").write_text(json.dumps(case))
    return path


def test_equal_sides_report_nothing(invoke, text_model: Path, short_case: Path) -> None:
    result = invoke("diff", text_model, short_case)
    assert "0 different" in result.stdout and "first difference" not in result.stdout
    data = json.loads(invoke("diff", text_model, short_case, "--json").stdout)
    assert data["equal"] and data["first"] is None
    assert [(b["step"], b["number"], b["sizes"]["T"]) for b in data["micro_batches"]] == [("a", 0, 4), ("a", 1, 2), ("b", 0, 1)]
    assert "blk.0.attn_norm.rms" in data["micro_batches"][0]["missing"], "fused away, which the report says"


def test_other_sides_of_the_command(invoke, text_model: Path, short_case: Path) -> None:
    for what in (("target=x86-64-v3",), ("passes=canonicalize,cse,dce",), ("type-k=f32", "type-v=f32")):
        result = invoke("diff", text_model, short_case, *(x for w in what for x in ("--against", w)))
        assert "errors add up" in result.stdout and "0 different" in result.stdout
    result = invoke("diff", text_model, short_case, "--interpret", "--against", "passes=canonicalize,cse,fuse-norm,fuse-glu,dce")
    assert "0 different" in result.stdout


def test_a_difference_is_exit_status_1(invoke, text_model: Path, short_case: Path) -> None:
    result = invoke("diff", text_model, short_case, "--against", "type-k=f32", "--tolerance", "1e-7", ok=False)
    assert result.exit_code == 1
    assert "first difference: blk.0.k.store  (set_rows, f16[32, 256]), step a, micro-batch 0 (T = 4, O = 4, KV = 256" in result.stdout
    assert "left" in result.stdout and "right" in result.stdout
    data = json.loads(invoke("diff", text_model, short_case, "--against", "type-k=f32", "--tolerance", "1e-7", "--json", ok=False).stdout)
    assert not data["equal"] and data["first"]["node"] == "blk.0.k.store" and len(data["first"]["index"]) == 2
    assert invoke("diff", text_model, short_case, "--against", "type-k=f32", "--tolerance", "1e-7", "--tolerance", "*=1").exit_code == 0


def test_stored_tensors(invoke, text_model: Path, short_case: Path, tmp_path: Path) -> None:
    """Values saved by one run are the reference of another, in files, folders and under other names."""
    saved = tmp_path / "saved.npz"
    invoke("diff", text_model, short_case, "--save", saved)
    arrays = dict(np.load(saved))
    assert arrays["a/blk.0.ffn_residual"].shape == (4, 64) and arrays["a.1/blk.0.ffn_residual"].shape == (2, 64)
    result = invoke("diff", text_model, short_case, "--against", saved)
    assert "0 within tolerance, 0 different" in result.stdout, "every bit is equal"

    arrays["a/blk.1.attn_norm"] = arrays["a/blk.1.attn_norm"].copy()
    arrays["a/blk.1.attn_norm"][2, 5] = np.nan
    arrays["b/blk.0.ffn_residual"] = np.zeros((3, 64), np.float32)
    np.savez(tmp_path / "other.npz", **arrays)
    result = invoke("diff", text_model, short_case, "--against", tmp_path / "other.npz", ok=False)
    assert result.exit_code == 1
    assert "first difference: blk.1.attn_norm" in result.stdout and "at [5, 2] (ne order)" in result.stdout and "nan" in result.stdout
    assert "shapes" in result.stdout and "64x3" in result.stdout
    only = invoke("diff", text_model, short_case, "--against", tmp_path / "other.npz", "--first", ok=False)
    assert "64x3" not in only.stdout

    folder = tmp_path / "engine" / "a"
    folder.mkdir(parents=True)
    np.save(folder / "l_out-0.npy", arrays["a/blk.0.ffn_residual"])
    np.save(folder / "l_out-1.npy", arrays["a/blk.0.ffn_residual"])
    (names := tmp_path / "names.json").write_text('{"l_out-{il}": "blk.{il}.ffn_residual"}')
    result = invoke("diff", text_model, short_case, "--against", folder.parent, "--names", names, ok=False)
    assert result.exit_code == 1 and "2 results compared: 1 with equal bits" in result.stdout
    assert "first difference: blk.1.ffn_residual" in result.stdout and "no node is called" not in result.stdout
    np.save(folder / "l_in-0.npy", arrays["a/blk.0.ffn_residual"])
    result = invoke("diff", text_model, short_case, "--against", folder.parent, "--names", names, ok=False)
    assert "no node is called l_in-0: what --names says" in result.stdout, "a tensor that nothing is compared with is not passed over"
    data = invoke("diff", text_model, short_case, "--against", folder.parent, "--names", names, "--json", ok=False).stdout
    assert json.loads(data)["strangers"] == ["l_in-0"]
    follow = invoke("diff", text_model, short_case, "--interpret", "--against", saved)
    assert "each node from the other side's operands" in follow.stdout


def test_stored_logits(invoke, text_model: Path, short_case: Path, tmp_path: Path) -> None:
    """A step's name alone holds the logits of its rows, whatever micro-batches they are computed in: what ``ggufc logits`` writes."""
    out = tmp_path / "logits.npz"
    invoke("logits", text_model, short_case, "-o", out)
    arrays = dict(np.load(out))
    assert {name: len(rows) for name, rows in arrays.items()} == {"a": 6, "b": 1}
    result = invoke("diff", text_model, short_case, "--against", out)
    assert "3 micro-batches, 3 results compared: 3 with equal bits, 0 within tolerance, 0 different" in result.stdout

    (folder := tmp_path / "engine").mkdir()
    arrays["a"][5, 9] += 1  # row 1 of the second micro-batch
    for name, rows in arrays.items():
        np.save(folder / f"{name}.npy", rows)
    result = invoke("diff", text_model, short_case, "--against", folder, ok=False)
    assert result.exit_code == 1 and "3 results compared: 2 with equal bits, 0 within tolerance, 1 different" in result.stdout
    assert "first difference: logits" in result.stdout and "step a, micro-batch 1" in result.stdout and "at [9, 1]" in result.stdout
    follow = invoke("diff", text_model, short_case, "--interpret", "--against", out)
    assert "3 results compared" in follow.stdout and "0 different" in follow.stdout
    np.save(folder / "a.npy", arrays["a"][:5])
    result = invoke("diff", text_model, short_case, "--against", folder, ok=False)
    assert result.exit_code == 1 and "shapes" in result.stdout and "x5" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--against", "nowhere.npz"), "is no file, no folder"),
        (("--against", "size=3"), "there is no 'size'; there are target, passes"),
        (("--against", "dsa=perhaps"), "write on or off"),
        (("--against", "mla=x"), "write a whole number"),
        (("--against", "interpreter", "--against", "a.npz"), "two right sides"),
        (("--interpret",), "both sides would be the same"),
        (("--against", "type-k="), "type-k= has no value"),
        (("--against", "passes="), "passes= alone is for the interpreter"),
        (("--against", "interpreter", "--against", "target=x86-64"), "which the interpreter does not run"),
        (("--follow", "--against", "type-k=f32"), "neither side is one"),
        (("--tolerance", "mul_mat=x"), "give a number"),
        (("--tolerance", "-1"), "give a number"),
        (("--tolerance", "foo=1"), "--tolerance foo=1: no node or operator is called 'foo'; ggufc dump"),
        (("--tolerance", "1e-2", "--tolerance", "blk.0.atn_q=1"), "is called 'blk.0.atn_q'; did you mean blk.0.attn_q"),
    ],
)
def test_refusals(invoke, text_model: Path, short_case: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(DriverError, match=message):
        invoke("diff", text_model, short_case, *arguments)


def test_refusals_about_files(invoke, text_model: Path, artifact: Path, short_case: Path, tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="is an artifact"):
        invoke("diff", artifact, short_case)
    np.savez(tmp_path / "bad.npz", **{"c/blk.0.ffn_residual": np.zeros(3)})
    with pytest.raises(DriverError, match="a step 'c', which the case does not have; its steps are a, step1, b"):
        invoke("diff", text_model, short_case, "--against", tmp_path / "bad.npz")
    np.savez(tmp_path / "unknown.npz", **{"a/typo": np.zeros(3)})
    with pytest.raises(DriverError, match="nothing was compared"):
        invoke("diff", text_model, short_case, "--against", tmp_path / "unknown.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(DriverError, match=r"is no \.npz file"):
        invoke("diff", text_model, short_case, "--against", tmp_path / "text.npz")
    (names := tmp_path / "names.json").write_text("[1]")
    with pytest.raises(DriverError, match="a map of names is a JSON object"):
        invoke("diff", text_model, short_case, "--against", tmp_path / "bad.npz", "--names", names)
    with pytest.raises(Exception, match=r"no node is called 'blk\.7\.\*'"):
        invoke("diff", text_model, short_case, "--keep", "blk.7.*")
