"""The known architectures, and loading a model file under the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ggufc.models.architecture import Architecture
from ggufc.models.deepseek2 import DEEPSEEK2
from ggufc.models.deepseek4 import DEEPSEEK4
from ggufc.models.errors import ModelError
from ggufc.models.gemma2 import GEMMA2
from ggufc.models.gemma3 import GEMMA3
from ggufc.models.glm4moe import GLM4MOE
from ggufc.models.glm_dsa import GLM_DSA
from ggufc.models.gpt_oss import GPT_OSS
from ggufc.models.llama import LLAMA
from ggufc.models.model import Model
from ggufc.models.openpangu import OPENPANGU
from ggufc.models.phi3 import PHI3
from ggufc.models.qwen2 import QWEN2
from ggufc.models.qwen3 import QWEN3, QWEN3MOE
from ggufc.models.smollm3 import SMOLLM3
from ggufc.models.weights import check_tensors

_FAMILIES = (
    LLAMA, DEEPSEEK2, DEEPSEEK4, GEMMA2, GEMMA3, GLM4MOE, GLM_DSA, GPT_OSS, OPENPANGU,
    PHI3, QWEN2, QWEN3, QWEN3MOE, SMOLLM3,
)  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in _FAMILIES}

ARCH_KEY = "general.architecture"


class ModelFile(Protocol):
    """What loading needs of a file: ``formats.GGUFFile`` has it. Tensors have ``ne`` and ``type``."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, Any]: ...


def load_model(gguf: ModelFile) -> Model:
    """Hyperparameters and tensors of a file, all checked, nothing built yet.

    Raises ``ModelError`` for an unknown architecture (listing the known ones), a wrong hyperparameter (naming its key) and a
    missing or unfit tensor (naming it).
    """
    name = gguf.metadata.get(ARCH_KEY)
    if not isinstance(name, str):
        found = "is missing" if name is None else f"is {name!r}, not a string"
        raise ModelError(f"key {ARCH_KEY} {found}; this file does not say which model it holds")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelError(f"architecture {name!r} is not known; known are {', '.join(sorted(ARCHITECTURES))}")
    hparams = architecture.read(gguf.metadata)
    weights = check_tensors(architecture.tensors(hparams, gguf.tensors), gguf.tensors, name)
    return Model(architecture, hparams, weights)
