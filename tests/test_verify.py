"""Verifying a quantized file against its source, compared with errors computed from the libraries' own dequantize."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BLOCK_LINEARS, TinyModel, relative_error, tiny_model

from quant_core import CheckpointError, QuantizeConfig, load_quantized_model, save_quantized_model
from quant_core.cli import main
from quant_core.verify import verify

INT8 = "comfy_kitchen_int8_w8a8"
METHODS = [
    INT8,
    "comfy_kitchen_fp8_w8a8",
    "comfy_kitchen_nvfp4_w4a4",
    "comfy_kitchen_mxfp8_w8a8",
    "comfy_kitchen_int4_convrot_w4a4",
    "comfy_kitchen_int4_w4a8",
    "bitsandbytes_nf4",
    "torchao_int8_w8a16",
]


@pytest.fixture
def files(tmp_path):
    """A function that writes a float file and its quantized copy."""

    def write(method=INT8, targets=BLOCK_LINEARS):
        model, config = tiny_model(), QuantizeConfig(method=method, target_modules=targets)
        save_file(model.state_dict(), tmp_path / "float.safetensors")
        config.quantize_model(model)
        save_quantized_model(model, config, tmp_path / "quantized.safetensors")
        return tmp_path / "quantized.safetensors", tmp_path / "float.safetensors"

    return write


@pytest.mark.parametrize("method", METHODS)
def test_errors_are_those_of_the_library(files, method):
    path, source = files(method)
    report = verify(path, source)
    assert [row.name for row in report.rows] == BLOCK_LINEARS
    assert report.problems() == [] and report.identical == 10
    model = TinyModel().to(torch.bfloat16)
    config = load_quantized_model(model, path, compute_dtype=torch.float32)
    weights = load_file(source)
    for row in report.rows:
        part = config.parts()[0]
        restored = part.backend.dequantize_to_linear(model.get_submodule(row.name), torch.float32).weight
        expected = relative_error(weights[row.name + ".weight"], restored)
        assert math.isclose(row.relative_error, expected, rel_tol=1e-3)
        assert row.shape == tuple(weights[row.name + ".weight"].shape)


def test_a_limit(files):
    report = verify(*files("bitsandbytes_nf4"))
    assert report.worst is not None and 0.05 < report.worst.relative_error < 0.15
    assert len(report.problems(max_error=0.01)) == len(BLOCK_LINEARS)
    assert "blocks.0.up" in report.problems(max_error=0.01)[0] and "1.00%" in report.problems(max_error=0.01)[0]
    assert report.problems(max_error=0.2) == []


def change(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_damage_is_seen(files):
    path, source = files()
    change(path, lambda t: t["blocks.0.up.weight"].zero_())
    change(path, lambda t: t["blocks.1.up.weight_scale"].fill_(float("nan")))
    rows = {row.name: row.relative_error for row in verify(path, source).rows}
    assert rows["blocks.0.up"] == 1.0 and rows["blocks.1.up"] == math.inf
    assert rows["blocks.0.down"] < 0.02
    report = verify(path, source)
    assert "inf" in "".join(report.problems())
    row = next(row for row in report.to_dict()["rows"] if row["name"] == "blocks.1.up")
    assert (row["relative_error"], row["max_error"]) == (None, None)


def test_other_tensors(files):
    path, source = files()

    def edit(tensors):
        tensors["head.bias"] += 1
        tensors["proj_in.bias"] = tensors["proj_in.bias"].float()
        tensors["more"] = torch.ones(2)
        del tensors["head.weight"]

    report = verify(change(path, edit), source)
    assert (report.changed, report.missing, report.added) == (["proj_in.bias", "head.bias"], ["head.weight"], ["more"])
    assert len(report.problems()) == 3 and json.loads(json.dumps(report.to_dict()))["identical"] == 7


def test_with_and_without_the_prefix(files):
    path, source = files()
    tensors = load_file(source)
    save_file({f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}, source)
    assert verify(path, source).problems() == []
    assert len(verify(path, source).rows) == len(BLOCK_LINEARS)


def test_a_quantized_source(files, tmp_path):
    """Against itself a file has no error at all."""
    path, _ = files("bitsandbytes_nf4")
    report = verify(path, path)
    assert {row.relative_error for row in report.rows} == {0.0} and report.problems() == []


def test_another_model(files):
    path, source = files()
    change(source, lambda t: t.update({"blocks.0.up.weight": torch.ones(512, 128)}))
    with pytest.raises(CheckpointError, match=r"'blocks.0.up' stands for \[512, 256\].*different models"):
        verify(path, source)


def test_zero_weights(files, tmp_path):
    path, source = files()
    change(source, lambda t: t["blocks.0.up.weight"].zero_())
    change(path, lambda t: t["blocks.0.up.weight"].zero_())
    assert {row.name: row.relative_error for row in verify(path, source).rows}["blocks.0.up"] == 0.0


def test_memory_holds_tiles(tmp_path):
    """A layer of 64 MiB is compared in tiles: the process never holds a float copy of it."""
    import subprocess
    import sys

    weight = torch.randn(8192, 2048, generator=torch.Generator().manual_seed(0))
    save_file({"blocks.0.up.weight": weight.bfloat16()}, tmp_path / "float.safetensors")
    scale = weight.abs().max() / 448
    tensors = {
        "blocks.0.up.weight": (weight / scale).to(torch.float8_e4m3fn),
        "blocks.0.up.weight_scale": scale,
        "blocks.0.up.comfy_quant": torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "fp8.safetensors")
    script = """
import sys, threading, time, torch
from quant_core.cli import main
from quant_core.verify import verify
import quant_core.checkpoint.formats
torch.set_num_threads(1)
try:
    import resource
except ImportError:
    sys.exit(0)
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
report = verify(sys.argv[1], sys.argv[2])
assert report.rows[0].relative_error < 0.03
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before) / 2**20)
"""
    arguments = [sys.executable, "-c", script, str(tmp_path / "fp8.safetensors"), str(tmp_path / "float.safetensors")]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    grown = float(result.stdout or 0)
    assert grown < 60, f"{grown:.0f} MiB for a weight of 64 MiB in float32"


def test_command(files, capsys):
    path, source = map(str, files("bitsandbytes_nf4"))
    assert main(["verify", path, source]) == 0
    out = capsys.readouterr().out
    assert "nf4" in out and "4 quantized layers compared, 10 other tensors are the same bytes" in out
    assert main(["verify", path, source, "--max-error", "20%"]) == 0
    assert main(["verify", path, source, "--max-error", "0.01", "--json"]) == 1
    captured = capsys.readouterr()
    assert len(json.loads(captured.out.splitlines()[-1])["problems"]) == 4 and "more than 1.00%" in captured.err
    with pytest.raises(SystemExit):
        main(["verify", path, source, "--max-error", "many"])
