"""dump, opt and inspect: what a model becomes, at every stage."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ggufc.cli import cli
from ggufc.errors import DriverError
from ggufc.inspection import affine_text, short_value
from ggufc.ir import IRError, parse_graph, print_graph
from ggufc.passes import PassError


def test_every_graph_stage_prints_text_that_parses_back(invoke, text_model: Path) -> None:
    for stage in ("built", "after:fuse-attention", "final"):
        text = invoke("dump", text_model, "--stage", stage).stdout
        assert print_graph(parse_graph(text)) == text
    assert "soft_max" in invoke("dump", text_model, "--stage", "built").stdout
    assert "flash_attn" in text and "soft_max" not in text


def test_the_artifact_holds_the_final_graph(invoke, text_model: Path, artifact: Path) -> None:
    for graph in ("eval", "eval_embd"):
        assert invoke("dump", artifact, "--graph", graph).stdout == invoke("dump", text_model, "--graph", graph).stdout
    with pytest.raises(DriverError, match="final graphs only"):
        invoke("dump", artifact, "--stage", "built")


def test_an_artifact_for_another_cpu_can_be_looked_at(invoke, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggufc.runtime.artifact.host_features", frozenset)
    assert invoke("dump", artifact).stdout.startswith("graph @eval")
    assert "sections" in json.loads(invoke("inspect", artifact, "--json").stdout)


def test_code_stages(invoke, text_model: Path) -> None:
    assert "blk.0." in invoke("dump", text_model, "--stage", "schedule").stdout
    assert "define " in invoke("dump", text_model, "--stage", "llvm", "--target", "x86-64").stdout
    assert ".text" in invoke("dump", text_model, "--stage", "asm", "--target", "x86-64").stdout
    with pytest.raises(DriverError, match="plain text"):
        invoke("dump", text_model, "--stage", "asm", "--format", "svg")


@pytest.mark.parametrize(("form", "start"), [("json", "{"), ("dot", "digraph"), ("svg", "<svg"), ("csv", "id,op"), ("html", "<!DOCTYPE")])
def test_other_formats(invoke, text_model: Path, tmp_path: Path, form: str, start: str) -> None:
    output = tmp_path / f"graph.{form}"
    assert invoke("dump", text_model, "--format", form, "-o", output).stdout == ""
    assert output.read_text().startswith(start)
    if form != "json":
        assert invoke("dump", text_model, "--format", form, "--layer", 1).stdout.startswith(start)


def test_an_input_is_never_overwritten(invoke, text_model: Path, artifact: Path, tmp_path: Path) -> None:
    for model in (text_model, artifact):
        before = model.read_bytes()
        (link := tmp_path / model.name).symlink_to(model)
        for output in (model, link):
            with pytest.raises(DriverError, match="is a file this command reads"):
                invoke("dump", model, "-o", output)
        assert model.read_bytes() == before
    (case := tmp_path / "case.json").write_text('{"options": {}, "steps": [{"op": "clear"}]}')
    for output in (case, artifact):
        with pytest.raises(DriverError, match="is a file this command reads"):
            invoke("logits", artifact, case, "-o", output)


def test_one_layer(invoke, text_model: Path) -> None:
    text = invoke("dump", text_model, "--stage", "built", "--layer", 1).stdout
    assert "blk.1.attn_q" in text and "blk.0.attn_q" not in text
    whole = invoke("dump", text_model, "--stage", "built").stdout
    line = next(line for line in text.splitlines() if "blk.1.attn_norm.weight" in line)
    assert line in whole, "nodes keep their numbers"
    rows = list(csv.DictReader(io.StringIO(invoke("dump", text_model, "--stage", "built", "--layer", 1, "--format", "csv").stdout)))
    assert 0 < len(rows) == len(text.splitlines()) - 1
    with pytest.raises(DriverError, match="it has layers 0 to 1"):
        invoke("dump", text_model, "--layer", 2)
    with pytest.raises(DriverError, match="whole graph"):
        invoke("dump", text_model, "--layer", 1, "--format", "json")


def test_unknown_stages_list_the_known_ones(invoke, text_model: Path) -> None:
    with pytest.raises(DriverError, match=r"built, after:canonicalize, .*final, schedule, llvm, asm"):
        invoke("dump", text_model, "--stage", "after:nothing")


def test_opt_runs_passes_over_text(invoke, text_model: Path, tmp_path: Path) -> None:
    built = invoke("dump", text_model, "--stage", "built").stdout
    assert invoke("opt", input=built).stdout == built
    result = invoke("opt", "--passes", "canonicalize,fuse-norm", "--print-after", "fuse-norm", "--time", input=built)
    assert "rms_norm_mul" in result.stdout and print_graph(parse_graph(result.stdout)) == result.stdout
    assert "# after fuse-norm" in result.stderr and "nodes" in result.stderr
    (tmp_path / "graph.ggir").write_text(built)
    invoke("opt", tmp_path / "graph.ggir", "--passes", "default", "-o", tmp_path / "out.ggir")
    assert (tmp_path / "out.ggir").read_text() == invoke("dump", text_model).stdout


def test_opt_names_what_is_wrong(invoke) -> None:
    with pytest.raises(IRError, match="line 1"):
        invoke("opt", input="graph nonsense")
    with pytest.raises(PassError, match="There is no pass 'nothing'"):
        invoke("opt", "--passes", "nothing", input="graph @g() {\n}\n")
    assert "fuse-attention" in invoke("opt", "--list").stdout


def test_inspect_a_model(invoke, text_model: Path) -> None:
    text = invoke("inspect", text_model, "--tensors", "--metadata").stdout
    for expected in (
        "architecture  llama",
        "f32  20 tensors",
        "llama.block_count",
        "token_embd.weight",
        "with chat template",
        "[<unk>, <s>",
    ):
        assert expected in text
    data = json.loads(invoke("inspect", text_model, "--json").stdout)
    assert data["kind"] == "model" and data["parameters"] == sum(t["parameters"] for t in data["types"].values())
    assert data["tensors"][0]["ne"] == [64, 320]


def test_inspect_an_artifact(invoke, artifact: Path, text_model: Path) -> None:
    text = invoke("inspect", artifact, "-c", 512, "-ub", 16).stdout
    for expected in (
        "weights",
        "code",
        "caches        4 for 512 cells",
        "program eval:",
        "(budget ",
        "held by",
        "reuse key",
        "fixups",
        "kernels",
    ):
        assert expected in text
    data = json.loads(invoke("inspect", artifact, "--json", "-c", 512, "-ub", 16).stdout)
    assert sum(section["bytes"] for section in data["sections"]) == data["bytes"] == artifact.stat().st_size
    program = data["programs"][0]
    assert program["nodes"] <= program["node_budget"]
    assert program["activation_bytes"] == sum(slot["bytes"] for slot in program["slots"])
    assert all(slot["holders"] for slot in program["slots"])
    assert sum(kernel["launches"] for kernel in data["kernels"]) == sum(p["launches"] for p in data["programs"])
    # Cache: 2 layers x (K + V) x 2 heads of 16 f16 values.
    assert data["caches"]["bytes"] == 2 * 2 * 32 * 2 * 512
    assert json.loads(invoke("inspect", text_model, "--compiled", "--json").stdout)["kind"] == "artifact"


def test_buffers_grow_with_the_micro_batch_and_hardly_with_the_context(invoke, artifact: Path) -> None:
    def activations(*options: object) -> int:
        return json.loads(invoke("inspect", artifact, "--json", *options).stdout)["programs"][0]["activation_bytes"]

    assert activations("-ub", 32) > activations("-ub", 16)
    # Attention that is split over long lists of cells keeps a few words for each part.
    assert 0 <= activations("-ub", 16, "-c", 1024) - activations("-ub", 16, "-c", 512) <= 16 * 512


def test_affine_forms_in_words() -> None:
    assert affine_text({"T": 2304, "": 64}) == "2304 T + 64"
    assert affine_text({"": 0}) == "0" == affine_text({})
    assert affine_text({"T": 1}) == "T"


def test_long_values_are_shortened() -> None:
    assert short_value(list(range(20))) == "[0, 1, 2, 3, ...] (20 values)"
    assert short_value("x" * 300) == "x" * 100 + "... (300 characters)"
    assert short_value([1, 2]) == [1, 2]


def test_a_pass_that_runs_again_has_a_stage_of_its_own(invoke, text_model: Path) -> None:
    first = invoke("dump", text_model, "--stage", "after:cse")
    assert "cse runs 2 times, this is after the first; see also after:cse#2" in first.stderr
    again = invoke("dump", text_model, "--stage", "after:cse#2")
    assert first.stdout != again.stdout and "flash_attn(" in again.stdout and "flash_attn(" not in first.stdout
    assert invoke("dump", text_model, "--stage", "after:cse#1").stdout == first.stdout
    with pytest.raises(DriverError, match="after:cse#2"):
        invoke("dump", text_model, "--stage", "after:cse#3")


def test_fusions_are_those_of_fusing_passes(invoke, artifact: Path) -> None:
    from ggufc.passes.fusion_counts import FUSION_PASSES

    (program, *_) = json.loads(invoke("inspect", artifact, "--json").stdout)["programs"]
    assert program["fusions"]["fuse-norm/rms-norm-mul"] > 0
    assert {name.partition("/")[0] for name in program["fusions"]} <= set(FUSION_PASSES)


def test_a_damaged_tensor_is_found(invoke, artifact: Path, text_model: Path, tmp_path: Path) -> None:
    assert "as they were written" in invoke("inspect", artifact, "--verify").stdout
    from ggufc.formats.gguf_reader import GGUFFile

    with GGUFFile.open(artifact) as file:
        name = next(name for name in file.tensors if "ffn_down" in name)
        content = bytearray(artifact.read_bytes())
        content[content.find(file.data(name).tobytes()) + 5] ^= 1
    (damaged := tmp_path / "damaged.ggufc").write_bytes(content)
    sound = json.loads(invoke("inspect", artifact, "--verify", "--json").stdout)
    assert sound["tensors"] > 10 and sound["damaged"] == []
    assert invoke("inspect", damaged).exit_code == 0, "opening looks at code and manifest only"
    with pytest.raises(DriverError, match=rf"1 of \d+ tensors are damaged \({name}"):
        invoke("inspect", damaged, "--verify")
    report = CliRunner().invoke(cli, ["inspect", str(damaged), "--verify", "--json"])
    assert json.loads(report.stdout)["damaged"] == [name] and isinstance(report.exception, DriverError)
    with pytest.raises(Exception, match="this is a model"):
        invoke("inspect", text_model, "--verify")


def test_an_output_that_cannot_be_written_is_refused_first(
    invoke, text_model: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case := tmp_path / "case.json").write_text('{"options": {}, "steps": [{"op": "clear"}]}')
    monkeypatch.setattr("ggufc.api.artifact_for", lambda *_, **__: pytest.fail("work began"))
    monkeypatch.setattr("ggufc.codegen.compile.compile_file", lambda *_, **__: pytest.fail("work began"))
    monkeypatch.setattr("ggufc.codegen.compile.stages", lambda *_, **__: pytest.fail("work began"))
    (file := tmp_path / "file").write_text("")
    for folder, message in ((tmp_path / "missing", "there is no folder"), (file, "there is no folder"), (Path("/proc"), "takes no files")):
        for command in (
            ("compile", text_model), ("dump", text_model), ("logits", artifact, case), ("diff", text_model, case),
        ):  # fmt: skip
            option = "--save" if command[0] == "diff" else "-o"
            with pytest.raises(DriverError, match=message):
                invoke(*command, option, folder / "out")
    assert list(tmp_path.glob(".out*")) == []


def test_caches_of_one_kind_are_told_by_part_and_rows() -> None:
    """Rings and states of sequences are no cells, and must not look like keys of another size."""
    from ggufc.cli.inspect import _cache_rows

    def cache(part: str, row: int, rows: int, **more: object) -> dict[str, object]:
        return {"part": part, "dtype": "f16", "row": row, "heads": 1, "window": 0, "hadamard": 0, "rows": rows, **more}

    assert _cache_rows(
        [cache("k", 64, 512, window=24, hadamard=64), cache("ring_kv", 64, 9), cache("ring_kv", 64, 9), cache("k", 64, 512, heads=2)]
    ) == [
        ("1 x", "k", "f16", "64 values", "512 rows", "window 24, transformed in blocks of 64"),
        ("2 x", "ring_kv", "f16", "64 values", "9 rows", ""),
        ("1 x", "k", "f16", "64 values in 2 heads", "512 rows", ""),
    ]
