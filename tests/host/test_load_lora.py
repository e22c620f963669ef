"""LoRAs beside the layers of a quantized model: exact, chainable, and gone without a trace."""

from __future__ import annotations

import importlib

import pytest

NVFP4 = "comfy_kitchen_nvfp4_w4a4"
INT8 = "comfy_kitchen_int8_w8a8"

# Method: the largest error against the float model with the LoRA, beside the layers and quantized again (measured:
# about nine tenths). The model without a LoRA is as far from the float model as the first.
ERRORS = {
    NVFP4: (0.083, 0.18),
    "comfy_kitchen_int4_convrot_w4a4": (0.153, 0.24),
    INT8: (0.0085, 0.014),
    "comfy_kitchen_fp8_w8a8": (0.0245, 0.046),
}


def relative_error(reference, value) -> float:
    return ((value - reference).norm() / reference.norm()).item()


@pytest.fixture(scope="module")
def host(pack):
    return importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".lora")


def make_lora(make_tiny, seed: int, only: str = "") -> dict:
    """Return a LoRA of every Linear of the tiny flux's blocks, three tenths as large as the weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in make_tiny.state_dict("flux").items():
        if "_blocks." in key and key.endswith(".weight") and weight.ndim == 2 and only in key:
            up = torch.randn(weight.shape[0], 8, generator=generator)
            down = torch.randn(8, weight.shape[1], generator=generator)
            layer = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
            tensors[layer + ".lora_up.weight"] = up * (0.3 * weight.float().norm() / (up @ down).norm())
            tensors[layer + ".lora_down.weight"] = down
            tensors[layer + ".alpha"] = torch.tensor(8.0)
    return tensors


@pytest.fixture(scope="module")
def factors(make_tiny):
    return lambda seed, only="": make_lora(make_tiny, seed, only)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that writes tensors to a file and returns its path."""
    import safetensors.torch

    folder = tmp_path_factory.mktemp("loras")

    def save(name: str, tensors: dict) -> str:
        path = folder / f"{name}.safetensors"
        safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        return str(path)

    return save


@pytest.fixture(scope="module")
def loras(factors, saved):
    return [saved(f"lora{seed}", factors(seed)) for seed in (5, 6)]


@pytest.fixture
def float_model(tiny_flux, comfy_idle):
    import comfy.sd
    import torch

    with torch.inference_mode():
        return comfy.sd.load_diffusion_model(str(tiny_flux), model_options={"dtype": torch.float32})


@pytest.fixture(scope="module")
def stock():
    """A function that adds LoRA files as ComfyUI's own node does."""

    def add(model, *files, clip=None):
        import comfy.sd
        import comfy.utils

        for path, strength in files:
            tensors = comfy.utils.load_torch_file(path)
            model, clip = comfy.sd.load_lora_for_models(model, clip, tensors, strength, strength)
        return model if clip is None else (model, clip)

    return add


@pytest.fixture(scope="module")
def ours(host):
    """A function that adds LoRA files one after another, as a workflow of our nodes does."""
    import torch

    def add(model, *files, mode=host.BYPASS):
        for path, strength in files:
            with torch.inference_mode():
                model = host.add_to_model(model, host.read_lora(path, model), strength, mode)
        return model

    return add


# ------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("mode", ["auto", "bypass", "patch (requantize)"])
def test_a_float_model_gets_what_comfyuis_loader_gives(mode, float_model, loras, stock, ours, flux_output):
    plain = flux_output(float_model)
    for strength in (1.0, -0.6):
        expected = flux_output(stock(float_model, (loras[0], strength)))
        assert relative_error(plain, expected) > 0.1
        assert relative_error(expected, flux_output(ours(float_model, (loras[0], strength), mode=mode))) < 2e-6
    assert relative_error(plain, flux_output(float_model)) == 0


