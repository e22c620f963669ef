"""File to file: the tensors that the libraries give, whatever the number of threads; and nothing left on a failure."""

import json
import os
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_methods import METHODS
from tiny_models import tensor_bytes

from quant_core import CheckpointError, QuantizationError, QuantizeConfig, runs
from quant_core.checkpoint.reader import open_checkpoint
from quant_core.cli import main
from quant_core.constraints import violations
from quant_core.convert import convert, convert_file
from quant_core.plan import plan

INT8, FP8 = "comfy_kitchen_int8_w8a8", "comfy_kitchen_fp8_w8a8"


def layers(dtype=torch.bfloat16, seed=0):
    """Weights of several runs each, with a run of zeros, one large row, and tensors that are kept."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in {"wide": (384, 1088), "tall": (1344, 256), "small": (256, 320)}.items():
        weight = torch.randn(shape, generator=generator) * 0.02
        weight[5], weight[7] = 0, weight[7] * 500
        weight[:, 64:128] = 0
        state[f"blocks.0.{name}.weight"] = weight.to(dtype)
        state[f"blocks.0.{name}.bias"] = torch.randn(shape[0], generator=generator).to(torch.float16)
    state["blocks.0.table"] = torch.randint(-9, 9, (33, 7), generator=generator)
    state["blocks.0.empty.weight"] = torch.empty(0, 4)
    state["blocks.0.scalar"] = torch.tensor(3.5, dtype=torch.float64)
    state["head.weight"] = torch.randn(64, 256, generator=generator).to(torch.float32)
    return state


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    save_file(layers(), folder / "source.safetensors", metadata={"format": "pt", "note": "kept"})
    return folder / "source.safetensors"


@pytest.fixture
def small_runs(monkeypatch):
    """Weights of this size then have many runs."""
    monkeypatch.setattr(runs, "RUN_ELEMENTS", 40_000)


def contents(path):
    return {name: tensor_bytes(tensor) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_runs_give_what_the_whole_layer_gives(method, dtype, tmp_path, small_runs):
    state = layers(dtype)
    save_file(state, tmp_path / "in.safetensors")
    config = QuantizeConfig(method=method)
    convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", config)
    expected = {name: tensor_bytes(tensor) for name, tensor in state.items()}
    for name in ("wide", "tall", "small"):
        name = f"blocks.0.{name}"
        weight = state[f"{name}.weight"]
        if violations(config.backend.constraints(), in_features=weight.shape[1], out_features=weight.shape[0]):
            continue
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantized = config.backend.create_quantized_linear(linear).state_dict()
        flat, _ = config.backend.flatten_state_dict({f"{name}.{key}": value for key, value in quantized.items()})
        del expected[f"{name}.weight"]
        expected.update({key: tensor_bytes(value) for key, value in flat.items()})
    assert contents(tmp_path / "out.safetensors") == expected


def kitchen_truth(method, weight):
    """What comfy-kitchen's own quantize functions make of a weight in float32."""
    import comfy_kitchen as ck
    import comfy_kitchen.tensor as ckt

    weight = weight.float()
    amax = weight.abs().max()
    if method == FP8:
        scale = amax / 448
        return {"weight": ck.quantize_per_tensor_fp8(weight, scale), "weight_scale": scale}
    if method.startswith(INT8):
        rotation = {} if "=" in method else {"convrot": True, "convrot_groupsize": 64}
        codes, params = ckt.TensorWiseINT8Layout.quantize(weight, per_channel=True, **rotation)
        return {"weight": codes, "weight_scale": params.scale}
    if method == "comfy_kitchen_nvfp4_w4a4":
        scale = amax / (448 * 6)
        codes, blocks = ck.quantize_nvfp4(weight, scale)
        return {"weight": codes, "weight_scale": blocks, "weight_scale_2": scale}
    codes, blocks = ck.quantize_mxfp8(weight)
    return {"weight": codes, "weight_scale": blocks.view(torch.uint8)}


@pytest.mark.parametrize(
    "method", [FP8, INT8, INT8 + " convrot=false", "comfy_kitchen_nvfp4_w4a4", "comfy_kitchen_mxfp8_w8a8"]
)
def test_file_holds_what_comfy_kitchen_makes(method, source, tmp_path, small_runs):
    name, *option = method.split()
    options = {"convrot": False} if option else {}
    convert_file(source, tmp_path / "out.safetensors", QuantizeConfig(method=name, backend_config_kwargs=options))
    found = load_file(tmp_path / "out.safetensors")
    for key, value in kitchen_truth(method, load_file(source)["blocks.0.wide.weight"]).items():
        assert tensor_bytes(found[f"blocks.0.wide.{key}"])[2] == tensor_bytes(value)[2], key


