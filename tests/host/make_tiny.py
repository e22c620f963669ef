"""Tiny checkpoints with random weights that ComfyUI's own detection accepts.

Every model is built on the meta device from ComfyUI's model configuration, so its keys and shapes are the real
architecture's; only the widths are small. Run as a script it writes them to a folder:

    python tests/host/make_tiny.py FOLDER [name ...]        (COMFYUI_PATH names the ComfyUI)
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

# Widths are multiples of 256 where a block's Linear reads them, so that every rotation and group size fits.
CONFIGS = {
    "flux": (
        "Flux",
        {
            "image_model": "flux",
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "hidden_size": 256,
            "num_heads": 2,
            "axes_dim": [16, 56, 56],
            "mlp_ratio": 4.0,
            "theta": 10000,
            "qkv_bias": True,
            "txt_ids_dims": [],
            "context_in_dim": 64,
            "vec_in_dim": 32,
            "depth": 1,
            "depth_single_blocks": 2,
            "guidance_embed": True,
            "yak_mlp": False,
            "txt_norm": False,
        },
    ),
    "wan": (
        "WAN21_T2V",
        {
            "image_model": "wan2.1",
            "model_type": "t2v",
            "dim": 256,
            "ffn_dim": 512,
            "freq_dim": 256,
            "num_heads": 2,
            "num_layers": 2,
            "in_dim": 16,
            "out_dim": 16,
            "patch_size": (1, 2, 2),
            "window_size": (-1, -1),
            "qk_norm": True,
            "cross_attn_norm": True,
            "eps": 1e-6,
        },
    ),
}

FLUX_TOKENS, FLUX_CONTEXT, FLUX_POOLED, FLUX_CHANNELS = 7, 64, 32, 16
"""Text tokens, their width, the pooled width and the latent channels that the tiny flux takes."""


def random_like(tensor, generator):
    """Random values of a plausible size for a parameter of this shape, in bfloat16."""
    import torch

    if tensor.ndim == 1:
        return torch.empty(tensor.shape).normal_(0.0, 0.02, generator=generator).to(torch.bfloat16)
    fan_in = math.prod(tensor.shape[1:])
    return torch.empty(tensor.shape).normal_(0.0, fan_in**-0.5, generator=generator).to(torch.bfloat16)


def state_dict(name: str, seed: int = 0) -> dict:
    """The tensors of a tiny model, named as ComfyUI names them. ComfyUI must be importable."""
    import comfy.supported_models
    import torch

    class_name, unet_config = CONFIGS[name]
    config = getattr(comfy.supported_models, class_name)(dict(unet_config))
    config.set_inference_dtype(torch.bfloat16, None)
    model = config.get_model({}, "", device=torch.device("meta"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in model.diffusion_model.state_dict().items():
        tensors[key] = random_like(tensor, generator)
        if "norm" in key and tensor.ndim == 1 and not key.endswith("bias"):
            tensors[key] += 1
    return tensors


def write(name: str, path: Path, seed: int = 0, prefix: str = "") -> Path:
    """Write a tiny model to ``path``, its keys starting with ``prefix``."""
    import safetensors.torch

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + key: value.contiguous() for key, value in state_dict(name, seed).items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


def import_comfy() -> None:
    """Make ``import comfy`` work, on a CPU, whatever the command line of this process says."""
    root = os.environ["COMFYUI_PATH"]
    if root not in sys.path:
        sys.path.insert(0, root)
    argv, sys.argv = sys.argv, [sys.argv[0], "--cpu"]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.sd
    finally:
        sys.argv = argv


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    import_comfy()
    for each in names or CONFIGS:
        written = write(each, Path(folder) / f"tiny_{each}.safetensors")
        sys.stdout.write(f"{written} {written.stat().st_size / 2**20:.1f} MiB\n")
