"""The node *Load Diffusion Model (Quantized)*."""

from __future__ import annotations

import os

import folder_paths
import torch
from comfy_api.latest import io

from quant_core import QuantizeConfig

from .host.loading import load_diffusion_model
from .host.quantizer import usable_methods

COMPUTE_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_METHOD = "comfy_kitchen_int8_w8a8"


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
                "card fits. No second file is needed. A file that is quantized already is loaded as it is."
            ),
            search_aliases=["quantize", "int8", "fp8", "nvfp4", "mxfp8", "4 bit", "8 bit", "low vram", "load unet"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="The model file, from models/diffusion_models. A 16-bit original gives the best result.",
                ),
                io.Combo.Input(
                    "method",
                    options=usable_methods(),
                    default=DEFAULT_METHOD,
                    tooltip=(
                        "How weights are stored. int8_w8a8 and fp8_w8a8 take half the memory of a 16-bit model at "
                        "little loss; mxfp8 is fp8 with a scale for each block of 32; nvfp4 and int4 take about a "
                        "quarter and change the picture visibly. A format without a kernel for your card still "
                        "works, at the speed of 16-bit arithmetic."
                    ),
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
                io.Combo.Input(
                    "compute_dtype",
                    options=list(COMPUTE_DTYPES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="The dtype the model computes in. auto is what ComfyUI chooses for this model and card.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The quantized model, for a sampler or a LoRA node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: str, method: str, exclude_layers: str = "", compute_dtype: str = "auto"):
        path = folder_paths.get_full_path("diffusion_models", model_name)
        stat = None if path is None else os.stat(path)
        file = None if stat is None else (stat.st_size, stat.st_mtime_ns)
        return (path, file, method, tuple(parse_layers(exclude_layers)), compute_dtype)

    @classmethod
    def execute(
        cls, model_name: str, method: str, exclude_layers: str = "", compute_dtype: str = "auto"
    ) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("diffusion_models", model_name)
        recipe = QuantizeConfig(method=method, exclude_modules=parse_layers(exclude_layers) or None)
        return io.NodeOutput(load_diffusion_model(path, recipe, COMPUTE_DTYPES[compute_dtype]))


def parse_layers(text: str) -> list[str]:
    """Return the layer names in a text widget: one a line or separated by commas, ``#`` starts a comment."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [name.strip() for line in lines for name in line.split(",") if name.strip()]
