"""The nodes on recipes and files, run as ComfyUI runs them, against quant_core and ComfyUI's own loader."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).resolve().parents[1]
INT8, FP8, NVFP4 = "comfy_kitchen_int8_w8a8", "comfy_kitchen_fp8_w8a8", "comfy_kitchen_nvfp4_w4a4"
FLUX = "diffusion_models/flux.safetensors"
PROMPT, WORKFLOW = {"7": {"class_type": "QuantCore_ConvertCheckpoint"}}, {"nodes": [{"id": 7}], "title": "\u00fcber"}
CLASSES = {
    "quantization_method": "QuantizationMethod",
    "mixed_quantization": "MixedQuantization",
    "quantization_plan": "QuantizationPlan",
    "convert_checkpoint": "ConvertCheckpoint",
    "checkpoint_doctor": "CheckpointDoctor",
}


@pytest.fixture(scope="module")
def modules(pack):
    """The pack's node modules that are tested here, by name, and nodes/host/files.py."""
    package = pack.core.__name__.rpartition(".")[0]
    return SimpleNamespace(
        **{name: importlib.import_module(f"{package}.{name}") for name in CLASSES},
        files=importlib.import_module(f"{package}.host.files"),
    )


@pytest.fixture
def run(modules):
    """A function that runs a node with its hidden inputs, under inference mode as ComfyUI does."""
    import torch

    def execute(name, hidden=None, **inputs):
        node = getattr(getattr(modules, name), CLASSES[name])
        node.GET_SCHEMA()
        prepared = node.PREPARE_CLASS_CLONE({"hidden_inputs": hidden or {}})
        with torch.inference_mode():
            return prepared.EXECUTE_NORMALIZED(**inputs)

    return execute


@pytest.fixture
def hidden(modules):
    from comfy_api.latest import io

    return {io.Hidden.unique_id: "7", io.Hidden.prompt: PROMPT, io.Hidden.extra_pnginfo: {"workflow": WORKFLOW}}


@pytest.fixture
def folders(tiny_flux, tmp_path):
    """Model folders and an output folder of the test's own, with the tiny flux in it."""
    import folder_paths

    known, output = dict(folder_paths.folder_names_and_paths), folder_paths.get_output_directory()
    for name in ("diffusion_models", "text_encoders", "checkpoints"):
        (tmp_path / "models" / name).mkdir(parents=True)
        folder_paths.folder_names_and_paths[name] = ([str(tmp_path / "models" / name)], known[name][1])
    (tmp_path / "output").mkdir()
    folder_paths.set_output_directory(str(tmp_path / "output"))
    os.link(tiny_flux, tmp_path / "models" / FLUX)
    yield SimpleNamespace(models=tmp_path / "models", output=tmp_path / "output", flux=tmp_path / "models" / FLUX)
    folder_paths.folder_names_and_paths.update(known)
    folder_paths.set_output_directory(output)


def recipe(method=INT8, **options):
    from quant_core import QuantizeConfig

    return QuantizeConfig(method=method, **options)


def metadata_of(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()


def assert_same_tensors(left, right):
    import torch
    from safetensors.torch import load_file

    left, right = load_file(left), load_file(right)
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)), name


def everything_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------ recipes


def test_a_recipe_of_one_method(run):
    layers = {"exclude_layers": "img_mlp.0, txt_mlp.0\n# a comment\n", "target_layers": "single_blocks.1.linear1"}
    (made,) = run("quantization_method", method=INT8, options='{"convrot_groupsize": 64}', **layers).args
    assert made.to_dict() == {
        "method": INT8,
        "target_modules": ["single_blocks.1.linear1"],
        "exclude_modules": ["img_mlp.0", "txt_mlp.0"],
        "backend_config_kwargs": {"convrot_groupsize": 64},
    }
    (plain,) = run("quantization_method", method=NVFP4).args
    assert plain.to_dict() == {"method": NVFP4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"group": 64}', r"does not accept 'group'.*convrot_groupsize"),
        ("group=64", r"options cannot be read.*write them as JSON"),
        ("[64]", r"options are a JSON object.*got '\[64\]'"),
    ],
)
def test_options_that_a_method_does_not_have(run, options, message):
    with pytest.raises(ValueError, match=message):
        run("quantization_method", method=INT8, options=options)


