"""Presets: data that fits the real layers of each architecture, and recipes that keep to it."""

from __future__ import annotations

import functools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from quant_core import QUANT_METHODS, MixedQuantizeConfig, QuantizeConfig, recipe_from_dict
from quant_core.backends import load_all_backends
from quant_core.backends.comfy_kitchen import FORMATS
from quant_core.choice import Weight, choose_weights
from quant_core.convert import convert
from quant_core.layout import Formats
from quant_core.lora.names import PARTS, _other_names
from quant_core.plan import plan
from quant_core.presets import (
    PresetRecipe,
    Tier,
    _cuda_target,
    architectures,
    detect,
    policies,
    preset,
    targets,
    this_target,
)
from quant_core.presets import recipe as presets_recipe
from quant_core.selection import Reason, choose_layers

# The oldest compute capability of each NVIDIA target.
CAPABILITY = {"turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "blackwell": (10, 0)}
# The oldest that a format has a kernel for, by docs/hardware.md.
NEEDS = {
    "comfy_kitchen_int8_w8a8": (7, 5),
    "comfy_kitchen_int4_convrot_w4a4": (7, 5),
    "comfy_kitchen_int4_w4a8": (8, 0),
    "comfy_kitchen_fp8_w8a8": (8, 9),
    "comfy_kitchen_mxfp8_w8a8": (10, 0),
    "comfy_kitchen_nvfp4_w4a4": (10, 0),
}

# How many Linears each published model has that nearly every published quantized model of it keeps in float, and how
# many modulations and layers that are sensitive at 4 bits: counted by hand in those models.
TIERS = {
    "flux1-dev": (10, 76, 38),
    "flux2-dev": (11, 0, 17),
    "flux2-klein-9b": (9, 0, 2),
    "flux2-klein-4b": (9, 0, 2),
    "qwen-image": (7, 119, 384),
    "z-image": (6, 32, 40),
    "wan2.x-14b-t2v": (6, 0, 256),
    "wan2.1-14b-i2v": (8, 0, 264),
    "wan2.1-1.3b": (6, 0, 40),
    "wan2.2-5b": (6, 0, 40),
    "wan2.2-animate": (33, 0, 48),
    "ltx-2.3": (342, 0, 112),
    "ltxv-0.9-2b": (7, 0, 40),
    "chroma": (15, 0, 38),
    "minimax-h3": (8, 50, 24),
    "minimax-h3-pruned": (56, 0, 24),
    "krea2": (8, 0, 32),
    "ideogram4": (7, 34, 0),
    "ernie-image": (6, 0, 14),
    "hunyuanvideo-1.5": (14, 110, 8),
    "hunyuanvideo-1.0": (13, 82, 8),
    "sd3.5-large": (7, 76, 0),
    "sdxl": (21, 0, 22),
    "anima": (67, 168, 55),
    "boogu": (7, 36, 42),
    "hidream-i1": (56, 48, 0),
}


@functools.cache
def inventories() -> dict[str, dict[str, tuple[int, int]]]:
    """``{architecture: {layer: (out_features, in_features)}}`` of every Linear, as ComfyUI builds the models.

    The file has a line for all layers that differ in their numbers only: name, shape, and the numbers.
    """
    text = (Path(__file__).parent / "fixtures" / "linears.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, rows in json.loads(text).items():
        layers = found.setdefault(name, {})
        for template, rows_out, columns, *numbers in rows:
            for one in numbers[0] if numbers else [[]]:
                parts = template.split("*")
                filled = [str(n) for n in (one if isinstance(one, list) else [one])]
                layers["".join(a + b for a, b in zip(parts, [*filled, ""], strict=True))] = (rows_out, columns)
    return found


@functools.cache
def diffusers_names(name: str) -> dict[str, tuple[str, tuple[int, int]]]:
    """``{layer in diffusers: (layer in ComfyUI, shape)}``, by the tables that LoRAs are matched by."""
    layers = inventories()[name]
    theirs = {}
    for ours, other, part in _other_names(layers):
        start, stop = PARTS[part if part in PARTS else ""](layers[ours])
        theirs[other] = (ours, (stop - start, layers[ours][1]))
    return theirs


def weights_of(layers) -> dict[str, Weight]:
    return {layer: Weight(tuple(shape), torch.bfloat16) for layer, shape in layers.items()}


def resolve(recipe, layers):
    formats = Formats()
    weights = weights_of(layers)
    structure = choose_layers({f"{layer}.weight": shape for layer, shape in layers.items()})
    packed = lambda part: formats.is_packed(part.method, {})  # noqa: E731
    chosen, structure, note = recipe.for_model(weights, structure, packed)
    return choose_weights(weights, chosen, structure, packed), note


# ------------------------------------------------------------------ the data


def test_there_are_as_many_as_inventories():
    assert set(architectures()) == set(inventories()) == set(TIERS)
    assert all(len(layers) > 80 for layers in inventories().values())


@pytest.mark.parametrize("name", TIERS)
def test_an_architecture_is_detected_by_its_layers(name):
    layers = inventories()[name]
    assert len(layers) == architectures()[name].linears
    assert detect(layers).name == name
    assert detect({f"model.diffusion_model.{layer}": shape for layer, shape in layers.items()}).name == name
    known = {layer: [shape] for layer, shape in layers.items()}
    assert [one.name for one in architectures().values() if one.matches(known)] == [name]


@pytest.mark.parametrize("name", TIERS)
def test_every_pattern_names_as_many_layers_as_it_says(name):
    found = dict.fromkeys(architectures()[name].patterns, 0)
    for layer in inventories()[name]:
        first = next((p for p in found if p.pattern.fullmatch(layer)), None)
        if first is not None:
            found[first] += 1
    assert [(p.pattern.pattern, count) for p, count in found.items() if count != p.count or not count] == []
    tiers = [sum(count for p, count in found.items() if p.tier is tier) for tier in (Tier.KEEP, Tier.MOD, Tier.SOFT)]
    assert tuple(tiers) == TIERS[name]
    assert all(p.reason for p in found)


@pytest.mark.parametrize("name", TIERS)
def test_little_is_kept(name):
    layers = inventories()[name]
    size = {layer: rows * columns for layer, (rows, columns) in layers.items()}
    kept = sum(size[layer] for layer in layers if architectures()[name].tier(layer)[0] is Tier.KEEP)
    assert kept <= 0.07 * sum(size.values())


def test_every_class_is_named_once_for_each_size():
    for one in architectures().values():
        assert one.classes and one.title


WITH_DIFFUSERS_NAMES = [
    "flux1-dev",
    "flux2-dev",
    "flux2-klein-4b",
    "qwen-image",
    "wan2.x-14b-t2v",
    "wan2.1-14b-i2v",
    "wan2.1-1.3b",
    "hunyuanvideo-1.0",
]


@pytest.mark.parametrize("name", WITH_DIFFUSERS_NAMES)
def test_diffusers_names_have_the_tiers_of_comfyuis(name):
    architecture = architectures()[name]
    theirs = diffusers_names(name)
    layers = {**{layer: shape for layer, (_, shape) in theirs.items()}}
    own = {layer: shape for layer, shape in inventories()[name].items() if layer not in {o for o, _ in theirs.values()}}
    assert detect({**own, **layers}).name == name
    wrong = {}
    for layer, (ours, _) in theirs.items():
        tier, expected = architecture.tier(layer)[0], architecture.tier(ours)[0]
        if tier is not expected:
            wrong[layer] = (ours, tier, expected)
    assert wrong == {}


# ------------------------------------------------------------------ what a preset makes of a model


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("name", TIERS)
def test_a_preset_keeps_to_the_tiers(name, policy):
    layers, architecture = inventories()[name], architectures()[name]
    for target in targets():
        choices, note = resolve(preset(policy, target), layers)
        assert note == ""
        quantized = {layer: choice.part.method for layer, choice in choices.items() if choice.part is not None}
        for layer, choice in choices.items():
            tier, reason = architecture.tier(layer)
            if tier is Tier.KEEP:
                assert layer not in quantized
                assert (choice.decision.why, choice.decision.reason) == (Reason.PRESET, reason)
            elif layer in quantized and policy == "balanced" and tier in (Tier.MOD, Tier.SOFT):
                assert "_w8" in quantized[layer], layer
            if min(layers[layer]) < 256:
                assert layer not in quantized
        size = sum(layers[layer][0] * layers[layer][1] for layer in quantized)
        assert size >= 0.9 * sum(rows * columns for rows, columns in layers.values()), target


@pytest.mark.parametrize("policy", policies())
def test_its_formats_are_comfyuis_and_run_natively(policy):
    load_all_backends()
    for target in targets():
        for methods in presets_recipe.methods_of(policy, target).values():
            assert all(method in QUANT_METHODS and method in FORMATS for method in methods)
            if target in CAPABILITY and not (target == "turing" and policy != "safe-8bit"):
                assert NEEDS[methods[0]] <= CAPABILITY[target]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cards_have_their_target(capability):
    target = _cuda_target(capability)
    assert CAPABILITY[target] <= capability
    assert all(other > capability for other in CAPABILITY.values() if other > CAPABILITY[target])
    assert _cuda_target((6, 1)) == "any"


def test_this_machine():
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert this_target() == "cpu"
    assert preset("safe-8bit").target == this_target()


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="safe-8bit"):
        preset("tiny")
    with pytest.raises(ValueError, match="blackwell"):
        preset("safe-8bit", "toaster")


def test_an_unknown_architecture_is_said_to_be_one():
    layers = {f"tower.{n}.{part}": (512, 512) for n in range(3) for part in ("a", "b")} | {"stem": (512, 512)}
    choices, note = resolve(preset("balanced", "any"), layers)
    assert "unknown architecture, structural rule" in note
    assert {layer for layer, choice in choices.items() if choice.part is None} == {"stem"}
    with pytest.raises(ValueError, match="no layer to quantize"):
        resolve(preset("balanced", "any"), {"stem": (512, 512)})


ONE_OF_SEVERAL_SIZES = {
    "flux2-dev": {"flux2-dev"},
    "flux2-klein-9b": {"flux2-klein-9b", "flux2-klein-4b"},
    "flux2-klein-4b": {"flux2-klein-9b", "flux2-klein-4b"},
    "wan2.1-1.3b": {"wan2.1-1.3b", "wan2.2-5b"},
    "wan2.2-5b": {"wan2.1-1.3b", "wan2.2-5b"},
}


@pytest.mark.parametrize("name", TIERS)
def test_a_model_of_another_width_is_known_by_its_names(name):
    layers = {layer: (rows * 2, columns * 2) for layer, (rows, columns) in inventories()[name].items()}
    assert detect(layers).name in ONE_OF_SEVERAL_SIZES.get(name, {name})


def test_a_recipe_is_stored_and_read():
    recipe = preset("balanced", "ada")
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    with pytest.raises(ValueError, match="method"):
        recipe_from_dict({**recipe.to_dict(), "method": "bitsandbytes_nf4"})


# ------------------------------------------------------------------ files and models


def write_header(path: Path, layers) -> Path:
    """A file of the model's full size that takes no room on the disk: its tensors are a hole."""
    header, position = {}, 0
    for layer, shape in layers.items():
        end = position + 2 * shape[0] * shape[1]
        header[f"{layer}.weight"] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return path


def test_a_plan_of_a_whole_flux(tmp_path):
    source = write_header(tmp_path / "flux.safetensors", inventories()["flux1-dev"])
    made = plan(source, preset("balanced", "blackwell"))
    methods = {row.layer: row.method for row in made.rows}
    assert made["img_in"].reason is Reason.PRESET and "latent" in made["img_in"].why
    assert methods["double_blocks.3.img_mod.lin"] == "comfy_kitchen_mxfp8_w8a8"
    assert methods["double_blocks.3.txt_attn.qkv"] == "comfy_kitchen_mxfp8_w8a8"
    assert methods["double_blocks.3.img_attn.qkv"] == "comfy_kitchen_nvfp4_w4a4"
    assert not made.warnings
    assert 0.33 < made.file_bytes / source.stat().st_size < 0.40


def test_a_converted_file_names_each_layers_method(tmp_path):
    import safetensors.torch

    layers = {layer: (512, 512) for layer in inventories()["flux1-dev"] if ".1" not in layer and ".2" not in layer}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{layer}.weight": torch.randn(shape, generator=generator)
        for layer, shape in layers.items()
        if "_blocks.0." in layer or "blocks" not in layer
    }
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    made = plan(tmp_path / "in.safetensors", preset("balanced", "any"))
    convert(made, tmp_path / "out.safetensors")
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        recorded = json.loads(file.metadata()["quant_core"])
    recipe = recipe_from_dict(recorded["recipe"])
    assert isinstance(recipe, MixedQuantizeConfig)
    by_method: dict[str, set[str]] = {}
    for part in recipe.parts():
        by_method.setdefault(part.method, set()).update(part.target_modules)
    assert by_method["comfy_kitchen_int8_w8a8"] >= {"double_blocks.0.img_mod.lin", "double_blocks.0.txt_attn.proj"}
    assert by_method["comfy_kitchen_int4_w4a8"] >= {"double_blocks.0.img_attn.qkv", "single_blocks.0.linear1"}
    assert "img_in.weight" in safetensors.torch.load_file(tmp_path / "out.safetensors")


