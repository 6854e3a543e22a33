"""Memory on a device: the pool, weights that sessions share, recordings that replay what memory holds."""

from __future__ import annotations

import types
from itertools import pairwise

import numpy as np
import pytest

from ggufc.formats import abi
from ggufc.formats import artifact as fmt
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.caches import CacheBuffers
from ggufc.runtime.cuda import CudaExecutor, on_device
from ggufc.runtime.cuda.caches import DeviceCaches
from ggufc.runtime.cuda.pool import CHUNK, Pool
from ggufc.runtime.cuda.recordings import KEPT, Recordings
from ggufc.runtime.cuda.weights import hold
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.session import Session
from ggufc.runtime.sizes import Sizes
from simt_device import SimtDevice

TOKENS = [5, 17, 200, 31, 7, 7, 90, 12]

# The pool


class Driver:
    """An allocator that counts: ``held`` maps addresses to sizes."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.next = 1 << 20

    def alloc(self, size: int) -> int:
        self.held[self.next], self.next = size, self.next + size + 4096
        return self.next - size - 4096

    def free(self, address: int) -> None:
        del self.held[address]


def test_small_buffers_share_chunks_and_never_overlap():
    driver, rng = Driver(), np.random.default_rng(0)
    pool = Pool(driver.alloc, driver.free)
    live: dict[int, int] = {}
    for _ in range(2000):
        if live and rng.random() < 0.45:
            address = list(live)[rng.integers(len(live))]
            pool.free(address)
            del live[address]
        else:
            size = int(rng.choice([1, 255, 256, 257, 4000, 70000, CHUNK]))
            live[pool.alloc(size)] = size
        spans = sorted((a, a + s) for a, s in live.items())
        assert all(a % 256 == 0 for a in live)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert len(driver.held) < len(live)
    for address in live:
        pool.free(address)
    assert not driver.held
    with pytest.raises(KeyError):
        pool.free(next(iter(live)))


def test_a_closed_pool_holds_nothing():
    driver = Driver()
    pool = Pool(driver.alloc, driver.free)
    for size in (1, 1000, 3 * CHUNK, 5):
        pool.alloc(size)
    assert len(driver.held) == 2
    pool.close()
    assert not driver.held


# Weights


def test_sessions_of_one_artifact_share_its_weights(model):
    """Uploaded once with progress, shared with a second session, gone with the last; the first may close first."""
    device, steps = SimtDevice(races=False), []
    executor = on_device(device, lambda done, total: steps.append((done, total)))
    first = Session(model.path, n_ctx=256, executor=executor)
    assert steps[-1][0] == steps[-1][1] > 0 and [d for d, _ in steps] == sorted(d for d, _ in steps)
    uploaded = device.copied["to"]
    assert uploaded == steps[-1][1]
    with Session(model.path, n_ctx=256, executor=executor) as second:
        assert device.copied["to"] == uploaded
        want = first.decode(TOKENS, logits="all")
        first.close()
        assert second.decode(TOKENS, logits="all").tobytes() == want.tobytes()
    assert not device.allocated


def test_an_interrupted_upload_leaves_nothing_half_there(model):
    """A second session that shares the weights brings the rest itself."""
    device, uploads = SimtDevice(races=False), []

    def upload(address: int, data: np.ndarray) -> None:
        uploads.append(address)
        if len(uploads) == 4:
            raise KeyboardInterrupt
        SimtDevice.upload(device, address, data)

    with Artifact.open(model.path) as artifact:
        weights, names = hold(device, artifact), [name for name in artifact.file.tensors if name.startswith("blk.")]
        device.upload = upload
        with pytest.raises(KeyboardInterrupt):
            weights.upload(artifact, names)
        assert len(weights.places) == 3 and len(device.allocated) == 3
        device.upload = types.MethodType(SimtDevice.upload, device)
        assert hold(device, artifact) is weights
        weights.upload(artifact, names)
        assert not weights.missing(names)
        for name, (address, size) in weights.places.items():
            device.download(address, there := np.empty(size, np.uint8))
            assert there.tobytes() == artifact.file.data(name).tobytes()
        weights.release()
        weights.release()
    assert not device.allocated


def test_closing_a_session_frees_the_memory_of_all_its_programs(model):
    device = SimtDevice(races=False)
    with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
        s.decode(TOKENS[:2])
        before = len(device.allocated)
        s.decode(embd=np.zeros((1, s.artifact.manifest.n_embd), np.float32))
        assert len(device.allocated) > before
    assert not device.allocated


# Recordings


def test_a_decoded_token_is_one_replay_with_the_same_bits(model):
    """The first token of a shape is started call by call, the second recorded, all later ones replayed: the bits of a device without."""

    class Plain(SimtDevice):
        graphs = False

    def texts(device: SimtDevice) -> tuple[list[bytes], Session]:
        with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
            return [s.decode([t]).tobytes() for t in TOKENS], s

    plain = texts(Plain(races=False))[0]
    device = SimtDevice(races=False)
    recorded, session = texts(device)
    assert recorded == plain
    counts = session.executor.recordings
    assert (counts.recorded, counts.replayed, device.replays) == (1, len(TOKENS) - 1, len(TOKENS) - 1)


def test_what_a_replay_copies(model):
    """A decoded token moves its inputs, the symbols and one row of logits, nothing else."""
    device = SimtDevice(races=False)
    with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
        for token in TOKENS[:3]:
            s.decode([token])
        before = dict(device.copied)
        s.decode([TOKENS[3]])
        moved = {way: device.copied[way] - before[way] for way in before}
        listed = 128  # the list goes up to what its shape can hold
        assert moved["from"] == 4 * s.n_vocab
        assert moved["to"] <= 8 * len(abi.PARAMS) + 4 * (1 + 1 + 1 + 1 + 3 + 3 + listed)


def test_longer_lists_are_recorded_anew(model):
    """The list's length decides how many splits attention makes: a new recording when it passes one, the same bits as at once."""
    tokens = np.random.default_rng(1).integers(0, 200, 131)
    device = SimtDevice(races=False)
    with Session(model.path, n_ctx=256, executor=on_device(device)) as s:
        s.decode(tokens[:125], logits="none")
        rows = [s.decode([int(t)]) for t in tokens[125:]]
        recordings = s.executor.recordings
        assert recordings.recorded == 2
        s.reset()
        whole = s.decode(tokens, logits=list(range(125, 131)))
    assert np.concatenate(rows).tobytes() == whole.tobytes()


