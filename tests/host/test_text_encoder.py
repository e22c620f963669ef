"""Loading and quantizing text encoders, in ComfyUI, against its own loader and the command line's files."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from pathlib import Path

import pytest

INT8, NVFP4 = "comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4"

# Method: the largest acceptable error of the hidden states against the float encoder; what was measured is about two
# thirds of it for T5, and four fifths for Qwen.
METHODS = {
    INT8: 0.03,
    "comfy_kitchen_fp8_w8a8": 0.08,
    NVFP4: 0.28,
    "bitsandbytes_nf4": 0.28,
    "torchao_int8_w8a8": 0.03,
}
NATIVE = [method for method in METHODS if method.startswith("comfy_kitchen")]
LAYERS = {"t5": 12, "qwen": 14}
T5_LAYER = "t5base.transformer.encoder.block.1.layer.1.DenseReluDense.wi.weight"


@pytest.fixture(scope="session")
def te(make_tiny):
    path = Path(__file__).parent / "make_tiny_te.py"
    spec = importlib.util.spec_from_file_location("quantcore_make_tiny_te", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def files(te, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("text_encoders")
    return {name: te.write(name, folder / f"{name}.safetensors") for name in te.ENCODERS}


@pytest.fixture(scope="session")
def host(pack):
    return importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".text_encoder")


@pytest.fixture(scope="session")
def quantized(host, te):
    """A function that loads text encoders as the node does, and returns what the host layer returns."""
    import torch

    from quant_core import QuantizeConfig

    def load(names, paths, method=INT8, clip_type=None, recipe=None, **options):
        library = method.partition("_")[0]
        if library in os.environ.get("QUANTCORE_MISSING_BACKENDS", "").split(","):
            pytest.skip(f"needs {library}, which has no release for this platform")
        names = [names] if isinstance(names, str) else names
        paths = [paths] if isinstance(paths, Path) else paths
        clip_type = clip_type or te.ENCODERS[names[-1]].clip_type
        recipe = recipe or QuantizeConfig(method=method)
        with torch.inference_mode():
            return host.load_text_encoder(
                [str(path) for path in paths], clip_type, recipe, model_options=te.options(*names), **options
            )

    return load


@pytest.fixture(scope="session")
def shared(quantized, files):
    """A function that loads a tiny file with a method once, for tests that leave the result as it is."""
    loaded = {}

    def load(name, method=INT8):
        if (name, method) not in loaded:
            loaded[name, method] = quantized(name, files[name], method)
        return loaded[name, method]

    return load


@pytest.fixture(scope="session")
def stock(te):
    """A function that loads text encoders with ComfyUI's own loader, their tensors copied out of the file's map."""
    import comfy.sd
    import comfy.utils
    import torch

    def load(names, paths, clip_type=None):
        names = [names] if isinstance(names, str) else names
        paths = [paths] if isinstance(paths, Path) else paths
        kind = getattr(comfy.sd.CLIPType, (clip_type or te.ENCODERS[names[-1]].clip_type).upper())
        with torch.inference_mode():
            states = [comfy.utils.load_torch_file(str(path)) for path in paths]
            states = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
            options = te.options(*names)
            if any(key.endswith(".comfy_quant") for key in states[0]):
                options["quantization_metadata"] = {"mixed_ops": True}  # ComfyUI looks for it in larger T5s only
            return comfy.sd.load_text_encoder_state_dicts(states, clip_type=kind, model_options=options)

    return load


@pytest.fixture(scope="session")
def reference(stock, files, te):
    """``{encoder: what the float encoder of ComfyUI makes of the prompt}``; T5 also with a LoRA."""
    import comfy.sd

    clips = {name: stock(name, files[name]) for name in (*LAYERS, "clip_l")}
    clips["t5 with lora"] = comfy.sd.load_lora_for_models(None, clips["t5"], lora(), 0.0, 1.0)[1]
    return {name: te.encode(clip) for name, clip in clips.items()}


def convert(source: Path, target: Path, method: str) -> Path:
    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    convert_file(source, target, QuantizeConfig(method=method))
    return target


def contents(clip) -> dict:
    """Every tensor of the text encoders, as ``(dtype, bytes)``."""
    import torch

    state = clip.cond_stage_model.state_dict()
    return {k: (t.dtype, t.detach().reshape(-1).view(torch.uint8).clone()) for k, t in state.items() if t.ndim}


def different(left: dict, right: dict) -> list[str]:
    import torch

    assert set(left) == set(right)
    return [key for key in left if left[key][0] != right[key][0] or not torch.equal(left[key][1], right[key][1])]


def error(output, reference) -> float:
    return ((output - reference).norm() / reference.norm()).item()


def operators(run) -> dict[str, int]:
    """Return ``{operator of torch: how often it ran}`` of a call, as torch's profiler saw it."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages()}