def test_a_model_in_pytorch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(256, 256)
            self.layers = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(256, 256)}) for _ in range(2))

    net = Net()
    assert PresetRecipe("safe-8bit", "any").quantize_model(net) == ["layers.0.proj", "layers.1.proj"]
    assert type(net.stem) is nn.Linear
    assert isinstance(QuantizeConfig(method="comfy_kitchen_int8_w8a8"), type(PresetRecipe("safe-8bit").parts()[0]))


# ------------------------------------------------------------------ on the command line


def command(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "quant_core", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def test_the_command_says_what_each_policy_makes_of_a_file(tmp_path):
    source = write_header(tmp_path / "qwen.safetensors", inventories()["qwen-image"])
    data = json.loads(command("preset", source, "--hardware", "ampere", "--json").stdout)
    assert data["architecture"] == "qwen-image"
    assert data["tiers"] == {"keep": 7, "mod": 119, "soft": 384, "body": 336}
    sizes = [data["policies"][policy]["bytes"] for policy in ("safe-8bit", "balanced", "smallest")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] < 0.55 * data["bytes"]
    assert data["policies"]["balanced"]["layers"] == {"comfy_kitchen_int8_w8a8": 503, "comfy_kitchen_int4_w4a8": 336}
    printed = command("preset", source, "--hardware", "ampere").stdout
    assert "Qwen-Image" in printed and "503 comfy_kitchen_int8_w8a8" in " ".join(printed.split())
    assert "FLUX.1 dev" in command("preset").stdout


def test_the_command_converts_with_a_preset(tmp_path):
    import safetensors.torch

    tensors = {f"layers.{n}.proj.weight": torch.randn(512, 512) for n in range(2)} | {"stem.weight": torch.ones(4, 4)}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    done = command(
        "quantize", "in.safetensors", "out.safetensors", "--preset", "smallest", "--hardware", "any", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "unknown architecture" in done.stdout + done.stderr
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert json.loads(file.metadata()["quant_core"])["recipe"]["method"] == "comfy_kitchen_int4_convrot_w4a4"
    for wrong in (["--preset", "smallest", "--method", "x"], ["--method", "x", "--hardware", "ada"], []):
        done = command("plan", "in.safetensors", *wrong, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.startswith("error: ")
