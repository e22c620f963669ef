"""The pack's nodes. Imported by ComfyUI's door only, since every module below imports ComfyUI."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io

from .core import provide_quant_core, quantizes

provide_quant_core()  # Before the node modules, which import quant_core by its name.


def _nodes() -> list[type[io.ComfyNode]]:
    """Return the pack's nodes; only the one that says what is missing where ComfyUI cannot quantize anything."""
    if quantizes():
        from .catalog import NODES

        return NODES
    from .list_methods import ListMethods

    logging.getLogger("quant_core").error(
        "ComfyUI-QuantCore needs the library comfy-kitchen, which ComfyUI itself could not import: install it into "
        "ComfyUI's Python (pip install comfy-kitchen) and restart. Until then its only node is %s.",
        ListMethods.GET_SCHEMA().display_name,
    )
    return [ListMethods]


class QuantCoreExtension(ComfyExtension):
    """What ComfyUI asks the pack for."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return _nodes()
