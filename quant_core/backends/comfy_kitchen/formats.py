"""ComfyUI's native weight formats as data: their tensors, their shapes, and the marker that names them.

A quantized layer is stored as its packed weight, its scales and ``comfy_quant``, a uint8 tensor that holds UTF-8 JSON
with at least the key ``format``. Nothing here needs comfy-kitchen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

MARKER_KEY = "comfy_quant"
MAX_MARKER_BYTES = 4096

# The smallest group that a rotation falls back to when a layer's width is no multiple of the requested one. Rotating
# over 4 columns averages too little to be worth its matmul.
_SMALLEST_FALLBACK_GROUP = 16


@dataclass(frozen=True)
class ComfyFormat:
    """What ComfyUI's loader expects of one format.

    Attributes:
        name: the ``format`` of the marker.
        method: the quantization method that reads and writes it.
        label: a description for people.
        layout: name of the layout class in ``comfy_kitchen.tensor``.
        storage_dtype: dtype of ``weight``.
        scale_keys: the scale tensors every file of the format has.
        optional_keys: tensors that a file may bring.
        packed: whether two weights share a byte, so that ``weight`` has half the columns.
        alignment: both dimensions of a weight must be multiples of this. ComfyUI pads others with zeros, then fails
            to add their bias, and reads the padded width as the model's.
        block: columns that share one block scale; 0 for the formats without.
        min_version: the first comfy-kitchen that has the layout.
        min_capability: the first CUDA compute capability with a kernel for it.
        native_on_cpu: whether comfy-kitchen multiplies in this format on a CPU.
    """

    name: str
    method: str
    label: str
    layout: str
    storage_dtype: torch.dtype
    scale_keys: tuple[str, ...]
    optional_keys: tuple[str, ...] = ()
    packed: bool = False
    alignment: int = 1
    block: int = 0
    min_version: str = "0.1.0"
    min_capability: tuple[int, int] = (7, 5)
    native_on_cpu: bool = False


_FORMATS = (
    ComfyFormat(
        name="int8_tensorwise",
        method="comfy_kitchen_int8_w8a8",
        label="W8A8, int8 weight + int8 dynamic activation (ComfyUI int8_tensorwise)",
        layout="TensorWiseINT8Layout",
        storage_dtype=torch.int8,
        scale_keys=("weight_scale",),
        min_version="0.2.11",
        native_on_cpu=True,
    ),
    ComfyFormat(
        name="float8_e4m3fn",
        method="comfy_kitchen_fp8_w8a8",
        label="W8A8, fp8 E4M3 weight + fp8 activation, static input_scale when present (ComfyUI float8_e4m3fn)",
        layout="TensorCoreFP8Layout",
        storage_dtype=torch.float8_e4m3fn,
        scale_keys=("weight_scale",),
        optional_keys=("input_scale",),
        min_capability=(8, 9),
    ),
    ComfyFormat(
        name="float8_e5m2",
        method="comfy_kitchen_fp8_e5m2_w8a8",
        label="W8A8, fp8 E5M2 weight + fp8 E4M3 activation, static input_scale when present (ComfyUI float8_e5m2)",
        layout="TensorCoreFP8Layout",
        storage_dtype=torch.float8_e5m2,
        scale_keys=("weight_scale",),
        optional_keys=("input_scale",),
        min_capability=(8, 9),
    ),
    ComfyFormat(
        name="mxfp8",
        method="comfy_kitchen_mxfp8_w8a8",
        label="W8A8, MXFP8: fp8 E4M3 in blocks of 32 with power-of-two scales (ComfyUI mxfp8)",
        layout="TensorCoreMXFP8Layout",
        storage_dtype=torch.float8_e4m3fn,
        scale_keys=("weight_scale",),
        optional_keys=("input_scale",),
        alignment=32,
        block=32,
        min_version="0.2.8",
        min_capability=(10, 0),
    ),
    ComfyFormat(
        name="nvfp4",
        method="comfy_kitchen_nvfp4_w4a4",
        label="W4A4, NVFP4: fp4 E2M1 in blocks of 16 with fp8 scales (ComfyUI nvfp4)",
        layout="TensorCoreNVFP4Layout",
        storage_dtype=torch.uint8,
        scale_keys=("weight_scale", "weight_scale_2"),
        optional_keys=("input_scale", "pre_quant_scale"),
        packed=True,
        alignment=16,
        block=16,
        min_capability=(10, 0),
    ),
    ComfyFormat(
        name="convrot_w4a4",
        method="comfy_kitchen_int4_convrot_w4a4",
        label="W4A4, rotated int4 weight and activation, one scale a row (ComfyUI convrot_w4a4)",
        layout="TensorCoreConvRotW4A4Layout",
        storage_dtype=torch.int8,
        scale_keys=("weight_scale",),
        packed=True,
        min_version="0.2.17",
    ),
    ComfyFormat(
        name="asym_w4a8_int8",
        method="comfy_kitchen_int4_w4a8",
        label="W4A8, rotated 4-bit codebook weight in groups + int8 dynamic activation (ComfyUI asym_w4a8_int8)",
        layout="AsymW4A8Int8Layout",
        storage_dtype=torch.int8,
        scale_keys=("weight_s_rel", "weight_s_channel"),
        optional_keys=("weight_codebook",),
        packed=True,
        min_version="0.2.27",
        min_capability=(8, 0),
    ),
)

FORMATS: dict[str, ComfyFormat] = {f.method: f for f in _FORMATS}
"""``{method name: ComfyFormat}``, every format that this backend reads and writes."""

FORMATS_BY_NAME: dict[str, ComfyFormat] = {f.name: f for f in _FORMATS}
"""The same objects by the ``format`` of a marker."""


# ------------------------------------------------------------------ marker


@dataclass(frozen=True)
class Marker:
    """What ``comfy_quant`` says about one layer.

    Attributes:
        format: name of the format.
        rotation: columns that each regular Hadamard rotation mixes; 0 for a weight that is not rotated.
        group_size: columns that share one scale (``asym_w4a8_int8`` only, otherwise 0).
        linear_dtype: what ``convrot_w4a4`` multiplies in, ``int4`` or ``int8``.
        full_precision: the file asks for dequantize + matmul, never a quantized kernel.
    """

    format: str
    rotation: int = 0
    group_size: int = 0
    linear_dtype: str = "int4"
    full_precision: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object as ComfyUI itself writes it: defaults that it leaves out are left out."""
        conf: dict[str, Any] = {"format": self.format}
        if self.full_precision:
            conf["full_precision_matrix_mult"] = True
        if self.format == "int8_tensorwise" and self.rotation:
            conf["convrot"] = True
        if self.format == "asym_w4a8_int8":
            conf["group_size"] = self.group_size
        if self.rotation:
            conf["convrot_groupsize"] = self.rotation
        if self.linear_dtype != "int4":
            conf["linear_dtype"] = self.linear_dtype
        return conf


