"""What the doctor says of ComfyUI's own loader, against that loader: each crafted file is loaded and run by it."""

from __future__ import annotations

import pytest
from doctor_cases import CASES

LAYER = "double_blocks.0.img_attn.qkv"
VERDICTS = {"raises": "does not load", "differs": "loads, wrong output", "same": "loads"}


@pytest.fixture(scope="module")
def quantized(tiny_flux, tmp_path_factory, stock_load, flux_output):
    """A function that returns a quantized tiny flux and what ComfyUI computes with it, made once a method."""
    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file

    made = {}

    def of(method):
        if method not in made:
            path = tmp_path_factory.mktemp("quantized") / f"{method}.safetensors"
            convert_file(tiny_flux, path, QuantizeConfig(method=method))
            made[method] = path, flux_output(stock_load(path))
        return made[method]

    return of


def outcome(path, stock_load, flux_output, reference) -> str:
    import torch

    try:
        output = flux_output(stock_load(path))
    except Exception as error:
        assert not isinstance(error, AssertionError)
        return "raises"
    return "same" if torch.equal(output, reference) else "differs"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_comfyui_does_what_the_doctor_says(case, quantized, stock_load, flux_output, tmp_path, comfy_idle):
    from safetensors.torch import load_file, save_file

    from quant_core.doctor import COMFYUI, doctor

    good, reference = quantized(case.method)
    tensors, metadata = load_file(good), {"format": "pt"}
    case.change(tensors, metadata, LAYER)
    path = tmp_path / "broken.safetensors"
    save_file(tensors, path, metadata=metadata)
    report = doctor(path)
    found = {finding.code for finding in report.findings}
    if case.code != "rotation-disagrees":  # which takes the recipe, left out here
        assert case.code in found
        assert case.comfyui is None or report.verdict(COMFYUI) == VERDICTS[case.comfyui]
    if case.comfyui is not None:
        assert outcome(path, stock_load, flux_output, reference) == case.comfyui


@pytest.mark.parametrize("method", sorted({case.method for case in CASES}))
def test_no_finding_on_a_file_that_comfyui_loads(quantized, method):
    from quant_core.doctor import doctor

    assert doctor(quantized(method)[0]).findings == []


@pytest.mark.parametrize("method", ["comfy_kitchen_nvfp4_w4a4", "comfy_kitchen_int4_convrot_w4a4"])
def test_a_packed_layer_that_detection_reads(method, tiny_flux, stock_load, flux_output, tmp_path):
    from safetensors.torch import load_file, save_file

    from quant_core import QuantizeConfig
    from quant_core.convert import convert_file
    from quant_core.doctor import COMFYUI, doctor

    source, path = tmp_path / "float.safetensors", tmp_path / "packed.safetensors"
    tensors = load_file(tiny_flux)
    # Quantized under a name that detection does not read, which the converter would refuse otherwise.
    tensors["blocks.0.lin.weight"] = tensors.pop("img_in.weight")
    save_file(tensors, source)
    convert_file(source, path, QuantizeConfig(method=method, target_modules=["blocks.0.lin"]))
    packed = {key.replace("blocks.0.lin.", "img_in."): value for key, value in load_file(path).items()}
    save_file(packed, path)
    report = doctor(path)
    assert [(f.code, f.layer) for f in report.findings] == [("packed-on-detection-key", "img_in")]
    assert report.verdict(COMFYUI) == "does not load"
    # ComfyUI either fails on it, or takes it for a model of half the channels.
    try:
        loaded = stock_load(path)
        flux_output(loaded)
    except (RuntimeError, ValueError, AttributeError):
        return
    good = stock_load(tiny_flux).model.model_config.unet_config["in_channels"]
    assert loaded.model.model_config.unet_config["in_channels"] == good // 2


@pytest.mark.parametrize("change", [lambda data: data[:-100], lambda data: data + bytes(8)], ids=["cut", "tail"])
def test_damaged_files(change, quantized, stock_load, tmp_path):
    from quant_core.doctor import COMFYUI, doctor

    path = tmp_path / "damaged.safetensors"
    path.write_bytes(change(quantized("comfy_kitchen_fp8_w8a8")[0].read_bytes()))
    assert doctor(path).verdict(COMFYUI) == "does not load"
    with pytest.raises(Exception, match="(?i)incomplete|buffer|size"):
        stock_load(path)


def test_the_loader_for_dynamic_memory_knows_no_e8m0(make_tiny):
    import comfy.utils

    assert "F8_E8M0" not in comfy.utils._TYPES and "F8_E4M3" in comfy.utils._TYPES


def test_clip_reads_no_markers(make_tiny, tmp_path):
    """Nothing of ComfyUI's CLIP-L and CLIP-G code takes the markers' metadata; a T5's does."""
    import inspect

    import comfy.sdxl_clip
    import comfy.text_encoders.flux

    assert "quantization_metadata" not in inspect.getsource(comfy.sdxl_clip)
    assert "quantization_metadata" in inspect.getsource(comfy.text_encoders.flux)
