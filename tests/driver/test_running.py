"""Commands that compile and run a model: the tiny one, end to end."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ggufc
from ggufc.errors import DriverError
from ggufc.runtime.sampling import GREEDY


def test_compile_writes_one_artifact_and_says_what_it_cost(invoke, text_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.ggufc"
    result = invoke("compile", text_model, "-o", output, "-ctk", "f32")
    assert re.search(
        r"out\.ggufc: .* KiB \(\d.\d\d x the model\), \d+ kernels \(\d.* KiB of code\), \d+ launches, .* s, peak memory", result.stdout
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.ggufc"]
    with pytest.raises(DriverError, match="--force"):
        invoke("compile", text_model, "-o", output)
    with pytest.raises(DriverError, match="is the model itself"):
        invoke("compile", text_model, "-o", text_model, "--force")
    with pytest.raises(DriverError, match="has a f32 K cache, not f16"):
        invoke("run", output, "-p", "a", "-ctk", "f16")
    with pytest.raises(DriverError, match=r"holds code for .*, not x86-64; compile the model again"):
        invoke("run", output, "-p", "a", "--target", "x86-64")
    with pytest.raises(DriverError, match="is an artifact, which is compiled already"):
        invoke("compile", output, "-o", tmp_path / "again.ggufc")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DriverError, match="no regular file"):
        invoke("compile", text_model, "-o", tmp_path / "pipe", "--force")


def test_a_model_file_may_have_any_name(invoke, text_model: Path, tmp_path: Path) -> None:
    """Also one whose bytes are not UTF-8."""
    model = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.gguf"))
    model.symlink_to(text_model)
    invoke("compile", model, "-o", tmp_path / "out.ggufc")
    assert json.loads(invoke("inspect", tmp_path / "out.ggufc", "--json").stdout)["source"]["name"] == "caf\N{REPLACEMENT CHARACTER}.gguf"


def test_run_streams_text_and_reports_speed(invoke, artifact: Path) -> None:
    result = invoke("run", artifact, "-p", "hello", "-n", 8, "--temp", 0, "-t", 1)
    assert re.search(r"^prompt \d+ tokens, [\d.]+ tokens/s; decode 7 tokens, [\d.]+ tokens/s \(1 threads\)$", result.stderr, re.MULTILINE)
    assert invoke("run", artifact, "-p", "hello", "-n", 8, "--temp", 0, "-t", 1, "--quiet").stderr == ""


def test_run_is_the_same_from_model_artifact_file_and_stdin(invoke, artifact: Path, text_model: Path, tmp_path: Path) -> None:
    """Short options as llama.cpp spells them; micro-batch and threads do not change the text."""
    (tmp_path / "prompt.txt").write_text("hello world\n")
    common = ["-n", 12, "--temp", 0, "--raw", "--quiet"]
    texts = {
        invoke("run", artifact, "-p", "hello world", *common, "-t", 1).stdout,
        invoke("run", "-m", text_model, "-p", "hello world", *common, "-t", 2, "-ub", 3, "-b", 16).stdout,
        invoke("run", artifact, "-f", tmp_path / "prompt.txt", *common, "-ub", "2", "-c", 256).stdout,
        invoke("run", artifact, *common, input="hello world").stdout,
        invoke("run", artifact, "-f", "-", *common, input="hello world\n").stdout,
    }
    assert len(texts) == 1
    assert len(texts.pop()) > 1


def test_run_uses_the_template_unless_raw(invoke, artifact: Path) -> None:
    common = [artifact, "-p", "hello", "-n", 8, "--temp", 0, "--quiet"]
    with ggufc.load(artifact, n_threads=1) as session:
        prompt = "<s>user: hello</s><s>assistant: "
        assert session.chat_prompt([{"role": "user", "content": "hello"}]) == prompt
        expected = session.generate(session.tokenize(prompt, bos=False), 8, GREEDY).text()
    assert invoke("run", *common).stdout.rstrip("\n") == expected.rstrip("\n")
    assert invoke("run", *common).stdout != invoke("run", *common, "--raw").stdout
    assert invoke("run", *common, "-sys", "be brief").stdout != invoke("run", *common).stdout


def test_a_seed_makes_sampling_repeatable(invoke, artifact: Path) -> None:
    def text(*more: object) -> str:
        return invoke("run", artifact, "-p", "a", "-n", 24, "--quiet", "--raw", *more).stdout

    assert text("-s", 7) == text("--seed", 7)
    assert text("-s", 7) != text("-s", 8)
    options = ["--temp", 1.5, "--top-k", 5, "--top-p", 0.9, "--min-p", 0.01, "--repeat-penalty", 1.3, "--repeat-last-n", -1, "-s", 7]
    assert text(*options) == text(*options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "x", "-f", "y"], "use one of them"),
        (["-p", "x", "--raw", "-sys", "y"], "--raw uses no chat template"),
        (["-p", "x", "-m", "other"], "named twice"),
        (["-p", "x", "-ub", "0"], "-ub"),
        (["-p", "x", "--top-p", "2"], "--top-p"),
        (["-p", "x", "--context-shift", "--compact-windows"], "--compact-windows does not allow"),
    ],
)
def test_contradictions_are_usage_errors(invoke, artifact: Path, arguments: list[str], message: str) -> None:
    result = invoke("run", artifact, *arguments, ok=False)
    assert result.exit_code == 2
    assert message in result.stderr


def test_expect_digest(invoke, artifact: Path, text_model: Path) -> None:
    import hashlib

    digest = hashlib.sha256(artifact.read_bytes()).hexdigest()
    invoke("run", artifact, "-p", "a", "-n", 1, "--expect-digest", digest)
    with pytest.raises(ggufc.GgufcError, match="nothing was loaded"):
        invoke("run", artifact, "-p", "a", "-n", 1, "--expect-digest", "0" * 64)
    with pytest.raises(DriverError, match="is about artifacts"):
        invoke("run", text_model, "-p", "a", "-n", 1, "--expect-digest", digest)


def test_chat_keeps_the_conversation(invoke, artifact: Path) -> None:
    """The second answer is the one a fresh evaluation of the whole conversation gives."""
    result = invoke("chat", artifact, "-n", 6, "--temp", 0, "-t", 1, input="hello\ntwo \\\nlines\n/clear\n/help\nhello\n/exit\nnever\n")
    with ggufc.load(artifact, n_threads=1) as session:
        first = session.generate(session.chat_tokens([{"role": "user", "content": "hello"}]), 6, GREEDY).text()
        session.reset()
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "two \nlines"},
        ]
        second = session.generate(session.chat_tokens(messages), 6, GREEDY).text()
    assert result.stdout == f"{first}\n{second}\n{first}\n"
    assert "the conversation was forgotten" in result.stderr
    assert "/clear forgets" in result.stderr


def test_chat_refuses_what_does_not_fit_and_goes_on(invoke, artifact: Path) -> None:
    result = invoke("chat", artifact, "-n", 2, "-c", 256, "-t", 1, input="long " * 100 + "\nhi\n")
    assert "/clear starts a new conversation" in result.stderr
    assert result.stdout.count("\n") == 1


def test_bench_speaks_llama_bench(invoke, artifact: Path, text_model: Path) -> None:
    rows = json.loads(invoke("bench", text_model, "-p", "16,8", "-n", "4", "-t", "1,2", "-r", 2, "-o", "json").stdout)
    assert [(r["n_prompt"], r["n_gen"], r["n_threads"]) for r in rows] == [
        (16, 0, 1),
        (8, 0, 1),
        (0, 4, 1),
        (16, 0, 2),
        (8, 0, 2),
        (0, 4, 2),
    ]
    for row in rows:
        tokens = row["n_prompt"] or row["n_gen"]
        assert row["avg_ts"] == pytest.approx(np.mean([1e9 * tokens / ns for ns in row["samples_ns"]]), rel=1e-5)
        assert row["model_filename"] == str(text_model) and row["model_n_params"] > 0 and len(row["samples_ts"]) == 2
    table = list(csv.DictReader(io.StringIO(invoke("bench", artifact, "-p", 0, "-n", 4, "-r", 1, "-o", "csv").stdout)))
    assert len(table) == 1 and float(table[0]["avg_ts"]) > 0 and "samples_ns" not in table[0]
    markdown = invoke("bench", artifact, "-p", 8, "-n", 0, "-t", 1, "-r", 1, "--profile")
    assert re.search(r"\| pp8 +\| [\d.]+ ± 0\.00 \|", markdown.stdout)
    assert re.search(r"^  total +\d+ +[\d.]+ +100\.0%", markdown.stderr, re.MULTILINE)
    assert re.search(r"^ +[\d.]+% +[\d.]+ us x \d+ +mat_mul\(", markdown.stderr, re.MULTILINE)
    with pytest.raises(DriverError, match="nothing to measure"):
        invoke("bench", artifact, "-p", 0, "-n", 0)


def test_code_for_another_cpu_is_refused_before_it_is_compiled(invoke, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ggufc.codegen.cpu.target import resolve
    from ggufc.runtime import cpuinfo

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpuinfo, "host_features", lambda: frozenset({"sse4.2", "avx2", "fma"}))
    with pytest.raises(DriverError, match=r"--target avx512vnni needs CPU features this machine lacks: .*avx512vnni"):
        invoke("run", text_model, "-p", "a", "-n", 1, "--target", "avx512vnni")
    with pytest.raises(DriverError, match=r"--target aarch64-dotprod is code for aarch64, and this machine is x86_64"):
        invoke("run", text_model, "-p", "a", "-n", 1, "--target", "aarch64-dotprod")
    monkeypatch.setattr(cpuinfo, "host_features", lambda: frozenset(resolve("avx512vbmi").features))
    with pytest.raises(DriverError, match=r"--target amx needs CPU features this machine lacks: amx-int8, amx-tile"):
        invoke("run", text_model, "-p", "a", "-n", 1, "--target", "amx")
    with pytest.raises(DriverError, match=r"needs CPU features this machine lacks: avx512bf16"):
        invoke("run", text_model, "-p", "a", "-n", 1, "--target", "avx512vnni", "--fast-prefill")


def test_perplexity(invoke, artifact: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    row = json.loads(invoke("perplexity", artifact, "-f", text, "-c", 32, "--json", "-t", 1).stdout)
    assert row["n_chunks"] == 11 and row["perplexity"] > 1
    line = invoke("perplexity", artifact, "-f", text, "-c", 32, "-ub", 5, "-t", 2).stdout
    assert line.startswith(f"perplexity {row['perplexity']:.4f} +/- "), "batching and threads change nothing"
    assert json.loads(invoke("perplexity", artifact, "-f", text, "-c", 32, "--chunks", 2, "--json").stdout)["n_chunks"] == 2
    at_once = json.loads(invoke("perplexity", artifact, "-f", text, "-c", 32, "--json", "-np", 4).stdout)
    assert at_once == row, "several chunks at once give the same figure to the bit"
    one = invoke("perplexity", artifact, "-f", tmp_path / "text.txt", "-c", 4, "--chunks", 1)
    assert "+/-" not in one.stdout and "over 1 tokens" in one.stdout
    assert json.loads(invoke("perplexity", artifact, "-f", tmp_path / "text.txt", "-c", 4, "--chunks", 1, "--json").stdout)["error"] is None


def test_cache_settings_of_sessions(invoke, artifact: Path) -> None:
    plain = invoke("run", artifact, "-p", "the cat", "-n", 5, "--temp", 0, "--ignore-eos")
    again = invoke("run", artifact, "-p", "the cat", "-n", 5, "--temp", 0, "--ignore-eos", "--defrag-thold", 0.1)
    assert again.stdout == plain.stdout
    with pytest.warns(RuntimeWarning, match="compact_windows changes nothing: no layer's window"):
        assert invoke("run", artifact, "-p", "the cat", "-n", 5, "--temp", 0, "--ignore-eos", "--compact-windows").stdout == plain.stdout
    with pytest.warns(RuntimeWarning, match="compact_windows changes nothing"):
        invoke("bench", artifact, "-p", 4, "-n", 0, "-r", 1, "-t", 1, "--compact-windows")


def test_cache_options_are_part_of_the_artifact(invoke, text_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "turned.ggufc"
    made = invoke("compile", text_model, "-o", output, "-khad", "-ctv-first", "bf16,1")
    assert "note: the K cache is not rotated (-khad): it only helps quantised types, and this one is f16" in made.stderr
    assert "K f16, V bf16 x 1 + f16 x 1" in invoke("inspect", output).stdout
    invoke("run", output, "-p", "a", "-n", 1, "-khad", "-ctv-first", "bf16,1")
    with pytest.raises(DriverError, match=r"compiled with builder option 'type_v_first' bf16,1, not bf16,2"):
        invoke("run", output, "-p", "a", "-n", 1, "-ctv-first", "bf16,2")
    with pytest.raises(DriverError, match=r"compiled with builder option 'v_hadamard' off, not on"):
        invoke("run", output, "-p", "a", "-n", 1, "-vhad")
    with pytest.raises(ggufc.GgufcError, match=r"'type_k_first' is 'q2_k,1'; give a cache type and a number of layers"):
        invoke("compile", text_model, "-o", tmp_path / "no.ggufc", "-ctk-first", "q2_k,1")
    with pytest.raises(ggufc.GgufcError, match=r"option 'type_v_last': heads of 16 values are no whole q8_0 blocks of 32"):
        invoke("compile", text_model, "-o", tmp_path / "no.ggufc", "-ctv-last", "q8_0,1")


def test_an_artifact_is_asked_for_what_exists(invoke, artifact: Path) -> None:
    """A name that exists nowhere is not something to compile the model again with; two spellings of one value are no difference."""
    for arguments, message in (
        (("-ctk", "zz"), "a cache of type 'zz' is not supported; choose one of f32, f16"),
        (("-ctik", "q9"), "'idx_type_k': a cache of type 'q9' is not supported"),
        (("-ctk-first", "q8_0"), "give a cache type and a number of layers"),
        (("--target", "native,foo"), r"--target 'native,foo' names foo, unknown here; use native, a level"),
        (("--target", "native,x86-64"), "native says everything about a CPU and stands alone"),
        (("--target", "native,cuda:sm_11"), "unknown GPU architecture; use one of cuda:sm_80"),
    ):
        with pytest.raises(ggufc.GgufcError, match=message):
            invoke("run", artifact, "-p", "a", "-n", 1, *arguments)
    invoke("run", artifact, "-p", "a", "-n", 1, "--dsa-top-k", -1, "--mla", 3)


def test_inspect_says_which_graphs_could_be_reused(invoke, artifact: Path, text_model: Path) -> None:
    text = invoke("inspect", artifact, "--verbose").stdout
    assert re.search(r"^graph reuse   reused \d+ of \d+ graphs \(\d\d\.\d %\)$", text, re.MULTILINE)
    for reason in ("first evaluation", "program eval -> eval_embd", "keys were rotated", "state was restored"):
        assert f"  not reused 1 times: {reason}\n" in text
    assert invoke("inspect", text_model, "-v", ok=False).exit_code == 2


def test_logits_runs_a_golden_case(invoke, tmp_path: Path) -> None:
    case = Path(__file__).resolve().parents[1] / "golden" / "llama-gqa-tied"
    described = json.loads((case / "case.json").read_text())
    output = tmp_path / "out.npz"
    invoke("logits", case / "model.gguf", case / "case.json", "-o", output)
    with np.load(output) as arrays:
        expected = {path.stem: np.load(path) for path in case.glob("*.npy")}
        assert set(arrays) == set(expected)
        for name in arrays:
            np.testing.assert_allclose(arrays[name], expected[name], rtol=described["rtol"], atol=described["atol"], err_msg=name)


def test_logits_refuses_unknown_things_by_name(invoke, artifact: Path, tmp_path: Path) -> None:
    def refused(case: object) -> str:
        path = tmp_path / "case.json"
        path.write_text(case if isinstance(case, str) else json.dumps(case))
        with pytest.raises(ggufc.GgufcError) as failure:
            invoke("logits", artifact, path, "-o", tmp_path / "out.npz")
        return str(failure.value)

    assert "'no_such_option'" in refused({"options": {"no_such_option": 1}, "steps": []})
    assert "'no_such_step'" in refused({"options": {}, "steps": [{"op": "no_such_step"}]})
    assert "is not JSON" in refused("{")
    assert "nested too deeply" in refused("[" * 100_000)
    assert "JSON object" in refused([])
    assert "'n_ctx' of the case is 'many', but it takes an integer" in refused({"options": {"n_ctx": "many"}, "steps": []})
    assert "'type_k' of the case is 1, but it takes a string" in refused({"options": {"type_k": 1}, "steps": []})
    assert "has None where an integer" in refused({"options": {}, "steps": [{"op": "seq_rm", "seq": None, "p0": 0, "p1": 1}]})
    assert "has 'q' where an integer" in refused({"options": {}, "steps": [{"op": "decode", "tokens": [1], "seq": [["q"]]}]})
    assert "args is a list" in refused({"options": {}, "steps": [{"op": "seq_keep", "args": 7}]})
    assert "unknown operation" in refused({"options": {}, "steps": [{"op": ["clear"]}]})
    assert "'a' of an earlier step" in refused({"options": {}, "steps": 2 * [{"op": "decode", "name": "a", "tokens": [1]}]})
    assert not (tmp_path / "out.npz").exists()


def test_steps_may_have_any_name(invoke, artifact: Path, tmp_path: Path) -> None:
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"options": {"n_ctx": 64}, "steps": [{"op": "decode_last", "name": "file", "tokens": [1, 5]}]}))
    invoke("logits", artifact, case, "-o", tmp_path / "out")
    with np.load(tmp_path / "out") as arrays:
        assert arrays["file"].shape == (1, 320)


def test_the_second_run_compiles_nothing(ggufc_process, text_model: Path) -> None:
    arguments = ["run", text_model, "-p", "a", "-n", 1, "--target", "x86-64"]
    first = ggufc_process(*arguments)
    second = ggufc_process(*arguments)
    assert first.returncode == second.returncode == 0, first.stderr
    assert "compiling tiny.gguf" in first.stderr
    assert "compiling" not in second.stderr
    assert "\x1b" not in first.stdout + first.stderr


def test_an_interrupted_compilation_leaves_nothing(text_model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "GGUFC_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "ggufc", "run", str(text_model), "-p", "a"]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `pytest &` ignores it, and so would its children
    )
    assert process.stderr is not None and process.stderr.readline().startswith("compiling")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err and out == ""
    assert list((tmp_path / "artifacts").iterdir()) == []


def test_running_an_artifact_needs_no_compiler(artifact: Path) -> None:
    script = (
        "import sys; from ggufc.cli.failures import run; from ggufc.cli import cli\n"
        f"code = run(cli, ['run', {str(artifact)!r}, '-p', 'a', '-n', '2'])\n"
        "rooms = ('llvmlite', 'ggufc.codegen', 'ggufc.models', 'ggufc.passes', 'ggufc.ir')\n"
        "heavy = [m for m in sys.modules if m.startswith(rooms)]\n"
        "assert code == 0 and not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_python_api(artifact: Path, text_model: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ggufc.compile`` made the artifact of all these tests; a model file loads through the cache and gives the same bits."""
    monkeypatch.setenv("GGUFC_CACHE", str(shared_cache))
    with ggufc.load(artifact, n_threads=1) as compiled, ggufc.load(text_model, n_threads=1) as model:
        assert isinstance(model, ggufc.Session)
        tokens = compiled.tokenize("hello")
        np.testing.assert_array_equal(compiled.eval(tokens), model.eval("hello"))