def encode_marker(marker: Marker) -> torch.Tensor:
    """Return the marker as the uint8 tensor that is stored under ``comfy_quant``."""
    return torch.tensor(list(json.dumps(marker.to_json()).encode("utf-8")), dtype=torch.uint8, device="cpu")


def decode_marker(tensor: torch.Tensor) -> Marker:
    """Read a ``comfy_quant`` tensor.

    Raises:
        ValueError: it is not one; the message is a sentence that starts with ``comfy_quant``.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"{MARKER_KEY} is {tensor.dtype} {list(tensor.shape)}, expected a row of uint8")
    if tensor.is_meta:
        raise ValueError(f"{MARKER_KEY} is on the meta device: the state dict holds no data")
    if tensor.numel() > MAX_MARKER_BYTES:
        raise ValueError(f"{MARKER_KEY} has {tensor.numel()} bytes, more than the {MAX_MARKER_BYTES} a marker may have")
    try:
        conf = json.loads(bytes(tensor.tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MARKER_KEY} is not UTF-8 JSON ({error})") from None
    if not isinstance(conf, dict):
        raise ValueError(f"{MARKER_KEY} is a JSON {type(conf).__name__}, expected an object")
    return _marker_from_json(conf)


def _marker_from_json(conf: dict[str, Any]) -> Marker:
    name = conf.get("format")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{MARKER_KEY} has no 'format' key: {json.dumps(conf)[:200]}")
    nested = conf.get("params")
    params: Mapping[str, Any] = {**(nested if isinstance(nested, dict) else {}), **conf}

    def integer(key: str, default: int) -> int:
        value = params.get(key, default)
        if type(value) is not int:
            raise ValueError(f"{MARKER_KEY} has {key} {value!r}, expected an integer")
        return value

    rotated = params.get("convrot", False) if name == "int8_tensorwise" else name in ("convrot_w4a4", "asym_w4a8_int8")
    if not isinstance(rotated, bool):
        raise ValueError(f"{MARKER_KEY} has convrot {rotated!r}, expected true or false")
    linear_dtype = params.get("linear_dtype", "int4") if name == "convrot_w4a4" else "int4"
    if linear_dtype not in ("int4", "int8"):
        raise ValueError(f"{MARKER_KEY} has linear_dtype {linear_dtype!r}, expected 'int4' or 'int8'")
    rotation = integer("convrot_groupsize", 256) if rotated else 0
    if rotated and not is_power_of_four(rotation):
        raise ValueError(f"{MARKER_KEY} has convrot_groupsize {rotation}, which is not 4, 16, 64, 256, ...")
    group_size = integer("group_size", 16) if name == "asym_w4a8_int8" else 0
    if name == "asym_w4a8_int8" and not is_group_size(group_size):
        raise ValueError(f"{MARKER_KEY} has group_size {group_size}, which is not 4, 8, 16 or a multiple of 16")
    return Marker(
        format=name,
        rotation=rotation,
        group_size=group_size,
        linear_dtype=linear_dtype,
        full_precision=bool(conf.get("full_precision_matrix_mult", False)),
    )


# ------------------------------------------------------------------ rotation


def is_power_of_four(value: int) -> bool:
    """Whether ``value`` is 4, 16, 64, 256, ..., the sizes that a regular Hadamard matrix of the format has."""
    return value >= 4 and value & (value - 1) == 0 and (value.bit_length() - 1) % 2 == 0


def rotation_for(in_features: int, requested: int) -> int:
    """Return the largest rotation group of at most ``requested`` columns that divides ``in_features``, else 0.

    ``requested`` is a power of 4. The fallback goes 256, 64, 16 and stops there.
    """
    group = requested
    while group >= min(_SMALLEST_FALLBACK_GROUP, requested):
        if in_features % group == 0:
            return group
        group //= 4
    return 0


def marker_problems(marker: Marker, in_features: int) -> list[str]:
    """Return a sentence for each group size of the marker that does not divide the layer's width."""
    sizes = {"convrot_groupsize": marker.rotation, "group_size": marker.group_size}
    return [
        f"the marker has {key} {size}, which does not divide in_features {in_features}"
        for key, size in sizes.items()
        if size and in_features % size
    ]


