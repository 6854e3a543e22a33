"""Architectures: hyperparameters and weights of a model file to unfused graphs.

Map of the room, in the order data flows:

- ``metadata`` reads declared keys with types and ranges; ``hparams`` resolves them per layer; ``weights`` checks tensors against
  declared names and shapes.
- ``step`` is the shape of one evaluation, recording what a builder looked at.
- ``caches`` describes the persistent resources of a layer, for graphs and runtime alike; ``cache_types`` their types by layer.
- ``blocks``, ``attention``, ``latent``, ``ffn``, ``moe`` are the shared blocks; ``architecture`` is the frame around them, ``prenorm`` and
  ``gemma`` are whole layers several families share, ``experts`` the keys of those with experts, ``names`` tensors with two names.
- ``hyper_connections``, ``indexer``, ``conv``, ``compressor``, ``regions`` are blocks of families with sparse attention or state of their
  own; ``openpangu*`` and ``deepseek4*`` put them together. What a runtime fills in for them is said in ``ggufc.ir.ops.inputs``.
- one file per family (``llama``, ``qwen2``, ``gpt_oss``, ...), ``registry`` lists them; ``model`` is what loading a file gives.
"""

from ggufc.models.architecture import Architecture
from ggufc.models.caches import CacheInfo
from ggufc.models.errors import ModelError
from ggufc.models.hparams import HParams, LayerParams, RopeParams
from ggufc.models.model import Model
from ggufc.models.registry import ARCHITECTURES, load_model
from ggufc.models.step import Step
from ggufc.models.weights import TensorSpec, WeightInfo, Weights

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "CacheInfo",
    "HParams",
    "LayerParams",
    "Model",
    "ModelError",
    "RopeParams",
    "Step",
    "TensorSpec",
    "WeightInfo",
    "Weights",
    "load_model",
]
