"""The node *Quantize Model*."""

from __future__ import annotations

from comfy_api.latest import io

from quant_core import Recipe

from .devices import DEVICES, quantize_device_input
from .host.rebuilding import quantize_model
from .recipe import QuantRecipe


class QuantizeModel(io.ComfyNode):
    """Quantizes a model that is in the graph already."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_QuantizeModel",
            display_name="Quantize Model",
            category="quantization",
            description=(
                "Makes a quantized copy of a model. LoRAs and merges that come before this node are added in full "
                "precision first, which is the best they can get. The model that comes in stays as it is and keeps "
                "its memory until the workflow drops it; to load a file that does not fit, use Load Diffusion Model "
                "(Quantized)."
            ),
            search_aliases=["quantize", "convert model", "int8", "fp8", "nf4", "bake lora", "merge and quantize"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip=(
                        "A float model, with LoRAs, merges and sampling settings as you like. A model that is "
                        "quantized already is quantized again, which adds to its error."
                    ),
                ),
                QuantRecipe.Input("recipe", tooltip="From Quantization Method, Mixed Quantization or a preset."),
                quantize_device_input(),
            ],
            outputs=[io.Model.Output(tooltip="The quantized model, for a sampler, a LoRA node or a node that saves.")],
        )

    @classmethod
    def execute(cls, model: io.Model.Type, recipe: Recipe, quantize_device: str = "auto") -> io.NodeOutput:
        return io.NodeOutput(quantize_model(model, recipe, DEVICES[quantize_device]))
