"""Tiny text encoders with random weights, and the options with which ComfyUI builds encoders of their widths.

Each is built on the meta device from ComfyUI's own class, so that its keys are the real architecture's. Detection asks
for a few keys and widths; the rest is small.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple


class Tiny(NamedTuple):
    """A tiny text encoder.

    Attributes:
        module: where its class is, below ``comfy``.
        model_class: its class.
        config: its widths.
        base: a JSON file of ComfyUI with the rest of its configuration; empty where the class has defaults.
        option: the entry of ComfyUI's model options that replaces the configuration.
        dtype: name of the torch dtype of its tensors.
        clip_type: the type it is loaded as, alone.
    """

    module: str
    model_class: str
    config: dict[str, Any]
    base: str
    option: str
    dtype: str
    clip_type: str


_WORDS = 512
"""How many tokens an encoder other than CLIP knows, to be small."""

_T5 = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 512, "num_layers": 2, "vocab_size": _WORDS}

ENCODERS: dict[str, Tiny] = {
    "t5": Tiny(
        "text_encoders.t5",
        "T5",
        _T5,
        "text_encoders/t5_config_base.json",
        "t5base_model_config",
        "bfloat16",
        "stable_audio",
    ),
    "t5xxl": Tiny(
        "text_encoders.t5", "T5", _T5, "text_encoders/t5_config_xxl.json", "t5xxl_model_config", "bfloat16", "flux"
    ),
    # Too narrow for any of its layers to be quantized.
    "narrow": Tiny(
        "text_encoders.t5",
        "T5",
        {**_T5, "d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 128},
        "text_encoders/t5_config_base.json",
        "t5base_model_config",
        "float16",
        "stable_audio",
    ),
    # Known by a bias of 256 values: two heads of 128.
    "qwen": Tiny(
        "text_encoders.llama",
        "Qwen25_3B",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": _WORDS,
        },
        "",
        "qwen25_3b_model_config",
        "bfloat16",
        "omnigen2",
    ),
    "clip_l": Tiny(
        "clip_model",
        "CLIPTextModel",
        {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
        "sd1_clip_config.json",
        "model_config",
        "float16",
        "stable_diffusion",
    ),
}

REAL = {
    "t5_base": ENCODERS["t5"]._replace(config={"d_kv": 64}, dtype="float16"),
}
"""Of the real size (T5-base: 220 MB), which a server takes without options; with random weights."""


def options(*names: str) -> dict[str, Any]:
    """ComfyUI's model options for these encoders; a new dict, since ComfyUI writes into it."""
    return {ENCODERS[name].option: copy.deepcopy(ENCODERS[name].config) for name in names}


def state_dict(name: str, seed: int = 0) -> dict:
    """The tensors of a tiny text encoder, named as in a file. ComfyUI must be importable."""
    import importlib

    import comfy
    import comfy.ops
    import torch

    tiny = {**ENCODERS, **REAL}[name]
    root = Path(importlib.import_module("comfy.sd").__file__).parent
    config = json.loads((root / tiny.base).read_text(encoding="utf-8")) if tiny.base else {}
    make = getattr(importlib.import_module(f"comfy.{tiny.module}"), tiny.model_class)
    model = make({**config, **tiny.config}, getattr(torch, tiny.dtype), torch.device("meta"), comfy.ops.manual_cast)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        scale = 0.05 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5
        if "embed" in key or key == "shared.weight":
            scale = 0.5
        if key.endswith("SelfAttention.q.weight"):  # T5 does not divide by the width of a head; its queries are small
            scale *= tiny.config["d_kv"] ** -0.5
        values = torch.empty(tensor.shape).normal_(0.0, scale, generator=generator)
        if tensor.ndim == 1 and key.endswith("weight"):  # of a norm
            values += 1
        tensors[key] = values.to(tensor.dtype)
    return tensors


def write(name: str, path: Path, seed: int = 0) -> Path:
    """Write a tiny text encoder to ``path``."""
    import safetensors.torch

    safetensors.torch.save_file(state_dict(name, seed), path, metadata={"format": "pt"})
    return path


def encode(clip, as_it_is: bool = False):
    """Return ``(hidden states, pooled or None)`` of a prompt, in float32, as ComfyUI's text encode node has them.

    Args:
        clip: a CLIP of tiny encoders.
        as_it_is: on the weights where and as they are now; otherwise ComfyUI loads the model first.
    """
    import torch

    tokens = clip.tokenize("a red fox jumps over (the lazy:1.2) dog")
    for name, batches in tokens.items():
        if name != "l":  # CLIP's; its pooled output looks for the token that ends a prompt
            weighted = name != "qwen25_3b"  # a weight brings in a padding token that this one does not know
            batches[:] = [[(token % _WORDS, weight if weighted else 1.0) for token, weight in b] for b in batches]
    with torch.inference_mode():
        if as_it_is:
            clip.cond_stage_model.reset_clip_options()
            return clip.cond_stage_model.encode_token_weights(tokens)[0].float().clone(), None
        hidden, extra = clip.encode_from_tokens_scheduled(tokens)[0]
    pooled = extra.get("pooled_output")
    return hidden.float().clone(), None if pooled is None else pooled.float().clone()
