"""Weights of bitsandbytes, torchao and any registered backend inside ComfyUI, against the libraries' own Linears."""

from __future__ import annotations

import importlib

import pytest

METHODS = [
    "bitsandbytes_nf4",
    "bitsandbytes_fp4",
    "torchao_int8_w8a16",
    "torchao_int8_w8a8",
    "torchao_fp8_w8a16",
    "torchao_fp8_w8a8",
    "torchao_int4_w4a16",
    "torchao_int4_w4a8",
    "torchao_mxfp8_w8a8",
    "torchao_mxfp4_w4a4",
    "torchao_nvfp4_w4a4",
    "torchao_nvfp4_w4a16",
]
LAYER = "single_blocks.0.linear1"


@pytest.fixture
def adapter(pack):
    return importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".adapter")


@pytest.fixture
def library_linear(make_tiny):
    """A function that quantizes the tiny flux's layer with the library itself, outside ComfyUI."""
    import torch

    from quant_core import QuantizeConfig

    def make(method, dtype, **options):
        tensors = make_tiny.state_dict("flux")
        linear = torch.nn.Linear(256, tensors[f"{LAYER}.weight"].shape[0])
        linear.weight.data = tensors[f"{LAYER}.weight"]
        linear.bias.data = tensors[f"{LAYER}.bias"]
        config = QuantizeConfig(method=method, backend_config_kwargs=options)
        return config.backend.create_quantized_linear(linear).to(dtype)

    return make


@pytest.fixture
def ours(online):
    def make(method, dtype=None, **options):
        model = online(method, dtype=dtype, **options).model.diffusion_model
        return model.single_blocks[0].linear1

    return make


def test_every_method_that_is_not_comfyuis_is_tested(pack):
    usable = set(pack.quantizer.usable_methods())
    assert {method for method in usable if not pack.quantizer.is_native(method)} <= set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_computes_what_the_library_computes(method, ours, library_linear):
    """Bit for bit, in the three modes that code can run in."""
    import torch

    layer, library = ours(method, torch.bfloat16), library_linear(method, torch.bfloat16)
    x = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    with torch.no_grad():
        expected = library(x)
        assert torch.equal(layer(x), expected)
        assert torch.equal(torch.nn.functional.linear(x, layer.weight, layer.bias), expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
        assert torch.equal(torch.nn.functional.linear(x, layer.weight, layer.bias), expected)
    own, theirs = (x.clone().requires_grad_() for _ in range(2))
    layer(own).float().square().sum().backward()
    library(theirs).float().square().sum().backward()
    assert torch.equal(own.grad, theirs.grad)


@pytest.mark.parametrize("method", METHODS)
def test_the_weight_is_what_the_library_dequantizes_to(method, ours, library_linear):
    import torch

    expected = library_linear(method, torch.float32).dequantize_weight(torch.float32)
    assert torch.equal(ours(method).weight.dequantize(), expected)
    assert torch.equal(ours(method).weight.t().dequantize(), expected.t())


@pytest.mark.parametrize("method", METHODS)
def test_moving_gathering_and_copying_keep_every_byte(method, ours, adapter):
    """As ComfyUI streams a weight: gathered into one buffer of bytes, and taken out of it again."""
    import comfy.memory_management as memory
    import torch

    weight = ours(method).weight
    tensors = [weight._qdata, *weight._params.tensors()]
    buffer = torch.empty(memory.vram_aligned_size([weight]), dtype=torch.uint8)
    view = memory.interpret_gathered_like([weight], buffer)[0]
    view.copy_(weight)
    assert adapter.is_adapted(view)
    copies = [view, weight.clone(), weight.to("cpu", copy=True), weight.to(torch.float16), weight.detach()]
    for copy in copies:
        for one, other in zip([copy._qdata, *copy._params.tensors()], tensors, strict=True):
            assert one.dtype == other.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))
    assert torch.equal(view.dequantize(), weight.dequantize())
    assert copies[3].dequantize().dtype == torch.float16


@pytest.mark.parametrize("method", ["bitsandbytes_nf4", "torchao_int8_w8a8", "torchao_nvfp4_w4a16"])
def test_a_layer_compiles_into_one_graph_with_gradients(method, pack, tiny_flux):
    """Loaded outside inference mode, as ComfyUI's training does it."""
    import torch

    from quant_core import QuantizeConfig

    model = pack.load(str(tiny_flux), QuantizeConfig(method=method))
    layer = model.model.diffusion_model.single_blocks[0].linear1
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(layer(x), compiled(x))
    own, theirs = (x.clone().requires_grad_() for _ in range(2))
    layer(own).square().sum().backward()
    compiled(theirs).square().sum().backward()
    assert torch.allclose(own.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_converted_file_is_the_same_model(method, online, tiny_flux, tmp_path, assert_same, flux_output):
    """The command line's file, read back without a word about the method."""
    import torch

    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    path = tmp_path / "converted.safetensors"
    convert_file(tiny_flux, path, QuantizeConfig(method=method))
    stored, fresh = online("comfy_kitchen_fp8_w8a8", path=path), online(method)
    assert_same(stored, fresh)
    assert torch.equal(flux_output(stored), flux_output(fresh))


def test_options_reach_the_library(ours, library_linear):
    import torch

    method, options = "bitsandbytes_nf4", {"blocksize": 128}
    expected = library_linear(method, torch.float32, **options)
    layer = ours(method, backend_config_kwargs=options)
    assert torch.equal(layer.weight.dequantize(), expected.dequantize_weight(torch.float32))
