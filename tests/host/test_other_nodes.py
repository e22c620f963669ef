"""A quantized model among what other nodes do to a model: ControlNet, patches of attention, samplings, compilation."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

# Method: the largest error against the float model under the same node; four thirds of what was measured.
METHODS = {
    "comfy_kitchen_int8_w8a8": 0.012,
    "comfy_kitchen_nvfp4_w4a4": 0.11,
    "bitsandbytes_nf4": 0.11,
    "torchao_int8_w8a8": 0.020,
}


def relative_error(reference, value) -> float:
    assert value.isfinite().all()
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def share(plain, target, output) -> float:
    """How much of the way from ``plain`` to ``target`` lies in ``output``: 0 where what the node does is lost."""
    way = (target - plain).double()
    return (((output - plain).double() * way).sum() / way.square().sum()).item()


@pytest.fixture(scope="module")
def files(make_tiny, tmp_path_factory):
    """A function that returns the file of a tiny model, written once."""
    folder = tmp_path_factory.mktemp("models")

    def path(name: str):
        file = folder / f"{name}.safetensors"
        return file if file.exists() else make_tiny.write(name, file)

    return path


@pytest.fixture
def compare(make_tiny, files, stock_load, online, comfy_idle):
    """A function that samples the float and the quantized model as a node leaves them, and compares the two.

    Each node has to change what is sampled, and by as much in the quantized model as in the float one.
    """
    import torch

    def run(name: str, method: str, node, inputs=None, changed: Any = None) -> None:
        model, quantized = stock_load(files(name)), online(method, files(name))
        with torch.inference_mode():
            plain = make_tiny.sample(model, name, inputs=inputs)
            target = make_tiny.sample(node(model), name, inputs=changed or inputs)
            before = make_tiny.sample(quantized, name, inputs=inputs)
            output = make_tiny.sample(node(quantized), name, inputs=changed or inputs)
            after = make_tiny.sample(quantized, name, inputs=inputs)
        assert relative_error(plain, target) > 0.05
        assert 0 < relative_error(target, output) < METHODS[method]
        assert abs(share(plain, target, output) - 1) < 2 * METHODS[method]
        assert torch.equal(before, after)

    return run


@pytest.fixture(scope="module")
def control_net(make_tiny):
    """A ControlNet for the tiny SD1.5, with random weights."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops
    import torch

    config = {
        key: v for key, v in make_tiny.CONFIGS["sd15"].unet_config.items() if key not in ("out_channels", "legacy")
    }
    config = {**config, "num_heads": 8, "num_head_channels": -1, "hint_channels": 3, "legacy": False}
    del config["transformer_depth_output"]
    net = comfy.cldm.cldm.ControlNet(
        **config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        parameter.requires_grad_(False).copy_(make_tiny.random_like(parameter, generator))
    return comfy.controlnet.ControlNet(net, load_device=torch.device("cpu"))


@pytest.mark.parametrize("method", METHODS)
def test_control_net(method, compare, control_net, make_tiny):
    import torch

    given = make_tiny.forward_inputs("sd15")
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    control = control_net.copy().set_cond_hint(hint, 0.5, (0.0, 1.0))
    changed = given._replace(extra={**given.extra, "control": control, "control_apply_to_uncond": True})
    compare("sd15", method, lambda model: model.clone(), given, changed)


@pytest.mark.parametrize("method", METHODS)
def test_attention_to_an_image(method, compare):
    """As IP-Adapter nodes do it: further keys and values beside those of the text."""
    import torch
    from comfy.ldm.modules.attention import optimized_attention

    generator = torch.Generator().manual_seed(5)
    key, value = (torch.randn(1, 4, 320, generator=generator) * 2 for _ in range(2))

    def attend(q, k, v, extra):
        heads = extra["n_heads"]
        image = optimized_attention(q, key.expand(len(q), -1, -1).to(q), value.expand(len(q), -1, -1).to(q), heads)
        return optimized_attention(q, k, v, heads) + image

    def node(model):
        patched = model.clone()
        for block in [("input", 1), ("middle", 0), ("output", 0), ("output", 1)]:
            patched.set_model_attn2_replace(attend, *block)
        patched.set_model_attn1_output_patch(lambda out, extra: out * 1.5)
        return patched

    compare("sd15", method, node)


@pytest.mark.parametrize("method", METHODS)
def test_a_replaced_block(method, compare):
    """As nodes for Flux do it; the original block, which is quantized, is called from within."""

    def replace(arguments, original):
        result = original["original_block"](arguments)
        return {**result, "img": result["img"] * 1.25}

    def node(model):
        patched = model.clone()
        patched.set_model_patch_replace(replace, "dit", "double_block", 0)
        return patched

    compare("flux", method, node)


SAMPLINGS = {
    "flux": lambda nodes, model: nodes.ModelSamplingFlux().patch(model, 1.5, 0.6, 512, 512)[0],
    "wan": lambda nodes, model: nodes.ModelSamplingSD3().patch(model, 3.0)[0],
    "sd15": lambda nodes, model: nodes.ModelSamplingDiscrete().patch(model, "v_prediction", True)[0],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_another_sampling(name, method, compare):
    import comfy_extras.nodes_model_advanced as nodes

    compare(name, method, lambda model: SAMPLINGS[name](nodes, model))


@pytest.fixture
def one_block(make_tiny, tmp_path):
    """A function that writes a tiny model of one block of each kind: a compiler takes its time for each."""
    return lambda name: make_tiny.write(name, tmp_path / f"{name}.safetensors", changes=make_tiny.ONE_BLOCK[name])


COMPILED = [("flux", "comfy_kitchen_int8_w8a8"), ("wan", "comfy_kitchen_nvfp4_w4a4"), ("flux", "bitsandbytes_nf4")]


@pytest.mark.parametrize(("name", "method"), COMPILED)
def test_traced(name, method, one_block, online, make_tiny, comfy_idle):
    """As TorchCompileModel does it, with a compiler that traces the graph and its shapes and runs PyTorch's kernels."""
    import torch
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = online(method, one_block(name))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch.inference_mode():
        expected = make_tiny.sample(model, name)
        compiled = model.clone(disable_dynamic=True)
        set_torch_compile_wrapper(model=compiled, backend="aot_eager")
        output = make_tiny.sample(compiled, name)
        again = make_tiny.sample(model, name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert relative_error(expected, output) < 0.1 * METHODS[method]
    assert torch.equal(again, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, which torch.compile uses on a CPU")
def test_the_node_that_compiles(one_block, online, make_tiny, comfy_idle):
    import torch
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    model = online("bitsandbytes_nf4", one_block("wan"))
    torch.compiler.reset()
    with torch.inference_mode():
        expected = make_tiny.sample(model, "wan")
        output = make_tiny.sample(TorchCompileModel.execute(model, "inductor").args[0], "wan")
    assert relative_error(expected, output) < 0.1 * METHODS["bitsandbytes_nf4"]
