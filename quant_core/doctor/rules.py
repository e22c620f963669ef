"""Every rule of the doctor as data: how bad, for which loader, what the loader does, and the way out.

``cause`` and ``fix`` are format strings. ``mirrors`` names the function whose behaviour the rule transcribes (ComfyUI
v0.33.0, comfy-kitchen 0.2.31); a rule without one follows from the file format itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .findings import COMFYUI, QUANT_CORE, Edit, Finding, Level

FATAL, WRONG, ADVICE = Level.FATAL, Level.WRONG, Level.ADVICE


@dataclass(frozen=True)
class Rule:
    """One rule; a level of None means that this loader does not mind."""

    code: str
    comfyui: Level | None
    quant_core: Level | None
    mirrors: str
    cause: str
    fix: str


_LOAD = "comfy/ops.py _load_quantized_module"
_OLD = "comfy/utils.py convert_old_quants"
_AGAIN = "quantize the float file again"

_RULES = (
    # ---------------------------------------------------------------- the file
    Rule("file-truncated", FATAL, FATAL, "comfy/utils.py load_safetensors",
         "the tensors end at byte {end}, the file at byte {size}: {missing} bytes are missing",
         "download or copy the file again"),
    Rule("trailing-bytes", FATAL, FATAL, "safetensors: MetadataIncompleteBuffer",
         "{extra} bytes follow the last tensor (byte {end} of {size})",
         "cut them off (--fix); if the file's size is not the publisher's, download it again"),
    Rule("file-unreadable", FATAL, FATAL, "comfy/utils.py load_safetensors", "{error}",
         "download the file again, or have it written again by the tool that it came from"),
    Rule("tensor-misaligned", ADVICE, None, "comfy/utils.py load_safetensors (memory map)",
         "{count} tensors do not start at a multiple of their element size, first {first}: mapped from the file, a CPU "
         "computes with them more slowly and rounds differently than after a copy",
         "write the file again with any current tool (--fix does it beside other repairs)"),
    Rule("dtype-unknown-to-loader", FATAL, None, "comfy/utils.py load_safetensors _TYPES",
         "{tensor} is stored as {found}, which ComfyUI's loader for dynamic memory does not know (KeyError)",
         "store it as bytes (--fix), or as a dtype of 16 bits or more"),
    Rule("several-files", FATAL, None, "comfy/utils.py load_torch_file",
         "the model lies in {count} files; ComfyUI's loader of diffusion models takes one",
         "write it as one file: quantize it again without --shard-size"),
    Rule("no-tensors", FATAL, FATAL, "comfy/sd.py load_diffusion_model", "the file holds no tensors",
         "download the file again, or have it written again by the tool that it came from"),
    Rule("is-a-lora", FATAL, FATAL, "comfy/sd.py load_diffusion_model",
         "{count} of its {total} tensors are a LoRA's, first {first}: it changes a model and is none",
         "put it into models/loras, and load it with a LoRA node; `merge-lora` adds it to a model"),
    # ---------------------------------------------------------------- names
    Rule("prefix-unknown", FATAL, FATAL, "comfy/model_detection.py unet_prefix_from_state_dict",
         "every name starts with {prefix!r}, which no loader takes off: the model is not recognized",
         "take the prefix off (--fix)"),
    Rule("diffusers-names", WRONG, None, "comfy/model_detection.py convert_diffusers_mmdit, comfy/utils.py "
         "unet_to_diffusers",
         "the layers carry diffusers' names ({kind}); ComfyUI renames and fuses the weights and drops every scale and "
         "marker: {count} quantized layers load as bare codes",
         "convert the float file to ComfyUI's names first, then quantize"),
    Rule("packed-on-detection-key", FATAL, None, "comfy/model_detection.py detect_unet_config",
         "{format} stores {found} columns for a width of {width}, and architecture detection reads the stored width: "
         "another model, or none, is recognized",
         "keep this layer in float, or in fp8, mxfp8 or int8, which keep the shape: " + _AGAIN + " excluding it"),
    Rule("markers-ignored", WRONG, None, "comfy/sd1_clip.py SDClipModel (no quantization_metadata for CLIP)",
         "the layer is part of a CLIP encoder, where ComfyUI reads no markers: its codes are taken for weights",
         "use this encoder in float, or as plain fp8 without scales"),
    Rule("scale-elsewhere", FATAL, FATAL, _LOAD,
         "{tensor} belongs to layer {layer}, but carries another prefix",
         "rename it (--fix)"),
    # ---------------------------------------------------------------- markers
    Rule("marker-missing", WRONG, FATAL, _LOAD + ", layer_conf is None",
         "the weight is {found} with {scales}, and no marker says so: its codes are taken for the weights",
         "add the marker {conf} (--fix where the tensors allow one reading only)"),
    Rule("marker-missing-packed", FATAL, FATAL, _LOAD + ", layer_conf is None",
         "the weight is {found} with {scales}, two weights a byte, and no marker says so: half the columns are missing",
         "add the marker {conf} (--fix where the tensors allow one reading only)"),
    Rule("marker-unreadable", FATAL, FATAL, _LOAD + ", json.loads", "{error}", "write the marker again, or " + _AGAIN),
    Rule("marker-container", None, FATAL, _LOAD + ", numpy().tobytes()",
         "comfy_quant is {found}, expected a row of uint8", "store the same text as uint8 (--fix)"),
    Rule("marker-no-format", FATAL, FATAL, _LOAD + ", quant_format is None",
         "the marker has no 'format': {conf}", "name the format in it, or " + _AGAIN),
    Rule("marker-unknown-format", FATAL, FATAL, _LOAD + ", QUANT_ALGOS[...] (KeyError)",
         "the marker names the format {format!r}; known: {known}",
         "use the tool, or the newer ComfyUI, that the format comes from, or " + _AGAIN),
    Rule("marker-unusable", FATAL, FATAL, "comfy_kitchen tensor layouts", "{error}", _AGAIN),
    Rule("marker-not-linear", WRONG, FATAL, "comfy/ops.py mixed_precision_ops",
         "a {dims}-D weight is marked quantized; only a Linear reads its marker", "store this weight in float"),
    Rule("marker-dangling", ADVICE, FATAL, _OLD,
         "the metadata marks {count} layers that the file does not have, first {first}",
         "harmless in ComfyUI; correct the metadata"),
    Rule("marker-contradicted", WRONG, WRONG, _OLD,
         "the layer's own marker is {own}, the metadata says {other} and wins", "remove the wrong one of the two"),
    Rule("metadata-unreadable", FATAL, FATAL, _OLD, "the metadata entry '_quantization_metadata' {error}",
         "remove the entry or write it again: {{\"layers\": {{name: {{\"format\": ...}}}}}}"),
    Rule("rotation-disagrees", WRONG, WRONG, "",
         "the marker says {marked}, the recipe in the file says {recipe}: the weight is wrong by more than its size if "
         "the recipe is right", "correct the marker, or " + _AGAIN),
    # ---------------------------------------------------------------- scales
    Rule("scale-missing", FATAL, FATAL, _LOAD, "{tensor} is missing, without which {format} cannot be read", _AGAIN),
    Rule("scale-dtype", ADVICE, FATAL, "comfy_kitchen tensor layouts",
         "{tensor} is {found}, expected {expected}", "store it as {to} (--fix)"),
    Rule("scale-wrong-dtype", WRONG, FATAL, "comfy_kitchen tensor layouts",
         "{tensor} is {found}, expected {expected}: a scale that was rounded to this is lost", _AGAIN),
    Rule("block-scale-dtype", FATAL, FATAL, _LOAD + ", pop_scale(dtype) views the bytes",
         "{tensor} is {found}, expected {expected}: its bytes are read as one scale each",
         "store it as {to} (--fix where every value has one)"),
    Rule("scale-shape", ADVICE, FATAL, "comfy_kitchen tensor layouts",
         "{tensor} is {found}, expected {expected}", "reshape it (--fix)"),
    Rule("scale-shape-refused", FATAL, FATAL, "comfy_kitchen kernels' constraints",
         "{tensor} is {found}, expected {expected}", "reshape it (--fix)"),
    Rule("scale-wrong-shape", FATAL, FATAL, "comfy_kitchen tensor layouts",
         "{tensor} is {found}, expected {expected}: scales are missing, or belong to another layer", _AGAIN),
    Rule("scale-not-finite", WRONG, WRONG, "", "{count} of {total} values of {tensor} are NaN or infinite", _AGAIN),
    Rule("scale-zero", ADVICE, ADVICE, "",
         "{tensor} is 0, so that the whole layer is 0", "compare with the float file (`verify`)"),
    # ---------------------------------------------------------------- weights
    Rule("weight-missing", FATAL, FATAL, _LOAD + ", weight is None",
         "the layer has {keys}, but no weight", "download the file again, or " + _AGAIN),
    Rule("fp8-in-bytes", WRONG, FATAL, _LOAD + ", weight.to(storage_t)",
         "{format} codes are stored as {found}: the bytes are converted as numbers, 0x38 becomes 56 and not 1.0",
         "declare the bytes as {expected} (--fix)"),
    Rule("container-sign", None, FATAL, _LOAD + ", weight.to(storage_t)",
         "the codes are stored as {found}, expected {expected}; ComfyUI converts one to the other without loss",
         "declare the bytes as {expected} (--fix)"),
    Rule("weight-dtype", WRONG, FATAL, _LOAD + ", weight.to(storage_t)",
         "the marker says {format}, stored as {expected}, but the weight is {found}: its values are converted again",
         "correct the marker, or " + _AGAIN),
    Rule("weight-unaligned", FATAL, FATAL, "comfy_kitchen tensor layouts",
         "the weight is {found}; {format} needs multiples of {factor} both ways", "keep this layer in float"),
    Rule("bias-shape", FATAL, FATAL, "torch load_state_dict, size mismatch",
         "bias is {found}, the weight has {rows} rows", "the two belong to different layers: " + _AGAIN),
    Rule("all-zero", ADVICE, ADVICE, "", "every weight of the layer is 0",
         "right for some layers of control nets and adapters; elsewhere compare with the float file (`verify`)"),
    Rule("code-not-finite", WRONG, WRONG, "", "{count} codes are NaN{or_inf}", _AGAIN),
    Rule("codes-without-scales", WRONG, FATAL, _LOAD + ", layer_conf is None",
         "a 2-D weight is stored as {found}, with no scale and no marker: its codes are taken for the weights",
         "the scales are lost: " + _AGAIN),
    # ---------------------------------------------------------------- tensors that nothing reads
    Rule("tensor-ignored", WRONG, FATAL, _LOAD + ", QUANT_ALGOS parameters",
         "{tensor} changes what the weight means, and is not read for {format}", "fold it into the weight: " + _AGAIN),
    Rule("tensor-useless", ADVICE, FATAL, _LOAD + ", QUANT_ALGOS parameters",
         "{tensor} is not read for {format}", "harmless in ComfyUI; leave it out"),
    # ---------------------------------------------------------------- fp8 before markers
    Rule("fp8-cast", ADVICE, FATAL, "comfy/ops.py manual_cast",
         "{count} weights are plain fp8 without scales, first {first}: what lay under 2^-10 became 0, and the error is "
         "larger than with a scale for every layer", "quantize the float file with a comfy_kitchen fp8 or int8 method"),
    Rule("legacy-flag-missing", WRONG, FATAL, _OLD,
         "the weight is fp8 with scale_weight, but the file has no 'scaled_fp8', which makes ComfyUI read it",
         "rename it to weight_scale and add a marker (--fix)"),
    Rule("legacy-e5m2", WRONG, FATAL, _OLD,
         "the weight is float8_e5m2 with scale_weight; ComfyUI takes every scaled_fp8 weight for float8_e4m3fn and "
         "converts its values: over 448 they become NaN", "rename the scale and add a marker (--fix)"),
    Rule("legacy", None, FATAL, "",
         "{count} layers are in the older scaled_fp8 form, which load_quantized_model does not read",
         "use it as the source of a new quantization, or load it in ComfyUI"),
    # ---------------------------------------------------------------- other families
    Rule("not-comfyui", FATAL, None, "comfy/model_detection.py detect_unet_config",
         "{count} layers are in {family}'s format, which ComfyUI does not read",
         "load it with quant_core or the library itself; for ComfyUI quantize with a comfy_kitchen method"),
    Rule("gguf", FATAL, FATAL, "comfy/utils.py load_torch_file",
         "a GGUF file, which ComfyUI reads through a custom node only, and load_quantized_model not at all",
         "use it as the source of a new quantization, which adds to the error that it has"),
    Rule("part-missing", None, FATAL, "bitsandbytes QuantState.from_dict",
         "{tensor} is missing, without which the layer cannot be read", _AGAIN),
    Rule("part-wrong", None, FATAL, "bitsandbytes QuantState.from_dict",
         "{tensor} is {found}, expected {expected}", _AGAIN),
    Rule("state-unreadable", None, FATAL, "", "{error}", "save the file again with its metadata, or " + _AGAIN),
    # ---------------------------------------------------------------- the manifest
    Rule("manifest-unreadable", None, FATAL, "", "{error}", "update quant_core, or " + _AGAIN),
    Rule("manifest-layer-missing", None, FATAL, "",
         "the recipe in the file lists {count} layers that it does not hold, first {first}", _AGAIN),
    Rule("bytes-changed", None, FATAL, "",
         "the bytes of {count} tensors, first {first}, are not the ones that were saved: changed or damaged",
         "copy or download the file again"),
)  # fmt: skip

RULES: dict[str, Rule] = {rule.code: rule for rule in _RULES}
"""``{code: Rule}``, every rule there is."""


def found(code: str, layer: str = "", edits: tuple[Edit, ...] = (), **fields: Any) -> Finding:
    """Make the finding of a rule; ``fields`` fill its texts."""
    rule = RULES[code]
    levels = {
        loader: level for loader, level in ((COMFYUI, rule.comfyui), (QUANT_CORE, rule.quant_core)) if level is not None
    }
    fields = {"layer": layer, **fields}
    return Finding(code, levels, layer, rule.cause.format(**fields), rule.fix.format(**fields), rule.mirrors, edits)
