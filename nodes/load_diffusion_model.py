"""The node *Load Diffusion Model (Quantized)*."""

from __future__ import annotations

import os
from typing import Any

import folder_paths
from comfy_api.latest import io

from quant_core import QuantizeConfig, Recipe

from .devices import COMPUTE_DTYPES, DEVICES, compute_dtype_input, quantize_device_input
from .host.loading import load_diffusion_model
from .lora_to_bake import LoraList
from .recipe import DEFAULT_METHOD, QuantRecipe, method_names, parse_layers


class LoadDiffusionModelQuantized(io.ComfyNode):
    """Opens a float diffusion model and quantizes it while it is loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_LoadDiffusionModel",
            display_name="Load Diffusion Model (Quantized)",
            category="quantization",
            description=(
                "Loads a diffusion model and quantizes it while loading, so that a model too big for the graphics "
                "card fits. No second file is needed. A file that is quantized already, by whatever tool, is loaded "
                "as it is."
            ),
            search_aliases=["quantize", "int8", "fp8", "nf4", "nvfp4", "4 bit", "8 bit", "low vram", "load unet"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="The model file, from models/diffusion_models. A 16-bit original gives the best result.",
                ),
                io.Combo.Input(
                    "method",
                    options=method_names(),
                    default=DEFAULT_METHOD,
                    tooltip=(
                        "How weights are stored, unless a recipe is connected. int8_w8a8 and fp8_w8a8 take half the "
                        "memory of a 16-bit model at little loss; nvfp4, nf4 and int4 take about a quarter and change "
                        "the picture visibly. A format without a kernel for your card still works, at the speed of "
                        "16-bit arithmetic. A method whose library is missing says how to install it."
                    ),
                ),
                QuantRecipe.Input(
                    "recipe",
                    optional=True,
                    tooltip="A recipe with more than a method: takes the place of method and exclude_layers.",
                ),
                LoraList.Input(
                    "loras",
                    optional=True,
                    tooltip="LoRAs from LoRA to Bake, added in full precision before the layers are quantized.",
                ),
                io.String.Input(
                    "exclude_layers",
                    default="",
                    multiline=True,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Layers to keep in float, one a line: a full name (double_blocks.0.img_mlp.0) or its ending "
                        "after a dot (img_mlp.0 means that layer of every block). Embeddings, norms and the last "
                        "layer are kept anyway."
                    ),
                ),
                compute_dtype_input(),
                io.Boolean.Input(
                    "disk_cache",
                    default=False,
                    optional=True,
                    tooltip=(
                        "Keep the quantized model on disk, so that the next load of the same file, recipe and LoRAs "
                        "takes seconds and little memory. See Clear Quantization Cache."
                    ),
                ),
                quantize_device_input(),
            ],
            outputs=[io.Model.Output(tooltip="The quantized model, for a sampler or a LoRA node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: str | None = None, **options: Any) -> Any:
        path = None if model_name is None else folder_paths.get_full_path("diffusion_models", model_name)
        stat = None if path is None else os.stat(path)
        return (path, None if stat is None else (stat.st_size, stat.st_mtime_ns), tuple(sorted(options.items())))

    @classmethod
    def execute(
        cls,
        model_name: str,
        method: str,
        recipe: Recipe | None = None,
        loras: list[tuple[str, float]] | None = None,
        exclude_layers: str = "",
        compute_dtype: str = "auto",
        disk_cache: bool = False,
        quantize_device: str = "auto",
    ) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("diffusion_models", model_name)
        if recipe is None:
            recipe = QuantizeConfig(method=method, exclude_modules=parse_layers(exclude_layers) or None)
        model = load_diffusion_model(
            path, recipe, COMPUTE_DTYPES[compute_dtype], tuple(loras or ()), DEVICES[quantize_device], cached=disk_cache
        )
        return io.NodeOutput(model)
