"""Some layers on the device, the rest on the CPU: the right cuts, few copies, and the books of a session that knows nothing of it."""

from __future__ import annotations

import io
import threading
import time

import numpy as np
import pytest

from fat_models import compiled
from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.runtime.cuda import CudaExecutor, OffloadExecutor, on_device
from ggufc.runtime.cuda.division import check_caches, divide, places
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.executor import Executor
from ggufc.runtime.session import Session
from simt_device import SimtDevice

TOKENS = [5, 17, 200, 31, 7, 7, 90, 12]


def session(model, n_gpu_layers: int, device: SimtDevice | None = None, **options) -> Session:
    device = device or SimtDevice(races=False)
    return Session(model.path, **{"n_ctx": 256, "n_threads": 1, **options, "executor": on_device(device, n_gpu_layers=n_gpu_layers)})


# Where launches run


def program(*launches: tuple[str, dict[int, int]]) -> tuple[fmt.Program, list[dict[int, fmt.Affine]]]:
    """Launches (node, {argument: slot}) and what they write: argument 0."""
    found = [fmt.Launch(0, [fmt.Arg("slot", "", slot) for _, slot in sorted(args.items())], node) for node, args in launches]
    return fmt.Program("eval", found, [fmt.Slot([{"T": 64}])] * 8, [], {}), [{0: {"T": 4 + args[0]}} for _, args in launches]


LAYERS = [
    ("embd", {0: 0}),
    ("blk.0.norm", {0: 1, 1: 0}),
    ("blk.0.out", {0: 2, 1: 1}),
    ("mask", {0: 5}),
    ("blk.1.norm", {0: 3, 1: 2, 2: 5}),
    ("blk.1.out", {0: 4, 1: 3, 2: 2}),
    ("output_norm", {0: 1, 1: 4}),
    ("logits", {0: 6, 1: 1}),
]


@pytest.mark.parametrize(
    "n, where",
    [
        (0, "hhhhhhhh"),
        (1, "hhhdddhh"),  # what stands between layers goes with the layer after it
        (2, "hdddddhh"),
        (3, "dddddddd"),
        (99, "dddddddd"),
    ],
)
def test_the_last_layers_go_first_and_the_output_last(n, where):
    plan = places(program(*LAYERS)[0], 2, n)
    assert "".join("hd"[there] for there in plan) == where


def test_only_what_is_read_crosses():
    """Slot 2 is read on the device, 4 on the host; 1 is overwritten before it is read again, 5 and 3 stay."""
    made, writes = program(*LAYERS)
    first, middle, last = divide(made, writes, places(made, 2, 1))
    assert (first.launches, middle.launches, last.launches) == (range(0, 3), range(3, 6), range(6, 8))
    assert (middle.incoming, middle.outgoing, last.incoming) == ({2: {"T": 6}}, {4: {"T": 8}}, {4: {"T": 8}})


def test_values_written_in_pieces_cross_whole():
    """The second half of a slot is written on the device: the first must be there too when it is read."""
    made, writes = program(("blk.0.a", {0: 0}), ("blk.1.b", {0: 0}), ("blk.1.c", {0: 1, 1: 0}))
    assert divide(made, writes, [False, True, True])[1].incoming == {0: {"T": 4}}  # nobody has read it in between
    read, writes = program(("blk.0.a", {0: 0}), ("blk.0.r", {0: 2, 1: 0}), ("blk.1.b", {0: 0}), ("blk.1.c", {0: 1, 1: 0}))
    assert divide(read, writes, [False, False, True, True])[1].incoming == {}
    read.launches[2].args[0] = fmt.Arg("slot", "", 0, 64)
    assert divide(read, writes, [False, False, True, True])[1].incoming == {0: {"T": 4}}


def test_shared_caches_bound_the_choice():
    """Layers that read another layer's cache stay with it; the message names choices that do."""
    made = program(*LAYERS)[0]
    made.launches[1].args.append(fmt.Arg("cache", "blk.0.k"))
    made.launches[4].args.append(fmt.Arg("cache", "blk.0.k"))
    with pytest.raises(RuntimeRefusal, match=r"with 1 of 2 layers on the device, .* the cache blk\.0\.k; give -ngl 0 or 2"):
        check_caches(made, places(made, 2, 1), 2, 1)
    assert check_caches(made, places(made, 2, 2), 2, 2) == (set(), {"blk.0.k"})
    with pytest.raises(ArtifactError, match="does not say what the launches of eval write; compile the model again"):
        divide(made, [], places(made, 2, 1))


# Whole models