# ------------------------------------------------------------------ quantized, and how well


@pytest.mark.parametrize(
    ("name", "method"), [*(("t5", method) for method in METHODS), ("qwen", INT8), ("qwen", "bitsandbytes_nf4")]
)
def test_the_prompt_is_close_to_the_float_encoders(method, name, shared, reference, te, comfy_idle):
    loaded = shared(name, method)
    hidden, _ = te.encode(loaded.clip)
    assert 0.4 * METHODS[method] < error(hidden, reference[name][0]) < METHODS[method]
    assert loaded.notes[0].startswith(f"{name}.safetensors: {LAYERS[name]} layers quantized with {method}; ")


@pytest.mark.parametrize("method", METHODS)
def test_embeddings_norms_and_heads_are_the_files(method, shared, files):
    import safetensors.torch
    import torch

    model = shared("t5", method).clip.cond_stage_model
    source = safetensors.torch.load_file(files["t5"])
    kept = [name for name, parameter in model.named_parameters() if type(parameter.data) is torch.Tensor]
    kept = [name.removeprefix("t5base.transformer.") for name in kept if "logit_scale" not in name]
    assert sorted(kept) == sorted(
        key for key in source if "SelfAttention.relative" in key or "norm" in key or key == "shared.weight"
    )
    state = model.state_dict()
    for name in kept:
        # ComfyUI gives T5-base float16.
        assert torch.equal(state[f"t5base.transformer.{name}"], source[name].to(torch.float16))


@pytest.mark.parametrize("method", METHODS)
def test_model_size_is_what_is_held(method, shared):
    from comfy.quant_ops import QuantizedTensor

    clip = shared("t5", method).clip
    held = 0
    for _, parameter in clip.cond_stage_model.named_parameters():
        value = parameter.data
        parts = [value]
        if isinstance(value, QuantizedTensor):
            names, _ = value.__tensor_flatten__()
            parts = [getattr(value, name) for name in names]
        held += sum(part.numel() * part.element_size() for part in parts)
    assert clip.patcher.model_size() == pytest.approx(held, rel=0.01)


# ------------------------------------------------------------------ computes quantized


@pytest.mark.parametrize(
    ("method", "operator"), [(INT8, "comfy_kitchen::int8_linear"), ("torchao_int8_w8a8", "aten::_int_mm")]
)
def test_every_layer_multiplies_in_int8(method, operator, shared, te, comfy_idle):
    clip = shared("t5", method).clip
    assert operators(lambda: te.encode(clip)).get(operator) == LAYERS["t5"]


def test_comfyuis_own_loader_turns_int8_into_float(stock, files, te, tmp_path, comfy_idle):
    """Why the test above is not about ComfyUI."""
    clip = stock("t5", convert(files["t5"], tmp_path / "int8.safetensors", INT8))
    assert "comfy_kitchen::int8_linear" not in operators(lambda: te.encode(clip))


