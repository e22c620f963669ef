"""Recipes: validation at construction, the matching rule, and what is decided before a model is touched."""

import json

import pytest
import torch
import toy_int9  # noqa: F401 -- registers toy_int9_w9a16
from tiny_models import ALL_LINEARS, BLOCK_LINEARS, tiny_model
from torch import nn

from quant_core import (
    QUANT_METHODS,
    MixedQuantizeConfig,
    PackedLinear,
    QuantBackend,
    QuantizationError,
    QuantizeConfig,
    recipe_from_dict,
    register_quant_backend,
    register_quant_method,
)

METHOD = "toy_int9_w9a16"


def config(**kwargs):
    return QuantizeConfig(method=METHOD, **kwargs)


def quantized_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


# ---------------------------------------------------------------- construction


def test_unknown_method_names_the_nearest():
    with pytest.raises(
        ValueError,
        match=r"unknown quantization method 'bitsandbytes_nf5'.*Did you mean 'bitsandbytes_nf4'.*--import MODULE",
    ):
        QuantizeConfig(method="bitsandbytes_nf5")


def test_method_is_required():
    with pytest.raises(ValueError, match="method is required"):
        QuantizeConfig()


def test_unknown_option_lists_the_accepted_ones():
    with pytest.raises(
        ValueError, match=r"does not accept 'per_chanel'. Accepted: per_channel. Did you mean 'per_channel'"
    ):
        config(backend_config_kwargs={"per_chanel": True})


def test_pinned_option_is_refused():
    with pytest.raises(ValueError, match="does not accept 'bits'"):
        config(backend_config_kwargs={"bits": 8})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mode": "static"}, "mode must be one of dynamic, dequant_once"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": "fc1"}, "must be a list of layer names"),
        ({"exclude_modules": [3]}, "not a layer name"),
        ({"exclude_modules": [""]}, "not a layer name"),
        ({"load_prequantized": "false"}, "load_prequantized must be True or False"),
        ({"backend_config_kwargs": 5}, "must map option names to values"),
        ({"backend_config_kwargs": "abc"}, "must map option names to values"),
    ],
)
def test_bad_fields(kwargs, message):
    with pytest.raises(ValueError, match=message):
        config(**kwargs)


def test_missing_library_says_how_to_install(tmp_path):
    # A Python without the library: an empty folder in front makes the import fail as it does there.
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['bitsandbytes'] = None\n"
        "from quant_core import QuantizeConfig\n"
        "try: QuantizeConfig(method='bitsandbytes_nf4')\n"
        "except ImportError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 'pip install "bitsandbytes>=0.50"' in out


# ---------------------------------------------------------------- which layers


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, ALL_LINEARS),
        ({"target_modules": ["up"]}, ["blocks.0.up", "blocks.1.up"]),
        ({"target_modules": ["0.up"]}, ["blocks.0.up"]),
        ({"target_modules": ["blocks.0.up", "head"]}, ["blocks.0.up", "head"]),
        ({"exclude_modules": ["proj_in", "head"]}, BLOCK_LINEARS),
        ({"target_modules": ["up", "down"], "exclude_modules": ["1.down"]}, BLOCK_LINEARS[:3]),
    ],
)
def test_matching_rule(kwargs, expected):
    model = tiny_model()
    assert config(**kwargs).quantize_model(model) == expected
    assert quantized_names(model) == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"target_modules": ["upp"]}, r"target_modules entry 'upp' matches no layer.*up"),
        ({"exclude_modules": ["blocks.7.up"]}, r"exclude_modules entry 'blocks.7.up' matches no layer.*blocks.1.up"),
        ({"exclude_modules": ["p"]}, "matches no layer"),  # the end of a name counts after a dot only
        (
            {"exclude_modules": ["blocks.0"]},
            r"is a Block, not a Linear; name its Linears instead: blocks.0.up, blocks.0.down",
        ),
        ({"target_modules": ["norm"]}, "is a LayerNorm, not a Linear"),
        ({"exclude_modules": ALL_LINEARS}, "no layer of TinyModel is left to quantize"),
    ],
)
def test_entries_that_do_nothing_are_errors(kwargs, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        config(**kwargs).quantize_model(model)
    assert quantized_names(model) == []


def test_excluding_a_norm_is_harmless():
    assert config(exclude_modules=["norm"]).quantize_model(tiny_model()) == ALL_LINEARS


def test_model_without_linears():
    with pytest.raises(ValueError, match="Conv2d has no nn.Linear"):
        config().quantize_model(nn.Conv2d(3, 3, 1))


def test_root_linear():
    with pytest.raises(ValueError, match=r"itself a Linear.*torch.nn.Sequential\(linear\)"):
        config().quantize_model(nn.Linear(8, 8))


def test_zero_element_weight_is_kept():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 0))
    assert config().quantize_model(model) == ["0"]
    with pytest.raises(ValueError, match=r"'1' cannot be quantized: its weight \[0, 8\] has no elements"):
        config(target_modules=["1"]).quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 0)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weight_is_refused_and_nothing_changes(value):
    model = tiny_model()
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] = value
    with pytest.raises(QuantizationError, match=r"'blocks.1.up': the weight holds NaN or infinity.*exclude_modules"):
        config().quantize_model(model)
    assert quantized_names(model) == []


