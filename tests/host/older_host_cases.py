"""What an older ComfyUI does not have itself; ``test_older_host.py`` runs this file there.

Everything here holds in a newer ComfyUI as well, which then takes other ways to it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

LATER = {  # method: (its format, the first ComfyUI with it, largest error against the float layer)
    "comfy_kitchen_int8_w8a8": ("int8_tensorwise", "0.27.0", 0.02),
    "comfy_kitchen_int4_convrot_w4a4": ("convrot_w4a4", "0.28.0", 0.25),
    "comfy_kitchen_int4_w4a8": ("asym_w4a8_int8", "0.31.0", 0.12),
}
NVFP4 = "comfy_kitchen_nvfp4_w4a4"
LAYER = "single_blocks.0.linear1"


def relative(value, target) -> float:
    return ((value.double() - target).norm() / target.norm()).item()


@pytest.fixture
def host(pack):
    """A function that imports a module of the host layer."""
    return lambda name: importlib.import_module(f"{pack.load.__module__.rpartition('.')[0]}.{name}")


@pytest.fixture
def converted(tiny_flux, tmp_path):
    """A function that writes the tiny flux as a file in the format of a method."""
    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    def convert(method):
        convert_file(tiny_flux, tmp_path / f"{method}.safetensors", QuantizeConfig(method=method))
        return tmp_path / f"{method}.safetensors"

    return convert


@pytest.mark.parametrize("method", LATER)
def test_a_later_format_computes_quantized(method, online, converted, make_tiny, flux_output, assert_same):
    """Quantized while loading and from a file: the same model, close to the float formula."""
    import torch

    fresh, stored = online(method), online("comfy_kitchen_fp8_w8a8", path=converted(method))
    assert_same(fresh, stored)
    assert torch.equal(flux_output(fresh), flux_output(stored))
    tensors = make_tiny.state_dict("flux")
    weight, bias = tensors[f"{LAYER}.weight"], tensors[f"{LAYER}.bias"]
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    layer = stored.model.diffusion_model.get_submodule(LAYER)
    with torch.inference_mode():
        error = relative(layer(x), x.double() @ weight.double().T + bias.double())
    assert 0.001 < error < LATER[method][2]
    assert stored.model_size() < 0.8 * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("method", LATER)
def test_a_lora_on_a_part_of_a_model_that_does_not_fit(method, online, flux_output, comfy_idle, weights, assert_same):
    import torch

    plain = online(method)
    before = weights(plain)
    target = "diffusion_model.single_blocks.0.linear2.weight"
    difference = torch.randn(256, 1280, generator=torch.Generator().manual_seed(5)) * 0.1
    outputs = []
    for memory in (0, 1):  # all of it loaded with the LoRA baked in, and nothing of it
        patched = plain.clone()
        patched.add_patches({target: ("diff", (difference,))}, 1.0)
        with torch.inference_mode():
            patched.patch_model(patched.load_device, lowvram_model_memory=memory)
            assert (patched.lowvram_patch_counter() > 0) == bool(memory)
            layer = patched.model.diffusion_model.single_blocks[0].linear2
            outputs.append(layer(torch.eye(1280)).double().T - layer.bias.double().unsqueeze(1))
            patched.unpatch_model(patched.offload_device)
    assert_same(before, plain)
    with torch.inference_mode():
        unpatched = layer(torch.eye(1280)).double().T - layer.bias.double().unsqueeze(1)
    assert relative(outputs[1] - unpatched, difference.double()) < 0.2
    assert relative(outputs[0], outputs[1]) < LATER[method][2]


def test_the_layouts_name_alone_quantizes_a_patched_weight_again(online, host):
    """ComfyUI before 0.27.0 names the layout and nothing else where it streams weights with a LoRA."""
    import torch
    from comfy.quant_ops import QuantizedTensor

    layer = online("torchao_int8_w8a16").model.diffusion_model.get_submodule(LAYER)
    with torch.inference_mode():
        patched = layer.weight.dequantize() + 0.01
        expected = layer.set_weight(patched.clone(), seed=3, return_weight=True)
        with host("compat").requantizing(layer.weight._params.spec):
            arguments = {"scale": "recalculate", "stochastic_rounding": 3}
            again = QuantizedTensor.from_float(patched, layer.layout_type, **arguments)
    assert again._params.spec == layer.weight._params.spec
    assert torch.equal(again._qdata, expected._qdata)
    assert all(torch.equal(*pair) for pair in zip(again._params.tensors(), expected._params.tensors(), strict=True))
    with pytest.raises(LookupError):
        QuantizedTensor.from_float(patched, layer.layout_type, scale="recalculate")


def test_a_smoothed_layer_is_not_misread(online, converted, tmp_path):
    """nvfp4 with ``pre_quant_scale``, by which the layer multiplies its input."""
    import safetensors.torch
    import torch

    plain = converted(NVFP4)
    tensors = safetensors.torch.load_file(plain)
    smoothing = torch.rand(256, generator=torch.Generator().manual_seed(1)) * 2 + 0.25
    safetensors.torch.save_file({**tensors, f"{LAYER}.pre_quant_scale": smoothing}, tmp_path / "smoothed.safetensors")
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        weight = online(NVFP4, path=plain).model.diffusion_model.get_submodule(LAYER).weight.dequantize().double()
        layer = online(NVFP4, path=tmp_path / "smoothed.safetensors").model.diffusion_model.get_submodule(LAYER)
        expected = (x.double() * smoothing.double()) @ weight.T + layer.bias.double()
        assert relative(layer(x), expected) < 0.15


@pytest.mark.parametrize("method", LATER)
def test_a_file_that_only_comfyui_can_read_names_the_version(method, pack, online, converted, tmp_path):
    """A pickled file has no header to read layers by, so its format is left to ComfyUI."""
    import safetensors.torch
    import torch

    from quant_core import CheckpointError

    form, version, _ = LATER[method]
    torch.save(safetensors.torch.load_file(converted(method)), tmp_path / "model.pt")
    if pack.quantizer.is_native(method):
        online(method, path=tmp_path / "model.pt")
        return
    with pytest.raises(CheckpointError, match=rf"model\.pt: .*'{form}'.*needs ComfyUI {version} or newer"):
        online(method, path=tmp_path / "model.pt")


WITHOUT_COMFY_KITCHEN = """
import asyncio, importlib.util, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "comfy_kitchen":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
comfyui, root = sys.argv[1:3]
del sys.argv[1:]
sys.path.insert(0, comfyui)
import comfy.options
comfy.options.enable_args_parsing(False)
import comfy.cli_args
comfy.cli_args.args.cpu = True
try:
    import comfy.quant_ops
except ImportError:
    print("this ComfyUI does not start")
    raise SystemExit
spec = importlib.util.spec_from_file_location("pack", root + "/__init__.py", submodule_search_locations=[root])
door = importlib.util.module_from_spec(spec)
sys.modules["pack"] = door
spec.loader.exec_module(door)
nodes = asyncio.run(asyncio.run(door.comfy_entrypoint()).get_node_list())
print([node.GET_SCHEMA().node_id for node in nodes])
print(nodes[0].execute().args[0])
"""


def test_without_comfy_kitchen(make_tiny):
    """The pack loads, with the node that says what is missing. A newer ComfyUI does not start at all."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMFY_KITCHEN, os.environ["COMFYUI_PATH"], str(Path(__file__).parents[2])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    if "this ComfyUI does not start" not in result.stdout:
        assert "['QuantCore_ListMethods']" in result.stdout
        assert "comfy-kitchen is missing: install it into ComfyUI's Python, pip install comfy-kitchen" in result.stdout
        assert "pip install comfy-kitchen" in result.stderr