@pytest.mark.parametrize("method", [INT8, "torchao_int8_w8a8"])
def test_a_layer_is_the_librarys_own_product(method, shared, comfy_idle):
    """Bit for bit what ``F.linear`` makes of the weight, and not what it makes of the dequantized weight."""
    import comfy.model_management
    import torch

    clip = shared("t5", method).clip
    comfy.model_management.load_models_gpu([clip.patcher])
    layer = clip.cond_stage_model.get_submodule(T5_LAYER.removesuffix(".weight"))
    x = torch.randn(2, 7, 256, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        output = layer(x)
        assert torch.equal(output, torch.nn.functional.linear(x.reshape(-1, 256), layer.weight).reshape(2, 7, -1))
        in_float = torch.nn.functional.linear(x, layer.weight.dequantize())
    assert 1e-3 < error(output, in_float) < 0.02
    exact = x.double() @ layer.weight.dequantize().double().T
    assert error(output.double(), exact) < 0.02


@pytest.mark.parametrize("method", [INT8, NVFP4, "bitsandbytes_nf4"])
def test_the_compute_dtype_is_the_quantized_layers(method, quantized, files, te, reference, comfy_idle):
    import torch

    clip = quantized("t5", files["t5"], method, compute_dtype=torch.bfloat16).clip
    layer = clip.cond_stage_model.get_submodule(T5_LAYER.removesuffix(".weight"))
    assert layer.weight.dtype == torch.bfloat16
    assert layer(torch.ones(1, 256)).dtype == torch.float32
    assert error(te.encode(clip)[0], reference["t5"][0]) < METHODS[method]


# ------------------------------------------------------------------ files that are quantized already


@pytest.mark.parametrize(("name", "method"), [*(("t5", method) for method in NATIVE), ("qwen", INT8)])
def test_the_bytes_are_those_of_the_command_line_in_comfyuis_loader(
    method, name, quantized, shared, stock, files, te, tmp_path, comfy_idle
):
    path = convert(files[name], tmp_path / "cli.safetensors", method)
    online, again = shared(name, method), quantized(name, path, "bitsandbytes_nf4")
    theirs = stock(name, path)
    assert different(contents(online.clip), contents(theirs)) == []
    assert different(contents(again.clip), contents(theirs)) == []
    assert "quantized already" in again.notes[0]
    hidden = te.encode(online.clip)[0]
    # ComfyUI's loader computes with the dequantized weights; ours may quantize the activations too.
    assert error(hidden, te.encode(theirs)[0]) < METHODS[method]
    # The same bytes, but mapped from a file and perhaps misaligned, which CPU products may round differently.
    assert error(te.encode(again.clip)[0], hidden) < 1e-3


@pytest.mark.parametrize("method", ["bitsandbytes_nf4", "torchao_int8_w8a8"])
def test_another_librarys_file_is_loaded_as_it_is(method, quantized, shared, files, tmp_path):
    path = convert(files["t5"], tmp_path / "cli.safetensors", method)
    online, again = shared("t5", method), quantized("t5", path)
    assert different(contents(online.clip), contents(again.clip)) == []
    assert "quantized already" in again.notes[0]


def test_a_cast_fp8_file(quantized, stock, files, te, tmp_path, comfy_idle):
    """As widely used for T5: nothing says that it is quantized. ComfyUI casts its weights, and so it is computed."""
    import safetensors.torch
    import torch

    tensors = safetensors.torch.load_file(files["t5"])
    path = tmp_path / "t5_fp8.safetensors"
    safetensors.torch.save_file({k: t.to(torch.float8_e4m3fn) for k, t in tensors.items()}, path)
    ours = quantized("t5", path)
    assert error(te.encode(ours.clip)[0], te.encode(stock("t5", path))[0]) < 1e-5
    assert ours.clip.patcher.model_size() < 0.6 * path.stat().st_size * 2


# ------------------------------------------------------------------ CLIP text models


def test_clip_stays_in_float(quantized, files, te, reference, comfy_idle, caplog):
    import torch

    caplog.set_level(logging.INFO)
    loaded = quantized("clip_l", files["clip_l"])
    for output, expected in zip(te.encode(loaded.clip), reference["clip_l"], strict=True):
        assert torch.equal(output, expected)
    assert loaded.notes == ["clip_l.safetensors: a CLIP text model, kept in float"]
    assert loaded.notes[0] in caplog.text


@pytest.mark.parametrize(("method", "bound"), [(INT8, 0.05), ("bitsandbytes_nf4", 0.5)])
def test_a_quantized_clip_is_turned_back_into_float(
    method, bound, quantized, files, te, reference, tmp_path, comfy_idle, caplog
):
    import safetensors.torch
    import torch

    path = convert(files["clip_l"], tmp_path / "small.safetensors", method)
    loaded = quantized("clip_l", path)
    state = loaded.clip.cond_stage_model.state_dict()
    assert set(state) >= {f"clip_l.transformer.{key}" for key in safetensors.torch.load_file(files["clip_l"])}
    assert {t.dtype for key, t in state.items() if key.endswith("weight")} == {torch.float16}
    assert error(te.encode(loaded.clip)[0], reference["clip_l"][0]) < bound
    assert "small.safetensors is a quantized CLIP text model" in caplog.text
    assert "turned back into float" in loaded.notes[0]


def test_a_clip_without_a_projection(quantized, files, te, reference, tmp_path, comfy_idle):
    """Many files leave it out; the models that they are for do not use it."""
    import safetensors.torch
    import torch

    tensors = safetensors.torch.load_file(files["clip_l"])
    del tensors["text_projection.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "plain.safetensors")
    clip = quantized("clip_l", tmp_path / "plain.safetensors").clip
    assert torch.equal(te.encode(clip)[0], reference["clip_l"][0])


def test_an_encoder_without_layers_to_quantize(quantized, stock, files, te, comfy_idle):
    import torch

    loaded = quantized("narrow", files["narrow"])
    assert loaded.notes == ["narrow.safetensors: has no layers to quantize, kept in float"]
    assert torch.equal(te.encode(loaded.clip)[0], te.encode(stock("narrow", files["narrow"]))[0])


# ------------------------------------------------------------------ several files


@pytest.mark.parametrize("order", [("clip_l", "t5xxl"), ("t5xxl", "clip_l")])
def test_two_files_in_any_order(order, quantized, stock, files, te, comfy_idle):
    import torch

    paths = [files[name] for name in order]
    loaded = quantized(order, paths, clip_type="flux")
    (hidden, pooled), (float_hidden, float_pooled) = te.encode(loaded.clip), te.encode(stock(order, paths, "flux"))
    assert torch.equal(pooled, float_pooled)
    assert 0.005 < error(hidden, float_hidden) < 0.05
    notes = dict(zip(order, loaded.notes, strict=True))
    assert notes["clip_l"] == "clip_l.safetensors: a CLIP text model, kept in float"
    assert "t5xxl.safetensors: 14 layers quantized" in notes["t5xxl"]


def test_two_files_with_the_same_names(host, tmp_path, comfy_idle):
    """Each layer is quantized from its own file. ComfyUI's ACE is made of two Qwen3, both ``model.layers...``."""
    import safetensors.torch
    import torch

    from quant_core import QuantizeConfig

    generator = torch.Generator().manual_seed(0)
    layer, paths, weights = "model.layers.0.self_attn.q_proj", [], {}
    for title, width in (("qwen3_06b", 1024), ("qwen3_2b", 2048)):
        weights[title] = torch.randn(2048, width, generator=generator)
        tensors = {
            "model.layers.0.post_attention_layernorm.weight": torch.ones(width),
            "model.layers.0.self_attn.q_norm.weight": torch.ones(128),
            f"{layer}.weight": weights[title],
            "model.layers.0.mlp.up_proj.weight": torch.randn(256, width, generator=generator),
        }
        paths.append(str(tmp_path / f"{title}.safetensors"))
        safetensors.torch.save_file(tensors, paths[-1])
    recipe = QuantizeConfig(method=INT8, target_modules=["self_attn.q_proj"])
    loaded = host.load_text_encoder(paths, "ace", recipe)
    for title, weight in weights.items():
        held = loaded.clip.cond_stage_model.get_submodule(f"{title}.transformer.{layer}").weight
        assert error(held.dequantize(), weight) < 0.02
    assert [note.partition(":")[2].partition(";")[0] for note in loaded.notes] == [
        f" 1 layers quantized with {INT8}"
    ] * 2


# ------------------------------------------------------------------ the disk cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("method", METHODS)
def test_what_the_cache_keeps_is_what_loading_gives(method, cache, quantized, shared, files, te, comfy_idle):
    import torch

    fresh = shared("t5", method)
    first = quantized("t5", files["t5"], method, cached=True)
    (entry,) = cache.glob("*.safetensors")
    inode = entry.stat().st_ino
    second = quantized("t5", files["t5"], method, cached=True)
    assert list(cache.glob("*.safetensors")) == [entry] and entry.stat().st_ino == inode
    assert entry.stat().st_size < 0.6 * files["t5"].stat().st_size
    for loaded in (first, second):
        assert different(contents(loaded.clip), contents(fresh.clip)) == []
        assert torch.equal(te.encode(loaded.clip)[0], te.encode(fresh.clip)[0])
        assert loaded.notes[0].startswith(f"t5.safetensors: 12 layers quantized with {method}, from the disk cache; ")
    make, arguments = second.clip.patcher.cached_patcher_init
    with torch.inference_mode():
        again = make(*arguments).model.state_dict()
    assert list(again) == list(second.clip.patcher.model.state_dict())
    assert entry.stat().st_ino == inode


def test_a_recipe_of_several_methods_is_kept(cache, quantized, files):
    from quant_core import MixedQuantizeConfig, QuantizeConfig

    wide = QuantizeConfig(method=INT8, target_modules=["DenseReluDense.wi", "DenseReluDense.wo"])
    rest = QuantizeConfig(method="bitsandbytes_nf4", exclude_modules=wide.target_modules)
    recipe = MixedQuantizeConfig(configs=[wide, rest])
    plain = quantized("t5", files["t5"], recipe=recipe)
    kept = quantized("t5", files["t5"], recipe=recipe, cached=True)
    assert different(contents(plain.clip), contents(kept.clip)) == []
    assert len(list(cache.glob("*.safetensors"))) == 1


def test_only_what_is_quantized_is_kept(cache, quantized, files, te, comfy_idle):
    order = ("clip_l", "t5xxl")
    loaded = quantized(order, [files[name] for name in order], clip_type="flux", cached=True)
    assert "kept in float" in loaded.notes[0] and "from the disk cache" in loaded.notes[1]
    assert len(list(cache.glob("*.safetensors"))) == 1


def test_where_nothing_can_be_kept_it_is_quantized_all_the_same(quantized, shared, files, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("QUANTCORE_CACHE", str(tmp_path / "a file"))
    loaded = quantized("t5", files["t5"], cached=True)
    assert different(contents(loaded.clip), contents(shared("t5").clip)) == []
    assert "disk cache" not in loaded.notes[0]


def test_cancelling_keeps_nothing(cache, quantized, files, comfy_idle):
    comfy_idle.interrupt_current_processing(True)
    with pytest.raises(comfy_idle.InterruptProcessingException):
        quantized("t5", files["t5"], cached=True)
    assert not [path for path in cache.rglob("*") if "safetensors" in path.name]


# ------------------------------------------------------------------ what does not fit


def refused(quantized, names, paths, clip_type, *words):
    from quant_core import CheckpointError

    with pytest.raises(CheckpointError) as caught:
        quantized(names, paths, clip_type=clip_type)
    text = str(caught.value)
    for word in (*[path.name for path in paths], repr(clip_type), *words):
        assert word in text
    return text


def test_a_file_of_another_encoder(quantized, files):
    refused(quantized, ["clip_l", "t5xxl"], [files["clip_l"], files["qwen"]], "flux", "none of the files holds t5xxl")


def test_the_same_file_twice(quantized, files):
    refused(quantized, ["clip_l", "t5xxl"], [files["t5xxl"]] * 2, "flux", "none of the files holds clip_l")


def test_other_widths(quantized, files):
    """Without the options of a tiny encoder the files are none that ComfyUI knows."""
    refused(quantized, "qwen", [files["t5"]], "stable_audio", "size mismatch")


def test_a_diffusion_model(quantized, tiny_flux):
    refused(quantized, "clip_l", [tiny_flux], "stable_diffusion", "none of the files holds clip_l")


def test_a_file_that_no_encoder_of_the_type_is_in(quantized, files, te, tmp_path):
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"tower.weight": torch.zeros(8, 8)}, tmp_path / "other.safetensors")
    text = refused(quantized, "clip_l", [tmp_path / "other.safetensors"], "sd3", "other.safetensors")
    assert "NoneType" not in text


def test_a_file_that_is_rewritten_meanwhile(quantized, te, tmp_path, host, monkeypatch):
    """From within the progress of the loading itself, as a download that is still going on would."""
    import comfy.utils

    from quant_core import CheckpointError

    path = te.write("t5", tmp_path / "changing.safetensors")

    def rewrite(*_, **__) -> None:
        with open(path, "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"otherdat")

    comfy.utils.set_progress_bar_global_hook(rewrite)
    try:
        with pytest.raises(CheckpointError, match=r"changing\.safetensors was rewritten"):
            quantized("t5", path)
    finally:
        comfy.utils.set_progress_bar_global_hook(None)


def test_an_exclusion_that_matches_nothing(quantized, files):
    from quant_core import CheckpointError, QuantizeConfig

    with pytest.raises(CheckpointError, match="t5.safetensors.*no_such_layer"):
        quantized("t5", files["t5"], recipe=QuantizeConfig(method=INT8, exclude_modules=["no_such_layer"]))


def test_a_weight_that_is_not_finite(quantized, te, tmp_path):
    import safetensors.torch

    from quant_core import QuantizationError

    tensors = te.state_dict("t5")
    tensors["encoder.block.1.layer.1.DenseReluDense.wi.weight"][3, 5] = float("inf")
    safetensors.torch.save_file(tensors, tmp_path / "inf.safetensors")
    with pytest.raises(QuantizationError, match=r"inf.safetensors.*block\.1\.layer\.1\.DenseReluDense\.wi "):
        quantized("t5", tmp_path / "inf.safetensors")


# ------------------------------------------------------------------ in ComfyUI's hands


def lora() -> dict:
    import torch

    generator = torch.Generator().manual_seed(5)
    name = "text_encoders." + T5_LAYER.removesuffix(".weight")
    return {
        f"{name}.lora_up.weight": torch.randn(512, 4, generator=generator) * 0.2,
        f"{name}.lora_down.weight": torch.randn(4, 256, generator=generator) * 0.2,
    }


@pytest.mark.parametrize("full", [True, False], ids=["full load", "low vram"])
@pytest.mark.parametrize("method", METHODS)
def test_a_stock_lora(method, full, shared, te, reference, comfy_idle):
    import comfy.sd

    expected = reference["t5 with lora"][0]
    assert error(expected, reference["t5"][0]) > 0.2
    clip = shared("t5", method).clip
    before = contents(clip)
    _, patched = comfy.sd.load_lora_for_models(None, clip, lora(), 0.0, 1.0)
    if full:
        comfy_idle.load_models_gpu([patched.patcher], force_full_load=True)
    else:
        patched.patcher.patch_model(patched.patcher.load_device, lowvram_model_memory=1)
    assert patched.patcher.lowvram_patch_counter() == (0 if full else 1)
    assert error(te.encode(patched, as_it_is=True)[0], expected) < 1.3 * METHODS[method]
    patched.patcher.detach()
    assert different(contents(clip), before) == []


def test_a_lora_beside_4_bit_layers(host, quantized, online, files, reference, te, tmp_path, comfy_idle, caplog):
    """By *Load LoRA (Quantized)*, against the stock loader, which quantizes the layers again and is warned of."""
    import comfy.sd
    import safetensors.torch

    loras = importlib.import_module(host.__name__.rpartition(".")[0] + ".lora")
    path = tmp_path / "lora.safetensors"
    safetensors.torch.save_file(lora(), path)
    clip = quantized("t5", files["t5"], "bitsandbytes_nf4").clip
    before = contents(clip)
    beside = loras.add_to_clip(clip, loras.read_lora(str(path), online(), clip), 1.0, loras.AUTO)
    expected = reference["t5 with lora"][0]
    error_beside = error(te.encode(beside)[0], expected)
    assert "quantized again" not in caplog.text
    _, patched = comfy.sd.load_lora_for_models(None, clip, lora(), 0.0, 1.0)
    comfy_idle.load_models_gpu([patched.patcher], force_full_load=True)
    error_again = error(te.encode(patched, as_it_is=True)[0], expected)
    assert "quantized again" in caplog.text
    assert error_beside < min(error_again, METHODS["bitsandbytes_nf4"])
    comfy_idle.unload_all_models()
    assert different(contents(clip), before) == []


def test_saved_in_a_checkpoint(host, shared, online, files, tmp_path, comfy_idle):
    """With a quantized model: the text encoder's tensors are those of its own file, under ComfyUI's names."""
    import safetensors.torch

    from quant_core.checkpoint import open_checkpoint
    from quant_core.checkpoint.formats import stored_layers

    saving = importlib.import_module(host.__name__.rpartition(".")[0] + ".saving")
    clip = shared("t5", INT8).clip
    saving.save_model(tmp_path / "both.safetensors", online("comfy_kitchen_fp8_w8a8"), clip)
    saved = safetensors.torch.load_file(tmp_path / "both.safetensors")
    convert(files["t5"], tmp_path / "t5.safetensors", INT8)
    alone = safetensors.torch.load_file(tmp_path / "t5.safetensors")
    prefix = next(key for key in saved if key.endswith(T5_LAYER)).removesuffix(T5_LAYER) + "t5base.transformer."
    quantized = [layer for layer in stored_layers(open_checkpoint(tmp_path / "t5.safetensors"))]
    assert len(quantized) == LAYERS["t5"]
    assert {prefix + layer for layer in quantized} <= set(stored_layers(open_checkpoint(tmp_path / "both.safetensors")))
    for layer in quantized:
        for key in [key for key in alone if key.startswith(layer + ".")]:
            assert saved[prefix + key].equal(alone[key]), key


@pytest.mark.parametrize("method", METHODS)
def test_it_runs_again_after_unloading(method, shared, te, comfy_idle):
    """Workflows run in inference mode, unloading does not."""
    import torch

    clip = shared("t5", method).clip
    first = te.encode(clip)[0]
    comfy_idle.unload_all_models()
    assert torch.equal(te.encode(clip.clone())[0], first)


@pytest.mark.parametrize("method", [INT8, "bitsandbytes_nf4"])
def test_comfyui_can_load_it_again(method, shared):
    import torch

    clip = shared("t5", method).clip
    make, arguments = clip.patcher.cached_patcher_init
    with torch.inference_mode():
        again = make(*arguments, disable_dynamic=True)
    left, right = clip.patcher.model.state_dict(), again.model.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[key].view(torch.uint8), right[key].view(torch.uint8)) for key in left if left[key].ndim)