@pytest.mark.parametrize("value", [5e37, 3e38, 1e300])
def test_weights_beyond_the_arithmetic_are_refused(value):
    model = tiny_model(torch.float64)
    with torch.no_grad():
        model.head.weight[0, 0] = value
    with pytest.raises(QuantizationError, match=r"'head': the weight holds values up to .*, beyond 1e\+30"):
        config().quantize_model(model)


def test_weights_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"no weights yet \(meta device\), first '0': call load_state_dict"):
        config().quantize_model(model)


@pytest.mark.parametrize("device", ["xpu", "mps", "hpu", "meta"])
def test_unavailable_device(device):
    with pytest.raises(
        ValueError, match=f"compute_device '{device}' (is not available here|holds no values)"
    ) as caught:
        config().quantize_model(tiny_model(), compute_device=device)
    assert len(str(caught.value)) < 250


# ---------------------------------------------------------------- special Linears


def test_one_linear_under_two_names_is_replaced_at_both():
    model = nn.Module()
    model.a = nn.Linear(16, 16)
    model.b = nn.ModuleDict({"again": model.a})
    assert config().quantize_model(model) == ["a"]
    assert isinstance(model.a, PackedLinear)
    assert model.b["again"] is model.a


def test_excluding_either_name_keeps_a_shared_linear():
    model = nn.Module()
    model.a = nn.Linear(16, 16)
    model.b = nn.ModuleDict({"again": model.a})
    model.c = nn.Linear(16, 16)
    assert config(exclude_modules=["again"]).quantize_model(model) == ["c"]


def test_weight_tied_to_an_embedding_is_kept():
    model = nn.Module()
    model.embed = nn.Embedding(32, 16)
    model.fc = nn.Linear(16, 16)
    model.lm_head = nn.Linear(16, 32, bias=False)
    model.lm_head.weight = model.embed.weight
    assert config().quantize_model(model) == ["fc"]
    assert model.lm_head.weight is model.embed.weight
    with pytest.raises(ValueError, match="tied to embed.weight"):
        config(target_modules=["lm_head"]).quantize_model(model)


def test_weight_tied_between_two_linears_quantizes_both_alike():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    assert config().quantize_model(model) == ["0", "1"]
    assert torch.equal(model[0].weight, model[1].weight)


def test_subclass_keeps_its_forward():
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(16, 16), Doubling(16, 16))
    assert config().quantize_model(model) == ["0"]
    assert type(model[1]) is Doubling
    with pytest.raises(ValueError, match="'1' cannot be quantized: it is a Doubling"):
        config(target_modules=["1"]).quantize_model(model)


def test_multihead_attention_still_runs():
    model = nn.Module()
    model.attention = nn.MultiheadAttention(16, 2)
    model.fc = nn.Linear(16, 16)
    assert config().quantize_model(model) == ["fc"]
    x = torch.randn(3, 1, 16)
    model.attention.eval()(x, x, x)
    with pytest.raises(ValueError, match="output projection of a MultiheadAttention"):
        config(target_modules=["out_proj"]).quantize_model(model)


