"""Architectures: hyperparameters and weights of a model file to unfused graphs.

Map of the room, in the order data flows:

- ``metadata`` reads declared keys with types and ranges; ``hparams`` resolves them per layer; ``weights`` checks tensors against
  declared names and shapes.
- ``step`` is the shape of one evaluation, recording what a builder looked at.
- ``blocks``, ``attention``, ``ffn``, ``moe`` are the shared blocks, ``architecture`` the frame around them.
- ``llama``, ``gemma3`` are the families, ``registry`` the list of them; ``model`` is what loading a file gives.
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
