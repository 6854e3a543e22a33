"""The artifact manifest: the one definition of what an artifact file holds besides weights and code.

The manifest travels as JSON text in the GGUF key ``ggufc.manifest``. Dimensions and sizes are forms ``{"": constant, "T": 2}``; a key such
as ``KV*T`` is a product of symbols (only graphs with unfused attention have those).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

FORMAT_VERSION = 1
MANIFEST_KEY = "ggufc.manifest"
VERSION_KEY = "ggufc.format_version"
GRAPH_KEY = "ggufc.graph."
DIGEST_KEY = "ggufc.digest."
IMAGE_TENSOR = "ggufc.image"
DIGESTS_TENSOR = "ggufc.digests"
"""Bytes of the last tensor: the sha256 (32 bytes) of every tensor before it, in the file's order."""

_LAYER = re.compile(r"blk\.(\d+)\.")

Affine = dict[str, int]


def evaluate(form: Affine, env: Mapping[str, int]) -> int:
    """Value of a form; the key ``""`` holds the constant, ``"KV*T"`` the factor of a product."""
    total = 0
    for key, factor in form.items():
        for symbol in key.split("*") if key else ():
            factor *= env[symbol]
        total += factor
    return total


def layer_of(name: str) -> int | None:
    """The layer that a node, tensor or cache is named after (``blk.3.attn_q`` -> 3); None outside layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def numel(ne: Iterable[Affine], env: Mapping[str, int]) -> int:
    """Values of a tensor whose dimensions are forms."""
    return math.prod(evaluate(form, env) for form in ne)


class Slot(msgspec.Struct, frozen=True):
    """A piece of the activation arena; ``sizes`` are alternatives in bytes, the largest counts. ``holders`` name the values in it."""

    sizes: list[Affine]
    holders: list[str] = []


class Input(msgspec.Struct, frozen=True):
    """A runtime input; ``kind`` says how the runtime fills it, ``ratio`` how many positions make a compressed entry
    (docs/runtime-inputs.md).
    """

    name: str
    kind: str
    dtype: str
    ne: list[Affine]
    window: int = 0
    ratio: int = 0


class Cache(msgspec.Struct, frozen=True):
    """A persistent resource of ``rows`` rows; ``row`` values (heads of ``head`` values each) of ``dtype`` per row. Rows ``{"C": 1}`` are
    cells; others belong to sequences (docs/runtime-inputs.md), so they do not follow when cells move.

    ``rest_of``: the cache of the same layer that holds the heads before these (``split-heads``); together they are one cache.
    ``rope`` holds the attributes of the operator that rotated the keys (empty for values and unrotated keys): what a K-shift needs.
    ``hadamard`` is the block of the Walsh-Hadamard transform under which rows are stored, 0 for none.
    """

    name: str
    layer: int
    part: str  # "k" or "v"
    dtype: str
    row: int
    head: int
    window: int = 0
    rope: dict[str, float | int | str | list[float]] = {}
    rows: Affine = msgspec.field(default_factory=lambda: {"C": 1})
    hadamard: int = 0
    rest_of: str = ""


class Arg(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kernel argument.

    ``kind``: ``weight`` (name, byte offset), ``slot`` (index, byte offset), ``input``, ``output`` or ``cache`` (name), ``int`` (value),
    ``null``.
    """

    kind: str
    name: str = ""
    value: int = 0
    offset: int = 0


class Launch(msgspec.Struct, frozen=True, omit_defaults=True):
    """``kernel`` over ``mult * ceil(sym / div)`` tiles; ``wait``: first launch that must be complete before this one, -1 for none."""

    kernel: int
    args: list[Arg]
    node: str
    sym: str = ""
    div: int = 1
    mult: int = 1
    wait: int = -1
    bytes: Affine = {}
    flops: Affine = {}


class Kernel(msgspec.Struct, frozen=True):
    """A function of the image: ``symbol`` at byte ``offset``; ``signature`` is its human-readable specification."""

    symbol: str
    signature: str
    offset: int
    size: int
    scratch: int = 0


class Fixup(msgspec.Struct, frozen=True):
    """A cache write at a moving offset: argument ``arg`` of ``launch`` is cache base + head * ``step`` bytes."""

    launch: int
    arg: int
    cache: str
    step: int
    node: str


class Program(msgspec.Struct, frozen=True):
    """One graph, scheduled. ``outputs`` maps output names to their ``ne``; all outputs are f32."""

    name: str
    launches: list[Launch]
    slots: list[Slot]
    inputs: list[Input]
    outputs: dict[str, list[Affine]]
    fixups: list[Fixup] = []
    reuse_key: list[tuple[str, int | str | bool]] = []
    node_budget: int = 0
    nodes: int = 0
    fusions: dict[str, int] = {}


class Manifest(msgspec.Struct, frozen=True):
    """Everything the runtime needs to know about an artifact."""

    abi: int
    arch: str
    source_sha256: str
    source_name: str
    target: str  # triple
    level: str  # name of the feature level
    features: list[str]  # CPU features the image needs, LLVM names without "+"
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    type_k: str
    type_v: str
    caches: list[Cache]
    programs: list[Program]
    kernels: list[Kernel]
    drivers: dict[str, int]  # ggufc_worker, ggufc_eval: byte offsets in the image
    options: dict[str, str] = {}
    generator: str = "ggufc"


def dumps(manifest: Manifest) -> str:
    return msgspec.json.encode(manifest).decode()


def loads(text: str | bytes) -> Manifest:
    """Decode and type-check; raises ``msgspec.DecodeError`` on anything unexpected."""
    return msgspec.json.decode(text, type=Manifest)
