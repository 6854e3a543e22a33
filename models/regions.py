"""Compacted caches: layers with a window may cache the window's rows only (option ``swa_compress``, one sequence).

All such layers of a model share one region of ``CW`` rows and thus one set of inputs: where the batch's rows go, the list of live rows by
position, and which of them each token sees. When a batch does not fit, the runtime moves the last rows of the window to the front before it
evaluates; the graph does not change.
"""

from __future__ import annotations

from ggufc.ir import Node, Sym
from ggufc.models.blocks import Builder
from ggufc.models.hparams import LayerParams
from ggufc.models.step import Step

REGION_ROWS, REGION_VISIBLE, REGION_LIST = Sym("CW"), Sym("KVW"), Sym("RW")
"""Rows of a compacted cache, how many of them are in use (padded), and entries of the list of live rows."""
REGION_SYMBOLS = tuple(map(str, (REGION_ROWS, REGION_VISIBLE, REGION_LIST)))
REGION_NODES = 4
"""Three inputs and the mask."""


def compacted(layer: LayerParams, step: Step) -> bool:
    """Whether the layer's cache keeps the rows of its window only."""
    return layer.window > 0 and bool(step.observe("swa_compress"))


def region_slots(b: Builder) -> Node:
    """i32 [T]: row of the region each token is written to."""
    return b.input("kv_slots_window", "kv_slots", (b.step.T,), region="window")


def region_mask(b: Builder, window: int) -> Node:
    """f32 [KVW, T]: 0 where a token sees a row of the region, else minus infinity."""
    cells = b.input("kv_cells_window", "kv_cells", (REGION_LIST,), region="window")
    visible = b.input("visible_window", "visible", (3, b.step.T), window=window, region="window")
    return b.shared("kq_mask_region", lambda name: b.add("kq_mask", cells, visible, name=name, ne0=REGION_VISIBLE))
