"""Ways to break a quantized file: one function each, for any model that has a layer of the given name.

A case takes ``(tensors, metadata, layer)`` of a good file and changes them in place.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

import torch

FP8, INT8, NVFP4 = "comfy_kitchen_fp8_w8a8", "comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4"
MXFP8, W4A4, W4A8 = "comfy_kitchen_mxfp8_w8a8", "comfy_kitchen_int4_convrot_w4a4", "comfy_kitchen_int4_w4a8"


class Case(NamedTuple):
    """What to do to a file of ``method``, the rule that must find it, and what ComfyUI's own loader makes of it.

    ``comfyui``: ``"raises"`` (at loading or in the first forward), ``"differs"`` (loads, and computes something else)
    or ``"same"``; None where one small file cannot show it.
    """

    name: str
    method: str
    change: Callable
    code: str
    comfyui: str | None


def text(value):
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def marker(value):
    return text(json.dumps(value))


def drop(*keys):
    def change(tensors, metadata, layer):
        for key in keys:
            del tensors[f"{layer}.{key}"]

    return change


def put(key, make):
    """Replace, or add, one tensor of the layer; ``make`` gets the old one, or the weight when there is none."""

    def change(tensors, metadata, layer):
        old = tensors.get(f"{layer}.{key}", tensors.get(f"{layer}.weight"))
        tensors[f"{layer}.{key}"] = make(old).contiguous()

    return change


def mark(**changes):
    """Change entries of the layer's marker; None removes one."""

    def change(tensors, metadata, layer):
        conf = json.loads(bytes(tensors[f"{layer}.comfy_quant"].tolist())) | changes
        tensors[f"{layer}.comfy_quant"] = marker({k: v for k, v in conf.items() if v is not None})

    return change


def all_markers_lost(tensors, metadata, layer):
    for key in [key for key in tensors if key.endswith(".comfy_quant")]:
        del tensors[key]


def all_scales_and_markers_lost(tensors, metadata, layer):
    all_markers_lost(tensors, metadata, layer)
    for key in [key for key in tensors if key.endswith(".weight_scale")]:
        del tensors[key]


