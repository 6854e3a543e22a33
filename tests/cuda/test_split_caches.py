"""Caches divided by heads, half of a layer on the device and half on the host: the same text, the same books, the same state files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from fat_models import FatModel, compiled, find_case
from ggufc.codegen import frontend
from ggufc.codegen.options import CompileOptions
from ggufc.formats.artifact import Cache
from ggufc.ir import Graph, parse_graph, print_graph
from ggufc.passes import DEFAULT_PIPELINE, PassError
from ggufc.passes.split_heads import SplitHeads, with_split
from ggufc.runtime.cuda import OffloadExecutor, on_device
from ggufc.runtime.cuda.caches import DevicePart
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.logits import graph_options
from ggufc.runtime.rows import CacheRows, HostPart, head_split
from ggufc.runtime.session import Session
from simt_device import SimtDevice

NAME = "llama-headdim"
TOKENS = [5, 17, 200, 31, 7, 7, 90, 12]
HEADS = 4
CASE = Path(__file__).resolve().parents[1] / "passes" / "cases" / "split-heads.ggir"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> FatModel:
    return compiled(NAME, tmp_path_factory.mktemp("plain"), "cuda:sm_80")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> FatModel:
    """One head of layer 0 and three of layer 1 may be on a device."""
    return compiled(NAME, tmp_path_factory.mktemp("both"), "cuda:sm_80", pipeline=with_split(DEFAULT_PIPELINE, ["0:1", f"1:{HEADS - 1}"]))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> FatModel:
    """Half of layer 0's heads; layer 1 is whole."""
    return compiled(NAME, tmp_path_factory.mktemp("mixed"), "cuda:sm_80", pipeline=with_split(DEFAULT_PIPELINE, [f"0-0:{HEADS // 2}"]))


def session(model: FatModel, n_gpu_layers: int, device: SimtDevice | None = None, **options) -> Session:
    executor = on_device(device or SimtDevice(races=False), n_gpu_layers=n_gpu_layers)
    return Session(model.path, **{"n_ctx": 256, "n_threads": 1, "n_seq_max": 2, **options, "executor": executor})


def saved(s: Session, seq: int | None = None) -> bytes:
    blob = io.BytesIO()
    assert s.state_save(blob, seq) == s.state_size(seq)
    return blob.getvalue()


def test_dividing_changes_no_bit(plain, both, mixed):
    """On the CPU, at once and token by token."""
    rows = []
    for model in (plain, both, mixed):
        with session(model, 0) as s:
            whole = s.decode(TOKENS, logits="all")
            s.reset()
            single = np.concatenate([s.decode([t]) for t in TOKENS])
            assert whole.tobytes() == single.tobytes()
            rows.append(whole.tobytes())
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_first_heads_are_on_the_device_and_the_rest_on_the_host(both, mixed, n):
    """S75 with a layer's heads in two memories, some layers or all; each memory holds its part only."""
    for model in (both, mixed):
        device = SimtDevice()
        model.check(model.run(executor=on_device(device, n_gpu_layers=n)))
        assert device.launches and not device.allocated
        with session(model, n) as s:
            assert isinstance(s.executor, OffloadExecutor)
            there, here = s.executor._device.buffers.specs, s.executor._host.buffers.specs
            assert not set(there) & set(here)
            layers = range(2 - n if n < 2 else 0, 2)
            assert set(there) == {f"blk.{i}.{part}" for i in layers for part in "kv"}
            assert all(name in here for name in s.executor.caches._divided.specs if name.endswith(".rest"))