@pytest.fixture
def toy_int9(modules):
    """The toy backend, imported and registered by somebody else, until the test ends."""
    from quant_core import QUANT_BACKENDS, QUANT_METHODS

    modules.quantization_method.method_names()  # the built-in ones stay
    before = dict(QUANT_METHODS), dict(QUANT_BACKENDS)
    spec = importlib.util.spec_from_file_location("quantcore_toy_of_another_pack", TESTS / "toy_int9.py")
    toy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    yield toy
    for registry, entries in zip((QUANT_METHODS, QUANT_BACKENDS), before, strict=True):
        registry.clear()
        registry.update(entries)


def test_methods_of_other_packs_and_missing_libraries_are_listed(run, modules, toy_int9):
    from quant_core import register_quant_backend, register_quant_method

    @register_quant_backend("needs_a_library")
    class NeedsALibrary(toy_int9.Int9Backend):
        def validate_environment(self):
            raise ImportError("needs_a_library is missing: pip install needs-a-library")

    register_quant_method("needs_a_library_w9a16", "needs_a_library", toy_int9.Int9Config.from_kwargs)
    (method, *_) = modules.quantization_method.QuantizationMethod.define_schema().inputs
    own = {"needs_a_library_w9a16", "toy_int9_w9a16"}
    assert {INT8, "bitsandbytes_nf4", "torchao_int8_w8a16", *own} <= set(method.options)
    assert run("quantization_method", method="toy_int9_w9a16").args[0].method == "toy_int9_w9a16"
    with pytest.raises(ImportError, match="pip install needs-a-library"):
        run("quantization_method", method="needs_a_library_w9a16")


def test_a_mixed_recipe_plans_each_layer_once(run, folders):
    rest = run("quantization_method", method=NVFP4, exclude_layers="txt_mlp.0").args[0]
    first = run("quantization_method", method=INT8, target_layers="img_mlp.0\nimg_mlp.2").args[0]
    second = run("quantization_method", method=FP8, target_layers="linear2").args[0]
    inner = run("mixed_quantization", recipes={"recipe0": rest, "recipe1": first}).args[0]
    mixed = run("mixed_quantization", recipes={"recipe0": inner, "recipe1": second}).args[0]
    assert [part.method for part in mixed.parts()] == [NVFP4, INT8, FP8]
    assert rest.exclude_modules == ["txt_mlp.0"]  # what was connected is not changed

    text, data = run("quantization_plan", file=FLUX, recipe=mixed).args
    methods = {row["layer"]: row["method"] for row in json.loads(data)["rows"] if row["method"]}
    assert methods["double_blocks.0.img_mlp.0"] == methods["double_blocks.0.img_mlp.2"] == INT8
    assert methods["single_blocks.0.linear2"] == methods["single_blocks.1.linear2"] == FP8
    assert methods["single_blocks.0.linear1"] == methods["double_blocks.0.img_attn.qkv"] == NVFP4
    assert "double_blocks.0.txt_mlp.0" not in methods
    assert f"{NVFP4} + {INT8} + {FP8}" in text.splitlines()[0]


def test_two_recipes_for_all_the_rest_are_refused(run):
    with pytest.raises(ValueError, match=f"{NVFP4} and {INT8}: .*Name target layers in all of them but one"):
        run("mixed_quantization", recipes={"recipe0": recipe(NVFP4), "recipe1": recipe(INT8)})


# ------------------------------------------------------------------ files