@pytest.mark.parametrize("method", ERRORS)
def test_the_error_beside_the_layers_and_quantized_again(
    method, host, online, float_model, loras, stock, ours, flux_output, weights, assert_same
):
    plain, target = flux_output(float_model), flux_output(stock(float_model, (loras[0], 1.0)))
    quantized = online(method)
    before, floor = weights(quantized), relative_error(plain, flux_output(quantized))
    beside = ours(quantized, (loras[0], 1.0))
    error = relative_error(target, flux_output(beside))
    assert_same(before, weights(beside))
    again = relative_error(target, flux_output(ours(quantized, (loras[0], 1.0), mode=host.PATCH)))
    assert error < min(ERRORS[method][0], 1.25 * floor)
    assert 1.3 * error < again < ERRORS[method][1]
    few_bits = method not in (INT8, "comfy_kitchen_fp8_w8a8")
    chosen = relative_error(target, flux_output(ours(quantized, (loras[0], 1.0), mode=host.AUTO)))
    assert chosen == (error if few_bits else again)


def test_any_backends_weight_is_known_by_its_bits(host, online):
    layer = "single_blocks.0.linear1"
    for method, bits in {NVFP4: 4, INT8: 8, "bitsandbytes_nf4": 4, "torchao_int8_w8a16": 8}.items():
        weight = online(method).model.diffusion_model.get_submodule(layer).weight
        assert host.bits_of_layer(weight) == pytest.approx(bits, abs=0.1)
        assert host.has_few_bits(weight) == (bits == 4)


def test_a_weight_of_another_library(online, host, float_model, loras, stock, ours, flux_output, weights, assert_same):
    target = flux_output(stock(float_model, (loras[0], 1.0)))
    quantized = online("bitsandbytes_nf4")
    before = weights(quantized)
    added = ours(quantized, (loras[0], 1.0), mode=host.AUTO)
    assert relative_error(target, flux_output(added)) < 0.11
    assert_same(before, weights(added))


@pytest.mark.parametrize("files", [(0, 1), (0, 0), (1, 0, 1)])
def test_chained_loras_add_up(files, float_model, loras, stock, ours, flux_output):
    chosen = [(loras[number], 0.5 + number / 4) for number in files]
    expected = flux_output(stock(float_model, *chosen))
    added = ours(float_model, *chosen)
    assert relative_error(expected, flux_output(added)) < 2e-6
    assert len(added.injections) == len(files)
    assert relative_error(flux_output(stock(float_model, *chosen[:1])), expected) > 0.05


def test_comfyuis_own_bypass_may_come_before_or_after(float_model, loras, stock, ours, flux_output, comfy_idle):
    import comfy.sd
    import comfy.utils

    def theirs(model, path):
        return comfy.sd.load_bypass_lora_for_models(model, None, comfy.utils.load_torch_file(path), 1.0, 0)[0]

    expected = flux_output(stock(float_model, *((path, 1.0) for path in loras)))
    for added in (
        theirs(ours(float_model, (loras[0], 1.0)), loras[1]),
        ours(theirs(float_model, loras[1]), (loras[0], 1)),
    ):
        for _ in range(2):
            assert relative_error(expected, flux_output(added)) < 2e-6
            comfy_idle.unload_all_models()


# ------------------------------------------------------------------ kinds of LoRA


def _kinds(torch, layer: str) -> dict[str, dict]:
    """LoRA files of every kind for one fused layer ``[768, 256]`` and its bias."""
    generator = torch.Generator().manual_seed(8)

    def rand(*shape):
        return torch.randn(shape, generator=generator) / 6

    diffusers = "transformer.transformer_blocks.0.attn."
    low = {"lora_B.weight": rand(768, 4), "lora_A.weight": rand(4, 256)}
    split = {}
    for part in ("to_q", "to_k", "to_v"):
        split |= {f"{diffusers}{part}.lora_A.weight": rand(4, 256), f"{diffusers}{part}.lora_B.weight": rand(256, 4)}
    hada = {f"hada_w{i}_{n}": rand(*s) for i in (1, 2) for n, s in (("a", (768, 4)), ("b", (4, 256)))}
    kinds = {
        "no alpha": low,
        "alpha": {**low, "alpha": torch.tensor(2.0)},
        "loha": {**hada, "alpha": torch.tensor(20.0)},
        "lokr": {"lokr_w1": rand(16, 8), "lokr_w2": rand(48, 32), "alpha": torch.tensor(2.0)},
        "lokr of factors": {
            **{"lokr_w1_a": rand(16, 3), "lokr_w1_b": rand(3, 8)},
            **{"lokr_w2_a": rand(48, 3), "lokr_w2_b": rand(3, 32), "alpha": torch.tensor(20.0)},
        },
        "difference": {"diff": rand(768, 256) / 6},
    }
    named = {kind: {f"diffusion_model.{layer}.{name}": t for name, t in part.items()} for kind, part in kinds.items()}
    lokr = {
        f"lycoris_transformer_blocks_0_attn_to_k.{n}": t
        for n, t in (("lokr_w1", rand(8, 8)), ("lokr_w2", rand(32, 32)))
    }
    return {**named, "diffusers": split, "lokr of a part": lokr}


