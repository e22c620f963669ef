"""The node *Convert Checkpoint*."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from quant_core import Recipe
from quant_core.convert import convert
from quant_core.output import index_path

from .file_inputs import file_input, plan_of, recipe_inputs, requantize_input
from .host.files import fingerprint, output_file, report_progress, started_metadata, workflow_metadata
from .tables import plan_summary

GIGABYTE = 10**9


class ConvertCheckpoint(io.ComfyNode):
    """Quantizes a file into another file, in memory that does not grow with it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_ConvertCheckpoint",
            display_name="Convert Checkpoint (file to file)",
            category="quantization",
            description=(
                "Quantizes a file into a new one in the output folder. The model is never in memory as a whole, so a "
                "file of any size goes through. ComfyUI's own loader opens the result of a comfy_kitchen method, "
                "without this pack."
            ),
            search_aliases=["quantize file", "convert safetensors", "gguf to safetensors", "save quantized", "shrink"],
            is_output_node=True,
            inputs=[
                file_input("The file to quantize; it is not changed. A 16-bit original gives the best result."),
                *recipe_inputs(),
                io.String.Input(
                    "filename_prefix",
                    default="diffusion_models/quantized",
                    optional=True,
                    tooltip=(
                        "Where to write, below ComfyUI's output folder; a number is added. Loaders list what is in "
                        "the output folder's diffusion_models, clip and checkpoints. %year%, %month%, %day%, %hour%, "
                        "%minute% and %second% are replaced."
                    ),
                ),
                io.Float.Input(
                    "shard_size_gb",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "The most gigabytes (of 1,000,000,000 bytes) of tensors in a file; 0 writes one file. Shards "
                        "get an index, as diffusers reads them; ComfyUI's own loaders open single files only."
                    ),
                ),
                io.Boolean.Input(
                    "resume",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip=(
                        "Keep what is written when the run is cancelled or fails, and continue it in the next run of "
                        "the same file, recipe and prefix. Off: nothing is left behind."
                    ),
                ),
                requantize_input(),
            ],
            outputs=[
                io.String.Output(
                    "path", display_name="path", tooltip="The file that was written, or its shards' index."
                )
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str | None = None, **options: Any) -> Any:
        return (fingerprint(file), tuple(sorted(options.items())))

    @classmethod
    def execute(
        cls,
        file: str,
        recipe: Recipe,
        part: str = "diffusion",
        filename_prefix: str = "diffusion_models/quantized",
        shard_size_gb: float = 0.0,
        resume: bool = False,
        requantize: bool = False,
    ) -> io.NodeOutput:
        made = plan_of(file, recipe, part, requantize, round(shard_size_gb * GIGABYTE) or None)
        destination = output_file(filename_prefix)
        begun = started_metadata(destination, len(made.file_sizes)) if resume else None
        made.extra_metadata = workflow_metadata(cls.hidden) if begun is None else begun
        report = convert(made, destination, resume=resume, progress=report_progress(cls.hidden.unique_id))
        path = str(destination if len(report.files) == 1 else index_path(destination))
        return io.NodeOutput(path, ui={"text": [f"{plan_summary(made)}; written to {path}"]})