def test_what_is_listed(modules, folders):
    import safetensors.torch
    import torch

    (folders.models / "checkpoints" / "deep" / "er").mkdir(parents=True)
    for name in ("checkpoints/deep/er/all.safetensors", "text_encoders/t5.sft"):
        safetensors.torch.save_file({"a": torch.zeros(1)}, folders.models / name)
    for name in ("diffusion_models/flux-Q4.gguf", "diffusion_models/many.safetensors.index.json"):
        (folders.models / name).write_bytes(b"GGUF")
    for name in ("old.ckpt", ".half.safetensors.partial", "config.json", "notes.txt"):
        (folders.models / "checkpoints" / name).write_bytes(b"")
    assert modules.files.list_files() == [
        "diffusion_models/flux-Q4.gguf",
        "diffusion_models/flux.safetensors",
        "diffusion_models/many.safetensors.index.json",
        "text_encoders/t5.sft",
        "checkpoints/deep/er/all.safetensors",
    ]
    for entry in modules.files.list_files():
        assert os.path.samefile(modules.files.full_path(entry), folders.models / entry)

    deep = folders.models / "checkpoints" / "deep"
    shutil.rmtree(deep / "er")
    shutil.copy(folders.flux, deep / "new.safetensors")
    os.utime(deep, (1, 1))  # two changes within a tick of the clock would look like one
    listed = modules.files.list_files()
    assert "checkpoints/deep/new.safetensors" in listed and "checkpoints/deep/er/all.safetensors" not in listed


@pytest.mark.parametrize(
    "entry", ["diffusion_models/gone.safetensors", "diffusion_models/../../secret.safetensors", "loras/a", "flux", ""]
)
def test_what_is_not_in_the_folders_is_refused(run, folders, entry):
    (folders.models.parent / "secret.safetensors").write_bytes(folders.flux.read_bytes())
    with pytest.raises(FileNotFoundError, match="not found in ComfyUI's model folders"):
        run("quantization_plan", file=entry, recipe=recipe())


def test_the_fingerprint_is_that_of_the_files_content(modules, folders):
    def of(entry=FLUX, **options):
        return modules.convert_checkpoint.ConvertCheckpoint.fingerprint_inputs(file=entry, **options)

    assert of(part="vae") == of(part="vae") != of(part="diffusion")
    os.utime(folders.flux, ns=(1, 1))
    first = of()
    os.utime(folders.flux, ns=(1, 2))
    assert of() != first and hash(of()) == hash(of())

    index = "checkpoints/many.safetensors.index.json"
    (folders.models / "checkpoints" / "shard.safetensors").write_bytes(b"1")
    (folders.models / index).write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    first = of(index)
    (folders.models / "checkpoints" / "shard.safetensors").write_bytes(b"22")
    assert of(index) != first
    (folders.models / index).write_text("{")
    of(index), of("checkpoints/gone.safetensors"), of(None)


@pytest.mark.parametrize("prefix", ["../x", "/x", "a/../../x", "", ".", "..", "a/..", "a\0b"])
def test_a_prefix_stays_in_the_output_folder(run, folders, prefix):
    with pytest.raises(ValueError, match="does not name a file in ComfyUI's output folder"):
        run("convert_checkpoint", file=FLUX, recipe=recipe(), filename_prefix=prefix)
    assert everything_in(folders.output) == []


def test_a_link_in_the_output_folder_leads_nowhere(run, folders):
    try:
        (folders.output / "link").symlink_to(folders.models, target_is_directory=True)
    except OSError as error:
        pytest.skip(f"no links here: {error}")
    with pytest.raises(ValueError, match="does not name a file in ComfyUI's output folder"):
        run("convert_checkpoint", file=FLUX, recipe=recipe(), filename_prefix="link/x")
    assert everything_in(folders.models) == ["flux.safetensors"]


# ------------------------------------------------------------------ plans


@pytest.mark.parametrize("method", [INT8, NVFP4])
def test_the_plans_totals_are_the_files(run, folders, tmp_path, method):
    from safetensors.torch import load_file

    from quant_core.convert import convert
    from quant_core.plan import Plan

    result = run("quantization_plan", file=FLUX, recipe=recipe(method))
    text, data = result.args
    convert(Plan.from_json(data), tmp_path / "out.safetensors")
    size, tensors = (tmp_path / "out.safetensors").stat().st_size, load_file(tmp_path / "out.safetensors")
    assert json.loads(data)["totals"]["file_sizes"] == [size]
    assert f"the file takes {size:,} bytes" in text
    rows = result.ui["quantcore_rows"]
    assert sum(row["bytes_after"] for row in rows) == sum(t.numel() * t.element_size() for t in tensors.values())
    assert {row["tensor"] for row in rows} == set(load_file(folders.flux))
    assert result.ui["text"] == [text]
    json.dumps(result.ui)


