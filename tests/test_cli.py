"""The command line, and the converter under it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import BLOCK_LINEARS, relative_error, tensor_bytes, tiny_model

from quant_core import CheckpointError, QuantizationError, QuantizeConfig, load_quantized_model, save_quantized_model
from quant_core.cli import main, parse_options
from quant_core.convert import convert_file

INT8 = "comfy_kitchen_int8_w8a8"


@dataclass
class Done:
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys, monkeypatch):
    """Call the command line in this process: importing torch anew for every call would take minutes."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments, code=0):
        capsys.readouterr()
        try:
            found = main([*map(str, arguments)])
        except SystemExit as usage:
            found = usage.code
        done = Done(*capsys.readouterr())
        assert found == code, done
        return done

    return run


def test_as_a_process(source, tmp_path):
    def process(*arguments):
        command = [sys.executable, "-m", "quant_core", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")

    out = tmp_path / "out.safetensors"
    done = process("quantize", source, out, "--method", INT8)
    assert (done.returncode, "4 of 8 weights quantized" in done.stdout) == (0, True), done
    failed = process("inspect", tmp_path / "no.safetensors")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "float model.safetensors"
    save_file(tiny_model().state_dict(), path, metadata={"format": "pt", "note": "kept"})
    return path


def test_quantize(run, source, tmp_path):
    out = tmp_path / "new folder" / "out.safetensors"
    done = run("quantize", source, out, "--method", INT8, "--measure")
    assert "4 of 8 weights quantized with comfy_kitchen_int8_w8a8" in done.stdout
    assert "kept: outside the indexed" in done.stdout
    float_state, state = load_file(source), load_file(out)
    for name in BLOCK_LINEARS:
        assert state[f"{name}.weight"].dtype == torch.int8
        assert json.loads(bytes(state[f"{name}.comfy_quant"].tolist()))["format"] == "int8_tensorwise"
    for name, value in float_state.items():
        if name.removesuffix(".weight") not in BLOCK_LINEARS:
            assert tensor_bytes(state[name]) == tensor_bytes(value)
    with safe_open(out, "pt") as file:
        assert file.metadata()["note"] == "kept"


def test_json_report_is_true(run, source, tmp_path):
    out = tmp_path / "out.safetensors"
    report = json.loads(run("quantize", source, out, "--method", INT8, "--measure", "--json").stdout)
    assert report["bytes_after"] == out.stat().st_size
    assert report["bytes_before"] == sum(t.numel() * t.element_size() for t in load_file(source).values())
    rows = {row["name"]: row for row in report["rows"]}
    model = tiny_model()
    load_quantized_model(model, out)
    for name in BLOCK_LINEARS:
        error = relative_error(
            load_file(source)[f"{name}.weight"], model.get_submodule(name).dequantize_weight(torch.float32)
        )
        assert rows[name]["relative_error"] == pytest.approx(error, rel=1e-6)
    assert rows["head"]["method"] == "" and rows["head"]["reason"]


@pytest.mark.parametrize("method", ["bitsandbytes_nf4", "torchao_int8_w8a16", "comfy_kitchen_nvfp4_w4a4"])
def test_file_and_model_paths_write_the_same_tensors(source, tmp_path, method):
    convert_file(source, tmp_path / "file.safetensors", QuantizeConfig(method=method))
    model = tiny_model()
    config = QuantizeConfig(method=method, exclude_modules=["proj_in", "head"])
    config.quantize_model(model)
    save_quantized_model(model, config, tmp_path / "model.safetensors")
    a, b = load_file(tmp_path / "file.safetensors"), load_file(tmp_path / "model.safetensors")
    assert {k: tensor_bytes(v) for k, v in a.items()} == {k: tensor_bytes(v) for k, v in b.items()}
    with torch.no_grad():
        loaded = tiny_model(seed=4)
        load_quantized_model(loaded, tmp_path / "file.safetensors")
        x = torch.randn(3, 64, dtype=torch.bfloat16)
        assert torch.equal(loaded(x), model(x))


def test_shards_in(run, source, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    state = load_file(source)
    names = sorted(state)
    save_file({n: state[n] for n in names[:5]}, folder / "m-00001-of-00002.safetensors")
    save_file({n: state[n] for n in names[5:]}, folder / "m-00002-of-00002.safetensors")
    weight_map = {n: f"m-0000{1 if n in names[:5] else 2}-of-00002.safetensors" for n in names}
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    outputs = []
    for number, path in enumerate((source, index, folder)):
        out = tmp_path / f"{number}.safetensors"
        run("quantize", path, out, "--method", INT8)
        outputs.append({k: tensor_bytes(v) for k, v in load_file(out).items()})
    assert outputs[0] == outputs[1] == outputs[2]


def test_target_exclude_and_option(run, source, tmp_path):
    out = tmp_path / "out.safetensors"
    arguments = ["--target", "head", "--target", "up", "--exclude", "1.up", "--option", "convrot=false"]
    run("quantize", source, out, "--method", INT8, *arguments)
    state = load_file(out)
    assert sorted(k for k in state if k.endswith("comfy_quant")) == ["blocks.0.up.comfy_quant", "head.comfy_quant"]
    assert "convrot" not in json.loads(bytes(state["head.comfy_quant"].tolist()))


def test_layer_that_does_not_fit_is_kept_and_said(tmp_path):
    save_file(
        {"blocks.0.a.weight": torch.randn(256, 264), "blocks.0.b.weight": torch.randn(256, 256)},
        tmp_path / "in.safetensors",
    )
    report = convert_file(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", QuantizeConfig(method="torchao_nvfp4_w4a16")
    )
    assert [(row.name, bool(row.method)) for row in report.rows] == [("blocks.0.a", False), ("blocks.0.b", True)]
    assert "in_features 264 is not a multiple of 16" in report.rows[0].reason
    with pytest.raises(ValueError, match=r"target layer 'blocks.0.a' \[256, 264\] cannot be quantized"):
        config = QuantizeConfig(method="torchao_nvfp4_w4a16", target_modules=["a"])
        convert_file(tmp_path / "in.safetensors", tmp_path / "no.safetensors", config)


def test_packed_format_is_not_put_on_a_detection_key(tmp_path):
    tensors = {"blocks.0.attn2.to_k.weight": torch.randn(256, 256), "blocks.0.b.weight": torch.randn(256, 256)}
    save_file(tensors, tmp_path / "in.safetensors")
    for method, kept in (("comfy_kitchen_nvfp4_w4a4", True), (INT8, False), ("comfy_kitchen_int4_w4a8", True)):
        report = convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", QuantizeConfig(method=method))
        row = next(r for r in report.rows if r.name.endswith("to_k"))
        assert (row.method == "") == kept
        assert not kept or "architecture detection" in row.reason


# ---------------------------------------------------------------- errors


def test_errors_are_one_line_and_exit_1(run, source, tmp_path):
    text = tmp_path / "notes.safetensors"
    text.write_text("not a model at all")
    out = tmp_path / "out.safetensors"
    cases = [
        (("quantize", source, out, "--method", "nf4"), "unknown quantization method 'nf4'"),
        (("quantize", text, out, "--method", INT8), "notes.safetensors"),
        (("quantize", tmp_path / "no.safetensors", out, "--method", INT8), "does not exist"),
        (("quantize", source, source, "--method", INT8), "is the source itself"),
        (("quantize", source, tmp_path, "--method", INT8), "is a folder; name the file"),
        (("quantize", source, out, "--method", INT8, "--exclude", "hed"), "exclude 'hed' matches no weight"),
        (("quantize", source, out, "--method", INT8, "--option", "convrot"), "expected KEY=VALUE"),
        (("quantize", source, out, "--method", INT8, "--option", "rotate=1"), "does not accept 'rotate'"),
        (("quantize", source, out, "--method", INT8, "--device", "xpu"), "xpu"),
        (("inspect", text), "notes.safetensors"),
        (("describe", "nf4"), "unknown quantization method"),
    ]
    for arguments, message in cases:
        done = run(*arguments, code=1)
        assert message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.lstrip().startswith("error: ")
    assert not out.exists()
    failure = json.loads(run("quantize", text, out, "--method", INT8, "--json", code=1).stdout)
    assert failure["type"] == "CheckpointError"


def test_names_that_the_terminal_cannot_print_and_closed_pipes(source, tmp_path):
    out = tmp_path / "\u00f6ut \u6a21.safetensors"
    command = [sys.executable, "-m", "quant_core"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([*command, "quantize", source, out, "--method", INT8], capture_output=True, env=ascii_only)
    assert (done.returncode, out.exists()) == (0, True), done.stderr
    process = subprocess.Popen([*command, "methods", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_wrong_usage_exits_2(run, source):
    assert "usage" in run("quantize", source, code=2).stderr
    assert "usage" in run(code=2).stderr


def test_quantized_source_is_refused(run, source, tmp_path):
    once = tmp_path / "once.safetensors"
    run("quantize", source, once, "--method", INT8)
    assert "quantized already" in run("quantize", once, tmp_path / "twice.safetensors", "--method", INT8, code=1).stderr


def test_nan_is_named_and_leaves_no_file(tmp_path):
    weight = torch.randn(256, 256)
    weight[3, 4] = float("nan")
    save_file({"blocks.0.bad.weight": weight}, tmp_path / "in.safetensors")
    with pytest.raises(QuantizationError, match=r"layer 'blocks.0.bad' .*holds NaN"):
        convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", QuantizeConfig(method=INT8))
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_interrupt_leaves_no_file_and_the_old_one(source, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"an older file")

    def interrupt(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_file(source, out, QuantizeConfig(method=INT8), progress=interrupt)
    assert out.read_bytes() == b"an older file"
    assert sorted(p.name for p in tmp_path.iterdir()) == [source.name, "out.safetensors"]


def test_nothing_to_quantize(tmp_path):
    save_file({"a.bias": torch.zeros(4)}, tmp_path / "in.safetensors")
    with pytest.raises(ValueError, match=r"no weight of the file is quantized \(it has no \*.weight\)"):
        convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", QuantizeConfig(method=INT8))


def test_pickle_is_not_run(run, tmp_path):
    path = tmp_path / "evil.safetensors"
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="pickle archive"):
        convert_file(path, tmp_path / "out.safetensors", QuantizeConfig(method=INT8))


# ---------------------------------------------------------------- the other commands


def test_methods_lists_all(run, source):
    rows = json.loads(run("methods", "--json").stdout)
    rows = [r for r in rows if r["backend"] in ("bitsandbytes", "torchao", "comfy_kitchen")]  # others' tests add theirs
    assert len(rows) == 19
    assert {r["runs"] for r in rows} <= {"native", "emulated", "not here"}
    assert all(r["note"] for r in rows if r["runs"] != "native")
    assert "bitsandbytes_nf4" in run("methods").stdout.replace("\n", "")


def test_describe(run):
    out = run("describe", INT8).stdout
    for line in (
        "method: comfy_kitchen_int8_w8a8",
        "backend: comfy_kitchen",
        "detail: W8A8, int8 weight + int8 dynamic activation (ComfyUI int8_tensorwise)",
        "backend config: quant_core.backends.comfy_kitchen.ComfyKitchenInt8Config",
        "backend_config_kwargs (user-tunable):",
        "  per_channel       = True",
        "  convrot           = True",
        "  convrot_groupsize = 256",
        "  orig_dtype        = torch.bfloat16",
        "pinned by method (not overridable):",
        "  format = 'int8_tensorwise'",
    ):
        assert line in out.splitlines()
    assert json.loads(run("describe", INT8, "--json").stdout)["pinned"] == {"format": "'int8_tensorwise'"}


def test_method_of_ones_own(run, source, tmp_path):
    out = tmp_path / "int9.safetensors"
    run("--import", "toy_int9", "quantize", source, out, "--method", "toy_int9_w9a16")
    assert json.loads(run("inspect", out, "--json").stdout)["recipe"] == {"method": "toy_int9_w9a16"}
    failed = run("--import", "no_such_module", "methods", code=1)
    assert "No module named 'no_such_module'" in failed.stderr


@pytest.mark.parametrize("manifest", [True, False])
def test_inspect(run, source, tmp_path, manifest):
    out = tmp_path / "out.safetensors"
    run("quantize", source, out, "--method", INT8)
    if not manifest:
        save_file(load_file(out), out)
    data = json.loads(run("inspect", out, "--json").stdout)
    assert [(g["method"], sorted(g["layers"])) for g in data["quantized"]] == [(INT8, sorted(BLOCK_LINEARS))]
    assert (data["recipe"] is not None) == manifest
    assert data["tensors"] == len(load_file(out))
    assert f"{INT8}: 4 layers" in run("inspect", out).stdout
    assert "none (a float checkpoint)" in run("inspect", source).stdout


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("a=1", 1),
        ("a=true", True),
        ("a=False", False),
        ("a=None", None),
        ("a=bfloat16", "bfloat16"),
        ("a=x=y", "x=y"),
        ("a=", ""),
    ],
)
def test_option_values(pair, value):
    assert parse_options([pair]) == {"a": value}


def test_shards_are_named(run, source, tmp_path):
    done = run("quantize", source, tmp_path / "o.safetensors", "--method", INT8, "--shard-size", "300KB")
    shards = sorted(tmp_path.glob("o-*.safetensors"))
    assert len(shards) > 1 and f"{shards[0]} and {len(shards) - 1} more" in done.stdout


def test_a_table_in_a_pipe_is_not_folded(source, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    command = [sys.executable, "-m", "quant_core", "plan", str(source), "--method", INT8]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment)
    assert done.returncode == 0 and "comfy_kitchen_int8_w8a8: 2-D weight in an" in done.stdout