@pytest.mark.parametrize("method", [FP8, INT8, "comfy_kitchen_nvfp4_w4a4", "bitsandbytes_nf4", "torchao_int4_w4a16"])
def test_bytes_do_not_depend_on_threads(method, source, tmp_path, small_runs):
    made = plan(source, QuantizeConfig(method=method))
    found = set()
    before = torch.get_num_threads()
    for threads, intra_op in ((1, 1), (2, 2), (4, 1), (3, 2)):
        torch.set_num_threads(intra_op)
        convert(made, tmp_path / "out.safetensors", threads=threads)
        assert torch.get_num_threads() == intra_op
        found.add((tmp_path / "out.safetensors").read_bytes())
    torch.set_num_threads(before)
    assert len(found) == 1


def test_shards(source, tmp_path, small_runs):
    whole = tmp_path / "whole.safetensors"
    convert_file(source, whole, QuantizeConfig(method="torchao_int8_w8a16"))
    made = plan(source, QuantizeConfig(method="torchao_int8_w8a16"), shard_size=400_000)
    (tmp_path / "sharded").mkdir()
    report = convert(made, tmp_path / "sharded" / "m.safetensors")
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert [str(f) for f in files] == report.files and len(files) == len(made.file_sizes) > 1
    assert [f.stat().st_size for f in files] == made.file_sizes
    assert [f.name for f in files] == [f"m-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "sharded" / "m.safetensors.index.json").read_text())
    together = {}
    for file in files:
        state = contents(file)
        assert all(index["weight_map"][name] == file.name for name in state)
        together |= state
    assert together == contents(whole)
    assert report.hash == convert_file(source, whole, QuantizeConfig(method="torchao_int8_w8a16")).hash
    assert sorted(p.name for p in (tmp_path / "sharded").iterdir()) == sorted(
        [f.name for f in files] + ["m.safetensors.index.json"]
    )
    reopened = open_checkpoint(tmp_path / "sharded")
    assert "_weight_qdata" in reopened.metadata["tensor_names"] or "blocks.0.wide.weight" in reopened.metadata


def test_measure_and_transform(source, tmp_path, small_runs):
    class Negated:
        identity = "negated"

        def applies_to(self, layer):
            return layer in ("blocks.0.tall", "head")

        def __call__(self, layer, rows, start):
            assert rows.dtype == torch.float32
            return -rows

    state = load_file(source)
    for name in ("blocks.0.tall", "head"):
        state[f"{name}.weight"] = -state[f"{name}.weight"]
    save_file(state, tmp_path / "negated.safetensors")
    for method in (FP8, INT8):
        config = QuantizeConfig(method=method)
        convert_file(tmp_path / "negated.safetensors", tmp_path / "a.safetensors", config)
        convert(plan(source, config), tmp_path / "b.safetensors", transform=Negated())
        assert contents(tmp_path / "a.safetensors") == contents(tmp_path / "b.safetensors")
    report = convert(plan(source, QuantizeConfig(method=INT8)), tmp_path / "c.safetensors", measure=True)
    assert all(0 < row.relative_error < 0.05 for row in report.quantized)


# ---------------------------------------------------------------- failures


def only(folder, *names):
    return sorted(p.name for p in folder.iterdir()) == sorted(names)


def test_cancel_at_any_report_leaves_nothing(source, tmp_path, small_runs):
    made = plan(source, QuantizeConfig(method=FP8))
    out = tmp_path / "out" / "o.safetensors"
    convert(made, out)
    expected = out.read_bytes()
    out.unlink()

    class Cancelled(Exception):
        pass

    for stop in range(len(made.rows)):
        seen = 0

        def progress(done, total, name, stop=stop):
            nonlocal seen
            if seen == stop:
                raise Cancelled
            seen += 1

        with pytest.raises(Cancelled):
            convert(made, out, progress=progress)
        assert list(out.parent.iterdir()) == []
    seen = len(made.rows) - 3
    with pytest.raises(Cancelled):
        convert(made, out, resume=True, progress=progress)
    assert only(out.parent, ".o.safetensors.partial", ".o.safetensors.journal")
    convert(made, out, resume=True)
    assert out.read_bytes() == expected and only(out.parent, "o.safetensors")


def test_resume_refuses_another_plan_and_another_source(source, tmp_path):
    out = tmp_path / "o.safetensors"

    def stop(done, total, name):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan(source, QuantizeConfig(method=INT8)), out, resume=True, progress=stop)
    with pytest.raises(CheckpointError, match="cannot be resumed: the plan is another one"):
        convert(plan(source, QuantizeConfig(method=FP8)), out, resume=True)
    save_file(layers(seed=1), source)
    with pytest.raises(CheckpointError, match="cannot be resumed: the source is another one or was changed"):
        convert(plan(source, QuantizeConfig(method=INT8)), out, resume=True)
    assert out.with_name(".o.safetensors.partial").exists() and not out.exists()