@pytest.mark.parametrize("n", [1, 2, 3])
def test_any_number_of_layers_equals_the_golden(model, n):
    """S75: within the device's tolerance wherever the border is; the device's memory and the host's threads end with the session."""
    threads = threading.active_count()
    device = SimtDevice()
    model.check(model.run(executor=on_device(device, n_gpu_layers=n)))
    assert device.launches and not device.allocated and threading.active_count() == threads


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, n",
    [
        ("llama-cacheops", 1),
        ("llama-moe", 1),
        ("gpt-oss-mxfp4", 1),
        pytest.param("gemma3-7", 3, marks=pytest.mark.full),
        pytest.param("glm-dsa-dense", 2, marks=pytest.mark.full),
    ],
)
def test_more_models(name, n, tmp_path):
    """S75: windows, experts, sinks and selections on both sides of a border; moved, copied and removed cells."""
    model = compiled(name, tmp_path, "cuda:sm_80")
    model.check(model.run(executor=on_device(SimtDevice(races=False), n_gpu_layers=n)))


def test_no_layers_on_the_device_are_the_bits_of_the_cpu(model):
    """S155."""
    device = SimtDevice()
    with session(model, 0, device) as ours, Session(model.path, n_ctx=256, n_threads=1) as plain:
        assert type(ours.executor) is Executor
        assert ours.decode(TOKENS, logits="all").tobytes() == plain.decode(TOKENS, logits="all").tobytes()
    assert not device.copied["to"]


@pytest.mark.parametrize("n", [0, 1, -1])
def test_a_session_that_closes_says_so_once(model, n):
    """Whoever opened the device for it can close it, wherever the layers ran; a session that never came up closes nothing."""
    closed: list[str] = []
    device = SimtDevice(races=False)
    s = Session(model.path, n_ctx=256, n_threads=1, executor=on_device(device, n_gpu_layers=n, closing=lambda: closed.append("closed")))
    s.decode(TOKENS[:2])
    s.decode(embd=np.zeros((1, s.artifact.manifest.n_embd), np.float32))  # a second executor, which shares the first one's memory
    assert not closed
    s.close()
    s.close()
    assert closed == ["closed"]
    with pytest.raises(RuntimeRefusal, match=r"give a whole number from 1 to|free, .* are needed"):
        small, threads = SimtDevice(free=1 << 20), 0 if n == 0 else 1
        make = on_device(small, n_gpu_layers=n, closing=lambda: closed.append("again"))
        Session(model.path, n_ctx=256, n_threads=threads, executor=make)
    assert closed == ["closed"]


def test_bits_do_not_depend_on_the_batch(model):
    """S65 across a border; from the second token of a shape on, its pieces are replayed."""
    device = SimtDevice(races=False)
    with session(model, 1, device) as s:
        whole = s.decode(TOKENS, logits="all")
        s.reset()
        single = np.concatenate([s.decode([t]) for t in TOKENS])
        assert single.tobytes() == whole.tobytes() and device.replays == len(TOKENS) - 1
        s.reset()
        assert s.decode(TOKENS[:3], logits="all").tobytes() == whole[:3].tobytes()


def test_memory_is_divided(model):
    """The device holds its layers' caches and weights only; a decoded token moves the residual stream, the angles and a row."""
    device = SimtDevice(races=False)
    with session(model, 1, device) as s:
        caches = s.executor.caches
        assert sorted(caches._device.specs) == ["blk.1.k", "blk.1.v"] and sorted(caches._host.specs) == ["blk.0.k", "blk.0.v"]
        loaded = device.copied["to"]
        stored = {n: t.nbytes for n, t in s.artifact.file.tensors.items()}
        assert loaded == sum(size for name, size in stored.items() if name.startswith("blk.1."))
        for token in TOKENS[:3]:
            s.decode([token])
        before = dict(device.copied)
        s.decode([TOKENS[3]])
        n_embd, angles = s.artifact.manifest.n_embd, 16
        inputs = 8 * 14 + 4 * (1 + 1 + 3 + 3 + 128)
        assert 4 * (n_embd + angles) <= device.copied["to"] - before["to"] <= 4 * (n_embd + angles) + inputs
        assert device.copied["from"] - before["from"] == 4 * n_embd


def test_the_embedding_program_shares_both_sides(model):
    with session(model, 1) as s:
        rows = np.random.default_rng(0).standard_normal((2, s.artifact.manifest.n_embd)).astype(np.float32)
        s.decode(TOKENS[:3])
        first = s.decode(embd=rows)
    with session(model, -1) as s:
        assert type(s.executor) is CudaExecutor
        s.decode(TOKENS[:3])
        np.testing.assert_allclose(s.decode(embd=rows), first, rtol=1e-3, atol=1e-3)