def test_a_recipe_that_does_not_fit_names_the_file(run, folders):
    with pytest.raises(ValueError, match=f"^{FLUX}: target 'img_mpl.0' matches no weight"):
        run("quantization_plan", file=FLUX, recipe=recipe(target_modules=["img_mpl.0"]))
    with pytest.raises(ValueError, match=f"^{FLUX}: no weight of the file is quantized .not part of the text"):
        run("convert_checkpoint", file=FLUX, recipe=recipe(), part="text_encoders")
    assert everything_in(folders.output) == []


# ------------------------------------------------------------------ converting


@pytest.mark.parametrize("method", [INT8, NVFP4, "bitsandbytes_nf4", "torchao_int8_w8a16"])
def test_the_file_holds_what_quant_core_writes(run, folders, tmp_path, hidden, method):
    from quant_core.convert import convert_file

    try:
        made = recipe(method)
    except ImportError as error:
        pytest.skip(str(error))
    result = run("convert_checkpoint", hidden, file=FLUX, recipe=made)
    path = folders.output / "diffusion_models" / "quantized_00001_.safetensors"
    assert result.args == (str(path),) and everything_in(folders.output) == [path.name]
    convert_file(folders.flux, tmp_path / "plain.safetensors", made)
    assert_same_tensors(path, tmp_path / "plain.safetensors")
    found = metadata_of(path)
    assert json.loads(found["prompt"]) == PROMPT and json.loads(found["workflow"]) == WORKFLOW
    assert f"takes {path.stat().st_size:,} bytes" in result.ui["text"][0]

    again = run("convert_checkpoint", hidden, file=FLUX, recipe=made)
    assert again.args == (str(path.with_name("quantized_00002_.safetensors")),)


def test_comfyuis_loader_opens_it(run, folders, hidden, stock_load, online, flux_output, assert_same):
    import torch

    (path,) = run("convert_checkpoint", hidden, file=FLUX, recipe=recipe(INT8)).args
    native, quantized = stock_load(path), online(INT8)
    assert_same(native, quantized)
    assert torch.equal(flux_output(native), flux_output(quantized))


def test_metadata_can_be_disabled(run, folders, hidden, monkeypatch):
    from comfy.cli_args import args

    monkeypatch.setattr(args, "disable_metadata", True)
    (path,) = run("convert_checkpoint", hidden, file=FLUX, recipe=recipe()).args
    assert not {"workflow", "prompt"} & set(metadata_of(path))


def test_shards_get_an_index(run, folders, hidden, tmp_path):
    import torch

    from quant_core.checkpoint import open_checkpoint
    from quant_core.convert import convert_file

    options = {"shard_size_gb": 0.002, "filename_prefix": "checkpoints/%year%/many"}
    (index,) = run("convert_checkpoint", hidden, file=FLUX, recipe=recipe(), **options).args
    assert index.endswith("many_00001_.safetensors.index.json") and "%" not in index
    convert_file(folders.flux, tmp_path / "one.safetensors", recipe())
    many, one = open_checkpoint(index), open_checkpoint(tmp_path / "one.safetensors")
    assert len(many.files) > 2 and set(many.tensors) == set(one.tensors)
    for name in one.tensors:
        left, right = (checkpoint.read(name).reshape(-1).view(torch.uint8) for checkpoint in (many, one))
        assert torch.equal(left, right), name
    assert (
        run("convert_checkpoint", hidden, file=FLUX, recipe=recipe(), **options)
        .args[0]
        .endswith("many_00002_.safetensors.index.json")
    )


@pytest.fixture
def cancel_at_once(comfy_idle):
    """Cancels, as ComfyUI's button does, when the node's bar moves for the first time."""
    import comfy.utils

    seen = []

    def watch(value, total, preview, node_id=None):
        seen.append((value, total, node_id))
        comfy_idle.interrupt_current_processing(True)

    comfy.utils.set_progress_bar_global_hook(watch)
    yield seen
    comfy.utils.set_progress_bar_global_hook(None)


