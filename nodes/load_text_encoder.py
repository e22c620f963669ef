"""The node *Load Text Encoder (Quantized)*."""

from __future__ import annotations

import os
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

from quant_core import QuantizeConfig, Recipe

from .devices import COMPUTE_DTYPES, DEVICES, quantize_device_input
from .host.text_encoder import clip_types, load_text_encoder
from .recipe import DEFAULT_METHOD, QuantRecipe, method_names

FOLDER = "text_encoders"
NONE = "none"
RUN_DEVICES = {"default": None, "cpu": torch.device("cpu")}


class LoadTextEncoderQuantized(io.ComfyNode):
    """Opens up to four text encoder files and quantizes those that are large while they are loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_LoadTextEncoder",
            display_name="Load Text Encoder (Quantized)",
            category="quantization",
            description=(
                "Loads the text encoders of a model and quantizes them while loading: T5, UMT5, Qwen, Llama, Gemma "
                "and the like, which then also compute quantized. CLIP-L, CLIP-G and CLIP-H are small and stay in "
                "float. A file that is quantized already is loaded as it is."
            ),
            search_aliases=[
                "load clip",
                "dual clip",
                "triple clip",
                "t5",
                "umt5",
                "qwen",
                "llama",
                "gemma",
                "quantize",
            ],
            inputs=[
                io.Combo.Input(
                    "clip_name1",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip="A text encoder, from models/text_encoders. A 16-bit original gives the best result.",
                ),
                io.Combo.Input(
                    "type",
                    options=clip_types(),
                    tooltip=(
                        "The diffusion model that the text encoders are for, as in ComfyUI's CLIP loaders. With it go "
                        "the files: flux takes CLIP-L and T5-XXL, sd3 any of CLIP-L, CLIP-G and T5-XXL, wan UMT5-XXL."
                    ),
                ),
                io.Combo.Input(
                    "method",
                    options=method_names(),
                    default=DEFAULT_METHOD,
                    tooltip=(
                        "How weights are stored. The 8-bit methods halve a 16-bit encoder and change the picture "
                        "hardly; the 4-bit ones halve it again and read a long prompt less exactly. Without effect "
                        "when a recipe is connected."
                    ),
                ),
                io.Combo.Input(
                    "clip_name2",
                    options=[NONE, *folder_paths.get_filename_list(FOLDER)],
                    default=NONE,
                    optional=True,
                    tooltip="A second text encoder, for types that take two. The order of the files does not matter.",
                ),
                io.Combo.Input(
                    "clip_name3",
                    options=[NONE, *folder_paths.get_filename_list(FOLDER)],
                    default=NONE,
                    optional=True,
                    tooltip="A third text encoder, for the types sd3 and hidream.",
                ),
                io.Combo.Input(
                    "clip_name4",
                    options=[NONE, *folder_paths.get_filename_list(FOLDER)],
                    default=NONE,
                    optional=True,
                    advanced=True,
                    tooltip="A fourth text encoder, for the type hidream.",
                ),
                QuantRecipe.Input(
                    "recipe",
                    optional=True,
                    tooltip="In place of a method: a recipe with options, several methods, or layers to keep in float.",
                ),
                io.Boolean.Input(
                    "disk_cache",
                    default=False,
                    optional=True,
                    tooltip=(
                        "Keep the quantized text encoders on disk, so that the next load of the same files and recipe "
                        "takes seconds and little memory. See Clear Quantization Cache."
                    ),
                ),
                io.Combo.Input(
                    "compute_dtype",
                    options=list(COMPUTE_DTYPES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "What quantized layers compute in; between them ComfyUI computes in fp32. auto is bf16 on "
                        "cards that have it, fp32 elsewhere. fp16 is too narrow for T5."
                    ),
                ),
                io.Combo.Input(
                    "device",
                    options=list(RUN_DEVICES),
                    default="default",
                    optional=True,
                    advanced=True,
                    tooltip="Where prompts are encoded: cpu leaves the graphics card's memory to the diffusion model.",
                ),
                quantize_device_input(),
            ],
            outputs=[io.Clip.Output(tooltip="The text encoders, for CLIP Text Encode or a LoRA node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, clip_name1: str | None = None, **options: Any) -> Any:
        names = [clip_name1, *(options.get(f"clip_name{number}") for number in (2, 3, 4))]
        files = [_identity(name) for name in names if name not in (None, NONE)]
        return (files, tuple(sorted(options.items())))

    @classmethod
    def execute(
        cls,
        clip_name1: str,
        type: str,
        method: str,
        clip_name2: str = NONE,
        clip_name3: str = NONE,
        clip_name4: str = NONE,
        recipe: Recipe | None = None,
        disk_cache: bool = False,
        compute_dtype: str = "auto",
        device: str = "default",
        quantize_device: str = "auto",
    ) -> io.NodeOutput:
        names = [name for name in (clip_name1, clip_name2, clip_name3, clip_name4) if name != NONE]
        loaded = load_text_encoder(
            [folder_paths.get_full_path_or_raise(FOLDER, name) for name in names],
            type,
            recipe or QuantizeConfig(method=method),
            COMPUTE_DTYPES[compute_dtype],
            RUN_DEVICES[device],
            DEVICES[quantize_device],
            folder_paths.get_folder_paths("embeddings"),
            cached=disk_cache,
        )
        return io.NodeOutput(loaded.clip, ui={"text": ["\n".join(loaded.notes)]})


def _identity(name: str) -> tuple[str | None, tuple[int, int] | None]:
    """Return the path, size and modification time of a text encoder file."""
    path = folder_paths.get_full_path(FOLDER, name)
    stat = None if path is None else os.stat(path)
    return (path, None if stat is None else (stat.st_size, stat.st_mtime_ns))
