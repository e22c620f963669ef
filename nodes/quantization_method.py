"""The node *Quantization Method*."""

from __future__ import annotations

from comfy_api.latest import io

from quant_core import QuantizeConfig

from .recipe import DEFAULT_METHOD, QuantRecipe, method_names, parse_layers, parse_options


class QuantizationMethod(io.ComfyNode):
    """Makes a recipe of one method."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_QuantizationMethod",
            display_name="Quantization Method",
            category="quantization",
            description=(
                "A recipe: which method, on which layers, with which options. Connect it to a node that quantizes, or "
                "several of them to Mixed Quantization."
            ),
            search_aliases=["quantization recipe", "quant config", "int8", "fp8", "nf4", "nvfp4", "mxfp8", "torchao"],
            inputs=[
                io.Combo.Input(
                    "method",
                    options=method_names(),
                    default=DEFAULT_METHOD,
                    tooltip=(
                        "How weights are stored: library, format, bits of the weight (w) and of the activations (a). "
                        "8-bit methods lose little; 4-bit ones halve the file again and change the picture visibly. A "
                        "method whose library is missing says how to install it when it is run."
                    ),
                ),
                io.String.Input(
                    "exclude_layers",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip=(
                        "Layers to keep in float, one a line: a full name (double_blocks.0.img_mlp.0) or its ending "
                        "after a dot (img_mlp.0 means that layer of every block). Embeddings, norms and the last "
                        "layer are kept anyway."
                    ),
                ),
                io.String.Input(
                    "target_layers",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip=(
                        "Empty: the layers are chosen by the structure of the model. Otherwise exactly these are "
                        "quantized, written as for exclude_layers."
                    ),
                ),
                io.String.Input(
                    "options",
                    default="",
                    multiline=True,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        'Options of the method as JSON, e.g. {"convrot_groupsize": 64}. Empty: its defaults. A name '
                        "that the method does not have is an error that lists those it has."
                    ),
                ),
            ],
            outputs=[QuantRecipe.Output(display_name="recipe", tooltip="The recipe, for a node that quantizes.")],
        )

    @classmethod
    def execute(
        cls, method: str, exclude_layers: str = "", target_layers: str = "", options: str = ""
    ) -> io.NodeOutput:
        recipe = QuantizeConfig(
            method=method,
            target_modules=parse_layers(target_layers) or None,
            exclude_modules=parse_layers(exclude_layers) or None,
            backend_config_kwargs=parse_options(options),
        )
        return io.NodeOutput(recipe)