def test_bits_do_not_depend_on_the_batch(both):
    """S65."""
    with session(both, 2) as s:
        whole = s.decode(TOKENS, logits="all")
        s.reset()
        assert np.concatenate([s.decode([t]) for t in TOKENS]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("n", [0, 2])
def test_states_of_halves_go_everywhere(plain, both, mixed, n):
    """S1, S2, S5: the rows are those of whole caches whatever the split; restored into any other split, and none, the text goes on."""
    with session(both, n) as s, session(mixed, n) as other, session(plain, 0) as cpu, session(both, 0) as ours:
        for one in (s, cpu):
            one.decode(TOKENS[:5], logits="none")
        blob = saved(s, 0)
        assert len(blob) == len(saved(cpu, 0)) + 4 * 4  # the heads of four divided caches
        want = s.decode(TOKENS[5:], logits="all")
        s.seq_rm(0)
        s.decode([1, 2, 3], seq=1, logits="none")  # other cells than before
        s.state_load(blob, 0)
        assert s.decode(TOKENS[5:], logits="all").tobytes() == want.tobytes()
        for target in (other, cpu, ours):
            target.seq_rm(-1)
            target.state_load(blob, 0)
            cells = target.cells.list_of(0).cells
            mine = s.cells.list_of(0).cells[:5]
            for name in target.executor.caches.specs:
                assert target.executor.caches.rows(name).read(cells).tobytes() == s.executor.caches.rows(name).read(mine).tobytes(), name
            np.testing.assert_allclose(target.decode(TOKENS[5:], logits="all"), want, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name, choices", [(NAME, ["0:1", "1:3"]), (NAME, ["0-1:2"]), ("llama-fa-q8", ["0:1"])])
def test_states_go_from_cells_with_holes_to_cells_with_holes(name, choices, tmp_path):
    """S1, S2: F16 and Q8_0 rows of 1, half and all but one of the heads on a device: as many bytes as whole rows take and the number of
    heads, equal rows of both parts wherever the cells are, and the logits of the run that was never saved.
    """
    model = compiled(name, tmp_path, "cuda:sm_80", pipeline=with_split(DEFAULT_PIPELINE, choices))
    with session(model, 3, n_seq_max=3) as s:
        names, divided = s.executor.caches.specs, [n for n in s.executor.caches.specs if s.executor.caches.rows(n).split]
        assert divided and all(len(s.executor.caches.rows(n).parts) == 2 for n in divided)
        for token in TOKENS[:5]:
            s.decode([token], seq=0, logits="none")
            s.decode([token + 1], seq=1, logits="none")
        s.seq_rm(1)
        blob = saved(s, 0)
        source = s.cells.list_of(0).cells.copy()
        assert np.diff(source).min() == 2, "the source has holes"
        rows = {n: s.executor.caches.rows(n).read(source).tobytes() for n in names}
        assert sum(map(len, rows.values())) + 4 * len(divided) < len(blob)
        want = s.decode(TOKENS[5:], logits="all").tobytes()
        s.seq_rm(0)
        s.decode([7] * s.cells.size, seq=[2, 1] * (s.cells.size // 2), logits="none")
        s.seq_rm(2)
        assert s.state_load(blob, 0) == 5
        cells = s.cells.list_of(0).cells
        assert np.diff(cells).min() == 2, "the destination has holes"
        assert {n: s.executor.caches.rows(n).read(cells).tobytes() for n in names} == rows
        s.seq_rm(1)  # new tokens need cells side by side
        assert s.decode(TOKENS[5:], logits="all").tobytes() == want


def test_layers_that_are_whole_keep_their_form(plain, mixed):
    """S3: a state of undivided layers has the bytes it always had."""
    with session(plain, 0) as a, session(mixed, 0) as b:
        for s in (a, b):
            s.decode(TOKENS, logits="none")
        one, two = saved(a, 0), saved(b, 0)
        last = a.executor.caches.rows("blk.1.v").row_bytes * len(TOKENS)
        assert one[-last:] == two[-last:] and len(two) == len(one) + 2 * 4


def test_cells_of_halves_move_together(plain, both):
    """Copies, removals, shifted keys and gathering: the CPU's books, and bit for bit what whole caches of the same rows become."""
    with session(both, 2) as s, session(plain, 0) as cpu:
        s.decode(TOKENS, logits="none")
        cpu.state_load(saved(s, 0), 0)
        for one in (s, cpu):
            one.seq_cp(0, 1)
            one.seq_rm(0, 2, 4)
            one.seq_rm(1)
            one.seq_add(0, 4, -1, -2)
            assert one.defrag() > 0
            one.apply_shift()
        assert s.cells.pos.tolist() == cpu.cells.pos.tolist()
        cells = np.arange(6, dtype=np.int32)
        for name in cpu.executor.caches.specs:
            assert s.executor.caches.rows(name).read(cells).tobytes() == cpu.executor.caches.rows(name).read(cells).tobytes(), name
        s.clear()
        assert not any(s.executor.caches.rows(name).read(cells).any() for name in s.executor.caches.specs)


def continued(s: Session, token: int) -> tuple[list[int], list[bytes]]:
    """The most likely tokens after ``token``, and their logits."""
    text, rows = [token], []
    for _ in range(4):
        row = s.decode([text[-1]])[0]
        text.append(int(row.argmax()))
        rows.append(row.tobytes())
    return text, rows


@pytest.mark.slow
def test_checkpoints_of_windows_and_halves(tmp_path):
    """S6: layers with and without a window, divided; a prompt of 700 tokens in micro-batches of 512, checkpoint, go on, rewind, restore:
    the same text and logits fifty times, on the CPU and with the first heads of the last four layers on a device.
    """
    model = compiled("gemma3-7", tmp_path, "cuda:sm_80", pipeline=with_split(DEFAULT_PIPELINE, ["0-6:1"]))
    prompt = np.random.default_rng(2).integers(0, 200, 700)
    for n in (0, 4):
        with session(model, n, n_ctx=768, n_batch=768, n_ubatch=512, n_seq_max=1) as s:
            assert all(s.executor.caches.rows(name).split == 1 for name in s.executor.caches.specs)
            first = int(s.decode(prompt)[0].argmax())
            checkpoint = saved(s, 0)
            want = continued(s, first)
            for _ in range(50):
                s.seq_rm(0)
                assert s.state_load(checkpoint, 0) == len(prompt)
                assert continued(s, first) == want


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_parts_in_two_memories_are_read_within_their_bounds(dtype, heads):
    """S1: rows of a device part and a host part; a read or write outside either allocation would be an error."""
    spec = Cache("blk.0.k", 0, "k", dtype, HEADS * 32, 32)
    device, n = SimtDevice(), 9
    first, rest = head_split(spec, heads)
    address = device.alloc(n * first)
    rows = CacheRows(spec, [DevicePart(device, address, first), HostPart(np.zeros((n, rest), np.uint8))], heads)
    values = np.random.default_rng(0).integers(0, 256, (n, first + rest), dtype=np.uint8)
    rows.write(np.arange(n, dtype=np.int32), values)
    holes = np.array([0, 1, 4, 5, 8], np.int32)
    assert rows.read(holes).tobytes() == values[holes].tobytes()
    rows.move(np.array([0, 8], np.int32), np.array([2, 3], np.int32))
    assert rows.read(np.array([2, 3], np.int32)).tobytes() == values[[0, 8]].tobytes()
    with pytest.raises(RuntimeRefusal, match="do not make up its rows"):
        CacheRows(spec, [DevicePart(device, address, first), HostPart(np.zeros((n, rest - 1), np.uint8))], heads)


def test_how_a_division_is_written():
    assert with_split("cse,hoist,dce", ["3:2", "4-7:1"]) == (
        "cse,split-heads{first=3,last=3,heads=2},split-heads{first=4,last=7,heads=1},hoist,dce"
    )
    with pytest.raises(PassError, match="LAYER:HEADS or FIRST-LAST:HEADS, such as 0-3:2, not by 'all'"):
        with_split(DEFAULT_PIPELINE, ["all"])
    with pytest.raises(PassError, match="before the pass hoist, which this pipeline does not have: cse"):
        with_split("cse", ["0:1"])


def test_what_cannot_be_divided_stays_whole():
    """Fewer heads than asked for, layers that are not meant, a cache someone else reads."""
    text = CASE.read_text().partition("\n")[2]
    graph = parse_graph(text)
    assert SplitHeads(heads=4).apply(graph).counts == {"divided": 0, "whole": 1}
    assert SplitHeads(first=1).apply(graph).counts == {"divided": 0, "whole": 0}
    graph.outputs["rows"] = graph.add("cast", next(n for n in graph.nodes if n.op.name == "set_rows"), dtype="f32")
    assert SplitHeads().apply(graph).counts == {"divided": 0, "whole": 1} and print_graph(graph).count("cache ") == 2
    with pytest.raises(PassError, match="cannot divide layer 0 after 1 heads: more than one attention uses"):
        SplitHeads(last=0).apply(graph)
    with pytest.raises(PassError, match="layers in order, heads from 1"):
        SplitHeads(heads=0).apply(graph)
    with pytest.raises(PassError, match="layers 0 to 9; the last layer with attention is 0"):
        SplitHeads(last=9).apply(graph)


def test_layers_asked_for_by_number_must_be_divisible():
    """A layer that would stay whole without a word is refused where it was asked for, with what to do."""
    graph = parse_graph(CASE.read_text().partition("\n")[2])
    with pytest.raises(PassError, match="cannot divide layer 0 after 4 heads: it has 4 KV heads; give fewer, from 1 to 3"):
        SplitHeads(last=0, heads=4).apply(graph)
    latent = find_case("deepseek2-v3-fa-mla1")
    assert latent is not None
    with pytest.raises(PassError, match="all query heads share its one KV head, as in latent attention; leave the layer out"):
        divided_graph(latent, "0:1")


def test_attention_that_is_not_fused_is_not_divided():
    """S4: values read column by column, as without flash attention, disable the division with a message; a default pass stays silent."""
    with pytest.raises(PassError, match="values that are read column by column cannot be divided by heads; leave flash attention on"):
        SplitHeads(0, 0, 1).apply(Graph("unfused", "llama"))
    assert not SplitHeads().apply(Graph("unfused", "llama")).changed


def divided_graph(case: Path, choice: str) -> Graph:
    options = CompileOptions(pipeline=with_split(DEFAULT_PIPELINE, [choice]), builder=graph_options({}))
    with frontend.open_model(case / "model.gguf") as (_, model):
        graph = frontend.build_graph(model, options, "eval")
        frontend.run_passes(graph, options)
    return graph


def test_sinks_go_with_their_heads(tmp_path):
    """S1, S75: an attention with a sink per head, divided: the bits of the whole one on the CPU, the golden on half a device."""
    name = "gpt-oss-mxfp4"
    whole = compiled(name, tmp_path, "cuda:sm_80")
    case = find_case(name)
    assert case is not None
    graph = divided_graph(case, "0:1")
    sinks = [node.operands[5] for node in graph.nodes if node.op.name == "flash_attn"]
    assert [node.ne[0] for node in sinks[:2]] != [sinks[-1].ne[0]] * 2 and sum(node.ne[0] for node in sinks[:2]) == sinks[-1].ne[0]
    with session(whole, 0) as s:
        want = s.decode(TOKENS, logits="all").tobytes()
    parts = compiled(name, tmp_path, "cuda:sm_80", pipeline=with_split(DEFAULT_PIPELINE, ["0:1"]))
    with session(parts, 0) as s:
        assert s.decode(TOKENS, logits="all").tobytes() == want
    parts.check(parts.run(executor=on_device(SimtDevice(races=False), n_gpu_layers=2)))