def legacy(tensors, metadata, layer):
    """The form before markers: ``scaled_fp8`` for the file, ``scale_weight`` for each layer."""
    all_markers_lost(tensors, metadata, layer)
    for key in [key for key in tensors if key.endswith(".weight_scale")]:
        tensors[key.removesuffix("weight_scale") + "scale_weight"] = tensors.pop(key)
    tensors["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)


def legacy_without_flag(tensors, metadata, layer):
    legacy(tensors, metadata, layer)
    del tensors["scaled_fp8"]


def legacy_without_scale(tensors, metadata, layer):
    legacy(tensors, metadata, layer)
    del tensors[f"{layer}.scale_weight"]


def legacy_e5m2(tensors, metadata, layer):
    legacy(tensors, metadata, layer)
    tensors["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e5m2)
    tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float().mul(100).to(torch.float8_e5m2)


def scale_under_other_prefix(tensors, metadata, layer):
    tensors[f"model.diffusion_model.{layer}.weight_scale"] = tensors.pop(f"{layer}.weight_scale")


def all_prefixed(prefix):
    def change(tensors, metadata, layer):
        for key in list(tensors):
            tensors[prefix + key] = tensors.pop(key)

    return change


def fill(key, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.reshape(-1)[0] = value
        return tensor

    return put(key, change)


def metadata_markers(layers):
    """Move every marker into the header's metadata; ``layers`` changes the entries."""

    def change(tensors, metadata, layer):
        found = {}
        for key in [key for key in tensors if key.endswith(".comfy_quant")]:
            found[key.removesuffix(".comfy_quant")] = json.loads(bytes(tensors.pop(key).tolist()))
        metadata["_quantization_metadata"] = layers(found, layer)

    return change


def in_metadata(found, layer):
    return json.dumps({"layers": found})


def too_much_in_metadata(found, layer):
    return json.dumps({"layers": found | {layer + "_gone": {"format": "float8_e4m3fn"}}})


def contradiction(tensors, metadata, layer):
    metadata["_quantization_metadata"] = json.dumps({"layers": {layer: {"format": "float8_e5m2"}}})


def on_norm(tensors, metadata, layer):
    """A marker and a scale for a 1-D weight, which no Linear has."""
    name = next(key for key in tensors if "norm" in key and key.endswith(".weight")).removesuffix(".weight")
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale"] = torch.tensor(0.5)
    tensors[f"{name}.comfy_quant"] = marker({"format": "float8_e4m3fn"})


def widen(tensor):
    return tensor.reshape(1, -1)


def wider(tensor):
    return torch.cat([tensor, tensor], dim=-1)


CASES = [
    # markers
    Case("marker of one fp8 layer lost", FP8, drop("comfy_quant"), "marker-missing", "differs"),
    Case("every marker lost", FP8, all_markers_lost, "marker-missing", "differs"),
    Case("marker of one int8 layer lost", INT8, drop("comfy_quant"), "marker-missing", "differs"),
    Case("marker of one mxfp8 layer lost", MXFP8, drop("comfy_quant"), "marker-missing", "differs"),
    Case("marker of one nvfp4 layer lost", NVFP4, drop("comfy_quant"), "marker-missing-packed", "raises"),
    Case("marker of one w4a4 layer lost", W4A4, drop("comfy_quant"), "marker-missing-packed", "raises"),
    Case("marker of one w4a8 layer lost", W4A8, drop("comfy_quant"), "marker-missing-packed", "raises"),
    Case("marker without format", FP8, mark(format=None), "marker-no-format", "raises"),
    Case("marker of a newer ComfyUI", FP8, mark(format="awq_w4a16"), "marker-unknown-format", "raises"),
    Case("marker of another tool", FP8, mark(format="float8_e4m3fn_rowwise"), "marker-unknown-format", "raises"),
    Case("marker not JSON", FP8, put("comfy_quant", lambda t: text("{format")), "marker-unreadable", "raises"),
    Case("marker a list", FP8, put("comfy_quant", lambda t: text('["nvfp4"]')), "marker-unreadable", "raises"),
    Case("marker empty", FP8, put("comfy_quant", lambda t: t[:0]), "marker-unreadable", "raises"),
    Case("marker as int32", FP8, put("comfy_quant", lambda t: t.to(torch.int32)), "marker-container", "same"),
    Case("marker on a norm", FP8, on_norm, "marker-not-linear", "differs"),
    Case("group of no power of 4", INT8, mark(convrot_groupsize=128), "marker-unusable", "raises"),
    Case("group that does not divide", INT8, mark(convrot_groupsize=1024), "marker-unusable", "raises"),
    Case("rotation forgotten", INT8, mark(convrot=None, convrot_groupsize=None), "rotation-disagrees", "differs"),
    # markers in the metadata
    Case("metadata not JSON", FP8, metadata_markers(lambda *_: "{"), "metadata-unreadable", "raises"),
    Case("metadata without layers", FP8, metadata_markers(lambda *_: "{}"), "metadata-unreadable", "raises"),
    Case("metadata names a layer too many", FP8, metadata_markers(too_much_in_metadata), "marker-dangling", "same"),
    Case("metadata against markers", FP8, contradiction, "marker-contradicted", "differs"),
    # scales missing
    Case("fp8 scale lost", FP8, drop("weight_scale"), "scale-missing", "raises"),
    Case("int8 scale lost", INT8, drop("weight_scale"), "scale-missing", "raises"),
    Case("mxfp8 scale lost", MXFP8, drop("weight_scale"), "scale-missing", "raises"),
    Case("nvfp4 block scale lost", NVFP4, drop("weight_scale"), "scale-missing", "raises"),
    Case("nvfp4 tensor scale lost", NVFP4, drop("weight_scale_2"), "scale-missing", "raises"),
    Case("w4a4 scale lost", W4A4, drop("weight_scale"), "scale-missing", "raises"),
    Case("w4a8 group scale lost", W4A8, drop("weight_s_rel"), "scale-missing", "raises"),
    Case("w4a8 row scale lost", W4A8, drop("weight_s_channel"), "scale-missing", "raises"),
    # scales of another dtype or shape
    Case("fp8 scale in float16", FP8, put("weight_scale", lambda t: t.half()), "scale-dtype", None),
    Case("int8 scale in bfloat16", INT8, put("weight_scale", lambda t: t.bfloat16()), "scale-dtype", None),
    Case("fp8 scale as integer", FP8, put("weight_scale", lambda t: t.ceil().long()), "scale-wrong-dtype", None),
    Case("fp8 scale [1, 1]", FP8, put("weight_scale", lambda t: t.reshape(1, 1)), "scale-shape", None),
    Case("int8 scale without its 1", INT8, put("weight_scale", lambda t: t.flatten()), "scale-shape", None),
    Case("int8 scale lying down", INT8, put("weight_scale", widen), "scale-shape", None),
    Case("w4a4 scale [N, 1]", W4A4, put("weight_scale", lambda t: t.unsqueeze(1)), "scale-shape-refused", "raises"),
    Case("int8 scales of half the rows", INT8, put("weight_scale", lambda t: t[::2]), "scale-wrong-shape", "raises"),
    Case("nvfp4 block scales cut", NVFP4, put("weight_scale", lambda t: t[:128]), "scale-wrong-shape", "raises"),
    Case("nvfp4 block scales flat", NVFP4, put("weight_scale", lambda t: t.flatten()), "scale-shape", None),
    Case("nvfp4 block scales float32", NVFP4, put("weight_scale", lambda t: t.float()), "block-scale-dtype", "raises"),
    Case(
        "mxfp8 scales E8M0",
        MXFP8,
        put("weight_scale", lambda t: t.view(torch.float8_e8m0fnu)),
        "dtype-unknown-to-loader",
        None,  # the loader for dynamic memory, which a CPU does not use, refuses it
    ),
    Case(
        "mxfp8 scales float32",
        MXFP8,
        put("weight_scale", lambda t: t.view(torch.float8_e8m0fnu).float()),
        "block-scale-dtype",
        "raises",
    ),
    # values of scales and codes
    Case("NaN scale", INT8, fill("weight_scale", float("nan")), "scale-not-finite", "differs"),
    Case("infinite scale", FP8, fill("weight_scale", float("inf")), "scale-not-finite", "differs"),
    Case("NaN block scale", NVFP4, fill("weight_scale", float("nan")), "scale-not-finite", "differs"),
    Case("NaN exponent", MXFP8, fill("weight_scale", 255), "scale-not-finite", "differs"),
    Case("scale of 0", FP8, put("weight_scale", torch.zeros_like), "all-zero", None),
    Case("codes of 0", INT8, put("weight", torch.zeros_like), "all-zero", None),
    Case("NaN code", FP8, fill("weight", float("nan")), "code-not-finite", "differs"),
    # weights
    Case("weight lost", INT8, drop("weight"), "weight-missing", "raises"),
    Case("fp8 codes in uint8", FP8, put("weight", lambda t: t.view(torch.uint8)), "fp8-in-bytes", "differs"),
    Case("int8 codes in uint8", INT8, put("weight", lambda t: t.view(torch.uint8)), "container-sign", "same"),
    Case("nvfp4 codes in int8", NVFP4, put("weight", lambda t: t.view(torch.int8)), "container-sign", "same"),
    Case("e4m3 marked e5m2", FP8, mark(format="float8_e5m2"), "weight-dtype", "differs"),
    Case("float weight marked int8", INT8, put("weight", lambda t: t.bfloat16() / 100), "weight-dtype", "differs"),
    Case("bias of another width", FP8, put("bias", wider), "bias-shape", "raises"),
    # tensors that nothing reads
    Case("smoothing on int8", INT8, put("pre_quant_scale", lambda t: torch.ones(t.shape[1])), "tensor-ignored", None),
    Case("zero points", INT8, put("weight_zero_point", lambda t: torch.ones(t.shape[0])), "tensor-ignored", None),
    Case("input scale on int8", INT8, put("input_scale", lambda t: torch.tensor(1.0)), "tensor-useless", "same"),
    # older forms
    Case("plain fp8", FP8, all_scales_and_markers_lost, "fp8-cast", None),
    Case("scale_weight without scaled_fp8", FP8, legacy_without_flag, "legacy-flag-missing", "differs"),
    Case("scaled_fp8 with a scale lost", FP8, legacy_without_scale, "fp8-cast", None),
    Case("scaled_fp8 of e5m2", FP8, legacy_e5m2, "legacy-e5m2", None),
    Case("codes without scales", INT8, drop("weight_scale", "comfy_quant"), "codes-without-scales", "differs"),
    # names
    Case("scale under another prefix", INT8, scale_under_other_prefix, "scale-elsewhere", "raises"),
    Case("prefix of torch.compile", FP8, all_prefixed("_orig_mod."), "prefix-unknown", "raises"),
    Case("prefix of a trainer", FP8, all_prefixed("module."), "prefix-unknown", "raises"),
    Case("half a prefix", FP8, all_prefixed("diffusion_model."), "prefix-unknown", "raises"),
]