def test_left_behind_is_removed_with_a_notice(source, tmp_path, caplog):
    out = tmp_path / "o.safetensors"

    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan(source, QuantizeConfig(method=INT8)), out, resume=True, progress=stop)
    convert(plan(source, QuantizeConfig(method=FP8)), out)
    assert "an interrupted conversion to" in caplog.text and only(tmp_path, "in", "o.safetensors")


def test_damaged_partial_is_written_again(source, tmp_path):
    out = tmp_path / "o.safetensors"
    made = plan(source, QuantizeConfig(method=INT8))
    convert(made, out)
    expected = out.read_bytes()

    def stop(done, total, name):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(made, out, resume=True, progress=stop)
    partial = out.with_name(".o.safetensors.partial")
    data = bytearray(partial.read_bytes())
    data[len(data) // 2] ^= 1
    partial.write_bytes(data)
    convert(made, out, resume=True)
    assert out.read_bytes() == expected


def test_two_conversions_to_one_file(source, tmp_path):
    made = plan(source, QuantizeConfig(method=INT8))
    problems = []

    def meanwhile(done, total, name):
        if not problems:
            try:
                convert(made, tmp_path / "o.safetensors")
            except CheckpointError as error:
                problems.append(str(error))

    convert(made, tmp_path / "o.safetensors", progress=meanwhile)
    assert "is being written by another process" in problems[0]


def test_destination_that_is_the_source(source, tmp_path):
    made = plan(source, QuantizeConfig(method=INT8))
    before = source.read_bytes()
    link, folder = tmp_path / "link.safetensors", tmp_path / "linked"
    link.symlink_to(source)
    folder.symlink_to(source.parent)
    os.link(source, tmp_path / "hard.safetensors")
    for path in (source, link, folder / source.name, tmp_path / "hard.safetensors"):
        with pytest.raises(ValueError, match="is the source itself"):
            convert(made, path)
    assert source.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "rewritten"])
def test_source_that_changes_while_it_is_read(damage, source, tmp_path):
    def progress(done, total, name):
        with open(source, "r+b") as file:
            if damage == "truncated":
                file.truncate(5000)
            else:
                file.seek(-8, os.SEEK_END)
                file.write(bytes(8))
        if damage == "rewritten":
            os.utime(source, ns=(1, 1))

    with pytest.raises(CheckpointError, match=r"source\.safetensors"):
        convert(plan(source, QuantizeConfig(method=FP8)), tmp_path / "o.safetensors", progress=progress)
    assert only(tmp_path, "in")


def test_layer_is_named(source, tmp_path):
    state = load_file(source)
    state["blocks.0.tall.weight"][1000, 3] = float("inf")
    save_file(state, source)
    for method in (FP8, INT8, "bitsandbytes_nf4", "comfy_kitchen_int4_w4a8"):
        with pytest.raises(QuantizationError, match=r"layer 'blocks\.0\.tall' \[1344, 256\].*NaN or infinity"):
            convert_file(source, tmp_path / "o.safetensors", QuantizeConfig(method=method))
    assert only(tmp_path, "in")


def test_not_enough_space(source, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OSError, match="has 1 bytes free"):
        convert_file(source, tmp_path / "o.safetensors", QuantizeConfig(method=INT8))
    assert only(tmp_path, "in")


def test_interrupt_on_the_command_line(source, tmp_path, monkeypatch, capsys):
    from quant_core.job import Job

    advance = Job._advance

    def interrupt(self, count, name):
        advance(self, count, name)
        if self.done > self.total / 2:
            raise KeyboardInterrupt

    arguments = ["quantize", str(source), str(tmp_path / "o.safetensors"), "--method", INT8]
    with monkeypatch.context() as patched:
        patched.setattr(Job, "_advance", interrupt)
        assert main(arguments) == 130
        assert "nothing was written" in capsys.readouterr().err and only(tmp_path, "in")
        assert main([*arguments, "--resume"]) == 130
        assert "the same command continues it" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert only(tmp_path, "in", "o.safetensors")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_mode(source, tmp_path):
    before = os.umask(0o077)
    try:
        convert_file(source, tmp_path / "o.safetensors", QuantizeConfig(method=INT8))
    finally:
        os.umask(before)
    assert (tmp_path / "o.safetensors").stat().st_mode & 0o777 == 0o644


def test_no_thread_is_left(source, tmp_path):
    convert_file(source, tmp_path / "o.safetensors", QuantizeConfig(method=INT8))
    assert not [t for t in threading.enumerate() if t.name.startswith("quant_core")]
