"""Metadata that a plan adds to the file: counted in its size, kept in its JSON, part of what is resumed."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from quant_core import CheckpointError, QuantizeConfig, load_quantized_model
from quant_core.checkpoint.journal import partial_path
from quant_core.convert import convert
from quant_core.plan import Plan, plan

INT8, TORCHAO = "comfy_kitchen_int8_w8a8", "torchao_int8_w8a16"
EXTRA = {"workflow": json.dumps({"nodes": [{"title": 'quote " and \u00fcmlaut'}]}), "prompt": "{}"}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file(tiny_model().state_dict(), path, metadata={"format": "pt", "note": "kept", "prompt": "the source's own"})
    return path


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.parametrize("method", [INT8, TORCHAO, "bitsandbytes_nf4"])
def test_it_is_written_and_counted(method, source, tmp_path):
    recipe = QuantizeConfig(method=method)
    made = plan(source, recipe, extra_metadata=EXTRA)
    plain = plan(source, recipe)
    convert(made, tmp_path / "extra.safetensors")
    convert(plain, tmp_path / "plain.safetensors")
    assert made.file_bytes == (tmp_path / "extra.safetensors").stat().st_size
    assert made.file_bytes > plain.file_bytes and made.bytes_after == plain.bytes_after

    found, before = metadata_of(tmp_path / "extra.safetensors"), metadata_of(tmp_path / "plain.safetensors")
    assert before["prompt"] == "the source's own" and found["note"] == "kept"
    assert {key: found[key] for key in EXTRA} == EXTRA
    assert {k: v for k, v in found.items() if k not in EXTRA} == {k: v for k, v in before.items() if k not in EXTRA}
    extra, without = load_file(tmp_path / "extra.safetensors"), load_file(tmp_path / "plain.safetensors")
    assert all(torch.equal(extra[name].view(torch.uint8), without[name].view(torch.uint8)) for name in without)
    load_quantized_model(tiny_model(seed=3), tmp_path / "extra.safetensors")


def test_only_the_first_shard_holds_it(source, tmp_path):
    made = plan(source, QuantizeConfig(method=INT8), shard_size=300_000, extra_metadata=EXTRA)
    report = convert(made, tmp_path / "many.safetensors")
    first, *others = report.files
    assert others and metadata_of(first)["workflow"] == EXTRA["workflow"]
    assert not any("workflow" in metadata_of(path) for path in others)
    assert made.file_bytes == report.bytes_after


def test_the_plan_as_json_has_it(source):
    made = plan(source, QuantizeConfig(method=INT8), extra_metadata=EXTRA)
    assert Plan.from_json(made.to_json()) == made
    older = json.loads(plan(source, QuantizeConfig(method=INT8)).to_json())
    del older["extra_metadata"]
    assert Plan.from_dict(older).extra_metadata == {}
    with pytest.raises(ValueError, match="extra_metadata of a plan is an object"):
        Plan.from_dict({**older, "extra_metadata": ["workflow"]})


@pytest.mark.parametrize(
    ("method", "extra", "message"),
    [
        (INT8, {"format": "np"}, "'format', by which readers"),
        (INT8, {"quant_core": "{}"}, "'quant_core', by which readers"),
        (TORCHAO, {"tensor_names": "[]"}, "'tensor_names', by which readers"),
        (TORCHAO, {"blocks.0.up.weight": "{}"}, "'blocks.0.up.weight', by which readers"),
        (INT8, {"blocks.0.up.comfy_quant": "{}"}, "'blocks.0.up.comfy_quant', by which readers"),
        (INT8, {"workflow": {"nodes": []}}, "names and values must be text"),
    ],
)
def test_entries_that_would_break_the_file_are_refused(source, method, extra, message):
    with pytest.raises(ValueError, match=message):
        plan(source, QuantizeConfig(method=method), extra_metadata=extra)


def test_a_run_is_resumed_with_the_same_entries_only(source, tmp_path):
    out, recipe = tmp_path / "out.safetensors", QuantizeConfig(method=INT8)

    class Stop(Exception):
        pass

    def stop_half_way(done, total, _):
        if done * 2 > total:
            raise Stop

    with pytest.raises(Stop):
        convert(plan(source, recipe, extra_metadata=EXTRA), out, resume=True, progress=stop_half_way, threads=1)
    assert partial_path(out).exists()
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        convert(plan(source, recipe, extra_metadata={**EXTRA, "prompt": "[]"}), out, resume=True)
    convert(plan(source, recipe, extra_metadata=EXTRA), out, resume=True)
    convert(plan(source, recipe, extra_metadata=EXTRA), tmp_path / "at_once.safetensors")
    assert out.read_bytes() == (tmp_path / "at_once.safetensors").read_bytes()
