"""Plays the runtime's part for families with state, in plain Python: the executable form of ``ggufc.ir.ops.inputs``.

``Runtime`` keeps cells, streams and rings as the input kinds describe them and fills every input a graph declares from its kind alone,
so a graph with inputs nobody can fill fails here. Resources are allocated from ``Model.caches``.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node
from ggufc.ir.dims import evaluate, parse_dim
from ggufc.ir.interp import interpret
from ggufc.ir.types import row_bytes
from ggufc.models import Model, Step, load_model
from nan_trap import no_nan

PAD = 32
COMPRESSED_PAD = 256
COMPACT_SLACK = 256
OPTIONS = ("type_k", "type_v", "idx_type_k", "mla", "dsa", "dsa_top_k", "fidx", "swa_compress")
SWITCHES = ("dsa", "fidx", "swa_compress")


def pad(n: int, to: int) -> int:
    return -(-n // to) * to


class Region:
    """The rows of compacted caches (C1.11): the positions ``base .. base+live-1`` of one sequence, moved to the front when they run out."""

    def __init__(self, window: int, n_ubatch: int) -> None:
        self.window = window
        self.rows = pad(window + max(n_ubatch, COMPACT_SLACK), PAD)
        self.clear()

    def clear(self) -> None:
        self.base = self.live = 0

    def make_room(self, n: int) -> tuple[int, int] | None:
        """Rows (first, count) that must move to row 0 before n more tokens fit, if any."""
        if self.live + n <= self.rows:
            return None
        move = (self.live - self.window, self.window)
        self.base, self.live = self.base + move[0], self.window
        return move


class Runtime:
    """A model with its resources and the bookkeeping of cells and sequences. ``sized`` builds a graph per kind of step, as a runtime
    that plans memory does; without it one graph serves all steps."""

    def __init__(self, model: Model, data: Any, options: dict[str, Any], *, sized: bool = True) -> None:
        self.model, self.sized = model, sized
        self.n_seq = int(options.get("n_seq_max", 1))
        self.n_ubatch = int(options.get("n_ubatch", 256))
        self.n_cells = pad(int(options["n_ctx"]), PAD)
        self.options = {k: bool(options[k]) if k in SWITCHES else options[k] for k in OPTIONS if k in options}
        self.infos = {info.name: info for info in model.caches(self.options)}
        self.weights = {name: data(name) for name in model.weights}
        self.graphs: list[tuple[dict[str, Any], Graph]] = []
        self.builds = 0
        window = max((w for w in model.hparams.windows()), default=0)
        self.region = Region(window, self.n_ubatch) if self.options.get("swa_compress") else None
        self.clear()

    # Cells and sequences.

    def clear(self) -> None:
        self.pos = [-1] * self.n_cells
        self.owner = [-1] * self.n_cells
        if self.region is not None:
            self.region.clear()
        self.caches: dict[str, np.ndarray] = {}
        for info in self.infos.values():
            rows = evaluate(parse_dim(info.rows), self.capacity())
            self.caches[info.name] = np.zeros((rows, row_bytes(info.dtype, info.width)), np.uint8)

    def capacity(self) -> dict[str, int]:
        """Values of the symbols that the context fixes."""
        out = {"C": self.n_cells, "S": self.n_seq}
        if self.region is not None:
            out["CW"] = self.region.rows
        for ratio in (4, 128):
            out[f"C{ratio}"] = self.n_seq * self.entries_per_seq(ratio)
        return out

    def entries_per_seq(self, ratio: int) -> int:
        return pad(-(-self.n_cells // ratio), COMPRESSED_PAD)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        end = p1 if p1 >= 0 else 1 << 31
        for c in self._cells(seq):
            if max(p0, 0) <= self.pos[c] < end:
                self.pos[c] = self.owner[c] = -1
        if p0 <= 0 and p1 < 0:
            self._clear_stream(seq)

    def _clear_stream(self, seq: int) -> None:
        """Zeroes what belongs to a sequence and not to cells: rings and compressed entries. State rows need it not: see ``state_reads``."""
        for info in self.infos.values():
            first, count = self._stream_rows(info.rows, seq)
            data = self.rows(info.name).copy()
            data[first : first + count] = 0
            self.caches[info.name] = data

    def _stream_rows(self, rows: str, seq: int) -> tuple[int, int]:
        """Rows of a resource that belong to one sequence alone."""
        total = evaluate(parse_dim(rows), self.capacity())
        if rows in ("C", "CW", "S+1"):
            return 0, 0
        per = total // self.n_seq
        return seq * per, per

    def rows(self, name: str) -> np.ndarray:
        """A resource as rows of bytes."""
        info = self.infos[name]
        return self.caches[name].view(np.uint8).reshape(-1, row_bytes(info.dtype, info.width))

    def _cells(self, seq: int) -> list[int]:
        return sorted((c for c in range(self.n_cells) if self.owner[c] == seq), key=lambda c: self.pos[c])

    # State of one sequence.

    def save(self, seq: int) -> Any:
        cells = self._cells(seq)
        rows = {}
        for name, info in self.infos.items():
            data = self.rows(name)
            if info.rows == "C":
                rows[name] = data[cells].copy()
            elif info.rows == "S+1":
                rows[name] = data[seq : seq + 1].copy()
            else:
                first, count = self._stream_rows(info.rows, seq)
                rows[name] = data[first : first + count].copy()
        return [self.pos[c] for c in cells], rows

    def load(self, state: Any, seq: int) -> None:
        positions, rows = state
        self.remove(seq, 0, -1)
        cells = self._free(len(positions))
        for c, p in zip(cells, positions):
            self.pos[c], self.owner[c] = p, seq
        for name, info in self.infos.items():
            data = self.rows(name).copy()
            if info.rows == "C":
                data[cells] = rows[name]
            elif info.rows == "S+1":
                data[seq] = rows[name][0]
            else:
                first, count = self._stream_rows(info.rows, seq)
                data[first : first + count] = rows[name]
            self.caches[name] = data

    def _free(self, n: int) -> list[int]:
        return [c for c in range(self.n_cells) if self.owner[c] < 0][:n]

    # Evaluation.

    def decode(self, tokens: list[int], pos: list[int], seq: list[int], *, last: bool = False) -> np.ndarray:
        rows = []
        for start in range(0, len(pos), self.n_ubatch):
            part = slice(start, start + self.n_ubatch)
            wanted = [len(pos) - 1] if last else list(range(len(pos)))
            ids = [i - start for i in wanted if start <= i < start + self.n_ubatch]
            batch = Batch(self, tokens[part], pos[part], seq[part], ids)
            rows.append(batch.run())
        return np.concatenate(rows)

    def graph(self, sizes: dict[str, int]) -> Graph:
        """A stored graph whose observations hold for these sizes, or a new one."""
        step = Step(self.options, sizes if self.sized else None)
        for observed, graph in self.graphs:
            if not step.matches(observed):
                return graph
        graph = self.model.build(step)
        self.builds += 1
        self.graphs.append((step.observations, graph))
        return graph


class Batch:
    """One micro-batch: its cells, then the inputs of any graph by kind."""

    def __init__(self, rt: Runtime, tokens: list[int], pos: list[int], seq: list[int], ids: list[int]) -> None:
        self.rt, self.tokens, self.pos, self.seq, self.ids = rt, tokens, pos, seq, ids
        self.n = len(pos)
        self.sequences = list(dict.fromkeys(seq))
        self.slots = self._place()
        self.region_slots: list[int] = []
        if rt.region is not None:
            self._compact(rt.region)
        self.counts = {s: 1 + max(p for p, q in zip(pos, seq) if q == s) for s in self.sequences}

    def _place(self) -> list[int]:
        """One cell per token: its position in single-sequence contexts (windows are read as ranges of rows), else the first free ones."""
        rt = self.rt
        cells = list(self.pos) if rt.n_seq == 1 else rt._free(self.n)
        for c, p, s in zip(cells, self.pos, self.seq):
            rt.pos[c], rt.owner[c] = p, s
        return cells

    def _compact(self, region: Region) -> None:
        move = region.make_room(self.n)
        if move is not None:
            first, count = move
            for name, info in self.rt.infos.items():
                if info.rows == "CW":
                    data = self.rt.caches[name].copy()
                    data[:count] = data[first : first + count]
                    self.rt.caches[name] = data
        self.region_slots = [p - region.base for p in self.pos]
        region.live += self.n

    def sizes(self) -> dict[str, int]:
        """Values of all symbols for this batch."""
        rt = self.rt
        highest = 1 + max(c for c in range(rt.n_cells) if rt.owner[c] >= 0)
        kv = min(rt.n_cells, pad(highest, PAD))
        out = rt.capacity() | {"T": self.n, "O": len(self.ids), "KV": kv}
        out["R"] = sum(len(rt._cells(s)) for s in self.sequences)
        windows = [w for w in rt.model.hparams.windows() if w]
        if windows:
            out["WV"] = min(kv, pad(windows[0] + PAD + self.n, PAD))
            out["WO"] = kv - out["WV"]
        if rt.region is not None:
            out["RW"] = rt.region.live
            out["KVW"] = min(rt.region.rows, pad(rt.region.live, PAD))
        for ratio in (4, 128):
            per = rt.entries_per_seq(ratio)
            entries = [self.counts[s] // ratio for s in self.sequences]
            out[f"E{ratio}"] = sum(entries)
            highest_row = max(s * per + n for s, n in zip(self.sequences, entries))
            out[f"V{ratio}"] = min(rt.n_seq * per, pad(max(highest_row, 1), COMPRESSED_PAD))
            out[f"W{ratio}"] = sum((p + 1) % ratio == 0 for p in self.pos)
        return out

    def run(self) -> np.ndarray:
        sizes = self.sizes()
        graph = self.rt.graph(sizes)
        inputs = {node.attrs["name"]: np.asarray(self.fill(node), np.int32).reshape(node.type.shape(sizes)) for node in graph.inputs()}
        out = interpret(graph, self.rt.weights, inputs, self.rt.caches, sizes, trace=no_nan, activations="rounded")
        return np.asarray(out["logits"]).reshape(len(self.ids), self.rt.model.n_vocab)

    def fill(self, node: Node) -> Any:
        """The content of an input, from its kind and attributes alone."""
        return getattr(self, f"_{node.attrs['kind']}")(node.attrs)

    def _tokens(self, attrs: Any) -> Any:
        return self.tokens

    def _positions(self, attrs: Any) -> Any:
        return self.pos

    def _out_ids(self, attrs: Any) -> Any:
        return self.ids

    def _kv_slots(self, attrs: Any) -> Any:
        return self.region_slots if attrs["region"] else self.slots

    def _kv_cells(self, attrs: Any) -> Any:
        if attrs["region"]:
            return list(range(self.rt.region.live))
        return [c for s in self.sequences for c in self.rt._cells(s)]

    def _visible(self, attrs: Any) -> Any:
        out, base = [], {}
        if attrs["region"]:
            at = self.rt.region.base
            return [(0, max(0, p - attrs["window"] + 1 - at), p + 1 - at) for p in self.pos]
        total = 0
        for s in self.sequences:
            base[s] = total
            total += len(self.rt._cells(s))
        for p, s in zip(self.pos, self.seq):
            mine = [self.rt.pos[c] for c in self.rt._cells(s)]
            lo = sum(q <= p - attrs["window"] for q in mine) if attrs["window"] else 0
            out.append((base[s], lo, sum(q <= p for q in mine)))
        return out

    def _state_reads(self, attrs: Any) -> Any:
        return [self.seq[0] if self.pos[0] > 0 else self.rt.n_seq]

    def _state_slots(self, attrs: Any) -> Any:
        return [self.seq[0]]

    def _phases(self, attrs: Any) -> Any:
        return [p % attrs["ratio"] for p in self.pos]

    def _ring(self, ratio: int) -> int:
        return 2 * ratio if ratio == 4 else ratio

    def _ring_slots(self, attrs: Any) -> Any:
        m = self._ring(attrs["ratio"])
        rows = [s * m + p % m for p, s in zip(self.pos, self.seq)]
        return [row if row not in rows[t + 1 :] else m * self.rt.n_seq for t, row in enumerate(rows)]

    def _closing(self, ratio: int) -> list[tuple[int, int]]:
        return [(s, p + 1 - ratio) for p, s in zip(self.pos, self.seq) if (p + 1) % ratio == 0]

    def _entry_slots(self, attrs: Any) -> Any:
        per = self.rt.entries_per_seq(attrs["ratio"])
        return [s * per + first // attrs["ratio"] for s, first in self._closing(attrs["ratio"])]

    def _entry_positions(self, attrs: Any) -> Any:
        return [first for _, first in self._closing(attrs["ratio"])]

    def _source(self, s: int, p: int, ratio: int) -> int:
        m = self._ring(ratio)
        rings = m * self.rt.n_seq + 1
        if p < 0:
            return rings + self.n
        here = [t for t in range(self.n) if self.seq[t] == s and self.pos[t] == p]
        return rings + here[0] if here else s * m + p % m

    def _entry_sources(self, attrs: Any) -> Any:
        r = attrs["ratio"]
        return [[self._source(s, first + j, r) for j in range(r)] for s, first in self._closing(r)]

    def _entry_previous(self, attrs: Any) -> Any:
        r = attrs["ratio"]
        return [[self._source(s, first - r + j, r) for j in range(r)] for s, first in self._closing(r)]

    def _entry_cells(self, attrs: Any) -> Any:
        per, r = self.rt.entries_per_seq(attrs["ratio"]), attrs["ratio"]
        return [s * per + b for s in self.sequences for b in range(self.counts[s] // r)]

    def _entry_visible(self, attrs: Any) -> Any:
        r, base, total = attrs["ratio"], {}, 0
        for s in self.sequences:
            base[s] = total
            total += self.counts[s] // r
        return [(base[s], 0, (p + 1) // r) for p, s in zip(self.pos, self.seq)]


STEPS_LATER = ("mtp_warmup", "mtp_update", "mtp_draft", "mtp_rm")
"""Steps of a companion with NextN heads."""


def arguments(step: dict[str, Any], *names: str) -> list[int]:
    """Arguments of a step, named or in order."""
    return [int(step[n]) for n in names] if "args" not in step else [int(v) for v in step["args"][-len(names) :]]


def run_case(folder: Path, *, steps: int | None = None, sized: bool = True, **options: Any) -> tuple[dict[str, np.ndarray], Runtime]:
    """Logits of the named steps of a case (the first ``steps`` of its steps), and the runtime after them."""
    case = json.loads((folder / "case.json").read_text())
    out: dict[str, np.ndarray] = {}
    with GGUFFile.open(folder / "model.gguf") as file:
        rt = Runtime(load_model(file), file.data, case["options"] | options, sized=sized)
        saved: Any = None
        for step in case["steps"][:steps]:
            op = step["op"]
            if op in ("decode", "decode_last"):
                out[step["name"]] = rt.decode(step["tokens"], step["pos"], step["seq"], last=op == "decode_last")
            elif op == "seq_rm":
                rt.remove(*arguments(step, "seq", "p0", "p1"))
            elif op == "clear":
                rt.clear()
            elif op == "state_save":
                saved = copy.deepcopy(rt.save(*arguments(step, "seq")))
            elif op == "state_load":
                rt.load(saved, *arguments(step, "seq"))
            elif op == "ckpt_save":
                saved = {name: rt.caches[name].copy() for name, info in rt.infos.items() if info.rows == "S+1"}
            elif op == "ckpt_restore":
                rt.remove(0, step["npast"], -1)
                rt.caches |= saved
            elif op not in STEPS_LATER:
                raise ValueError(f"{folder.name}: step {op!r} is not known here")
        rt.weights.clear()
    return out, rt


def excess(folder: Path, found: dict[str, np.ndarray]) -> float:
    """The largest distance to the golden in units of the tolerance."""
    case = json.loads((folder / "case.json").read_text())
    assert found
    worst = 0.0
    for name, logits in found.items():
        golden = np.load(folder / f"{name}.npy")
        assert logits.shape == golden.shape and np.isfinite(logits).all()
        worst = max(worst, float((np.abs(logits - golden) / (case["atol"] + case["rtol"] * np.abs(golden))).max()))
    return worst
