"""The good files that the fuzz tests damage: one of every kind of checkpoint that is read."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quant_core import QuantizeConfig, save_quantized_model
from quant_core.convert import convert
from quant_core.plan import plan

INT8 = "comfy_kitchen_int8_w8a8"
NATIVE = (
    INT8,
    "comfy_kitchen_fp8_w8a8",
    "comfy_kitchen_mxfp8_w8a8",
    "comfy_kitchen_nvfp4_w4a4",
    "comfy_kitchen_int4_convrot_w4a4",
    "comfy_kitchen_int4_w4a8",
)
OTHERS = (
    "bitsandbytes_nf4",
    "torchao_int8_w8a16",
    "torchao_fp8_w8a16",
    "torchao_int4_w4a16",
    "torchao_nvfp4_w4a16",
)
LAYERS = ["blocks.0.up", "blocks.0.down"]


class SmallModel(nn.Module):
    """One block between a projection in and a head: as little as shows every way to store a layer."""

    def __init__(self):
        super().__init__()
        self.proj_in = nn.Linear(16, 256)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(256, 256), "down": nn.Linear(256, 256, False)})])
        self.norm = nn.LayerNorm(256)


def small_model():
    torch.manual_seed(0)
    return SmallModel().bfloat16()


def write_seeds(folder):
    """Write the files; return ``{kind: path}``. ``float`` is the source that the others were made from."""
    seeds = {"float": folder / "float.safetensors"}
    state = small_model().state_dict()
    save_file(state, seeds["float"], metadata={"format": "pt"})
    for method in (*NATIVE, *OTHERS):
        seeds[method] = folder / f"{method}.safetensors"
        config = QuantizeConfig(method=method, target_modules=LAYERS)
        model = small_model()
        config.quantize_model(model)
        save_quantized_model(model, config, seeds[method])
    for method in (INT8, "comfy_kitchen_nvfp4_w4a4"):
        seeds[f"{method} markers"] = folder / f"{method}-markers.safetensors"
        save_file(load_file(seeds[method]), seeds[f"{method} markers"])
    _metadata_markers(folder, seeds)
    _legacy(folder, seeds, state)
    _several_files(folder, seeds)
    seeds["gguf"] = _gguf(folder / "model.gguf", state)
    return seeds


def _metadata_markers(folder, seeds):
    tensors = load_file(seeds["comfy_kitchen_fp8_w8a8"])
    markers = {
        name.removesuffix(".comfy_quant"): json.loads(bytes(tensors.pop(name).tolist()))
        for name in [name for name in tensors if name.endswith(".comfy_quant")]
    }
    seeds["metadata markers"] = folder / "metadata.safetensors"
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    metadata = {"_quantization_metadata": json.dumps({"layers": markers})}
    save_file(tensors, seeds["metadata markers"], metadata=metadata)


def _legacy(folder, seeds, state):
    """scaled_fp8, a plain cast, bitsandbytes in 8 bits, and a format of convert_to_quant."""
    codes = state["blocks.0.up.weight"].to(torch.float8_e4m3fn)
    scale = torch.ones(())
    rest = {name: tensor for name, tensor in state.items() if name != "blocks.0.up.weight"}
    flag = torch.empty(0, dtype=torch.float8_e4m3fn)
    marker = torch.tensor(list(b'{"format": "int8_blockwise"}'), dtype=torch.uint8)
    int8 = torch.randint(-127, 128, (256, 256), dtype=torch.int8)
    kinds = {
        "scaled_fp8": {"weight": codes, "scale_weight": scale, "scale_input": scale.clone()},
        "fp8 cast": {"weight": codes},
        "bitsandbytes int8": {"weight": int8, "SCB": torch.ones(256)},
        "convert_to_quant": {"weight": int8, "weight_scale": torch.ones(2, 2), "comfy_quant": marker},
    }
    for kind, parts in kinds.items():
        seeds[kind] = folder / f"{kind.replace(' ', '-')}.safetensors"
        tensors = {**rest, **{f"blocks.0.up.{key}": tensor for key, tensor in parts.items()}}
        save_file({**tensors, "scaled_fp8": flag} if kind == "scaled_fp8" else tensors, seeds[kind])


def _several_files(folder, seeds):
    for kind, target in (
        ("shards", folder / "shards" / "model.safetensors"),
        ("diffusers", folder / "diffusers" / "transformer" / "diffusion_pytorch_model.safetensors"),
    ):
        made = plan(seeds["float"], QuantizeConfig(method=INT8, target_modules=LAYERS))
        convert(made, target, shard_size=80_000)
        seeds[kind] = folder / kind
    (folder / "diffusers" / "transformer" / "config.json").write_text('{"_class_name": "Tiny", "num_layers": 1}')


def _gguf(path, state):
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFWriter, quants

    writer = GGUFWriter(path, "flux")
    writer.add_string("general.name", "small")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("comfy.gguf.orig_shape.norm.weight", [256])
    for name, kind in (("blocks.0.up.weight", Type.Q8_0), ("blocks.0.down.weight", Type.Q4_0)):
        writer.add_tensor(name, quants.quantize(state[name].float().numpy(), kind), raw_dtype=kind)
    writer.add_tensor("proj_in.weight", state["proj_in.weight"].view(torch.uint8).numpy(), raw_dtype=Type.BF16)
    writer.add_tensor("norm.weight", state["norm.weight"].float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
