"""Tensors that writers of model files call by different names."""

from __future__ import annotations

from collections.abc import Container, Iterable


def first_present(present: Container[str], stems: Iterable[str], suffix: str) -> str:
    """The first stem whose ``<stem><suffix>`` is in ``present``; the very first if none is, so that errors name the usual tensor."""
    listed = list(stems)
    return next((stem for stem in listed if f"{stem}{suffix}" in present), listed[0])
