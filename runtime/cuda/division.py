"""Which launches of a program run on the device when only some layers do, and what crosses between the memories.

``-ngl N`` counts as ggml does: the last N layers, with N = layers + 1 the output and everything else too. A launch belongs to the layer its
node is named after (``blk.3.``); what stands between layers goes with the layer after it, what stands before the first stays on the host.
The launch list is cut wherever the place changes. A value crosses when a launch reads a slot that was last written on the other side;
what is overwritten first does not. Of a cache divided by heads (``passes.split_heads``) the rest stays on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.runtime.errors import RuntimeRefusal


@dataclass
class Stretch:
    """Neighbouring launches of one place; ``incoming``: slots it reads that the other side wrote last, ``outgoing``: slots of it that the
    other side reads later, each with the bytes of the value in it.
    """

    on_device: bool
    launches: range
    incoming: dict[int, fmt.Affine] = field(default_factory=dict)
    outgoing: dict[int, fmt.Affine] = field(default_factory=dict)


def places(program: fmt.Program, n_layer: int, n_gpu_layers: int, on_host: Collection[str] = ()) -> list[bool]:
    """Per launch whether it runs on the device. ``on_host``: caches that stay on the host whatever their layer does, with the launches
    that use them.
    """
    layers = [fmt.layer_of(launch.node) for launch in program.launches]
    everything = n_gpu_layers > n_layer
    first = n_layer - n_gpu_layers
    named = [i for i, layer in enumerate(layers) if layer is not None]
    found, following = [False] * len(layers), everything
    for i in reversed(range(len(layers))):
        layer = layers[i]
        if layer is not None:
            following = layer >= first
        kept = any(arg.kind == "cache" and arg.name in on_host for arg in program.launches[i].args)
        found[i] = not kept and (everything or (following and bool(named) and i >= named[0]))
    return found


def check_caches(
    program: fmt.Program, on_device: Sequence[bool], n_layer: int, n_gpu_layers: int, on_host: Collection[str] = ()
) -> tuple[set[str], set[str]]:
    """Names of the caches of the host's and of the device's launches. RuntimeRefusal if a cache has users on both sides: its rows are in
    one memory.
    """
    host, device = _cache_users(program, on_device)
    shared = sorted(host & device)
    if not shared:
        return host, device

    def fits(n: int) -> bool:
        a, b = _cache_users(program, places(program, n_layer, n, on_host))
        return not a & b

    less = max(n for n in range(n_gpu_layers) if fits(n))
    more = min(n for n in range(n_gpu_layers + 1, n_layer + 2) if fits(n))
    raise RuntimeRefusal(
        f"with {n_gpu_layers} of {n_layer} layers on the device, layers on both sides use the cache {shared[0]}; give -ngl {less} or {more}"
    )


def _cache_users(program: fmt.Program, on_device: Sequence[bool]) -> tuple[set[str], set[str]]:
    sides: tuple[set[str], set[str]] = (set(), set())
    for launch, there in zip(program.launches, on_device):
        sides[there].update(arg.name for arg in launch.args if arg.kind == "cache")
    return sides


def divide(program: fmt.Program, writes: Sequence[Mapping[int, fmt.Affine]], on_device: Sequence[bool]) -> list[Stretch]:
    """The stretches of a program in order; ``writes`` says per launch what it writes (``CudaManifest.writes``). ArtifactError if it does
    not.
    """
    if len(writes) != len(program.launches) or not all(writes):
        raise ArtifactError(
            f"the artifact does not say what the launches of {program.name} write; compile the model again to offload some layers"
        )
    stretches: list[Stretch] = []
    written: dict[int, tuple[Stretch, fmt.Affine]] = {}  # slot -> who wrote it last, and what
    pending: set[int] = set()  # slots nobody has read since
    for i, launch in enumerate(program.launches):
        if not stretches or stretches[-1].on_device != on_device[i]:
            stretches.append(Stretch(on_device[i], range(i, i)))
        here = stretches[-1]
        here.launches = range(here.launches.start, i + 1)
        slots = {k: arg for k, arg in enumerate(launch.args) if arg.kind == "slot"}
        reads = {arg.value for k, arg in slots.items() if k not in writes[i]}
        made = {k: arg for k, arg in slots.items() if k in writes[i]}
        # A value written in pieces: the part of the other side must not be lost.
        continued = {arg.value for arg in made.values() if arg.value in pending or arg.offset}
        for slot in reads | continued:
            author, size = written.get(slot, (here, {}))
            if author.on_device != here.on_device and slot not in here.incoming:
                here.incoming[slot] = author.outgoing[slot] = size
        pending = (pending - reads) | {arg.value for arg in made.values()}
        written |= {arg.value: (here, writes[i][k]) for k, arg in made.items()}
    return stretches