def test_weight_norm_is_kept():
    model = nn.Sequential(nn.Linear(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    assert config().quantize_model(model) == ["0"]
    model(torch.randn(1, 16))


def test_hooks_and_training_flag_move_to_the_new_layer():
    model = tiny_model().eval()
    model.blocks[0].train()
    seen = []
    handle = model.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    model.blocks[0].up.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    config().quantize_model(model)
    assert model.blocks[0].up.training
    assert not model.blocks[1].up.training
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    model(x)
    assert seen == ["Int9Linear"]
    handle.remove()
    model(x)
    assert seen == ["Int9Linear"]


# ---------------------------------------------------------------- failures leave the model as it was


@register_quant_backend("failing")
class FailingBackend(QuantBackend):
    """Fails on the layer whose out_features is the number that the config holds."""

    def create_quantized_linear(self, linear, compute_device=None, model_device=None):
        if linear.out_features == self.config["out"]:
            raise self.config.get("error", RuntimeError)("the kernel gave up")
        return nn.Identity()


register_quant_method("failing_w8a16", "failing", dict)


def test_failure_midway_restores_every_layer():
    model = tiny_model()
    before = {name: id(module) for name, module in model.named_modules()}
    failing = QuantizeConfig(method="failing_w8a16", backend_config_kwargs={"out": 32})  # the head, the last one
    with pytest.raises(
        QuantizationError, match=r"layer 'head' \[32, 256\] torch.bfloat16: failing_w8a16 failed: the kernel gave up"
    ):
        failing.quantize_model(model)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_a_backend_that_makes_nothing_is_named():
    @register_quant_backend("empty")
    class EmptyBackend(QuantBackend):
        def create_quantized_linear(self, linear, compute_device=None, model_device=None):
            pass

    register_quant_method("empty_w8a16", "empty", dict)
    with pytest.raises(QuantizationError, match=r"layer 'proj_in'.*backend 'empty' made None of it, not a module"):
        QuantizeConfig(method="empty_w8a16").quantize_model(tiny_model())


def test_stored_recipe_holds_what_applies():
    adjusted = QuantizeConfig(method="comfy_kitchen_int8_w8a8", backend_config_kwargs={"convrot_groupsize": 128})
    assert adjusted.to_dict()["backend_config_kwargs"] == {"convrot_groupsize": 64}


def test_environment_is_announced_once_a_process():
    import subprocess
    import sys

    code = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "import torch; from quant_core import QuantizeConfig, announce_environment\n"
        "announce_environment(); announce_environment()\n"
        "for _ in range(2):\n"
        "    QuantizeConfig(method='bitsandbytes_nf4').quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 64)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("quant_core: torch") == 1
    assert done.stderr.count("Quantization backend bitsandbytes") == 1
    assert "github.com/bitsandbytes-foundation/bitsandbytes" in done.stderr
    assert done.stderr.count("bitsandbytes_nf4 runs emulated on cpu") == 1


def test_interrupt_midway_restores_every_layer_and_passes_through():
    model = tiny_model()
    before = {name: id(module) for name, module in model.named_modules()}
    failing = QuantizeConfig(method="failing_w8a16", backend_config_kwargs={"out": 32, "error": KeyboardInterrupt})
    with pytest.raises(KeyboardInterrupt):
        failing.quantize_model(model)
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_freeing_originals_keeps_one_float_layer_at_a_time():
    import gc
    import weakref

    model = tiny_model()
    floats = [weakref.ref(m) for m in model.modules() if isinstance(m, nn.Linear)]
    alive = []
    config().quantize_model(
        model,
        keep_originals=False,
        progress=lambda done, total, name: alive.append(sum(r() is not None for r in floats)),
    )
    gc.collect()
    assert alive[-1] <= 1
    assert alive[0] <= len(floats)


def test_progress_names_every_layer():
    calls = []
    config().quantize_model(tiny_model(), progress=lambda *args: calls.append(args))
    assert calls == [(i + 1, len(ALL_LINEARS), name) for i, name in enumerate(ALL_LINEARS)]


def test_quantizing_twice_is_refused():
    model = tiny_model()
    config().quantize_model(model)
    with pytest.raises(ValueError, match="quantized already"):
        config().quantize_model(model)


# ---------------------------------------------------------------- mixed recipes


def mixed(*targets, **kwargs):
    return MixedQuantizeConfig(configs=[config(**t) for t in targets], **kwargs)


def test_overlap_is_found_before_the_model_is_touched():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"1 layer\(s\) are selected by more than one config: blocks.0.up"):
        mixed({"target_modules": ["blocks.0.up"]}, {"target_modules": ["up"]}).quantize_model(model)
    assert quantized_names(model) == []
    with pytest.raises(ValueError, match="selected by more than one config"):
        mixed({"target_modules": ["up"]}, {"target_modules": ["0.up"]}).prepare_for_prequantized_load(model)
    assert quantized_names(model) == []


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "configs is empty"),
        (["nf4"], r"configs\[0\] is 'nf4'"),
        ([{"load_prequantized": True}], "set it on the mixed config"),
        ([{}, {"mode": "dequant_once"}], "must share one mode"),
    ],
)
def test_mixed_construction(configs, message):
    with pytest.raises(ValueError, match=message):
        MixedQuantizeConfig(configs=[config(**c) if isinstance(c, dict) else c for c in configs])