def test_cancelling_leaves_nothing(run, folders, hidden, cancel_at_once, comfy_idle):
    with pytest.raises(comfy_idle.InterruptProcessingException):
        run("convert_checkpoint", hidden, file=FLUX, recipe=recipe())
    assert everything_in(folders.output) == []
    ((value, total, node),) = cancel_at_once
    assert 0 < value < total and node == "7"


def test_a_cancelled_run_is_resumed_under_another_workflow(run, folders, hidden, tmp_path, cancel_at_once, comfy_idle):
    import comfy.utils
    from comfy_api.latest import io

    from quant_core.convert import convert_file

    with pytest.raises(comfy_idle.InterruptProcessingException):
        run("convert_checkpoint", hidden, file=FLUX, recipe=recipe(), resume=True)
    left = everything_in(folders.output)
    assert len(left) == 2 and all(name.startswith(".quantized_00001_.safetensors.") for name in left)
    comfy.utils.set_progress_bar_global_hook(None)
    moved = {**hidden, io.Hidden.extra_pnginfo: {"workflow": {"nodes": [], "moved": True}}}
    (path,) = run("convert_checkpoint", moved, file=FLUX, recipe=recipe(), resume=True).args
    assert everything_in(folders.output) == ["quantized_00001_.safetensors"]
    assert json.loads(metadata_of(path)["workflow"]) == WORKFLOW  # of the run that began it
    convert_file(folders.flux, tmp_path / "plain.safetensors", recipe())
    assert_same_tensors(path, tmp_path / "plain.safetensors")


# ------------------------------------------------------------------ the doctor


@pytest.fixture
def quantized(folders):
    from quant_core.convert import convert_file

    path = folders.models / "diffusion_models" / "fp8.safetensors"
    convert_file(folders.flux, path, recipe(FP8))
    return path


def broken(quantized):
    """A copy that lost one layer's marker: ComfyUI then reads codes as weights."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(quantized)
    del tensors["double_blocks.0.img_attn.qkv.comfy_quant"]
    path = quantized.with_name("broken.safetensors")
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_the_doctor_finds_nothing_in_a_good_file(run, quantized):
    result = run("checkpoint_doctor", file=f"diffusion_models/{quantized.name}", repair=True)
    report, loads = result.args
    assert loads is True and "no findings" in report and "not repaired: there is nothing to repair" in report
    assert result.ui["quantcore_rows"] == [] and result.ui["text"] == [report]


def test_the_doctor_repairs_a_broken_file(run, folders, quantized, stock_load, flux_output):
    import torch

    path = broken(quantized)
    result = run("checkpoint_doctor", file=f"diffusion_models/{path.name}")
    report, loads = result.args
    assert loads is False and "marker-missing" in report and "double_blocks.0.img_attn.qkv" in report
    assert result.ui["quantcore_rows"][0]["code"] == "marker-missing"
    json.dumps(result.ui)
    assert everything_in(folders.output) == []

    good = flux_output(stock_load(quantized))
    assert not torch.equal(flux_output(stock_load(path)), good)
    report, loads = run("checkpoint_doctor", file=f"diffusion_models/{path.name}", repair=True).args
    repaired = folders.output / "diffusion_models" / "broken_repaired_00001_.safetensors"
    assert loads is True and str(repaired) in report
    assert torch.equal(flux_output(stock_load(repaired)), good)


def test_the_doctor_on_damaged_files(run, folders, quantized):
    cut = quantized.with_name("cut.safetensors")
    cut.write_bytes(quantized.read_bytes()[:-100])
    report, loads = run("checkpoint_doctor", file=f"diffusion_models/{cut.name}", repair=True).args
    assert loads is False and "file-truncated" in report and "not repaired: " in report
    cut.write_bytes(b"<!DOCTYPE html>" * 99)
    report, loads = run("checkpoint_doctor", file=f"diffusion_models/{cut.name}", read_weights=False).args
    assert loads is False and "HTML page" in report
    assert everything_in(folders.output) == []