def test_progress_and_cancel(quantized, files, comfy_idle):
    import comfy.utils

    seen = []
    comfy.utils.set_progress_bar_global_hook(lambda value, total, preview, node_id=None: seen.append((value, total)))
    try:
        quantized("t5", files["t5"])
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    assert (seen[0], seen[-1]) == ((1, 12), (12, 12))
    comfy_idle.interrupt_current_processing(True)
    with pytest.raises(comfy_idle.InterruptProcessingException):
        quantized("t5", files["t5"])


# ------------------------------------------------------------------ the node


@pytest.fixture
def node(pack, host):
    return importlib.import_module(host.__name__.rpartition(".host.")[0] + ".load_text_encoder")


def test_the_node_explains_itself(node):
    schema = node.LoadTextEncoderQuantized.GET_SCHEMA()
    assert schema.node_id == "QuantCore_LoadTextEncoder"
    assert all(each.tooltip for each in [*schema.inputs, *schema.outputs])
    page = Path(__file__).parents[2] / "web" / "docs" / f"{schema.node_id}.md"
    assert all(f"`{each.id}`" in page.read_text(encoding="utf-8") for each in schema.inputs)


def test_the_types_are_those_of_comfyuis_loaders(host, make_tiny):
    import nodes

    for loader in (nodes.CLIPLoader, nodes.DualCLIPLoader):
        assert set(loader.INPUT_TYPES()["required"]["type"][0]) <= set(host.clip_types())


