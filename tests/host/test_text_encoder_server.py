"""*Load Text Encoder (Quantized)* in a real ComfyUI server: from a prompt's text to a sampled latent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from host.conftest import load_module
from host.test_server import PACK, ROOT, Server, message

INT8, NVFP4 = "comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4"
FILE = "t5_base.safetensors"


@pytest.fixture(scope="module")
def server(make_tiny, tmp_path_factory):
    base = tmp_path_factory.mktemp("comfyui")
    make_te = load_module("quantcore_make_tiny_te_server", Path(__file__).parent / "make_tiny_te.py")
    (base / "models" / "text_encoders").mkdir(parents=True)
    make_te.write("t5_base", base / "models" / "text_encoders" / FILE)
    # Reads 768 values a token, as T5-base gives them.
    make_tiny.write("sd15", base / "models" / "diffusion_models" / "sd15.safetensors")
    for part in ("nodes", "quant_core", "web"):
        target = base / "custom_nodes" / PACK / part
        shutil.copytree(ROOT / part, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", base / "custom_nodes" / PACK)
    running = Server(base)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.stop()


def ours(clip_type: str = "stable_audio", **options) -> dict:
    inputs = {"clip_name1": FILE, "type": clip_type, "method": INT8, **options}
    return {"class_type": "QuantCore_LoadTextEncoder", "inputs": inputs}


STOCK = {"class_type": "CLIPLoader", "inputs": {"clip_name": FILE, "type": "stable_audio", "device": "default"}}


def workflow(loader: dict, name: str, text: str = "a red fox jumps over (the lazy:1.2) dog") -> dict:
    sampler = {"seed": 7, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {"model": ["2", 0], "positive": ["3", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    return {
        "1": loader,
        "2": {"class_type": "UNETLoader", "inputs": {"unet_name": "sd15.safetensors", "weight_dtype": "default"}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 0], "text": text}},
        "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "5": {"class_type": "KSampler", "inputs": {**sampler, **links}},
        "6": {"class_type": "SaveLatent", "inputs": {"samples": ["5", 0], "filename_prefix": name}},
    }


@pytest.fixture(scope="module")
def float_latent(server):
    return server.latent(server.run(workflow(STOCK, "float")))


@pytest.mark.parametrize("method", [INT8, NVFP4])
def test_a_prompt_is_read_as_by_the_float_encoder(method, server, float_latent):
    entry = server.run(workflow(ours(method=method), method))
    another = server.latent(server.run(workflow(STOCK, "another", "a blue bird")))
    error, distance = (float_latent - server.latent(entry)).norm(), (float_latent - another).norm()
    assert 0 < error < {INT8: 0.05, NVFP4: 0.5}[method] * distance
    (text,) = entry["outputs"]["1"]["text"]
    assert text.startswith(f"{FILE}: 72 layers quantized with {method}; ")


def test_the_disk_cache(server):
    import torch

    plain = server.latent(server.run(workflow(ours(), "plain")))
    for name in ("first", "second"):
        server.post("/free", {"unload_models": True, "free_memory": True})
        entry = server.run(workflow(ours(disk_cache=True), name, "a red fox jumps over (the lazy:1.2) dog"))
        assert torch.equal(server.latent(entry), plain)
    assert len(list((server.base / "user" / "quantcore_cache").glob("*.safetensors"))) == 1


def test_files_that_do_not_fit_the_type_are_refused_in_plain_words(server):
    error = message(server.run(workflow(ours("flux", clip_name2=FILE), "refused")), "execution_error")
    assert error["node_id"] == "1"
    assert f"{FILE}, {FILE}: not the text encoders of the type 'flux'" in error["exception_message"]
    assert "size mismatch" in error["exception_message"] and len(error["exception_message"]) < 600
