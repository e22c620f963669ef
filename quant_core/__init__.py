"""quant_core: quantize the ``nn.Linear`` layers of any PyTorch model.

Start with :class:`QuantizeConfig`. Importing this package loads no quantization library; each is imported when a
method of its backend is first used.
"""

from . import backends
from .backend import BackendConfig, QuantBackend, Support
from .checkpoint import (
    FileHash,
    load_quantized_model,
    register_model_config,
    save_quantized_model,
)
from .checks import check_backend_contract, check_differentiable
from .config import MixedQuantizeConfig, QuantizeConfig, Recipe, recipe_from_dict
from .constraints import Constraint, DivisibleBy
from .environment import announce_environment
from .errors import CheckpointError, QuantizationError
from .measure import measure_quantization_error
from .packed_linear import PackedLinear
from .registry import (
    QUANT_BACKENDS,
    QUANT_METHODS,
    QuantMethodSpec,
    describe_quant_method,
    register_quant_backend,
    register_quant_method,
)
from .version import __version__

__all__ = [
    "QUANT_BACKENDS",
    "QUANT_METHODS",
    "BackendConfig",
    "CheckpointError",
    "Constraint",
    "DivisibleBy",
    "FileHash",
    "MixedQuantizeConfig",
    "PackedLinear",
    "QuantBackend",
    "QuantMethodSpec",
    "QuantizationError",
    "QuantizeConfig",
    "Recipe",
    "Support",
    "__version__",
    "announce_environment",
    "backends",
    "check_backend_contract",
    "check_differentiable",
    "describe_quant_method",
    "load_quantized_model",
    "measure_quantization_error",
    "recipe_from_dict",
    "register_model_config",
    "register_quant_backend",
    "register_quant_method",
    "save_quantized_model",
]