def test_the_node_runs(node, te, tmp_path, monkeypatch, comfy_idle):
    import folder_paths
    import safetensors.torch
    import torch

    from quant_core import QuantizeConfig

    cls = node.LoadTextEncoderQuantized
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "text_encoders", ([str(tmp_path)], {".safetensors"}))
    # The real CLIP-L, of which nothing but what tells it from others is in the file, cannot be quantized or run.
    tensors = {f"text_model.encoder.layers.{n}.mlp.fc1.weight": torch.zeros(3072, 768) for n in range(12)}
    safetensors.torch.save_file(tensors, tmp_path / "clip.safetensors")
    widgets = {"clip_name1": "clip.safetensors", "type": "stable_diffusion", "method": INT8}
    before = cls.fingerprint_inputs(**widgets)
    assert before == cls.fingerprint_inputs(**widgets)
    assert before != cls.fingerprint_inputs(**{**widgets, "type": "flux"})
    assert before != cls.fingerprint_inputs(**widgets, clip_name2="gone.safetensors")
    with torch.inference_mode():
        output = cls.execute(
            "clip.safetensors", "stable_diffusion", INT8, recipe=QuantizeConfig(method="bitsandbytes_nf4")
        )
    assert output.ui == {"text": ["clip.safetensors: a CLIP text model, kept in float"]}
    assert type(output.args[0]).__name__ == "CLIP"
    safetensors.torch.save_file({**tensors, "more": torch.zeros(4)}, tmp_path / "clip.safetensors")
    assert before != cls.fingerprint_inputs(**widgets)
    with pytest.raises(FileNotFoundError, match="none.safetensors"):
        cls.execute("none.safetensors", "stable_diffusion", INT8)