def test_two_configs_on_one_backend_are_told_apart_by_name():
    recipe = mixed(
        {"target_modules": ["up"], "backend_config_kwargs": {"per_channel": False}}, {"target_modules": ["down"]}
    )
    model = tiny_model()
    recipe.quantize_model(model)
    assert quantized_names(model) == BLOCK_LINEARS
    assert model.blocks[0].up.weight_scale.unique().numel() == 1
    assert model.blocks[0].down.weight_scale.unique().numel() > 1
    shell = recipe.build_quantized_shell(model.blocks[0].up, torch.float32, layer_name="blocks.0.up")
    assert (shell.in_features, shell.out_features, shell.bias is not None) == (256, 512, True)
    assert all(b.is_meta for b in shell.buffers())
    with pytest.raises(ValueError, match="pass layer_name"):
        recipe.build_quantized_shell(model.blocks[0].up, torch.float32)
    assert (recipe.method, recipe.mode) == (f"{METHOD} + {METHOD}", "dynamic")
    assert recipe.is_quantized_linear(model.blocks[0].up)
    assert not recipe.is_quantized_linear(model.head)


# ---------------------------------------------------------------- modes and JSON


def test_load_prequantized_does_not_quantize():
    model = tiny_model()
    assert config(load_prequantized=True).quantize_model(model) == []
    assert quantized_names(model) == []


def test_dequant_once_restores_plain_linears():
    model = tiny_model(torch.float32)
    reference = tiny_model(torch.float32)
    recipe = config(mode="dequant_once")
    recipe.quantize_model(model)
    quantized = model(torch.ones(1, 64))
    names = recipe.dequantize_model(model, compute_dtype=torch.float32)
    assert names == ALL_LINEARS
    assert all(type(model.get_submodule(n)) is nn.Linear for n in names)
    assert torch.equal(model(torch.ones(1, 64)), quantized)
    step = reference.head.weight.abs().amax(dim=1, keepdim=True) / 255
    assert bool(((model.head.weight - reference.head.weight).abs() <= step * 0.5001).all())


def test_dequantize_does_nothing_in_dynamic_mode():
    model = tiny_model()
    config().quantize_model(model)
    assert config().dequantize_model(model) == []
    assert quantized_names(model) == ALL_LINEARS


@pytest.mark.parametrize(
    "recipe",
    [
        config(),
        config(mode="dequant_once", target_modules=["up"], exclude_modules=["0.up"]),
        mixed(
            {"target_modules": ["up"], "backend_config_kwargs": {"per_channel": False}}, {"target_modules": ["down"]}
        ),
    ],
)
def test_json_round_trip(recipe):
    again = recipe_from_dict(json.loads(recipe.to_json()))
    assert again.to_dict() == recipe.to_dict()
    assert type(again) is type(recipe)


@pytest.mark.parametrize(
    "data", [[], {}, {"configs": 3}, {"configs": [1]}, {"method": METHOD, "colour": 1}, {"configs": [], "x": 1}]
)
def test_what_is_no_recipe(data):
    with pytest.raises(ValueError, match="recipe|configs is empty"):
        recipe_from_dict(data)


def test_every_documented_method_is_registered():
    from quant_core import backends

    backends.load_all_backends()
    documented = """bitsandbytes_nf4 bitsandbytes_fp4 torchao_int8_w8a16 torchao_fp8_w8a16 torchao_int4_w4a16
    torchao_nvfp4_w4a16 torchao_int8_w8a8 torchao_fp8_w8a8 torchao_int4_w4a8 torchao_mxfp8_w8a8 torchao_mxfp4_w4a4
    torchao_nvfp4_w4a4 comfy_kitchen_int8_w8a8 comfy_kitchen_fp8_w8a8 comfy_kitchen_fp8_e5m2_w8a8
    comfy_kitchen_mxfp8_w8a8 comfy_kitchen_nvfp4_w4a4 comfy_kitchen_int4_convrot_w4a4 comfy_kitchen_int4_w4a8"""
    assert set(documented.split()) <= set(QUANT_METHODS)
