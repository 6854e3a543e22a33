"""A complete artifact around a toy model whose kernels and drivers are Python functions.

The image holds real machine code: one jump per function into a ctypes callback. The toy's logits depend on token, position and order of
exactly the cells a token sees, so any mistake in cells, lists, windows or positions changes them. ``reference`` computes the same from
lists.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ggufc.formats import abi
from ggufc.formats import artifact as fmt
from ggufc.formats.gguf_writer import GGUFWriter

HEAD = 4
WINDOW = 5
N_EMBD = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *LETTERS, "\u2581a", "ab", "\u2581ab", "<tool>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(TEXTS) - 260), 4]
N_VOCAB = len(TEXTS)
WEIGHT = np.array([0.37, 0.11], np.float32)
ROPE: dict[str, Any] = {
    "mode": "neox",
    "n_dims": HEAD,
    "base": 100.0,
    "freq_scale": 1.0,
    "ext_factor": 0.0,
    "attn_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "n_ctx_orig": 512,
}

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_TEAM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


def words(address: int, n: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_int64 * n).from_address(address), np.int64)


def floats(address: int, n: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_float * n).from_address(address), np.float32)


def ints(address: int, n: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_int32 * n).from_address(address), np.int32)


def rotated(value: float, pos: int) -> np.ndarray:
    """The toy's key or query: two pairs (NEOX) of length ``value`` at angle 0, rotated to ``pos``."""
    theta = ROPE["base"] ** (-2.0 * np.arange(HEAD // 2) / HEAD) * pos
    return (value * np.concatenate([np.cos(theta), np.sin(theta)])).astype(np.float32)


def mix(entries: list[tuple[float, np.ndarray]], pos: int) -> np.float32:
    """Order-dependent digest of (value, key) entries seen from ``pos``; through q.k it knows relative positions only."""
    h = np.float32(0)
    query = rotated(1.0, pos)
    for value, key in entries:
        h = np.float32(np.float32(0.5) * h + np.float32(value) * (np.float32(1) + np.float32(0.1) * np.float32(query @ key)))
    return h


def head(h1: np.float32, h2: np.float32) -> np.ndarray:
    return np.cos(np.float32(h1) * WEIGHT[0] + np.float32(h2) * WEIGHT[1] + np.arange(N_VOCAB, dtype=np.float32) ** 2).astype(np.float32)


def reference(tokens: list[int], positions: list[int], row: int) -> np.ndarray:
    """Logits of entry ``row`` of one sequence given as parallel lists in order of arrival (causal)."""
    p = positions[row]
    order = sorted((i for i in range(len(tokens)) if positions[i] <= p), key=lambda i: positions[i])
    entries = [(float(tokens[i]), rotated(1.0 + tokens[i] % 3, positions[i])) for i in order]
    narrow = [e for e, i in zip(entries, order) if positions[i] > p - WINDOW]
    return head(mix(entries, p), mix(narrow, p))


def _store(args: int, params: int, tile: int, scratch: int) -> None:
    tokens, positions, slots, k, v = words(args, 5).tolist()
    n, cells = words(params, 3)[[0, 2]].tolist()
    token, pos, slot = (int(ints(a, n)[tile]) for a in (tokens, positions, slots))
    floats(k, cells * HEAD)[slot * HEAD : (slot + 1) * HEAD] = rotated(1.0 + token % 3, pos)
    floats(v, cells)[slot] = token


def _store_embd(args: int, params: int, tile: int, scratch: int) -> None:
    embd, positions, slots, k, v = words(args, 5).tolist()
    n, cells = words(params, 3)[[0, 2]].tolist()
    value = float(floats(embd, n * N_EMBD).reshape(n, N_EMBD)[tile].sum())
    pos, slot = (int(ints(a, n)[tile]) for a in (positions, slots))
    floats(k, cells * HEAD)[slot * HEAD : (slot + 1) * HEAD] = rotated(1.0 + value % 3, pos)
    floats(v, cells)[slot] = value


def _attend(args: int, params: int, tile: int, scratch: int) -> None:
    positions, k, v, lists, visible, out = words(args, 6).tolist()
    n, _, cells, n_kv, r = words(params, 5).tolist()
    base, lo, hi = ints(visible, 3 * n).reshape(n, 3)[tile].tolist()
    listed = ints(lists, r)[base + lo : base + hi].tolist()
    assert all(cell < n_kv for cell in listed)
    keys, values = floats(k, cells * HEAD).reshape(cells, HEAD), floats(v, cells)
    floats(out, n)[tile] = mix([(float(values[c]), keys[c]) for c in listed], int(ints(positions, n)[tile]))


def _head(args: int, params: int, tile: int, scratch: int) -> None:
    h1, h2, ids, weight, out, n_vocab = words(args, 6).tolist()
    n, rows = words(params, 2).tolist()
    assert np.array_equal(floats(weight, 2), WEIGHT)
    row = int(ints(ids, rows)[tile])
    floats(out, rows * n_vocab).reshape(rows, n_vocab)[tile] = head(floats(h1, n)[row], floats(h2, n)[row])
    floats(scratch, 4)[:] = tile  # scratch memory must be there


@dataclass
class Driver:
    """The driver functions of the ABI in Python: the caller runs all tiles in order, workers wait for the stop word."""

    evaluations: int = 0
    workers: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def worker(self, pool: int, tid: int) -> None:
        self.workers.append(tid)
        stopped = threading.Event()
        while not words(pool, abi.POOL_WORDS)[abi.POOL_STOP]:
            stopped.wait(0.001)
        self.left.append(tid)

    def evaluate(self, pool: int, record: int) -> None:
        self.evaluations += 1
        p, e = words(pool, abi.POOL_WORDS), words(record, abi.EXEC_WORDS)
        p[abi.POOL_EPOCH] += 1
        n = int(e[abi.EXEC_N_LAUNCHES])
        table = words(int(e[abi.EXEC_LAUNCHES]), n * abi.LAUNCH_WORDS).reshape(n, abi.LAUNCH_WORDS)
        params = words(int(e[abi.EXEC_PARAMS]), len(abi.PARAMS))
        for i, entry in enumerate(table):
            assert entry[abi.LAUNCH_WAIT] <= i
            if e[abi.EXEC_PROFILE]:
                words(int(e[abi.EXEC_PROFILE]), 2 * n + 1)[2 * i : 2 * i + 3] = [100 * i, 100 * i + 20, 100 * i + 70]
            size = 1 if entry[abi.LAUNCH_SYM] < 0 else int(params[entry[abi.LAUNCH_SYM]])
            kernel = _KERNEL(int(entry[abi.LAUNCH_FN]))
            for tile in range(int(entry[abi.LAUNCH_MULT]) * -(-size // int(entry[abi.LAUNCH_DIV]))):
                kernel(int(entry[abi.LAUNCH_ARGS]), int(e[abi.EXEC_PARAMS]), tile, int(p[abi.POOL_SCRATCH]))


def jump(address: int) -> bytes:
    """Machine code that jumps to an absolute address, padded to 32 bytes."""
    if platform.machine() in ("x86_64", "AMD64"):
        code = b"\x48\xb8" + struct.pack("<Q", address) + b"\xff\xe0"  # mov rax, address; jmp rax
    else:
        code = struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)  # ldr x16, #8; br x16
    return code.ljust(32, b"\0")


DRIVER = Driver()
_CALLBACKS = [_KERNEL(f) for f in (_store, _attend, _head, _store_embd)] + [_TEAM(DRIVER.worker), _TEAM(DRIVER.evaluate)]
IMAGE = np.frombuffer(b"".join(jump(ctypes.cast(c, ctypes.c_void_p).value or 0) for c in _CALLBACKS), np.uint8)
KERNELS = [fmt.Kernel(name, f"{name}()", 32 * i, 32, 16) for i, name in enumerate(("store", "attend", "head", "store_embd"))]


def arg(kind: str, name: str = "", value: int = 0, offset: int = 0) -> fmt.Arg:
    return fmt.Arg(kind, name, value, offset)


def program(name: str = "eval") -> fmt.Program:
    embd = name == "eval_embd"
    first = fmt.Input("embd", "embd", "f32", [{"": N_EMBD}, {"T": 1}]) if embd else fmt.Input("tokens", "tokens", "i32", [{"T": 1}])
    inputs = [
        first,
        fmt.Input("positions", "positions", "i32", [{"T": 1}]),
        fmt.Input("out_ids", "out_ids", "i32", [{"O": 1}]),
        fmt.Input("kv_slots", "kv_slots", "i32", [{"T": 1}]),
        fmt.Input("kv_cells", "kv_cells", "i32", [{"R": 1}]),
        fmt.Input("visible", "visible", "i32", [{"": 3}, {"T": 1}]),
        fmt.Input("visible_w", "visible", "i32", [{"": 3}, {"T": 1}], WINDOW),
    ]
    k, v = arg("cache", "blk.0.k"), arg("cache", "blk.0.v")
    store = [arg("input", first.name), arg("input", "positions"), arg("input", "kv_slots"), k, v]

    def attend(visible: str, slot: int) -> list[fmt.Arg]:
        return [arg("input", "positions"), k, v, arg("input", "kv_cells"), arg("input", visible), arg("slot", value=slot)]

    last = [
        arg("slot", value=0),
        arg("slot", value=1),
        arg("input", "out_ids"),
        arg("weight", "w"),
        arg("output", "logits"),
        arg("int", value=N_VOCAB),
    ]
    launches = [
        fmt.Launch(3 if embd else 0, store, "blk.0.store", "T"),
        fmt.Launch(1, attend("visible", 0), "blk.0.attn", "T", wait=0),
        fmt.Launch(1, attend("visible_w", 1), "blk.1.attn", "T", wait=0),
        fmt.Launch(2, last, "head", "O", wait=1),
    ]
    slots = [fmt.Slot([{"T": 4}, {"": 8}]), fmt.Slot([{"T": 4}])]
    return fmt.Program(name, launches, slots, inputs, {"logits": [{"": N_VOCAB}, {"O": 1}]}, reuse_key=[("arch", "toy")])


def manifest(**changes: Any) -> fmt.Manifest:
    fields: dict[str, Any] = dict(
        abi=abi.ABI_VERSION,
        arch="toy",
        source_sha256="0" * 64,
        source_name="toy.gguf",
        target=f"{platform.machine()}-unknown-linux-gnu",
        level="baseline",
        features=[],
        n_vocab=N_VOCAB,
        n_ctx_train=1024,
        n_embd=N_EMBD,
        n_layer=1,
        type_k="f32",
        type_v="f32",
        caches=[fmt.Cache("blk.0.k", 0, "k", "f32", HEAD, HEAD, rope=ROPE), fmt.Cache("blk.0.v", 0, "v", "f32", 1, 1)],
        programs=[program(), program("eval_embd")],
        kernels=KERNELS,
        drivers={"ggufc_worker": 32 * 4, "ggufc_eval": 32 * 5},
    )
    fields.update(changes)
    return fmt.Manifest(**fields)


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TEXTS,
    "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(TEXTS) - 259)], np.float32),
    "tokenizer.ggml.token_type": np.array(TYPES, np.int32),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def write(
    path: Path,
    described: fmt.Manifest | None = None,
    *,
    version: int = fmt.FORMAT_VERSION,
    image: np.ndarray = IMAGE,
    image_digest: str | None = None,
    text: str | None = None,
    text_digest: str | None = None,
    metadata: dict[str, Any] | None = None,
    weight: np.ndarray = WEIGHT,
) -> Path:
    """Write the toy artifact, or a deliberately wrong one."""
    text = fmt.dumps(described or manifest()) if text is None else text
    writer = GGUFWriter(path, 64)
    writer.add("general.architecture", "toy")
    for key, value in (TOKENIZER if metadata is None else metadata).items():
        writer.add(key, value)
    writer.add(fmt.VERSION_KEY, version, "uint32")
    writer.add(fmt.MANIFEST_KEY, text)
    writer.add(fmt.GRAPH_KEY + "eval", "graph @eval {}")
    writer.add(fmt.DIGEST_KEY + "manifest", text_digest or hashlib.sha256(text.encode()).hexdigest())
    writer.add(fmt.DIGEST_KEY + "image", image_digest or hashlib.sha256(image.tobytes()).hexdigest())
    writer.add_tensor(fmt.IMAGE_TENSOR + ".test", (image.size,), "i8", image)
    raw = weight.view(np.uint8)
    writer.add_tensor("w", (raw.size,), "i8", raw)
    writer.finish()
    return path