def is_group_size(value: int) -> bool:
    """Whether ``asym_w4a8_int8`` can have scales for groups of ``value`` columns."""
    return value >= 4 and (16 % value == 0 or value % 16 == 0)


# ------------------------------------------------------------------ shapes


@dataclass(frozen=True)
class TensorSpec:
    """The shapes and dtypes that one stored tensor may have; the first of each is what is written."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def accepts(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype in self.dtypes and tuple(tensor.shape) in self.shapes

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shapes[0], dtype=self.dtypes[0], device="meta")

    def describe(self) -> str:
        shapes = " or ".join(str(list(shape)) for shape in self.shapes)
        return f"{' or '.join(map(str, self.dtypes))} {shapes}"


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


_SCALAR = ((), (1,))
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def tensor_specs(
    marker: Marker, out_features: int, in_features: int, per_channel: bool = True
) -> dict[str, TensorSpec]:
    """Return ``{key: TensorSpec}`` of a layer's packed weight and scales, without the marker.

    The block scales of ``mxfp8`` and ``nvfp4`` are stored in tiles of 128 rows and 4 columns, each padded.
    """
    fmt = FORMATS_BY_NAME[marker.format]
    f32, fp8, u8 = torch.float32, torch.float8_e4m3fn, torch.uint8
    row = in_features // 2 if fmt.packed else in_features
    specs = {"weight": TensorSpec(((out_features, row),), (fmt.storage_dtype,))}
    if fmt.block:
        tiles = ((_round_up(out_features, 128), _round_up(in_features // fmt.block, 4)),)
        # ComfyUI's dynamic loader has no entry for F8_E8M0, so the exponents are written as plain bytes.
        written = (fp8, u8) if fmt.name == "nvfp4" else (u8, torch.float8_e8m0fnu)
        specs["weight_scale"] = TensorSpec(tiles, written)
        if fmt.name == "nvfp4":
            specs["weight_scale_2"] = TensorSpec(_SCALAR, (f32,))
    elif fmt.name == "int8_tensorwise":
        rows = (out_features, 1)
        specs["weight_scale"] = TensorSpec((rows, *_SCALAR) if per_channel else (*_SCALAR, rows), (f32,))
    elif fmt.name == "convrot_w4a4":
        specs["weight_scale"] = TensorSpec(((out_features,),), (f32,))
    elif fmt.name == "asym_w4a8_int8":
        groups = in_features // marker.group_size
        specs["weight_s_rel"] = TensorSpec(((out_features, groups),), (fp8, u8, f32))
        specs["weight_s_channel"] = TensorSpec(((out_features,),), (f32,))
        specs["weight_codebook"] = TensorSpec(((16,),), (f32,))
    else:
        specs["weight_scale"] = TensorSpec(_SCALAR, (f32,))
    if "input_scale" in fmt.optional_keys:
        specs["input_scale"] = TensorSpec(_SCALAR, _FLOATS)
    if "pre_quant_scale" in fmt.optional_keys:
        specs["pre_quant_scale"] = TensorSpec(((in_features,),), _FLOATS)
    return specs


def as_written(marker_format: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a block scale in the dtype that is written, without changing a byte (uint8 against the fp8 dtypes)."""
    if key == "weight_scale" and marker_format == "mxfp8" and tensor.element_size() == 1:
        return tensor.view(torch.uint8)
    if (marker_format, key) in (("nvfp4", "weight_scale"), ("asym_w4a8_int8", "weight_s_rel")):
        return tensor.view(torch.float8_e4m3fn) if tensor.dtype == torch.uint8 else tensor
    return tensor


def layer_marker(config: Any, in_features: int) -> Marker:
    """Return the marker of a layer of this width under a method's config: where the group fallback is decided."""
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    rotate = options.get("convrot", "convrot_groupsize" in options)
    return Marker(
        format=options["format"],
        rotation=rotation_for(in_features, options["convrot_groupsize"]) if rotate else 0,
        group_size=options.get("group_size", 0),
        linear_dtype=options.get("linear_dtype", "int4"),
    )
