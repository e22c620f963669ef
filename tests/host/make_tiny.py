"""Tiny checkpoints with random weights that ComfyUI's own detection accepts, and inputs to run them with.

Every model is built on the meta device from ComfyUI's model configuration, so its keys and shapes are the real
architecture's; only the widths are small. Run as a script it writes them to a folder:

    python tests/host/make_tiny.py FOLDER [name ...]        (COMFYUI_PATH names the ComfyUI)

Without names it writes ``ARCHITECTURES``; ``flux_mid``, 1.5 GB, is written only when it is named.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Tiny(NamedTuple):
    """A tiny model.

    Attributes:
        model_class: its class in ``comfy.supported_models``.
        unet_config: what the class is made with: the configuration that detection must find in the file again.
        dtype: name of the torch dtype of its tensors.
        transformer: what its file has in the metadata entry ``config``, for architectures that are detected by it.
    """

    model_class: str
    unet_config: dict[str, Any]
    dtype: str = "bfloat16"
    transformer: dict[str, Any] | None = None


LTXV = {
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "cross_attention_dim": 256,
    "caption_channels": 48,
    "in_channels": 128,
}

# Widths are multiples of 256 where a block's Linear reads them, so that every rotation and group size fits.
CONFIGS: dict[str, Tiny] = {
    "flux": Tiny(
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
    "wan": Tiny(
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
    "flux2": Tiny(
        "Flux2",
        {
            "image_model": "flux2",
            "in_channels": 128,
            "out_channels": 128,
            "patch_size": 1,
            "hidden_size": 256,
            "num_heads": 2,
            "axes_dim": [32, 32, 32, 32],
            "mlp_ratio": 3.0,
            "theta": 2000,
            "qkv_bias": False,
            "ops_bias": False,
            "global_modulation": True,
            "mlp_silu_act": True,
            "default_ref_method": "index",
            "ref_index_scale": 10.0,
            "txt_ids_dims": [3],
            "context_in_dim": 96,
            "vec_in_dim": None,
            "depth": 1,
            "depth_single_blocks": 1,
            "guidance_embed": True,
            "yak_mlp": False,
            "txt_norm": False,
        },
    ),
    # Its channels are what ComfyUI knows it by, so 320 of them it has to be.
    "sd15": Tiny(
        "SD15",
        {
            "use_checkpoint": False,
            "image_size": 32,
            "use_spatial_transformer": True,
            "legacy": False,
            "adm_in_channels": None,
            "in_channels": 4,
            "out_channels": 4,
            "model_channels": 320,
            "num_res_blocks": [1],
            "channel_mult": [1],
            "transformer_depth": [1],
            "transformer_depth_middle": 1,
            "transformer_depth_output": [1, 1],
            "use_linear_in_transformer": False,
            "context_dim": 768,
            "use_temporal_resblock": False,
            "use_temporal_attention": False,
        },
        "float16",
    ),
    "ltxv": Tiny(
        "LTXV",
        {"image_model": "ltxv", "num_layers": 2, "use_keyframes_abs_pos_embedding": False, **LTXV},
        transformer=LTXV,
    ),
    "minimax_h3": Tiny(
        "MiniMaxH3",
        {
            "image_model": "minimax_h3",
            "num_layers": 2,
            "token_refiner_num_layers": 1,
            "hidden_size": 256,
            "num_attention_heads": 2,
            "attention_head_dim": 128,
            "ffn_hidden_size": 256,
            "text_dim": 96,
            "latents_dim": 24,
            "audio_latents_dim": 32,
            "timestep_input_dim": 256,
            "time_embed_hidden_size": 256,
            "time_embed_dim": 256,
            "rope_inv_freq_len": 16,
        },
    ),
}
ARCHITECTURES = tuple(CONFIGS)

_FLUX = CONFIGS["flux"].unet_config
CONFIGS["flux_mid"] = Tiny(
    "Flux", {**_FLUX, "hidden_size": 1536, "num_heads": 12, "depth": 4, "depth_single_blocks": 12}
)

FLUX_TOKENS, FLUX_CONTEXT, FLUX_POOLED, FLUX_CHANNELS = 7, 64, 32, 16
"""Text tokens, their width, the pooled width and the latent channels that the tiny flux takes."""


class Inputs(NamedTuple):
    """What a model is run on.

    Attributes:
        latents: the noise; more than one tensor for a model of video and sound.
        context: the text's tokens ``[1, tokens, width]``.
        extra: more entries of the conditioning.
        sigma: the noise level of a single forward.
    """

    latents: tuple[Any, ...]
    context: Any
    extra: dict[str, Any]
    sigma: float = 0.7


# {name: (shapes of the latents, tokens, their width, width of the pooled text, sigma of a single forward)}
_INPUTS: dict[str, tuple[tuple[tuple[int, ...], ...], int, int, int | None, float]] = {
    "flux": (((1, 16, 16, 16),), FLUX_TOKENS, FLUX_CONTEXT, FLUX_POOLED, 0.7),
    "flux_mid": (((1, 16, 16, 16),), FLUX_TOKENS, FLUX_CONTEXT, FLUX_POOLED, 0.7),
    "wan": (((1, 16, 2, 8, 8),), 9, 4096, None, 0.7),
    "flux2": (((1, 128, 8, 8),), 7, 96, None, 0.7),
    "sd15": (((1, 4, 8, 8),), 77, 768, None, 5.0),
    "ltxv": (((1, 128, 2, 4, 4),), 9, 48, None, 0.7),
    "minimax_h3": (((1, 24, 2, 4, 4), (1, 32, 2, 5)), 9, 96, None, 0.7),
}


def forward_inputs(name: str, seed: int = 1) -> Inputs:
    """Return fixed inputs, in float32, for :func:`forward` and :func:`sample`."""
    import torch

    shapes, tokens, width, pooled, sigma = _INPUTS[name]
    generator = torch.Generator().manual_seed(seed)
    latents = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    context = torch.randn(1, tokens, width, generator=generator)
    extra = {} if pooled is None else {"pooled_output": torch.randn(1, pooled, generator=generator)}
    if name == "ltxv":  # the one that does not run without
        extra["attention_mask"] = torch.ones(1, tokens, dtype=torch.int64)
    return Inputs(latents, context, extra, sigma)


def forward(patcher, name: str, inputs: Inputs | None = None):
    """Run one forward as the sampler would, on the weights where and as they are now; returns float32.

    The caller loads the model, fully or partly, and chooses the mode of inference.
    """
    import comfy.utils
    import torch

    given = inputs or forward_inputs(name)
    latent, shapes = comfy.utils.pack_latents(given.latents) if len(given.latents) > 1 else (given.latents[0], None)
    model = patcher.model
    model.latent_shapes = shapes or [latent.shape]  # as the sampler does: a model of sound and video scales by it
    conditions = model.extra_conds(
        cross_attn=given.context, noise=latent, device=latent.device, latent_shapes=shapes, **given.extra
    )
    values = {key: condition.cond for key, condition in conditions.items()}
    context = values.pop("c_crossattn", given.context)
    return model.apply_model(latent, torch.tensor([given.sigma]), c_crossattn=context, **values).float()


def sample(patcher, name: str, steps: int = 2, inputs: Inputs | None = None):
    """Run ComfyUI's KSampler: euler, cfg 1, from an empty latent. Returns float32, the streams packed into one.

    ComfyUI loads the model for it, as it does for a workflow.
    """
    import comfy.nested_tensor
    import comfy.sample
    import comfy.utils
    import torch

    given = inputs or forward_inputs(name)
    streams = len(given.latents) > 1
    noise = comfy.nested_tensor.NestedTensor(list(given.latents)) if streams else given.latents[0]
    empty = [torch.zeros_like(latent) for latent in given.latents]
    latent = comfy.nested_tensor.NestedTensor(empty) if streams else empty[0]
    conditioning = [[given.context, dict(given.extra)]]
    out = comfy.sample.sample(
        patcher,
        noise,
        steps=steps,
        cfg=1.0,
        sampler_name="euler",
        scheduler="simple",
        positive=conditioning,
        negative=conditioning,
        latent_image=latent,
        disable_pbar=True,
        seed=0,
    )
    return (comfy.utils.pack_latents(out.unbind())[0] if out.is_nested else out).float()


def random_like(tensor, generator):
    """Random values of a plausible size for a parameter, in its dtype."""
    import torch

    scale = 0.02 if tensor.ndim == 1 else math.prod(tensor.shape[1:]) ** -0.5
    return torch.empty(tensor.shape).normal_(0.0, scale, generator=generator).to(tensor.dtype)


ONE_BLOCK: dict[str, dict[str, Any]] = {
    "flux": {"depth_single_blocks": 1},
    "flux2": {},
    "wan": {"num_layers": 1, "ffn_dim": 256},
}
"""Changes of a configuration that leave one block of each kind, for what takes long on each."""


def state_dict(name: str, seed: int = 0, changes: dict[str, Any] | None = None) -> dict:
    """The tensors of a tiny model, named as ComfyUI names them. ComfyUI must be importable.

    Args:
        name: of the configuration.
        seed: of the random weights.
        changes: of the configuration, such as those in ``ONE_BLOCK``.
    """
    import comfy.supported_models
    import torch

    tiny = CONFIGS[name]
    config = getattr(comfy.supported_models, tiny.model_class)({**tiny.unet_config, **(changes or {})})
    config.set_inference_dtype(getattr(torch, tiny.dtype), None)
    model = config.get_model({}, "", device=torch.device("meta"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in model.diffusion_model.state_dict().items():
        if key.endswith("inv_freq"):  # the angles of rotary positions: any other values would not be a model
            steps = torch.arange(len(tensor), dtype=torch.float32) / len(tensor)
            tensors[key] = (10000.0**-steps).to(tensor.dtype)
            continue
        tensors[key] = random_like(tensor, generator)
        if tensor.ndim == 1 and key.endswith((".weight", ".scale")):  # of a norm, whatever it is called
            tensors[key] += 1
    return tensors


def write(name: str, path: Path, seed: int = 0, prefix: str = "", changes: dict[str, Any] | None = None) -> Path:
    """Write a tiny model to ``path``, its keys starting with ``prefix``; the rest as in :func:`state_dict`."""
    import safetensors.torch

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + key: value.contiguous() for key, value in state_dict(name, seed, changes).items()}
    metadata = {"format": "pt"}
    if CONFIGS[name].transformer is not None:
        metadata["config"] = json.dumps({"transformer": CONFIGS[name].transformer})
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    return path


def write_lora(path: Path, tensors: dict, layers: list[str], seed: int) -> Path:
    """A LoRA of rank 4 in the usual format, whose product has a quarter of the norm of each layer's weight."""
    import safetensors.torch
    import torch

    generator = torch.Generator().manual_seed(seed)
    file = {}
    for layer in layers:
        weight = tensors[layer + ".weight"].float()
        up = torch.randn(weight.shape[0], 4, generator=generator)
        down = torch.randn(4, weight.shape[1], generator=generator)
        file[f"diffusion_model.{layer}.lora_up.weight"] = up * (0.25 * weight.norm() / (up @ down).norm())
        file[f"diffusion_model.{layer}.lora_down.weight"] = down
        file[f"diffusion_model.{layer}.alpha"] = torch.tensor(4.0)
    safetensors.torch.save_file(file, path)
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
    for each in names or ARCHITECTURES:
        written = write(each, Path(folder) / f"tiny_{each}.safetensors")
        sys.stdout.write(f"{written} {written.stat().st_size / 2**20:.1f} MiB\n")
