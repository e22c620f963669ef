"""Conversions of other kinds of sources, and conversions that are cancelled, with several methods and shards."""

from __future__ import annotations

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from quant_core import MixedQuantizeConfig, QuantizeConfig
from quant_core.convert import convert
from quant_core.plan import plan

Type = gguf.GGMLQuantizationType
INT8, NF4 = "comfy_kitchen_int8_w8a8", "bitsandbytes_nf4"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- GGUF


@pytest.fixture
def gguf_file(tmp_path):
    """A file of the package's own writer, and what its own decoder reads from it."""
    path, truth = tmp_path / "model.gguf", {}
    writer = gguf.GGUFWriter(path, "flux")
    for seed, kind in enumerate((Type.Q4_0, Type.Q5_1, Type.Q8_0, Type.BF16, Type.F16)):
        name = f"blocks.0.{kind.name.lower()}.weight"
        data = gguf.quants.quantize(random(256, 512, seed=seed).numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        truth[name] = torch.from_numpy(gguf.quants.dequantize(data, kind))
    norm = random(512, seed=9)
    writer.add_tensor("blocks.0.norm.weight", norm.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, truth, norm


def library_codes(method, weight):
    if method == INT8:
        from comfy_kitchen.tensor import TensorWiseINT8Layout

        codes, params = TensorWiseINT8Layout.quantize(weight.float(), per_channel=True)
        return {"weight": codes, "weight_scale": params.scale}
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    return {"weight": codes, "weight.absmax": state.absmax, "weight.nested_absmax": state.state2.absmax}


@pytest.mark.parametrize(("method", "options"), [(INT8, {"convrot": False}), (NF4, {})])
def test_gguf_is_converted_as_its_own_package_reads_it(method, options, gguf_file, tmp_path):
    path, truth, norm = gguf_file
    made = plan(path, QuantizeConfig(method=method, backend_config_kwargs=options))
    (warning,) = [text for text in made.warnings if "quantized already" in text]
    assert "3 layers" in warning and "Q4_0 about 9 %" in warning and "Q8_0 about 0.6 %" in warning
    report = convert(made, tmp_path / "out.safetensors")
    assert report.bytes_after == made.file_bytes == (tmp_path / "out.safetensors").stat().st_size
    result = load_file(tmp_path / "out.safetensors")
    assert torch.equal(result["blocks.0.norm.weight"], norm)
    dtypes = {row.tensor: getattr(torch, row.dtype) for row in made.rows}
    for name, weight in truth.items():
        for key, codes in library_codes(method, weight.to(dtypes[name])).items():
            stored = result[f"{name.removesuffix('.weight')}.{key}"]
            assert torch.equal(stored.view(-1), codes.view(-1)), (name, key)


# ---------------------------------------------------------------- cancelling


def everything(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_cancel_at_20_moments_of_a_mixed_conversion_into_shards(tmp_path):
    state = {}
    for block in range(8):
        for seed, layer in enumerate(("attn", "up", "down")):
            state[f"blocks.{block}.{layer}.weight"] = random(256, 256, seed=10 * block + seed).bfloat16()
            state[f"blocks.{block}.{layer}.bias"] = random(256, seed=seed).half()
    source = tmp_path / "source.safetensors"
    save_file(state, source)
    recipe = MixedQuantizeConfig(
        configs=[
            QuantizeConfig(method="comfy_kitchen_nvfp4_w4a4", target_modules=["attn"]),
            QuantizeConfig(method="comfy_kitchen_fp8_w8a8", target_modules=["up"]),
            QuantizeConfig(method=INT8, target_modules=["down"]),
        ]
    )
    made = plan(source, recipe, shard_size=300_000)
    reports = []
    whole = tmp_path / "whole"
    convert(made, whole / "m.safetensors", progress=lambda *report: reports.append(report))
    expected = everything(whole)
    assert len(expected) > 3 and "m.safetensors.index.json" in expected and len(reports) >= 40

    class Cancelled(BaseException):
        """As ComfyUI's interrupt, no Exception."""

    for moment in range(0, len(reports), len(reports) // 20):
        for resume in (False, True):
            folder = tmp_path / f"{moment}-{resume}"
            count = 0

            def progress(done, total, name, moment=moment):
                nonlocal count
                count += 1
                if count > moment:
                    raise Cancelled

            with pytest.raises(Cancelled):
                convert(made, folder / "m.safetensors", resume=resume, progress=progress)
            left = sorted(everything(folder))
            if not resume:
                assert left == []
                continue
            assert left and all(name.startswith(".m") for name in left)  # nothing under a final name
            convert(made, folder / "m.safetensors", resume=True)
            assert everything(folder) == expected
