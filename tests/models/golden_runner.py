"""Runs the steps of a golden case on a built graph with the reference interpreter, keeping just enough cell bookkeeping for it.

One cell per token, contiguous where room allows; a cell knows its position and the sequences that own it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph
from ggufc.ir.interp import interpret
from ggufc.models import Model, Step, load_model
from nan_trap import no_nan

PAD = 32


class Cells:
    """Position and owners of each cell, and the inputs a micro-batch needs."""

    def __init__(self, n_cells: int) -> None:
        self.n_cells = -(-n_cells // PAD) * PAD
        self.clear()

    def clear(self) -> None:
        self.pos = [-1] * self.n_cells
        self.owners: list[set[int]] = [set() for _ in range(self.n_cells)]

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        for c in self._between(src, p0, p1):
            self.owners[c].add(dst)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        for c in self._between(seq, p0, p1):
            self.owners[c].discard(seq)
            if not self.owners[c]:
                self.pos[c] = -1

    def _between(self, seq: int, p0: int, p1: int) -> list[int]:
        end = p1 if p1 >= 0 else 1 << 31
        return [c for c in range(self.n_cells) if seq in self.owners[c] and max(p0, 0) <= self.pos[c] < end]

    def place(self, pos: list[int], seq: list[int]) -> list[int]:
        """Cells for one micro-batch: the first gap that holds it."""
        n = len(pos)
        start = next(s for s in range(self.n_cells - n + 1) if not any(self.owners[s : s + n]))
        for i, c in enumerate(range(start, start + n)):
            self.pos[c], self.owners[c] = pos[i], {seq[i]}
        return list(range(start, start + n))

    def lists(self, pos: list[int], seq: list[int], windows: tuple[int, ...]) -> dict[str, np.ndarray]:
        """``kv_cells`` and one ``visible`` array per window."""
        base: dict[int, int] = {}
        cells: list[int] = []
        for s in dict.fromkeys(seq):
            base[s] = len(cells)
            cells += sorted((c for c in range(self.n_cells) if s in self.owners[c]), key=lambda c: self.pos[c])
        out = {"kv_cells": np.array(cells, np.int32)}
        for window in windows:
            rows = []
            for p, s in zip(pos, seq):
                mine = sorted(self.pos[c] for c in range(self.n_cells) if s in self.owners[c])
                lo = sum(q <= p - window for q in mine) if window else 0
                rows.append((base[s], lo, sum(q <= p for q in mine)))
            out[f"visible_w{window}" if window else "visible"] = np.array(rows, np.int32)
        return out

    def n_kv(self) -> int:
        """Visible length: one past the highest occupied cell, padded."""
        highest = max(c for c in range(self.n_cells) if self.owners[c])
        return min(self.n_cells, -(-(highest + 1) // PAD) * PAD)


class Runner:
    """A model with caches; ``decode`` evaluates tokens (or embeddings) in micro-batches and returns logits [rows, n_vocab]."""

    def __init__(self, model: Model, data: Any, options: dict[str, Any]) -> None:
        self.model = model
        self.cells = Cells(options.get("n_ctx", 256))
        self.n_ubatch = options.get("n_ubatch", 256)
        self.options = {key: options[key] for key in ("type_k", "type_v", "mla") if key in options}
        self.options["n_ctx_seq"] = options.get("n_ctx", 256) // options.get("n_seq_max", 1)
        self.weights = {name: data(name) for name in model.weights}
        self.graphs: dict[bool, Graph] = {}
        self.clear()

    def clear(self) -> None:
        self.cells.clear()
        # The interpreter starts caches it does not find as zeros.
        self.caches: dict[str, np.ndarray] = {}

    def graph(self, embd: bool) -> Graph:
        if embd not in self.graphs:
            self.graphs[embd] = self.model.build(Step({**self.options, "embd_input": embd}))
        return self.graphs[embd]

    def decode(
        self, tokens: list[int], pos: list[int], seq: list[int], *, last: bool = False, embd: np.ndarray | None = None
    ) -> np.ndarray:
        rows = []
        for start in range(0, len(pos), self.n_ubatch):
            part = slice(start, start + self.n_ubatch)
            wanted = [len(pos) - 1] if last else list(range(len(pos)))
            ids = [i - start for i in wanted if start <= i < start + self.n_ubatch]
            data = {"embd": embd[part]} if embd is not None else {"tokens": np.array(tokens[part], np.int32)}
            logits = self._evaluate(self.graph(embd is not None), data, pos[part], seq[part], ids)
            rows.append(logits)
        return np.concatenate(rows)

    def _evaluate(self, graph: Graph, inputs: dict[str, Any], pos: list[int], seq: list[int], ids: list[int]) -> np.ndarray:
        inputs["kv_slots"] = np.array(self.cells.place(pos, seq), np.int32)
        inputs |= self.cells.lists(pos, seq, self.model.hparams.windows())
        inputs["positions"] = np.array(pos, np.int32)
        inputs["out_ids"] = np.array(ids, np.int32)
        env = {"T": len(pos), "O": len(ids), "C": self.cells.n_cells, "KV": self.cells.n_kv(), "R": len(inputs["kv_cells"])}
        out = interpret(graph, self.weights, inputs, self.caches, env, trace=no_nan, activations="rounded")
        return np.asarray(out["logits"]).reshape(len(ids), self.model.n_vocab)


def run_case(folder: Path, *, steps: int | None = None, **options: Any) -> dict[str, np.ndarray]:
    """Logits of the named steps of a case (the first ``steps`` of its steps), with ``options`` over those of the case."""
    case = json.loads((folder / "case.json").read_text())
    out = {}
    with GGUFFile.open(folder / "model.gguf") as file:
        runner = Runner(load_model(file), file.data, case["options"] | options)
        for step in case["steps"][:steps]:
            op = step["op"]
            if op in ("decode", "decode_last"):
                out[step["name"]] = runner.decode(step["tokens"], step["pos"], step["seq"], last=op == "decode_last")
            elif op == "seq_cp":
                runner.cells.copy(step["src"], step["dst"], step["p0"], step["p1"])
            elif op == "seq_rm":
                runner.cells.remove(step["seq"], step["p0"], step["p1"])
            elif op == "clear":
                runner.clear()
            else:
                raise ValueError(f"{folder.name}: step {op!r} is not known here")
        del runner
    return out


def assert_close(folder: Path, found: dict[str, np.ndarray], atol: float | None = None) -> None:
    """Each array equals the golden one within the case's tolerances (``atol`` instead of the case's)."""
    case = json.loads((folder / "case.json").read_text())
    if atol is not None:
        case["atol"] = atol
    assert found
    for name, logits in found.items():
        golden = np.load(folder / f"{name}.npy")
        assert logits.shape == golden.shape
        excess = np.abs(logits - golden) - case["atol"] - case["rtol"] * np.abs(golden)
        assert excess.max() <= 0, f"{folder.name} step {name}: {np.abs(logits - golden).max():.3g} off, tolerance {case['atol']}"
