"""What every test may use. Also loaded by the host tests, in ComfyUI's Python: only pytest is imported up here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent

# Set by dev.py where a platform has no release of a backend's library.
MISSING = [name.replace("-", "_") for name in os.environ.get("QUANTCORE_MISSING_BACKENDS", "").split(",") if name]
collect_ignore_glob = [f"test_{name}*.py" for name in MISSING]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_tests:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for name in MISSING:
            if any(isinstance(value, str) and value.startswith(f"{name}_") for value in values):
                item.add_marker(pytest.mark.skip(reason=f"{name} has no release for this platform"))


@pytest.fixture(scope="session")
def peer_quant() -> types.ModuleType:
    """``diffsynth.core.quant`` of DiffSynth-Studio, without the packages that the rest of it imports.

    Empty parents stand in for ``diffsynth`` and ``diffsynth.core``, so that their ``__init__`` does not run.
    """
    spec = importlib.util.find_spec("diffsynth")
    assert spec is not None and spec.origin is not None, "diffsynth is not installed: run the tests with dev.py test"
    folder = Path(spec.origin).parent
    for name, path in (("diffsynth", folder), ("diffsynth.core", folder / "core")):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules.setdefault(name, module)
    return importlib.import_module("diffsynth.core.quant")


def load_file(path: Path, name: str) -> types.ModuleType:
    """Import one file of the repository that is part of no package on ``sys.path``."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def minilm() -> types.ModuleType:
    """demo/minilm.py: a small trained model, its tokenizer and the whole-model error."""
    return load_file(ROOT / "demo" / "minilm.py", "quantcore_demo_minilm")
