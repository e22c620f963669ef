"""Every format family that quantized layers are stored in: recognized, and decoded to what its own library decodes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import BLOCK_LINEARS, TinyModel, tiny_model
from torch import nn

from quant_core import CheckpointError, QuantizeConfig, load_quantized_model, save_quantized_model
from quant_core.checkpoint import formats, open_checkpoint
from quant_core.checkpoint.formats import dequantize_layer, describe_cost, stored_layers


def weight(rows=96, columns=512, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    values[0, 0] = 8.0  # an outlier, which a wrong scale cannot hide
    return values.to(dtype)


def write(path, tensors, metadata=None):
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata)
    return open_checkpoint(path)


def marker(**conf):
    return torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)


def only_layer(checkpoint):
    layers = stored_layers(checkpoint)
    assert len(layers) == 1
    return next(iter(layers.values()))


def assert_decodes(checkpoint, layer, expected, monkeypatch, tolerance=1e-6):
    """The layer decodes to ``expected``, whole, in small tiles, and in any slice of rows."""
    full = dequantize_layer(checkpoint, layer)
    assert full.dtype == torch.float32
    assert full.shape == expected.shape == layer.shape
    difference = (full.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= tolerance
    rows = full.shape[0]
    for start, stop in [(0, 1), (rows // 3, rows - 1), (rows - 1, rows), (2, 2)]:
        assert torch.equal(dequantize_layer(checkpoint, layer, slice(start, stop)), full[start:stop])
    monkeypatch.setattr(formats, "_TILE_WEIGHTS", 3 * full[0].numel())
    assert torch.equal(dequantize_layer(checkpoint, layer), full)
    monkeypatch.undo()


# ---------------------------------------------------------------------- ComfyUI's native formats

KITCHEN = [
    ("TensorCoreFP8Layout", {"scale": "recalculate"}, {"format": "float8_e4m3fn"}, (97, 130)),
    (
        "TensorCoreFP8Layout",
        {"scale": "recalculate", "dtype": torch.float8_e5m2},
        {"format": "float8_e5m2"},
        (97, 130),
    ),
    ("TensorWiseINT8Layout", {}, {"format": "int8_tensorwise"}, (97, 130)),
    ("TensorWiseINT8Layout", {"per_channel": True}, {"format": "int8_tensorwise"}, (97, 130)),
    *(
        (
            "TensorWiseINT8Layout",
            {"per_channel": True, "convrot": True, "convrot_groupsize": group},
            {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group},
            (97, 2 * group),
        )
        for group in (16, 64, 256)
    ),
    ("TensorCoreMXFP8Layout", {}, {"format": "mxfp8"}, (160, 352)),
    ("TensorCoreNVFP4Layout", {}, {"format": "nvfp4"}, (272, 144)),
    *(
        ("TensorCoreConvRotW4A4Layout", options, {"format": "convrot_w4a4", **options}, (9, 512))
        for options in ({}, {"convrot_groupsize": 64})
    ),
    *(
        ("AsymW4A8Int8Layout", options, {"format": "asym_w4a8_int8", **conf}, (97, 512))
        for options, conf in (
            ({}, {}),
            ({"group_size": 64, "convrot_groupsize": 64}, {"group_size": 64, "params": {"convrot_groupsize": 64}}),
            ({"codebook": False}, {"group_size": 16, "convrot_groupsize": 256}),
            ({"symmetric": False}, {"group_size": 16}),
            ({"scale_dtype": torch.float32}, {"group_size": 16}),
            ({"bits": 6}, {"group_size": 16}),
        )
    ),
]  # fmt: skip


def kitchen_layer(layout, options, shape):
    """Quantize with comfy-kitchen alone; return the tensors it stores and the float32 weight it reads back."""
    pytest.importorskip("comfy_kitchen")
    from comfy_kitchen.tensor import QuantizedTensor

    quantized = QuantizedTensor.from_float(weight(*shape), layout, **options)
    return {k: v for k, v in quantized.state_dict("l.weight").items()}, quantized.dequantize()


@pytest.mark.parametrize(("layout", "options", "conf", "shape"), KITCHEN)
def test_comfy_kitchens_layouts(layout, options, conf, shape, tmp_path, monkeypatch):
    tensors, expected = kitchen_layer(layout, options, shape)
    checkpoint = write(tmp_path / "a.safetensors", {**tensors, "l.comfy_quant": marker(**conf)})
    layer = only_layer(checkpoint)
    assert (layer.name, layer.family, layer.format) == ("l", "comfy", conf["format"])
    assert set(layer.keys) == set(checkpoint.tensors)
    assert layer.dtype == torch.bfloat16
    assert (layer.method is None) == (options.get("bits") == 6)
    assert_decodes(checkpoint, layer, expected, monkeypatch)


def test_padding_of_block_formats_is_cut_off_where_the_bias_tells(tmp_path, monkeypatch):
    pytest.importorskip("comfy_kitchen")
    import comfy_kitchen as ck

    for kind, multiple in (("nvfp4", 16), ("mxfp8", 32)):
        source = weight(70, 128)
        scale = source.abs().max() / (448 * 6)
        if kind == "nvfp4":
            codes, blocks = ck.quantize_nvfp4(source, scale, pad_16x=True)
            expected = ck.dequantize_nvfp4(codes, scale, blocks, torch.float32)
        else:
            codes, blocks = ck.quantize_mxfp8(source, pad_32x=True)
            expected = ck.dequantize_mxfp8(codes, blocks, torch.float32)
        assert codes.shape[0] == -(-70 // multiple) * multiple
        tensors = {"l.weight": codes, "l.weight_scale": blocks.view(torch.uint8), "l.weight_scale_2": scale}
        tensors |= {"l.bias": torch.zeros(70), "l.comfy_quant": marker(format=kind)}
        checkpoint = write(tmp_path / f"{kind}.safetensors", tensors)
        assert_decodes(checkpoint, only_layer(checkpoint), expected[:70], monkeypatch)


def test_pre_quant_scale_and_awq_follow_their_formulas(tmp_path, monkeypatch):
    tensors, expected = kitchen_layer("TensorCoreNVFP4Layout", {}, (32, 64))
    smooth = torch.rand(64) + 0.5
    checkpoint = write(
        tmp_path / "a.safetensors", {**tensors, "l.pre_quant_scale": smooth, "l.comfy_quant": marker(format="nvfp4")}
    )
    assert_decodes(checkpoint, only_layer(checkpoint), expected.double() * smooth.double(), monkeypatch)

    codes = torch.randint(0, 16, (24, 128), dtype=torch.uint8)
    scale, zeros = torch.rand(2, 24) + 0.1, torch.randn(2, 24)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    expected = (codes.double() - 8) * scale.t().double().repeat_interleave(64, 1)
    expected += zeros.t().double().repeat_interleave(64, 1)
    awq = {"l.weight": packed, "l.weight_scale": scale, "l.weight_zeros": zeros}
    checkpoint = write(tmp_path / "b.safetensors", {**awq, "l.comfy_quant": marker(format="awq_w4a16", group_size=64)})
    layer = only_layer(checkpoint)
    assert layer.method is None
    assert_decodes(checkpoint, layer, expected, monkeypatch)


def test_experts_in_one_tensor(tmp_path, monkeypatch):
    codes = torch.randint(-127, 128, (3, 8, 32), dtype=torch.int8)
    scale = torch.rand(3, 8, 1)
    checkpoint = write(
        tmp_path / "a.safetensors",
        {"l.weight": codes, "l.weight_scale": scale, "l.comfy_quant": marker(format="int8_tensorwise", num_experts=3)},
    )
    assert_decodes(checkpoint, only_layer(checkpoint), codes.double() * scale.double(), monkeypatch)


@pytest.mark.parametrize(
    ("stored", "named"), [("", ""), ("model.diffusion_model.", "")] + [("model.diffusion_model.",) * 2]
)
def test_markers_in_the_metadata(stored, named, tmp_path, monkeypatch):
    tensors, expected = kitchen_layer("TensorCoreMXFP8Layout", {}, (64, 64))
    tensors = {stored + k: v for k, v in tensors.items()}
    layers = {"format_version": "1.0", "layers": {named + "l": {"format": "mxfp8"}}}
    checkpoint = write(tmp_path / "a.safetensors", tensors, {"_quantization_metadata": json.dumps(layers)})
    layer = only_layer(checkpoint)
    assert (layer.name, layer.method) == (stored + "l", "comfy_kitchen_mxfp8_w8a8")
    assert_decodes(checkpoint, layer, expected, monkeypatch)


def test_a_file_with_markers_in_the_metadata_loads_like_the_one_with_tensors(tmp_path):
    model, config = tiny_model(), QuantizeConfig(method="comfy_kitchen_int8_w8a8", target_modules=BLOCK_LINEARS)
    config.quantize_model(model)
    tensors, _ = config.flatten_state_dict(model.state_dict())
    confs = {k: json.loads(bytes(v.tolist())) for k, v in tensors.items() if k.endswith(".comfy_quant")}
    layers = {"layers": {k.removesuffix(".comfy_quant"): v for k, v in confs.items()}}
    rest = {k: v for k, v in tensors.items() if k not in confs}
    write(tmp_path / "a.safetensors", rest, {"_quantization_metadata": json.dumps(layers)})
    again = TinyModel().to(torch.bfloat16)
    load_quantized_model(again, tmp_path / "a.safetensors")
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(again(x), model(x))


# ---------------------------------------------------------------------- fp8 without markers


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scale_key", ["scale_weight", "weight_scale"])
def test_scaled_fp8(scale_key, dtype, tmp_path, monkeypatch):
    codes, scale = weight(30, 20).to(dtype), torch.tensor([0.37])
    tensors = {"a.l.weight": codes, f"a.l.{scale_key}": scale, "a.l.bias": torch.zeros(30)}
    tensors |= {"scaled_fp8": torch.zeros(2, dtype=dtype), "a.l.scale_input": torch.ones(1)}
    checkpoint = write(tmp_path / "a.safetensors", tensors)
    layer = only_layer(checkpoint)
    assert (layer.family, layer.format, layer.method) == ("scaled_fp8", str(dtype).removeprefix("torch."), None)
    assert set(layer.keys) == {"a.l.weight", f"a.l.{scale_key}", "a.l.scale_input"}
    assert layer.options["full_precision_matrix_mult"] is True
    assert_decodes(checkpoint, layer, codes.double() * scale.double(), monkeypatch)


def test_plain_fp8_cast(tmp_path, monkeypatch):
    codes = weight(30, 20).to(torch.float8_e4m3fn)
    checkpoint = write(
        tmp_path / "a.safetensors", {"l.weight": codes, "norm.weight": torch.ones(4).to(torch.float8_e4m3fn)}
    )
    layer = only_layer(checkpoint)
    assert (layer.family, layer.method, layer.keys) == ("fp8_cast", None, ("l.weight",))
    assert_decodes(checkpoint, layer, codes.double(), monkeypatch)


def test_an_unmarked_scale_that_is_no_float_is_refused(tmp_path):
    tensors, _ = kitchen_layer("TensorCoreMXFP8Layout", {}, (64, 64))
    tensors["l.weight_scale"] = tensors["l.weight_scale"].view(torch.uint8)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: layer 'l' .*uint8.*no marker"):
        stored_layers(write(tmp_path / "a.safetensors", tensors))


# ---------------------------------------------------------------------- convert_to_quant


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("float8_e4m3fn_rowwise", (64,)),
        ("float8_e4m3fn_rowwise", (64, 1)),
        ("float8_e4m3fn_blockwise", (2, 4)),
        ("int8_blockwise", (2, 4)),
        ("float8_e4m3fn", (64, 4, 1)),
    ],
)
def test_convert_to_quants_formats_follow_their_formulas(kind, grid, tmp_path, monkeypatch):
    dtype = torch.int8 if kind.startswith("int8") else torch.float8_e4m3fn
    codes = (weight(64, 128) * 20).clamp(-127, 127).to(dtype)
    scale = torch.rand(grid) + 0.1
    full = scale.double().reshape(grid[0], -1)
    full = full.repeat_interleave(64 // full.shape[0], 0).repeat_interleave(128 // full.shape[1], 1)
    conf = {"format": kind, "orig_dtype": "torch.float16", "group_size": 32}
    checkpoint = write(
        tmp_path / "a.safetensors", {"l.weight": codes, "l.weight_scale": scale, "l.comfy_quant": marker(**conf)}
    )
    layer = only_layer(checkpoint)
    native = kind == "float8_e4m3fn"
    assert (layer.family, layer.format) == ("comfy" if native else "convert_to_quant", kind)
    assert layer.dtype == torch.float16
    assert_decodes(checkpoint, layer, codes.double() * full, monkeypatch)
    if not native:
        with pytest.raises(CheckpointError, match=f"convert_to_quant {kind}, which no method loads"):
            load_quantized_model(nn.Sequential(), checkpoint.path)


def test_convert_to_quants_older_int8(tmp_path, monkeypatch):
    codes = torch.randint(-127, 128, (64, 128), dtype=torch.int8)
    scale = torch.rand(4, 8)
    checkpoint = write(tmp_path / "a.safetensors", {"l.weight": codes, "l.scale_weight": scale})
    layer = only_layer(checkpoint)
    assert (layer.family, layer.format) == ("convert_to_quant", "scaled_int8")
    full = scale.double().repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert_decodes(checkpoint, layer, codes.double() * full, monkeypatch)


CTQ = {
    "float8_e4m3fn": [],
    "float8_e4m3fn_rowwise": ["--scaling_mode", "row"],
    "float8_e4m3fn_blockwise": ["--scaling_mode", "block", "--block_size", "64"],
    "int8_blockwise": ["--int8", "--scaling_mode", "block", "--block_size", "64"],
    "int8_tensorwise": ["--int8", "--scaling_mode", "row", "--convrot", "--convrot-group-size", "64"],
    "mxfp8": ["--mxfp8"],
    "nvfp4": ["--nvfp4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CTQ)
def test_files_that_convert_to_quant_writes(kind, tmp_path):
    """The error bound of each format, from a float file that the tool itself converted."""
    pytest.importorskip("convert_to_quant")
    import subprocess
    import sys

    source = weight(128, 256, torch.bfloat16)
    save_file({"blocks.0.l.weight": source, "blocks.0.l.bias": torch.zeros(128)}, tmp_path / "in.safetensors")
    command = [
        sys.executable,
        "-m",
        "convert_to_quant.convert_to_quant",
        "--comfy_quant",
        "--simple",
        "--device",
        "cpu",
    ]
    command += ["-i", str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.safetensors"), *CTQ[kind]]
    result = subprocess.run([*command, "--save-quant-metadata"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    checkpoint = open_checkpoint(tmp_path / "out.safetensors")
    layer = only_layer(checkpoint)
    assert layer.format == kind
    assert layer.shape == (128, 256)
    restored = dequantize_layer(checkpoint, layer)
    error = ((restored - source.float()).norm() / source.float().norm()).item()
    assert error < {"nvfp4": 0.13}.get(kind, 0.04)


# ---------------------------------------------------------------------- bitsandbytes


@pytest.mark.parametrize("shape", [(64, 128), (7, 33), (1, 1), (130, 1000)])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("kind", "blocksize"), [("nf4", 64), ("fp4", 64), ("nf4", 4096)])
def test_bitsandbytes_four_bit(kind, blocksize, nested, shape, tmp_path, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    source = weight(*shape)
    codes, state = functional.quantize_4bit(source, blocksize=blocksize, compress_statistics=nested, quant_type=kind)
    expected = functional.dequantize_4bit(codes, state)
    tensors = {"l.weight": codes, **{f"l.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    checkpoint = write(tmp_path / "a.safetensors", tensors)
    layer = only_layer(checkpoint)
    assert (layer.family, layer.format, layer.method) == ("bitsandbytes", kind, f"bitsandbytes_{kind}")
    assert (layer.shape, layer.dtype) == (shape, torch.float32)
    assert set(layer.keys) == set(tensors)
    if shape[0] > 3:
        assert_decodes(checkpoint, layer, expected, monkeypatch)
    else:
        torch.testing.assert_close(dequantize_layer(checkpoint, layer), expected)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=str)
def test_bitsandbytes_codes_in_a_wider_dtype(storage, tmp_path, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight(24, 40), quant_type="nf4", quant_storage=storage)
    expected = functional.dequantize_4bit(codes, state)
    tensors = {"l.weight": codes, **{f"l.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    checkpoint = write(tmp_path / "a.safetensors", tensors)
    assert_decodes(checkpoint, only_layer(checkpoint), expected, monkeypatch)


def test_bitsandbytes_eight_bit(tmp_path, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, scale, _ = functional.int8_vectorwise_quant(weight(40, 48, torch.float16))
    tensors = {"l.weight": codes, "l.SCB": scale, "l.weight_format": torch.zeros((), dtype=torch.uint8)}
    checkpoint = write(tmp_path / "a.safetensors", tensors)
    layer = only_layer(checkpoint)
    assert (layer.family, layer.format, layer.method) == ("bitsandbytes", "int8", None)
    assert_decodes(checkpoint, layer, functional.int8_vectorwise_dequant(codes, scale), monkeypatch)


# ---------------------------------------------------------------------- torchao

TORCHAO = [
    ("torchao_int8_w8a16", {}, "int8"),
    ("torchao_int8_w8a8", {}, "int8"),
    ("torchao_fp8_w8a16", {}, "fp8"),
    ("torchao_fp8_w8a8", {}, "fp8"),
    ("torchao_nvfp4_w4a16", {}, "nvfp4"),
    ("torchao_nvfp4_w4a4", {}, "nvfp4"),
    ("torchao_mxfp8_w8a8", {}, "mxfp8"),
    ("torchao_mxfp4_w4a4", {}, "mxfp4"),
]


@pytest.mark.parametrize(("method", "options", "kind"), TORCHAO)
def test_torchaos_tensors(method, options, kind, tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(352, 272)).to(torch.bfloat16)
    recipe = QuantizeConfig(method=method, backend_config_kwargs=options)
    recipe.quantize_model(model)
    stored = model.state_dict()["0.weight"]  # torchao's own tensor
    expected = stored.dequantize(torch.float32)
    tensors, metadata = recipe.flatten_state_dict(model.state_dict())
    checkpoint = write(tmp_path / "a.safetensors", tensors, metadata)
    layer = only_layer(checkpoint)
    assert (layer.name, layer.family, layer.format, layer.method) == ("0", "torchao", kind, method)
    assert layer.dtype == torch.bfloat16
    assert set(layer.keys) == set(tensors) - {"0.bias"}
    assert_decodes(checkpoint, layer, expected, monkeypatch)


@pytest.mark.parametrize("method", ["torchao_int4_w4a16", "torchao_int4_w4a8"])
def test_torchaos_int4_follows_its_formula(method, tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(256, 40, bias=False)).to(torch.bfloat16)
    recipe = QuantizeConfig(method=method)
    recipe.quantize_model(model)
    tensors, metadata = recipe.flatten_state_dict(model.state_dict())
    codes = tensors["0._weight_qdata"].view(torch.uint8)
    codes = torch.stack([codes & 15, codes >> 4], -1).reshape(40, 256).double()
    codes = torch.where(codes > 7, codes - 16, codes)
    scale, zero = (tensors[f"0._weight_{n}"].double().t().repeat_interleave(128, 1) for n in ("scale", "zero_point"))
    checkpoint = write(tmp_path / "a.safetensors", tensors, metadata)
    layer = only_layer(checkpoint)
    assert (layer.format, layer.method) == ("int4", method)
    assert_decodes(checkpoint, layer, codes * scale + zero, monkeypatch)


# ---------------------------------------------------------------------- whole files


@pytest.mark.parametrize("method", ["comfy_kitchen_int8_w8a8", "bitsandbytes_nf4", "torchao_int8_w8a16"])
def test_every_layer_of_a_saved_model(method, tmp_path):
    pytest.importorskip(method.rpartition("_int8")[0] or "bitsandbytes")
    model, config = tiny_model(), QuantizeConfig(method=method, target_modules=BLOCK_LINEARS)
    floats = {k: v.clone() for k, v in model.state_dict().items()}
    config.quantize_model(model)
    save_quantized_model(model, config, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    layers = stored_layers(checkpoint)
    assert sorted(layers) == sorted(BLOCK_LINEARS)
    for name, layer in layers.items():
        source = floats[name + ".weight"].float()
        error = ((dequantize_layer(checkpoint, layer) - source).norm() / source.norm()).item()
        assert error < (0.12 if "nf4" in method else 0.02)


def test_a_float_file_has_no_quantized_layer(tmp_path):
    checkpoint = write(tmp_path / "a.safetensors", {k: v for k, v in tiny_model().state_dict().items()})
    assert stored_layers(checkpoint) == {}
    assert describe_cost([]) == ""


def test_cost_names_each_format_once(tmp_path):
    codes = weight(16, 16).to(torch.float8_e4m3fn)
    nvfp4, _ = kitchen_layer("TensorCoreNVFP4Layout", {}, (32, 32))
    tensors = {"a.weight": codes, "b.weight": codes.clone(), **nvfp4, "l.comfy_quant": marker(format="nvfp4")}
    text = describe_cost(stored_layers(write(tmp_path / "a.safetensors", tensors)).values())
    assert text == (
        "quantizing again adds to the error that the weights already have: "
        "float8_e4m3fn about 2.7 % (2 layers), nvfp4 about 9.4 % (1 layer)"
    )


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"l.comfy_quant": b"{"}, "marker 'l.comfy_quant' is not JSON"),
        ({"l.comfy_quant": b"[]"}, "a JSON list, expected an object"),
        ({"l.comfy_quant": b"{}"}, "layer 'l' is marked with format None; known: int8_tensorwise"),
        ({"l.comfy_quant": b'{"format": "q9"}'}, "layer 'l' is marked with format 'q9'"),
        ({"l.comfy_quant": b" " * 70000}, "70000 bytes"),
        ({"l.weight": None}, "layer 'l' is marked as mxfp8, but has no 'l.weight'"),
    ],
)
def test_unreadable_markers(change, message, tmp_path):
    tensors, _ = kitchen_layer("TensorCoreMXFP8Layout", {}, (64, 64))
    tensors["l.comfy_quant"] = marker(format="mxfp8")
    for key, value in change.items():
        del tensors[key]
        if value is not None:
            tensors[key] = torch.tensor(list(value), dtype=torch.uint8)
    checkpoint = write(tmp_path / "a.safetensors", tensors)
    with pytest.raises(CheckpointError, match="a.safetensors") as caught:
        stored_layers(checkpoint)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON object with 'layers'"),
        ("[]", "not a JSON object with 'layers'"),
        ('{"layers": {"l": 3}}', "layer 'l' in the metadata is a JSON int"),
        ('{"layers": {"l": {"format": "nvfp4"}}}', "two markers that disagree: 'format' is 'mxfp8'"),
        ('{"layers": {"gone": {"format": "nvfp4"}}}', "layer 'gone' is marked as nvfp4, but has no 'gone.weight'"),
    ],
)
def test_unreadable_metadata_markers(text, message, tmp_path):
    tensors, _ = kitchen_layer("TensorCoreMXFP8Layout", {}, (64, 64))
    tensors["l.comfy_quant"] = marker(format="mxfp8")
    checkpoint = write(tmp_path / "a.safetensors", tensors, {"_quantization_metadata": text})
    with pytest.raises(CheckpointError) as caught:
        stored_layers(checkpoint)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "conf", "change", "message"),
    [
        ("TensorCoreMXFP8Layout", {"format": "mxfp8"}, {"l.weight_scale": None}, "'l.weight_scale' is missing"),
        ("TensorCoreMXFP8Layout", {"format": "mxfp8"}, {"l.weight_scale": torch.zeros(9, dtype=torch.uint8)}, "tiles"),
        ("TensorCoreNVFP4Layout", {"format": "nvfp4"}, {"l.weight_scale_2": torch.ones(2)}, "single number"),
        ("TensorCoreNVFP4Layout", {"format": "nvfp4"}, {"l.weight": torch.ones(64, 32)}, "expected torch.uint8"),
        ("TensorWiseINT8Layout", {"format": "int8_tensorwise"}, {"l.weight_scale": torch.ones(7, 1)}, "divide"),
        ("TensorWiseINT8Layout", {"format": "int8_tensorwise", "convrot": 1}, {}, "convrot 1"),
        (
            "TensorWiseINT8Layout",
            {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 32},
            {},
            "convrot_groupsize 32, which is not 4",
        ),
        (
            "TensorWiseINT8Layout",
            {"format": "int8_tensorwise", "convrot": True},
            {},
            "convrot_groupsize 256, which does not divide",
        ),
    ],
)
def test_parts_that_do_not_fit(layout, conf, change, message, tmp_path):
    tensors, _ = kitchen_layer(layout, {}, (64, 64))
    tensors = {k: v for k, v in {**tensors, **change}.items() if v is not None}
    checkpoint = write(tmp_path / "a.safetensors", {**tensors, "l.comfy_quant": marker(**conf)})
    layer = only_layer(checkpoint)
    with pytest.raises(CheckpointError, match=f"layer 'l' .{conf['format']}.") as caught:
        dequantize_layer(checkpoint, layer)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": None}, "the stored codes are flat"),
        ({"blocksize": 0}, "blocksize 0"),
        ({"nested_offset": "x"}, "nested_offset 'x'"),
        ({"shape": [64, 130]}, "expected 4160 bytes of codes"),
    ],
)
def test_damaged_quant_states(changes, message, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight(64, 128), compress_statistics=True, quant_type="nf4")
    tensors = {"l.weight": codes, **{f"l.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    key = "l.weight.quant_state.bitsandbytes__nf4"
    tensors[key] = marker(**{**json.loads(bytes(tensors[key].tolist())), **changes})
    checkpoint = write(tmp_path / "a.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*l") as caught:
        dequantize_layer(checkpoint, only_layer(checkpoint))
    assert message in str(caught.value)


def test_a_step_is_refused(tmp_path):
    checkpoint = write(tmp_path / "a.safetensors", {"l.weight": weight(8, 8).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="step"):
        dequantize_layer(checkpoint, only_layer(checkpoint), slice(0, 8, 2))