def test_profile(model):
    """Launches of both places in one table of nanoseconds, those of the host scaled to what their stretch took."""
    with session(model, 1, profile=True) as s:
        began = time.perf_counter()
        s.decode(TOKENS[:2])
        took = 1e9 * (time.perf_counter() - began)
        times, launches = s.executor.profile(), s.executor.program.launches
        assert times.shape == (len(launches), 2) and times.min() >= 0 and times.sum() < took
        there = [s.executor.on_device(i) for i in range(len(launches))]
        assert there == places(s.executor.program, s.artifact.manifest.n_layer, 1)
        assert times[there].sum() > 0 and times[[not place for place in there]].sum() > 0
        for stretch, seconds in zip(s.executor.crossing, s.executor._host_seconds):
            rows = times[stretch.launches.start : stretch.launches.stop]
            assert stretch.on_device or abs(rows.sum() - 1e9 * seconds) <= 2 * len(rows)
            assert not stretch.on_device or not rows[1:, 0].any()
    with session(model, 1) as s, pytest.raises(RuntimeRefusal, match="profiling is off"):
        s.executor.profile()


def test_refusals(model):
    threads = threading.active_count()
    with pytest.raises(RuntimeRefusal, match=r"1 MiB free, \d+ MiB are needed .*fewer layers on the device \(-ngl\)"):
        session(model, 1, SimtDevice(free=1 << 20))
    assert threading.active_count() == threads


# The books


def same_books(a: Session, b: Session) -> None:
    assert a.cells.pos.tolist() == b.cells.pos.tolist() and a.cells.member.tolist() == b.cells.member.tolist()


@pytest.mark.parametrize("n", [1, 3])
def test_cells_move_as_on_the_cpu(model, n):
    """Copies of sequences, removals, shifts and gathering leave the CPU's books, and logits near the CPU's."""

    def edit(s: Session) -> np.ndarray:
        s.decode(TOKENS, logits="none")
        s.seq_cp(0, 1)
        s.seq_rm(0, 2, 4)
        s.seq_add(0, 4, -1, -2)
        s.seq_rm(1, 6, -1)
        s.decode([3, 4], seq=1, logits="none")
        s.seq_keep(0)
        assert s.defrag() > 0
        return s.decode([9, 10], logits="all")

    with session(model, n, n_seq_max=2) as ours, Session(model.path, n_ctx=256, n_threads=1, n_seq_max=2) as cpu:
        got, want = edit(ours), edit(cpu)
        same_books(ours, cpu)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-3)
        ours.clear()
        assert not any(ours.executor.caches.rows(name).read(np.arange(64)).any() for name in ours.executor.caches.specs)


def test_keys_on_the_device_turn_to_the_bits_the_cpu_turns_them_to(model):
    with session(model, 3) as ours, Session(model.path, n_ctx=256, n_threads=1) as cpu:
        blob = io.BytesIO()
        cpu.decode(TOKENS, logits="none")
        cpu.state_save(blob)
        ours.state_load(blob.getvalue())
        for s in (ours, cpu):
            s.seq_rm(0, 0, 3)
            s.seq_add(0, 3, -1, -3)
            s.apply_shift()
        same_books(ours, cpu)
        for name in cpu.executor.caches.specs:
            cells = np.arange(8, dtype=np.int32)
            assert ours.executor.caches.rows(name).read(cells).tobytes() == cpu.executor.caches.rows(name).read(cells).tobytes(), name


@pytest.mark.parametrize("n", [1, 3])
def test_states_go_between_all_kinds_of_sessions(model, n):
    """A state has the CPU's bytes but for the rows; restored on the device it goes on with the same bits, and the CPU takes it too."""
    with session(model, n, n_seq_max=2) as s, Session(model.path, n_ctx=256, n_threads=1, n_seq_max=2) as cpu:
        for one in (s, cpu):
            one.decode(TOKENS[:5], logits="none")
            one.decode(TOKENS[:2], seq=1, logits="none")
        blob, theirs = io.BytesIO(), io.BytesIO()
        assert s.state_save(blob, 0) == cpu.state_save(theirs, 0) == s.state_size(0)
        want = s.decode(TOKENS[5:], logits="all")
        s.seq_rm(0)
        assert s.state_load(blob.getvalue(), 0) == 5
        assert s.decode(TOKENS[5:], logits="all").tobytes() == want.tobytes()
        cpu.seq_rm(0)
        assert cpu.state_load(blob.getvalue(), 0) == 5
        np.testing.assert_allclose(cpu.decode(TOKENS[5:], logits="all"), want, rtol=1e-3, atol=1e-3)
        assert isinstance(s.executor, OffloadExecutor if n == 1 else CudaExecutor)
