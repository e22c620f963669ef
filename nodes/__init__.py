"""The pack's nodes. Imported by ComfyUI's door only, since every module below imports ComfyUI."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .core import provide_quant_core

provide_quant_core()  # Before the node modules, which import quant_core by its name.

from .load_diffusion_model import LoadDiffusionModelQuantized  # noqa: E402


class QuantCoreExtension(ComfyExtension):
    """What ComfyUI asks the pack for."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [LoadDiffusionModelQuantized]
