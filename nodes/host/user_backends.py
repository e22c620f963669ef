"""Lets other node packs bring quantization backends of their own, in whatever order ComfyUI loads the packs."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("quant_core")

HOOK = "register_quant_backends"
"""A function without arguments at the top of another pack: it imports quant_core and registers a backend."""

_called: set[int] = set()  # the hooks that were called: each once a process


def register_user_backends() -> None:
    """Call the hook of every node pack that has one and was not asked before.

    ComfyUI loads packs in no certain order, so another pack may come before quant_core can be imported. A hook that
    fails is reported and leaves the other methods in place.
    """
    comfy_nodes = sys.modules.get("nodes")
    folders = {os.path.realpath(folder) for folder in getattr(comfy_nodes, "LOADED_MODULE_DIRS", {}).values()}
    for module in list(sys.modules.values()):
        hook = getattr(module, "__dict__", {}).get(HOOK)
        file = getattr(module, "__dict__", {}).get("__file__")
        if not callable(hook) or id(hook) in _called or not isinstance(file, str):
            continue
        if os.path.realpath(os.path.dirname(file)) not in folders:
            continue
        _called.add(id(hook))
        try:
            hook()
        except Exception:
            logger.exception("%s: %s() failed; its quantization methods are not available", file, HOOK)
