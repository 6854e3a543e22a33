"""Options and report of a compilation; the child process receives the one and returns the other as JSON."""

from __future__ import annotations

import msgspec


class CompileOptions(msgspec.Struct, frozen=True):
    """What may differ between two artifacts of one model.

    ``target``: ``native``, a feature level or a feature list; with ``cuda:sm_90`` items, separated by commas, the artifact holds GPU code
    as well. ``type_k``/``type_v``: dtypes of the KV cache. ``pipeline``: pass pipeline text, None for the default. ``jobs``: most
    processes that generate code, never more than there are cores; None for at most 2. ``builder``: options of the model's builder
    (``models.step.OPTIONS``), such as ``{"mla": 0}``. ``keep``: intermediate results that become outputs,
    for comparisons (``codegen.keep``): ``stored`` and patterns of node names, separated by commas.
    """

    target: str = "native"
    type_k: str = "f16"
    type_v: str = "f16"
    pipeline: str | None = None
    jobs: int | None = None
    builder: dict[str, int | bool | str] = {}
    keep: str = ""

    def for_builder(self) -> dict[str, int | bool | str]:
        """Everything the model's builder is told."""
        return {"type_k": self.type_k, "type_v": self.type_v, **self.effective()}

    def effective(self) -> dict[str, int | bool | str]:
        """``builder`` without what cannot take effect: nothing is chosen for attention whose heads are divided, which is dense."""
        return self.builder | {"dsa": False} if self._drops_dsa() else self.builder

    def notes(self) -> list[str]:
        """A sentence for each option that ``effective`` left out."""
        return ["dsa is off: caches are divided by heads (split-heads), and divided attention is dense"] if self._drops_dsa() else []

    def _drops_dsa(self) -> bool:
        return bool(self.builder.get("dsa")) and "split-heads" in (self.pipeline or "")


class CompileReport(msgspec.Struct, frozen=True):
    """What a compilation produced; sizes in bytes, ``peak_rss`` over all processes together; ``notes``: options that could not take
    effect."""

    output: str
    seconds: float
    source_bytes: int
    artifact_bytes: int
    kernels: int
    launches: int
    image_bytes: int
    target: str
    peak_rss: int
    phases: dict[str, float]
    notes: list[str] = []
