"""A loaded model: hyperparameters and checked tensors of one file, ready to build graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture
from ggufc.models.blocks import Builder
from ggufc.models.cache_types import notes
from ggufc.models.caches import CacheInfo, key_rope, layer_caches
from ggufc.models.hparams import HParams
from ggufc.models.step import Step
from ggufc.models.weights import TensorSpec, Weights

OBSERVATIONS = "observations"
"""Key of ``graph.analysis`` that holds what the builder observed: the reuse key in plain data."""
NODE_ESTIMATE = "node-estimate"
"""Key of ``graph.analysis`` that holds the family's node budget for this graph."""


@dataclass(frozen=True)
class Model:
    """Hyperparameters and weights of one file under its architecture; made by ``load_model``."""

    architecture: Architecture
    hparams: HParams
    weights: Weights

    @property
    def arch(self) -> str:
        return self.architecture.name

    @property
    def n_layer(self) -> int:
        return self.hparams.n_layer

    @property
    def n_embd(self) -> int:
        return self.hparams.n_embd

    @property
    def n_vocab(self) -> int:
        return self.hparams.n_vocab

    @property
    def n_ctx_train(self) -> int:
        return self.hparams.n_ctx_train

    @property
    def required_tensors(self) -> dict[str, TensorSpec]:
        """The tensors no file of this shape may lack, by name."""
        return {spec.name: spec for spec in self.architecture.tensors(self.hparams, self.weights) if not spec.optional}

    def build(self, step: Step | None = None, name: str = "decode") -> Graph:
        """The unfused evaluation graph for ``step`` (default: a step with default options).

        ``graph.analysis`` records the step's observations and the node estimate, so that passes need neither the model nor the
        step.
        """
        step = step or Step()
        graph = self.architecture.build(Builder(self.hparams, self.weights, step, name))
        graph.analysis[OBSERVATIONS] = dict(step.observations)
        graph.analysis[NODE_ESTIMATE] = self.node_estimate(step)
        return graph

    def node_estimate(self, step: Step | None = None) -> int:
        """The most nodes ``build(step)`` can make; the same for every step, except in families that work block by block."""
        return self.architecture.node_estimate(self.hparams, self.weights, step or Step())

    def cache_rope(self, layer: int, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Attributes of the operator that rotated layer ``layer``'s keys, as a K-shift needs them; empty where keys are not
        rotated, ``caches.UNSHIFTABLE`` where they cannot be turned again.

        ``factors`` names the tensor of frequency divisors where the model has one.
        """
        if self.architecture.caches is not None:
            return next(info.rope for info in self.caches(options) if info.layer == layer and info.part == "k")
        return key_rope(self.hparams.layers[layer], self.weights, Step(options))

    def caches(self, options: Mapping[str, Any] | None = None) -> list[CacheInfo]:
        """The persistent resources of every graph of this model under the builder options."""
        step = Step(options)
        if self.architecture.caches is not None:
            return list(self.architecture.caches(self.hparams, self.weights, step))
        return [cache for i in range(self.n_layer) for cache in layer_caches(self.hparams, i, self.weights, step)]

    def notes(self, options: Mapping[str, Any] | None = None) -> list[str]:
        """What the file, or the options, ask for in vain, a sentence each."""
        remarks = self.architecture.remarks
        return [*(remarks(self.hparams) if remarks else ()), *notes(self.caches(options), Step(options))]
