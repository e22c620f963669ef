"""A quantization method that another node pack brings: listed, and hosted, saved and loaded as the built-in ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

METHOD = "toy_int9_w9a16"
TOY = Path(__file__).resolve().parents[1] / "toy_int9.py"
TARGET = "diffusion_model.single_blocks.0.linear2.weight"


@pytest.fixture(scope="module", autouse=True)
def other_pack(pack, tmp_path_factory):
    """A folder of custom_nodes that ComfyUI has loaded; its module registers the method when it is asked to."""
    import importlib.util

    folder = tmp_path_factory.mktemp("custom_nodes") / "int9"
    folder.mkdir()
    (folder / "toy_int9.py").write_text(TOY.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "__init__.py").write_text("def register_quant_backends():\n    from . import toy_int9\n")
    spec = importlib.util.spec_from_file_location(
        "quantcore_test_int9", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["quantcore_test_int9"] = module
    spec.loader.exec_module(module)
    before = sys.modules.get("nodes")
    sys.modules["nodes"] = before or SimpleNamespace(LOADED_MODULE_DIRS={})
    sys.modules["nodes"].LOADED_MODULE_DIRS["int9"] = str(folder)
    yield
    del sys.modules["nodes"].LOADED_MODULE_DIRS["int9"]
    if before is None:
        del sys.modules["nodes"]


def test_the_method_is_in_the_list(pack):
    assert METHOD in pack.quantizer.usable_methods()
    schema = pack.nodes["QuantCore_LoadDiffusionModel"].define_schema()
    assert METHOD in next(widget for widget in schema.inputs if widget.id == "method").options


def test_it_computes_with_the_weights_that_the_format_has(online, make_tiny):
    """Nine bits and one scale a row, by the formula in float64."""
    import torch

    layer = online(METHOD).model.diffusion_model.single_blocks[0].linear1
    exact = make_tiny.state_dict("flux")["single_blocks.0.linear1.weight"].double()
    scale = exact.abs().amax(1, keepdim=True) / 255
    weight = (exact / scale).round() * scale
    assert ((layer.weight.dequantize().double() - weight).norm() / weight.norm()).item() < 1e-3
    x = torch.randn(3, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = x @ weight.T + layer.bias.double()
        assert ((layer(x.float()).double() - expected).norm() / expected.norm()).item() < 1e-3


def test_it_is_counted_unloaded_patched_and_restored(online, flux_output, comfy_idle, weights, assert_same):
    import torch

    patcher = online(METHOD)
    held = sum(tensor.nbytes for tensor in weights(patcher).values())
    assert abs(patcher.model_size() - held) < 0.01 * held
    plain, before = flux_output(patcher), weights(patcher)
    with torch.inference_mode():
        patched = patcher.clone()
        patched.add_patches({TARGET: ("diff", (torch.ones(256, 1280) * 0.1,))}, 1.0)
        comfy_idle.load_models_gpu([patched], force_full_load=True)
        assert not torch.equal(flux_output(patched), plain)
    comfy_idle.unload_all_models()
    with torch.inference_mode():
        assert torch.equal(flux_output(patcher), plain)
    assert_same(before, patcher)


def test_its_file_is_loaded_again_whoever_wrote_it(online, pack, tiny_flux, tmp_path, assert_same):
    """From the command line's converter, and from the node that saves."""
    import importlib

    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    save = importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".saving").save_model
    fresh = online(METHOD, backend_config_kwargs={"per_channel": False})
    recipe = QuantizeConfig(method=METHOD, backend_config_kwargs={"per_channel": False})
    convert_file(tiny_flux, tmp_path / "cli.safetensors", recipe)
    save(tmp_path / "node.safetensors", fresh)
    for name in ("cli.safetensors", "node.safetensors"):
        assert_same(fresh, online(path=tmp_path / name))
