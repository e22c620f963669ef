"""Rules about names: prefixes, the names of diffusers, and the keys that detection reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ..backends.comfy_kitchen.formats import FORMATS_BY_NAME
from ..selection import read_by_detection
from .findings import Finding, Rename
from .rules import found
from .scan import STRIPPED_PREFIXES, Layer, Scan

# What wrappers put before every name, and no loader takes off: torch.compile, data parallel training, a state dict
# saved one level too low.
_WRAPPERS = ("_orig_mod.", "module.", "diffusion_model.", "model.diffusion_model._orig_mod.")

# comfy/model_detection.py convert_diffusers_mmdit and unet_config_from_diffusers_unet: keys that all have to be there.
_DIFFUSERS = {
    "Flux": ("x_embedder.weight", "single_transformer_blocks.0.attn.to_q.weight"),
    "AuraFlow": ("joint_transformer_blocks.0.attn.add_k_proj.weight",),
    "PixArt": (
        "adaln_single.emb.timestep_embedder.linear_1.bias",
        "pos_embed.proj.bias",
        "transformer_blocks.0.attn1.to_q.weight",
    ),
    "Z-Image": ("noise_refiner.0.attention.norm_k.weight",),
    "Stable Diffusion 3": ("transformer_blocks.0.attn.add_q_proj.weight", "pos_embed.proj.weight"),
    "UNet": ("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight",),
}

# Encoders that ComfyUI builds without quantization_metadata: CLIP-L and CLIP-G, also in a checkpoint, and the vision
# towers.
_CLIP = re.compile(r"(^|\.)(text_model\.encoder\.layers|vision_model\.encoder\.layers|transformer\.resblocks)\.\d+\.")

SCALE_KEYS = (
    "weight_scale",
    "weight_scale_2",
    "weight_s_rel",
    "weight_s_channel",
    "weight_codebook",
    "scale_weight",
    "comfy_quant",
)


_OF_A_LORA = re.compile(r"(^|[._])(lora_(up|down|mid|A|B)|hada_w\d|lokr_w\d|oft_(blocks|diag)|dora_scale)(\.|_|$)")


def check_nature(scan: Scan) -> list[Finding]:
    """Return a finding for a file that is no model at all, to which no other rule applies."""
    names = scan.checkpoint.tensors
    if not names:
        return [found("no-tensors")]
    factors = [name for name in names if _OF_A_LORA.search(name)]
    if 2 * len(factors) < len(names):  # a model may hold a few that were trained into it
        return []
    return [found("is-a-lora", count=len(factors), total=len(names), first=factors[0])]


def check_names(scan: Scan) -> list[Finding]:
    """Apply the rules about names."""
    names = scan.checkpoint.tensors
    marked = [layer for layer in scan.layers.values() if layer.marked]
    findings = [*_wrapped(names), *_elsewhere(scan)]
    kind = next((kind for kind, keys in _DIFFUSERS.items() if all(key in names for key in keys)), None)
    if marked and kind:
        findings.append(found("diffusers-names", kind=kind, count=len(marked)))
    for layer in marked:
        if _CLIP.search(layer.name + "."):
            findings.append(found("markers-ignored", layer.name))
        findings.extend(_detection_key(layer))
    return findings


def _wrapped(names: Collection[str]) -> Iterable[Finding]:
    for prefix in sorted(_WRAPPERS, key=len, reverse=True):
        if names and all(name.startswith(prefix) for name in names):
            edits = tuple(Rename(name, name.removeprefix(prefix)) for name in names)
            yield found("prefix-unknown", edits=edits, prefix=prefix)
            return


def _elsewhere(scan: Scan) -> Iterable[Finding]:
    """Scales whose layer has no weight, while a layer of the same name under another prefix lacks them."""
    for layer in scan.layers.values():
        orphans = [key for key in layer.parts if key in SCALE_KEYS]
        if not orphans or "weight" in layer.parts:
            continue
        for prefix in STRIPPED_PREFIXES:
            bare = layer.name.removeprefix(prefix)
            other = scan.layers.get(bare if bare != layer.name else prefix + layer.name)
            if other is not None and "weight" in other.parts and not any(key in other.parts for key in orphans):
                for key in orphans:
                    tensor = layer.tensor(key)
                    edit = Rename(tensor, other.tensor(key))
                    yield found("scale-elsewhere", other.name, (edit,), tensor=tensor)
                    # For the other rules it is where it belongs.
                    other.parts[key], other.names[key] = layer.parts.pop(key), tensor
                break


def _detection_key(layer: Layer) -> Iterable[Finding]:
    fmt = FORMATS_BY_NAME.get(str((layer.conf or {}).get("format")))
    weight = layer.parts.get("weight")
    if fmt is not None and fmt.packed and weight is not None and len(weight.shape) == 2:
        if not read_by_detection(layer.name):
            return
        columns = weight.shape[1]
        yield found("packed-on-detection-key", layer.name, format=fmt.name, found=columns, width=2 * columns)