def test_a_device_that_cannot_record_runs_on():
    class Broken(SimtDevice):
        def record(self, issue):
            raise RuntimeRefusal("the GPU cannot record")

    done: list[int] = []
    recordings = Recordings(Broken())
    for i in range(4):
        recordings.run("a", lambda i=i: done.append(i))
    assert done == [0, 1, 2, 3] and not recordings.replayed


def test_recordings_are_bounded_and_dropped():
    device = SimtDevice()
    dropped: list[object] = []
    device.drop = dropped.append
    recordings = Recordings(device)
    for key in range(KEPT + 3):
        for _ in range(2):
            recordings.run(key, lambda: None)
    assert recordings.recorded == KEPT + 3 and len(dropped) == 3
    recordings.clear()
    assert len(dropped) == KEPT + 3


def test_programs_that_write_at_the_head_are_not_recorded(model, monkeypatch):
    """Their arguments move: replaying a recording would write the first token's cell."""
    with Artifact.open(model.path) as artifact:
        executor = CudaExecutor(artifact, "eval", Sizes(256, 4), device=SimtDevice(races=False))
        recorded: list[object] = []
        monkeypatch.setattr(executor._recordings, "run", lambda key, issue: recorded.append(key))
        executor.begin(1, 1, 1, 256)
        executor.run(0)
        assert len(recorded) == 1
        executor.program.fixups.append(object())
        executor.run(0)
        assert len(recorded) == 1
        executor.program.fixups.clear()
        executor.close()


# Caches


def test_caches_of_sequences_have_the_hosts_rows():
    """Rings, states and compressed entries: as many rows as on the CPU, cleared and exchanged row by row."""
    caches = [
        fmt.Cache("blk.0.k", 0, "k", "f16", 32, 32),
        fmt.Cache("blk.0.conv", 0, "conv", "f32", 8, 8, rows={"S": 1, "": 1}),
        fmt.Cache("blk.0.comp", 0, "comp", "f16", 16, 16, rows={"C4": 1}),
    ]
    described = types.SimpleNamespace(manifest=types.SimpleNamespace(caches=caches), path="toy")
    device = SimtDevice()
    sizes = Sizes(256, n_seq_max=3)
    there, here = DeviceCaches(described, sizes, device), CacheBuffers(described, sizes)
    assert there.n_rows == here.n_rows and there.n_rows["blk.0.conv"] == 4 and list(there.specs) == list(here.specs)
    rng = np.random.default_rng(0)
    for name, n in there.n_rows.items():
        every = np.arange(n, dtype=np.int32)
        values = rng.integers(1, 255, (n, there.row_bytes[name]), dtype=np.uint8)
        for store in (there, here):
            store.rows(name).write(every, values)
            store.clear_rows(name, 1, 2)
        read = there.rows(name).read(every)
        assert not read[1:3].any() and read[0].all() and read.tobytes() == here.rows(name).read(every).tobytes()
    for store in (there, here):
        store.clear(2)
    for name, n in there.n_rows.items():
        every = np.arange(n, dtype=np.int32)
        assert there.rows(name).read(every).tobytes() == here.rows(name).read(every).tobytes(), name
    device.free(there.base)
    assert not device.allocated
