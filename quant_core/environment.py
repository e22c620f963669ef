"""Says once a process what the quantization runs on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import platform
import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .backend import QuantBackend

logger = logging.getLogger("quant_core")

_announced: set[str] = set()

# Distribution names, to report a version without importing the library.
_DISTRIBUTIONS = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "comfy_kitchen": "comfy-kitchen"}


def library_version(backend_name: str) -> str | None:
    """Return the installed version of a built-in backend's library, None when it is not installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(backend_name, backend_name))
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """``"0.50.2"`` -> ``(0, 50, 2)``; a suffix such as ``+cpu`` or ``rc1`` is left out."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def require_library(backend_name: str, minimum: str, who: str) -> None:
    """Raise ImportError with an install hint when a backend's library is missing or older than ``minimum``.

    Does not import the library. ``who`` starts the sentence: the method or methods that need it.
    """
    distribution = _DISTRIBUTIONS.get(backend_name, backend_name)
    version = library_version(backend_name)
    hint = f'pip install "{distribution}>={minimum}"'
    if version is None or importlib.util.find_spec(backend_name) is None:
        raise ImportError(f"{who} needs {distribution}, which is not installed: {hint}")
    if version_numbers(version) < version_numbers(minimum):
        raise ImportError(f"{who} needs {distribution} {minimum} or newer, found {version}: {hint}")


def describe_machine() -> str:
    """Return one line: torch version, device, Python."""
    device = "cpu"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
    elif torch.backends.mps.is_available():
        device = "mps"
    return f"torch {torch.__version__} on {device}, Python {platform.python_version()}"


def announce_environment(backend: QuantBackend | None = None) -> None:
    """Log the machine, and for ``backend`` its library, version and project page; each once a process."""
    if "machine" not in _announced:
        _announced.add("machine")
        logger.info("quant_core: %s", describe_machine())
    if backend is None or backend.name in _announced:
        return
    _announced.add(backend.name)
    version = library_version(backend.name)
    logger.info(
        "Quantization backend %s%s. Problems of the library or the hardware: %s",
        backend.name,
        f" {version}" if version else "",
        backend.project_url or "(no project page given)",
    )
