"""The node Load LoRA (Quantized), in process and in a workflow of a real ComfyUI server."""

from __future__ import annotations

import importlib
import shutil
from types import SimpleNamespace

import pytest
from host.conftest import ROOT, load_module
from host.test_load_lora import NVFP4, make_lora, relative_error
from host.test_server import CONDITIONING_NODE, PACK, Server, our_loader, stock_loader


@pytest.fixture(scope="module")
def host(pack):
    return importlib.import_module(pack.load.__module__.rpartition(".")[0] + ".lora")


@pytest.fixture(scope="module")
def folder(make_tiny, tmp_path_factory):
    """A folder in which ComfyUI looks for LoRAs."""
    import folder_paths

    path = tmp_path_factory.mktemp("loras")
    folder_paths.add_model_folder_path("loras", str(path))
    return path


@pytest.fixture(scope="module")
def node(pack):
    return importlib.import_module(pack.core.__name__.rpartition(".")[0] + ".load_lora").LoadLoraQuantized


def test_strength_0_returns_the_input(node, online):
    model, clip = online(NVFP4), SimpleNamespace()
    unchanged = node.execute(model, "lora5.safetensors", 0.0, 0.0, clip=clip)
    assert unchanged.result[0] is model and unchanged.result[1] is clip
    unchanged = node.execute(model, "lora5.safetensors", 0.0, 1.0)
    assert unchanged.result[0] is model and unchanged.result[1] is None


def test_the_text_encoder_gets_what_comfyuis_loader_gives(node, host, folder, tiny_flux, tmp_path, comfy_idle):
    import comfy.sd
    import safetensors.torch
    import torch

    encoders = load_module("quantcore_make_tiny_te", ROOT / "tests" / "host" / "make_tiny_te.py")
    file = encoders.write("t5", tmp_path / "t5.safetensors")
    options = {**encoders.options("t5"), "dtype": torch.float32}
    kind = comfy.sd.CLIPType[encoders.ENCODERS["t5"].clip_type.upper()]
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(tiny_flux), model_options={"dtype": torch.float32})
        clip = comfy.sd.load_clip([str(file)], clip_type=kind, model_options=options)
    generator = torch.Generator().manual_seed(3)
    stem = "text_encoders.t5base.transformer.encoder.block.0.layer.1.DenseReluDense.wo"
    tensors = {
        stem + ".lora_B.weight": torch.randn(256, 4, generator=generator) / 3,
        stem + ".lora_A.weight": torch.randn(4, 512, generator=generator) / 3,
    }
    safetensors.torch.save_file(tensors, folder / "encoder.safetensors")
    plain = encoders.encode(clip)[0]
    expected = encoders.encode(comfy.sd.load_lora_for_models(model, clip, tensors, 1.0, 0.6)[1])[0]
    assert relative_error(plain, expected) > 0.005
    for mode in host.MODES:
        added = node.execute(model, "encoder.safetensors", 1.0, 0.6, mode=mode, clip=clip).result[1]
        assert relative_error(expected, encoders.encode(added)[0]) < 2e-6
    assert relative_error(plain, encoders.encode(clip)[0]) == 0


def test_the_node_runs_again_for_another_file_only(node, folder, make_tiny):
    import safetensors.torch

    fingerprints = []
    for only in ("qkv", "qkv", "linear1"):
        if len(fingerprints) != 1:
            safetensors.torch.save_file(make_lora(make_tiny, 1, only), folder / "changing.safetensors")
        fingerprints.append(node.fingerprint_inputs("changing.safetensors", 1.0, 1.0))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_every_input_and_output_explains_itself(node):
    schema = node.GET_SCHEMA()
    assert all(one.tooltip for one in [*schema.inputs, *schema.outputs])
    assert (ROOT / "web" / "docs" / f"{schema.node_id}.md").is_file()


def test_a_workflow_in_a_server(make_tiny, tmp_path):
    """Two chained LoRAs: on a float model the latent of the stock nodes, on a 4-bit one close to it."""
    import safetensors.torch

    make_tiny.write("flux", tmp_path / "models" / "diffusion_models" / "flux.safetensors")
    (tmp_path / "models" / "loras").mkdir()
    for seed in (5, 6):
        safetensors.torch.save_file(
            make_lora(make_tiny, seed), tmp_path / "models" / "loras" / f"lora{seed}.safetensors"
        )
    custom_nodes = tmp_path / "custom_nodes"
    for part in ("nodes", "quant_core", "web"):
        shutil.copytree(ROOT / part, custom_nodes / PACK / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", custom_nodes / PACK)
    (custom_nodes / "random_conditioning.py").write_text(CONDITIONING_NODE)

    def workflow(loader: dict, kind: str, prefix: str, **options) -> dict:
        shape = {"tokens": make_tiny.FLUX_TOKENS, "width": make_tiny.FLUX_CONTEXT, "pooled": make_tiny.FLUX_POOLED}
        sampler = {"seed": 7, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        links = {"model": ["7", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0]}
        first, second = (
            {"class_type": kind, "inputs": {"model": [source, 0], "lora_name": name, "strength_model": 0.7, **options}}
            for source, name in (("1", "lora5.safetensors"), ("6", "lora6.safetensors"))
        )
        return {
            "1": loader,
            "2": {"class_type": "RandomConditioning", "inputs": {"run": 0, "seed": 3, **shape}},
            "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
            "4": {"class_type": "KSampler", "inputs": {**sampler, **links}},
            "5": {"class_type": "SaveLatent", "inputs": {"samples": ["4", 0], "filename_prefix": prefix}},
            "6": first,
            "7": second,
        }

    server = Server(tmp_path)
    try:
        server.wait_until_up()
        inputs = server.get("/object_info/QuantCore_LoadLora")["QuantCore_LoadLora"]["input"]
        assert "lora5.safetensors" in str(inputs)
        options = {"strength_clip": 1.0, "mode": "bypass"}
        latents = [
            server.latent(server.run(flow))
            for flow in (
                workflow(stock_loader("flux.safetensors"), "LoraLoaderModelOnly", "stock"),
                workflow(stock_loader("flux.safetensors"), "QuantCore_LoadLora", "float", **options),
                workflow(our_loader("flux.safetensors", NVFP4), "QuantCore_LoadLora", "nvfp4", **options),
                workflow(
                    our_loader("flux.safetensors", NVFP4),
                    "QuantCore_LoadLora",
                    "again",
                    **{**options, "mode": "patch (requantize)"},
                ),
            )
        ]
    finally:
        server.stop()
    errors = [relative_error(latents[0], latent) for latent in latents[1:]]
    assert errors[0] < 1e-4 < errors[1] < errors[2]
    assert errors[1] < 0.15
