"""Files that are no model, or not one to quantize: each refused in a sentence that names the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def save(path, tensors, **metadata):
    import safetensors.torch

    safetensors.torch.save_file(tensors, path, metadata=metadata or None)
    return path


def marker(content: bytes):
    import torch

    return torch.tensor(list(content), dtype=torch.uint8)


def refused(online, path, *words, error="CheckpointError", **options):
    import quant_core

    with pytest.raises(getattr(quant_core, error)) as caught:
        online(path=path, **options)
    text = str(caught.value)
    assert path.name in text
    for word in words:
        assert word in text
    return text


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 4, b"<html>not found</html>" * 50, b"\x10" + b"\x00" * 7 + b"{" * 16]
)
def test_no_safetensors_file(content, online, tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    refused(online, path, "cannot be read as a model file")


@pytest.mark.parametrize("name", ["text.ckpt", "text.pt"])
def test_no_pickle(name, online, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"not a pickle at all")
    refused(online, path, "cannot be read as a model file")


def test_a_pickle_of_something_else(online, tmp_path):
    import torch

    path = tmp_path / "list.pt"
    torch.save([1, 2, 3], path)
    refused(online, path, "not named tensors")


def test_a_cut_off_file(online, tiny_flux, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(tiny_flux.read_bytes()[:-100])
    refused(online, path, "unfinished download")


def test_a_missing_file(online, tmp_path):
    refused(online, tmp_path / "missing.safetensors", "cannot be read")


def test_an_unknown_architecture(online, tmp_path):
    import torch

    path = save(tmp_path / "tower.safetensors", {"tower.0.weight": torch.zeros(4, 4)})
    refused(online, path, "not a diffusion model that this ComfyUI knows", "tower.0.weight")


def test_a_lora(online, tmp_path):
    import torch

    tensors = {f"lora_unet_block.lora_{side}.weight": torch.zeros(4, 4) for side in ("up", "down")}
    refused(online, save(tmp_path / "style.safetensors", tensors), "is a LoRA")


def test_a_bitsandbytes_layer_without_its_blocks(online, tiny_flux, tmp_path):
    import safetensors.torch

    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    path = tmp_path / "nf4.safetensors"
    convert_file(tiny_flux, path, QuantizeConfig(method="bitsandbytes_nf4"))
    tensors = safetensors.torch.load_file(path)
    tensors["single_blocks.0.linear1.weight.absmax"] = tensors["single_blocks.0.linear1.weight.absmax"][:-1].clone()
    refused(online, save(tmp_path / "short.safetensors", tensors), "single_blocks.0.linear1", "absmax")


def test_a_torchao_layer_whose_metadata_is_lost(online, tiny_flux, tmp_path):
    import safetensors.torch

    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    path = tmp_path / "int8.safetensors"
    convert_file(tiny_flux, path, QuantizeConfig(method="torchao_int8_w8a16"))
    refused(online, save(tmp_path / "bare.safetensors", safetensors.torch.load_file(path)), "torchao", "metadata")


def test_a_gguf_file_is_to_be_converted(online, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    refused(online, path, "Convert Checkpoint")


@pytest.mark.parametrize("content", [b"[1, 2]", b"{}", b"\xff\xfe", b"not json", b'"int8"'])
def test_a_broken_marker(content, online, make_tiny, tmp_path):
    tensors = make_tiny.state_dict("flux")
    tensors["single_blocks.0.linear1.comfy_quant"] = marker(content)
    path = save(tmp_path / "marked.safetensors", tensors)
    refused(online, path, "single_blocks.0.linear1", "marke")


def test_an_unknown_format(online, make_tiny, tmp_path):
    tensors = make_tiny.state_dict("flux")
    tensors["single_blocks.0.linear1.comfy_quant"] = marker(json.dumps({"format": "int3_dream"}).encode())
    path = save(tmp_path / "future.safetensors", tensors)
    refused(online, path, "single_blocks.0.linear1", "'int3_dream'", "known: int8_tensorwise")


def test_nothing_left_to_quantize(online, tiny_flux, make_tiny):
    layers = [key.removesuffix(".weight") for key in make_tiny.state_dict("flux") if key.endswith(".weight")]
    refused(online, tiny_flux, "Flux", exclude_modules=[name for name in layers if "_blocks." in name])


def test_an_exclusion_that_matches_nothing(online, tiny_flux):
    refused(online, tiny_flux, "img_mpl.0", exclude_modules=["img_mpl.0"])


def test_a_weight_that_is_not_finite(online, make_tiny, tmp_path):
    tensors = make_tiny.state_dict("flux")
    tensors["single_blocks.1.linear1.weight"][3, 5] = float("nan")
    path = save(tmp_path / "nan.safetensors", tensors)
    refused(online, path, "single_blocks.1.linear1", "NaN", error="QuantizationError")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on a process's memory, which only Linux keeps to")
def test_out_of_memory_says_what_to_lower(tmp_path):
    """A process whose memory is limited once ComfyUI is there."""
    script = Path(__file__).with_name("out_of_memory_process.py")
    result = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "MemoryError" in result.stdout
    assert "Convert Checkpoint" in result.stdout and "blocks.0.large" in result.stdout
