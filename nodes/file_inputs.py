"""The inputs that the nodes on files have in common, and the plan that they make of them."""

from __future__ import annotations

from comfy_api.latest import io

from quant_core import CheckpointError, Recipe
from quant_core.plan import PARTS, Plan, plan

from .host.files import full_path, list_files
from .recipe import QuantRecipe


def file_input(tooltip: str) -> io.Combo.Input:
    """The choice of a model file."""
    where = (
        " From models/diffusion_models, text_encoders and checkpoints: safetensors files, the index of a sharded "
        "model, GGUF files."
    )
    return io.Combo.Input("file", options=list_files(), tooltip=tooltip + where)


def recipe_inputs() -> list[io.Input]:
    """What is quantized, and how."""
    return [
        QuantRecipe.Input("recipe", tooltip="From Quantization Method, Mixed Quantization or another recipe node."),
        io.Combo.Input(
            "part",
            options=list(PARTS),
            default="diffusion",
            optional=True,
            tooltip=(
                "What of an all-in-one checkpoint is quantized; the rest is kept byte for byte. Leave it at diffusion "
                "for a file that holds one model, of whatever kind."
            ),
        ),
    ]


def requantize_input() -> io.Boolean.Input:
    """Whether layers that are quantized already are quantized again."""
    return io.Boolean.Input(
        "requantize",
        default=False,
        optional=True,
        advanced=True,
        tooltip=(
            "Also quantize layers that the file holds quantized. Their new error comes on top of the old one; start "
            "from the 16-bit original where you have it."
        ),
    )


def plan_of(file: str, recipe: Recipe, part: str, requantize: bool, shard_size: int | None = None) -> Plan:
    """Plan the conversion of a file of ComfyUI's folders.

    Raises:
        FileNotFoundError, CheckpointError: it cannot be read.
        ValueError: the recipe does not fit it. Every message names the file.
    """
    try:
        return plan(full_path(file), recipe, part=part, requantize=requantize, shard_size=shard_size)
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
