"""ComfyUI-QuantCore as a ComfyUI node pack. For the library alone, ``import quant_core``."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Called by ComfyUI at start; everything of ComfyUI is imported from here on, never before."""
    from .nodes import QuantCoreExtension

    return QuantCoreExtension()
