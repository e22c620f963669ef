"""The node *Save Quantized Checkpoint*."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .host.files import output_file, workflow_metadata
from .host.saving import save_model


class SaveQuantizedCheckpoint(io.ComfyNode):
    """Writes a model as a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantCore_SaveCheckpoint",
            display_name="Save Quantized Checkpoint",
            category="quantization",
            description=(
                "Writes a model of the graph as a safetensors file, one layer at a time, whether it is loaded or not. "
                "LoRAs on it are written into its weights. comfy_kitchen methods give files that ComfyUI's own "
                "loaders open, without this pack; bitsandbytes and torchao files are in the form of their own tools."
            ),
            search_aliases=["save model", "export checkpoint", "save safetensors", "quantized checkpoint"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model to write, quantized or not."),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip=(
                        "Text encoders to write into the same file, which makes it a full checkpoint. Leave it out "
                        "for a diffusion model file."
                    ),
                ),
                io.Vae.Input("vae", optional=True, tooltip="An autoencoder to write into the same file, likewise."),
                io.String.Input(
                    "filename_prefix",
                    default="diffusion_models/quantized",
                    tooltip=(
                        "Where to write, below ComfyUI's output folder; a number is added. Loaders list what is in "
                        "the output folder's diffusion_models and checkpoints. %year%, %month%, %day%, %hour%, "
                        "%minute% and %second% are replaced."
                    ),
                ),
            ],
            outputs=[io.String.Output("path", display_name="path", tooltip="The file that was written.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        clip: Any = None,
        vae: Any = None,
        filename_prefix: str = "diffusion_models/quantized",
    ) -> io.NodeOutput:
        path = output_file(filename_prefix)
        save_model(path, model, clip, vae, workflow_metadata(cls.hidden))
        size = path.stat().st_size
        return io.NodeOutput(str(path), ui={"text": [f"{size:,} bytes written to {path}"]})
