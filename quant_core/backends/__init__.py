"""The built-in backends. Each module is imported when a method of its backend is first used, and imports its
library later still, when the first layer is made: a comfy_kitchen method never imports torchao."""

from __future__ import annotations

import importlib

_LAZY_BACKENDS = {
    "bitsandbytes": ".bitsandbytes",
    "torchao": ".torchao",
    "comfy_kitchen": ".comfy_kitchen",
}


def load_backend(name: str) -> None:
    """Import the built-in backend ``name``, which registers its methods. Unknown names are ignored."""
    if name in _LAZY_BACKENDS:
        importlib.import_module(_LAZY_BACKENDS[name], __name__)


def load_backend_of_method(method: str) -> None:
    """Import the built-in backend whose name starts ``method``."""
    for name in _LAZY_BACKENDS:
        if method.startswith(name + "_"):
            load_backend(name)


def load_all_backends() -> None:
    """Register every built-in method in ``QUANT_METHODS``. Imports no quantization library."""
    for name in _LAZY_BACKENDS:
        load_backend(name)
