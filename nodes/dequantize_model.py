"""The node *Dequantize Model*."""

from __future__ import annotations

from comfy_api.latest import io

from .devices import COMPUTE_DTYPES
from .host.rebuilding import dequantize_model


class DequantizeModel(io.ComfyNode):
    """Turns a quantized model into a float one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_DequantizeModel",
            display_name="Dequantize Model",
            category="quantization",
            description=(
                "Makes a float copy of a quantized model, with the values that its weights stand for. For nodes that "
                "cannot work with quantized weights, and to see what a method's error alone does. It takes "
                "the memory of the float model, and does not bring back what quantizing lost."
            ),
            search_aliases=["dequantize", "to float", "unquantize", "fp8 to bf16"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="A quantized model, of this pack or of ComfyUI's own loaders. LoRAs stay on it."
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(COMPUTE_DTYPES),
                    default="auto",
                    optional=True,
                    tooltip="The dtype of the weights. auto is what the model computes in.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The float model.")],
        )

    @classmethod
    def execute(cls, model: io.Model.Type, dtype: str = "auto") -> io.NodeOutput:
        return io.NodeOutput(dequantize_model(model, COMPUTE_DTYPES[dtype]))