LAYER = "double_blocks.0.img_attn.qkv"
BESIDE = ["no alpha", "alpha", "loha", "lokr", "lokr of factors", "difference", "diffusers", "lokr of a part"]


@pytest.mark.parametrize("kind", BESIDE)
def test_every_linear_kind_lies_beside_the_layer(
    kind, saved, float_model, online, stock, ours, flux_output, weights, assert_same
):
    import torch

    path = saved(kind, _kinds(torch, LAYER)[kind])
    plain, expected = flux_output(float_model), flux_output(stock(float_model, (path, 0.7)))
    assert relative_error(plain, expected) > 0.005
    added = ours(float_model, (path, 0.7))
    assert not added.patches and len(added.injections) == 1
    assert relative_error(expected, flux_output(added)) < 2e-6

    quantized = online(INT8)
    before = weights(quantized)
    beside = ours(quantized, (path, 0.7))
    assert not beside.patches
    assert relative_error(expected, flux_output(beside)) < 0.012
    assert_same(before, weights(beside))


def test_what_needs_the_weight_is_patched_and_named(
    saved, factors, online, float_model, stock, ours, flux_output, caplog
):
    import torch

    tensors = factors(5, only=LAYER)
    stem = "lora_unet_" + LAYER.replace(".", "_")
    tensors[stem + ".dora_scale"] = torch.full((768, 1), 1.5)
    tensors[stem + ".diff_b"] = torch.full((768,), 0.1)
    tensors["diffusion_model.img_in.lora_A.weight"] = torch.randn(4, 64) / 8
    tensors["diffusion_model.img_in.lora_B.weight"] = torch.randn(256, 4) / 8
    tensors["diffusion_model.double_blocks.0.img_attn.norm.query_norm.scale.diff"] = torch.full((128,), 0.2)
    path = saved("needs_the_weight", tensors)
    target = flux_output(stock(float_model, (path, 1.0)))
    added = ours(online(NVFP4), (path, 1.0), mode="auto")
    assert "1 quantized layers are changed by DoRA" in caplog.text and LAYER in caplog.text
    assert not added.injections
    assert relative_error(target, flux_output(added)) < 0.2
    assert relative_error(target, flux_output(ours(float_model, (path, 1.0)))) < 2e-6


# ------------------------------------------------------------------ loading, unloading, copies


