"""Makes ``import quant_core`` give one module object, whoever imports it first.

The pack's folder is not put on sys.path: it would expose this very package as ``nodes``, a name that ComfyUI uses for
a module of its own.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1] / "quant_core"


def provide_quant_core(package: Path = PACKAGE) -> ModuleType:
    """Return the process's ``quant_core``; load the one in ``package`` when none is imported yet.

    A quant_core that other code imported before is used when it has the version of ``package``, so that both see the
    same registry of methods.

    Raises:
        ImportError: another version is imported already. Replacing it would leave its users with classes and
            registries that this pack does not see.
    """
    # Read, not imported: importing would make a second module of what may be there already.
    version = re.search(r'__version__ = "(.+?)"', (package / "version.py").read_text(encoding="utf-8")).group(1)
    loaded = sys.modules.get("quant_core")
    if loaded is not None:
        found = getattr(loaded, "__version__", "without a version")
        if found != version:
            raise ImportError(
                f"ComfyUI-QuantCore {version} cannot be used: quant_core {found} is imported already, from "
                f"{getattr(loaded, '__file__', None) or 'an unknown place'}. Install the same version of both "
                "(pip install --upgrade quantcore, or update the pack), or uninstall the package quantcore."
            )
        return loaded
    spec = importlib.util.spec_from_file_location(
        "quant_core", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["quant_core"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # As the import statement does: a half-made module must not be found by the next import.
        sys.modules.pop("quant_core", None)
        raise
    return module


def quantizes() -> bool:
    """Whether this ComfyUI has quantized tensors: an older one starts without comfy-kitchen, and then has none."""
    import comfy.quant_ops

    return hasattr(comfy.quant_ops, "QuantizedLayout")