def test_it_survives_whatever_comfyui_does_with_a_model(
    online, loras, ours, flux_output, make_tiny, weights, assert_same, comfy_idle
):
    """Copies, partial loading and unloading, and unloading between two runs; inference mode as ComfyUI has it."""
    import torch

    base = online(NVFP4)
    plain, before = flux_output(base), weights(base)
    added = ours(base, *((path, 0.8) for path in loras))
    expected = flux_output(added)
    assert not torch.equal(plain, expected)
    assert torch.equal(flux_output(added.clone()), expected)
    assert torch.equal(flux_output(base), plain)

    comfy_idle.unload_all_models()
    assert torch.equal(flux_output(added), expected)
    comfy_idle.unload_all_models()
    cpu = torch.device("cpu")
    added.patch_model(cpu, lowvram_model_memory=added.model_size() // 2)
    assert any(getattr(module, "prev_comfy_cast_weights", None) is not None for module in added.model.modules())
    with torch.inference_mode():
        low = make_tiny.forward(added, "flux")
    assert relative_error(expected, low) < 0.02
    added.partially_load(cpu, added.model_size())
    added.partially_unload(cpu, added.model_size() // 3)
    with torch.inference_mode():
        assert relative_error(expected, make_tiny.forward(added, "flux")) < 0.02
    added.detach()
    assert not any(module._forward_hooks for module in added.model.modules())
    assert torch.equal(flux_output(base), plain)
    assert_same(before, base)


def test_a_copy_of_a_loaded_model_leaves_nothing_in_it(online, loras, ours, flux_output):
    """A patch that a later node adds to a copy switches the copy's LoRAs on in the model that all copies share."""
    import torch

    first = ours(online(NVFP4), (loras[0], 1.0))
    expected = flux_output(first)
    second = ours(first, (loras[1], 1.0)).clone()
    second.add_patches({"diffusion_model.img_in.bias": ("diff", (torch.zeros(256),))})
    assert torch.equal(flux_output(first), expected)
    assert not torch.equal(flux_output(second), expected)
    assert torch.equal(flux_output(first), expected)


@pytest.mark.parametrize("method", [INT8, NVFP4])
def test_gradients_pass_through(method, pack, tiny_flux, loras, ours, comfy_idle):
    """The LoRA is read in inference mode, as in a workflow, and training has that switched off."""
    import torch

    from quant_core import QuantizeConfig

    added = ours(pack.load(str(tiny_flux), QuantizeConfig(method=method)), (loras[0], 1.0))
    comfy_idle.load_models_gpu([added])
    layer = added.model.diffusion_model.single_blocks[0].linear1
    x = torch.randn(4, 256, requires_grad=True)
    layer(x).sum().backward()
    (function,) = [*layer._forward_hooks.values(), *layer.weight_function]
    beside = function.__self__
    (down, up), scale = beside._tensors[0], beside._parts[0].scale
    dense = layer.weight.dequantize().double() + scale * up.double() @ down.double()
    assert torch.allclose(x.grad.double(), dense.sum(0).expand(4, -1), rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------ names


def test_what_matches_nothing_is_named(host, saved, factors, float_model, caplog):
    import torch

    tensors = factors(5)
    stem = "lora_unet_single_blocks_0_linear"
    tensors |= {stem + ".lora_up.weight": torch.zeros(768, 2), stem + ".lora_down.weight": torch.zeros(2, 256)}
    encoder = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    tensors |= {encoder + ".lora_up.weight": torch.zeros(768, 2), encoder + ".lora_down.weight": torch.zeros(2, 256)}
    with caplog.at_level("INFO"):
        host.read_lora(saved("one_unknown", tensors), float_model)
    assert "1 of " in caplog.text and f"'{stem}' (the nearest name is 'lora_unet_single_blocks_0_linear" in caplog.text
    assert "1 layers of a text encoder are not used" in caplog.text


def test_errors_say_what_is_wrong(host, saved, factors, float_model, ours):
    import torch

    from quant_core import CheckpointError

    down, up = torch.zeros(4, 64), torch.zeros(64, 4)
    cases = {
        "none_fits": (
            {"lora_unet_blocks_0_attn.lora_up.weight": up, "lora_unet_blocks_0_attn.lora_down.weight": down},
            "Flux.*lora_unet_blocks_0_attn",
        ),
        "encoder": ({"lora_te1_x.lora_up.weight": up, "lora_te1_x.lora_down.weight": down}, "Connect the CLIP"),
        "a_model": ({"blocks.0.weight": up}, "is not a LoRA"),
        "half": ({f"diffusion_model.{LAYER}.lora_B.weight": torch.zeros(768, 4)}, "incomplete.*lora_A"),
        "size": (
            {f"diffusion_model.{LAYER}.lora_B.weight": up, f"diffusion_model.{LAYER}.lora_A.weight": down},
            "768 x 256, the LoRA 64 x 64",
        ),
    }
    for name, (tensors, expected) in cases.items():
        with pytest.raises(CheckpointError, match=f"{name}.*{expected}"):
            ours(float_model, (saved(name, tensors), 1.0))
    path = saved("cut", factors(5))
    with open(path, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match="cut.safetensors cannot be read"):
        host.read_lora(path, float_model)


# ------------------------------------------------------------------ a stock LoRA in 4-bit layers


def test_a_stock_lora_in_4_bit_layers_is_warned_of_once(host, online, loras, stock, flux_output, caplog):
    for method, expected in ((NVFP4, 1), (INT8, 0)):
        caplog.clear()
        model = online(method)
        model.callbacks.clear()
        host.watch_patches(model)
        flux_output(model)
        assert "about 4 bits" not in caplog.text
        for path in loras:
            flux_output(stock(model, (path, 1.0)))
        assert caplog.text.count("about 4 bits") == expected
