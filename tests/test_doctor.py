"""The doctor: crafted files and their findings, our own files without any, and repairs that give back the good file."""

import contextlib
import json
import math
import random
import struct

import pytest
import torch
from doctor_cases import CASES, FP8, INT8, MXFP8, NVFP4, W4A4, W4A8, marker
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import BLOCK_LINEARS, TinyModel, tensor_bytes, tiny_model

from quant_core import CheckpointError, QuantizeConfig, load_quantized_model, save_quantized_model
from quant_core.cli import main
from quant_core.convert import convert, convert_file
from quant_core.doctor import COMFYUI, LOADERS, QUANT_CORE, RULES, Level, doctor, repair
from quant_core.doctor.repair import SAME, UNREADABLE
from quant_core.plan import plan

LAYER = "blocks.0.up"
NF4 = "bitsandbytes_nf4"
COMFY_METHODS = [FP8, "comfy_kitchen_fp8_e5m2_w8a8", INT8, MXFP8, NVFP4, W4A4, W4A8]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A function that returns the file of a small model quantized with a method, written once."""
    written = {}

    def of(method):
        if method not in written:
            config = QuantizeConfig(method=method, target_modules=BLOCK_LINEARS)
            model = tiny_model()
            config.quantize_model(model)
            written[method] = tmp_path_factory.mktemp("good") / f"{method}.safetensors"
            save_quantized_model(model, config, written[method])
        return written[method]

    return of


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.fixture
def broken(good, tmp_path):
    """A function that writes a good file with something changed; its recipe is left out unless asked for."""

    def write(method, change, recipe=False):
        tensors = load_file(good(method))
        metadata = metadata_of(good(method)) if recipe else {"format": "pt"}
        change(tensors, metadata, LAYER)
        path = tmp_path / "broken.safetensors"
        save_file(tensors, path, metadata=metadata)
        return path

    return write


def codes(report):
    return {finding.code for finding in report.findings}


def loads_here(path):
    model = TinyModel().to(torch.bfloat16)
    try:
        load_quantized_model(model, path)
    except CheckpointError:
        return False
    model(torch.randn(4, 64, dtype=torch.bfloat16))
    return True


# ---------------------------------------------------------------- crafted files


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_crafted_file(broken, case):
    path = broken(case.method, case.change, recipe=case.code == "rotation-disagrees")
    report = doctor(path)
    assert case.code in codes(report)
    finding = next(finding for finding in report.findings if finding.code == case.code)
    assert finding.layer in ("", LAYER) or case.change.__name__ in ("on_norm", "all_markers_lost") or finding.layer
    assert finding.cause and finding.fix
    # The verdicts, against this loader itself and against what ComfyUI's was seen to do.
    verdict = report.verdict(QUANT_CORE)
    assert (verdict != "does not load") == loads_here(path)
    expected = {"raises": "does not load", "differs": "loads, wrong output", "same": "loads"}
    assert case.comfyui is None or report.verdict(COMFYUI) == expected[case.comfyui]


def test_the_table_is_long_enough():
    assert len(CASES) >= 40 and len({case.name for case in CASES}) == len(CASES)
    assert {case.code for case in CASES} <= set(RULES)


# ---------------------------------------------------------------- our own files


@pytest.mark.parametrize("method", COMFY_METHODS)
def test_no_finding_on_what_we_write(good, method):
    report = doctor(good(method))
    assert report.findings == []
    assert report.layers == len(BLOCK_LINEARS)
    assert {report.verdict(loader) for loader in LOADERS} == {"loads"}


@pytest.mark.parametrize("options", [{"convrot": False}, {"convrot": False, "per_channel": False}])
def test_no_finding_on_other_int8(tmp_path, options):
    save_file(tiny_model().state_dict(), tmp_path / "float.safetensors")
    config = QuantizeConfig(method=INT8, backend_config_kwargs=options)
    convert_file(tmp_path / "float.safetensors", tmp_path / "int8.safetensors", config)
    assert doctor(tmp_path / "int8.safetensors").findings == []


@pytest.mark.parametrize("method", [NF4, "bitsandbytes_fp4", "torchao_int8_w8a16", "torchao_fp8_w8a16"])
def test_other_libraries_files_are_not_comfyuis(good, method):
    report = doctor(good(method))
    assert [finding.code for finding in report.findings] == ["not-comfyui"]
    assert report.findings[0].levels == {COMFYUI: Level.FATAL}
    assert (report.verdict(COMFYUI), report.verdict(QUANT_CORE)) == ("does not load", "loads")


def test_a_float_file_has_no_finding(tmp_path):
    save_file(tiny_model().state_dict(), tmp_path / "float.safetensors")
    assert doctor(tmp_path / "float.safetensors").findings == []


# ---------------------------------------------------------------- the file itself


def container(name):
    def change(data):
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        body = data[8 + length :]
        if name == "hole":
            last = max(header, key=lambda key: header[key].get("data_offsets", [0, 0])[1])
            header[last]["data_offsets"] = [offset + 8 for offset in header[last]["data_offsets"]]
            body += bytes(8)
        raw = json.dumps(header).encode()
        raw += b" " * ((-len(raw)) % 8 + (1 if name == "misaligned" else 0))
        return struct.pack("<Q", len(raw)) + raw + body

    return change


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("cut in the tensors", lambda data: data[:-100], "file-truncated"),
        ("cut in the header", lambda data: data[:200], "file-truncated"),
        ("bytes at the end", lambda data: data + b"\0" * 7, "trailing-bytes"),
        ("a hole", container("hole"), "file-unreadable"),
        ("odd start", container("misaligned"), "tensor-misaligned"),
        ("empty", lambda data: b"", "file-unreadable"),
        ("a web page", lambda data: b"<!DOCTYPE html><html></html>", "file-unreadable"),
        ("a Git LFS pointer", lambda data: b"version https://git-lfs.github.com/spec/v1\n", "file-unreadable"),
        ("a pickle", lambda data: b"PK\x03\x04" + bytes(50), "file-unreadable"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_container(good, tmp_path, name, change, code):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(change(good(FP8).read_bytes()))
    report = doctor(path)
    assert codes(report) == {code}
    assert report.verdict(COMFYUI) == ("loads" if code == "tensor-misaligned" else "does not load")
    assert loads_here(path) == (code == "tensor-misaligned")
    if code.startswith("file"):
        assert "behind the header" in report.unchecked[0]


def test_shards(tmp_path):
    """Ours load here; ComfyUI takes one file."""
    save_file(tiny_model().state_dict(), tmp_path / "float.safetensors")
    made = plan(tmp_path / "float.safetensors", QuantizeConfig(method=INT8))
    convert(made, tmp_path / "out" / "model.safetensors", shard_size=300_000)
    report = doctor(tmp_path / "out")
    assert [(f.code, f.levels) for f in report.findings] == [("several-files", {COMFYUI: Level.FATAL})]
    assert report.layers == 4 and loads_here(tmp_path / "out")


def test_gguf(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "flux")
    kind = gguf.GGMLQuantizationType.Q8_0
    weight = torch.randn(64, 256).numpy()
    writer.add_tensor("blocks.0.up.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert codes(doctor(tmp_path / "model.gguf")) == {"gguf"}


def test_mutated_headers(good, tmp_path):
    """Whatever a header says, the doctor answers; nothing but an error of quant_core leaves it."""
    random_ = random.Random(0)
    data = good(NVFP4).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    dtypes = ["F32", "BF16", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "BOOL", "C64", "F4"]
    names = ["", ".weight", "weight", "a.weight.absmax", STATE, "scaled_fp8", "x.comfy_quant", "x._weight_qdata"]
    markers = ["{", '{"layers": [1]}', '{"layers": {"blocks.0.up": 3}}', '{"layers": {"blocks.0.up": {"format": [3]}}}']
    sizes = {"F32": 4, "BF16": 2, "I64": 8, "C64": 8}
    path = tmp_path / "mutated.safetensors"
    for _ in range(150):
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__")
        if random_.random() < 0.5:
            metadata.clear()
        for _ in range(3):
            entry = header[random_.choice(list(header))]
            entry["dtype"] = random_.choice([entry["dtype"], random_.choice(dtypes)])
            shape = entry["shape"]
            entry["shape"] = random_.choice([shape, shape, shape[::-1], [1, *shape], [], [0]])
            header[random_.choice(names)] = header.pop(random_.choice(list(header)))
            metadata["_quantization_metadata"] = random_.choice(markers)
        position = 0
        for entry in header.values():
            size = sizes.get(entry["dtype"], 1) * math.prod(entry["shape"])
            entry["data_offsets"] = [position, position := position + size]
        if random_.random() < 0.7:
            metadata.pop("_quantization_metadata")
        raw = json.dumps({"__metadata__": metadata, **header}).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + (data[8 + length :] * 9)[:position])
        report = doctor(path)
        assert json.dumps(report.to_dict())
        with contextlib.suppress(CheckpointError, ValueError):
            repair(path, tmp_path / "fixed.safetensors", report)


def test_a_lost_shard(tmp_path):
    index = {"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert codes(doctor(path)) == {"file-unreadable"}
    with pytest.raises(FileNotFoundError):
        doctor(tmp_path / "nothing.safetensors")


# ---------------------------------------------------------------- names


def renamed(old, new):
    def change(tensors, metadata, layer):
        for key in [key for key in tensors if key.startswith(old)]:
            tensors[new + key.removeprefix(old)] = tensors.pop(key)

    return change


@pytest.mark.parametrize(
    "layer",
    [
        "text_model.encoder.layers.0.mlp.fc1",
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1",
        "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc",
    ],
)
def test_markers_on_clip(broken, layer):
    report = doctor(broken(FP8, renamed(LAYER, layer)))
    assert [(f.code, f.layer, f.levels) for f in report.findings] == [
        ("markers-ignored", layer, {COMFYUI: Level.WRONG})
    ]


@pytest.mark.parametrize(
    "keys",
    [
        ["x_embedder.weight", "single_transformer_blocks.0.attn.to_q.weight"],
        ["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight"],
        ["transformer_blocks.0.attn.add_q_proj.weight", "pos_embed.proj.weight"],
    ],
)
def test_diffusers_names(broken, keys):
    def change(tensors, metadata, layer):
        tensors.update({key: torch.ones(4, 4) for key in keys})

    report = doctor(broken(INT8, change))
    assert codes(report) == {"diffusers-names"}
    assert "4 quantized layers" in report.findings[0].cause


@pytest.mark.parametrize(
    ("method", "expected"),
    [(NVFP4, {"packed-on-detection-key"}), (W4A4, {"packed-on-detection-key"}), (INT8, set())],
)
@pytest.mark.parametrize("layer", ["img_in", "model.diffusion_model.txt_in", "input_blocks.1.1.attn2.to_k"])
def test_packed_where_detection_reads(broken, method, expected, layer):
    assert codes(doctor(broken(method, renamed(LAYER, layer)))) == expected


# ---------------------------------------------------------------- other families


def without(*keys):
    def change(tensors, metadata, layer):
        for key in keys:
            del tensors[f"{layer}.{key}"]

    return change


def with_tensor(key, make):
    def change(tensors, metadata, layer):
        tensors[f"{layer}.{key}"] = make(tensors[f"{layer}.{key}"])

    return change


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without(STATE), "part-missing"),
        (without("weight"), "part-missing"),
        (without("weight.quant_map"), "part-missing"),
        (without("weight.nested_absmax"), "part-missing"),
        (without("weight.nested_quant_map"), "part-missing"),
        (with_tensor("weight.absmax", lambda t: t[:-1].clone()), "part-wrong"),
        (with_tensor("weight", lambda t: t[:-1].clone()), "part-wrong"),
        (with_tensor(STATE, lambda t: t[:20].clone()), "state-unreadable"),
        (with_tensor("weight.nested_absmax", lambda t: t * float("inf")), "scale-not-finite"),
    ],
)
def test_bitsandbytes(broken, change, code):
    report = doctor(broken(NF4, change))
    assert codes(report) == {"not-comfyui", code}
    finding = next(finding for finding in report.findings if finding.code == code)
    assert finding.layer == LAYER


def test_torchao_without_its_header(broken):
    report = doctor(broken("torchao_int8_w8a16", lambda tensors, metadata, layer: None))
    assert codes(report) == {"not-comfyui", "state-unreadable"}
    assert not loads_here(report.path)


# ---------------------------------------------------------------- what quant_core wrote into the file


def test_changed_bytes(broken):
    path = broken(INT8, with_tensor("weight", lambda t: t.flip(0).contiguous()), recipe=True)
    report = doctor(path)
    assert codes(report) == {"bytes-changed"} and report.verdict(COMFYUI) == "loads"
    assert not loads_here(path)
    quick = doctor(path, read_weights=False)
    assert quick.findings == [] and "not read" in quick.unchecked[0]


def test_recipe_of_another_file(broken):
    def change(tensors, metadata, layer):
        manifest = json.loads(metadata["quant_core"])
        manifest["layers"][0].append("blocks.7.up")
        metadata["quant_core"] = json.dumps(manifest)

    path = broken(INT8, change, recipe=True)
    assert codes(doctor(path)) == {"manifest-layer-missing"} and not loads_here(path)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"manifest": 99})])
def test_unreadable_recipe(broken, text):
    path = broken(INT8, lambda tensors, metadata, layer: metadata.update(quant_core=text), recipe=True)
    assert codes(doctor(path)) == {"manifest-unreadable"} and not loads_here(path)


# ---------------------------------------------------------------- repair

# What a repair cannot give back exactly: a scale that was rounded before, or weights that were changed on purpose.
NOT_AS_BEFORE = ("fp8 scale in float16", "int8 scale in bfloat16", "scaled_fp8 of e5m2")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_repair_gives_back_the_good_file(good, broken, tmp_path, case):
    path = broken(case.method, case.change, recipe=case.code == "rotation-disagrees")
    report, fixed = doctor(path), tmp_path / "fixed.safetensors"
    before = path.read_bytes()
    if not report.repairable or codes(report) & {"bytes-changed"}:
        with pytest.raises((ValueError, CheckpointError)):
            repair(path, fixed, report)
        assert not fixed.exists()
        return
    result = repair(path, fixed, report)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.suffix not in (".safetensors",)] == []
    assert case.code not in codes(result.report) and set(result.proofs.values()) <= {SAME, UNREADABLE}
    if case.name in NOT_AS_BEFORE:
        assert codes(result.report) <= {"legacy"}
        return
    assert result.report.findings == [] and loads_here(fixed)
    expected, found = load_file(good(case.method)), load_file(fixed)
    extra = {key for key in found if key.endswith("scaled_fp8")}
    assert found.keys() - extra == expected.keys()
    assert {key: tensor_bytes(value) for key, value in found.items() if key not in extra} == {
        key: tensor_bytes(value) for key, value in expected.items()
    }


@pytest.mark.parametrize("method", [INT8, W4A4, W4A8])
def test_a_marker_is_not_guessed_but_taken_from_the_recipe(good, broken, tmp_path, method):
    drop = without("comfy_quant")
    assert not doctor(broken(method, drop)).repairable
    path = broken(method, drop, recipe=True)
    repair(path, tmp_path / "fixed.safetensors", doctor(path))
    fixed, expected = load_file(tmp_path / "fixed.safetensors"), load_file(good(method))
    assert torch.equal(fixed[f"{LAYER}.comfy_quant"], expected[f"{LAYER}.comfy_quant"])
    assert doctor(tmp_path / "fixed.safetensors").findings == []
    assert loads_here(tmp_path / "fixed.safetensors")


def test_trailing_bytes_are_cut(good, tmp_path):
    path, fixed = tmp_path / "long.safetensors", tmp_path / "fixed.safetensors"
    path.write_bytes(good(FP8).read_bytes() + b"tail")
    repair(path, fixed, doctor(path))
    found, expected = load_file(fixed), load_file(good(FP8))
    assert {k: tensor_bytes(v) for k, v in found.items()} == {k: tensor_bytes(v) for k, v in expected.items()}
    assert json.loads(metadata_of(fixed)["quant_core"]) == json.loads(metadata_of(good(FP8))["quant_core"])


def test_a_cast_that_would_round_is_refused(broken, tmp_path):
    path = broken(NVFP4, with_tensor("weight_scale", lambda t: t.float() * 1.01))
    report = doctor(path)
    assert report.repairable
    with pytest.raises(ValueError, match="values that float8_e4m3fn cannot hold"):
        repair(path, tmp_path / "fixed.safetensors", report)
    assert not (tmp_path / "fixed.safetensors").exists()


def test_the_source_is_never_written(broken):
    path = broken(FP8, without("comfy_quant"))
    with pytest.raises(ValueError, match="is the file itself"):
        repair(path, path, doctor(path))


def test_a_prefix_in_every_place(good, tmp_path):
    """Tensors, the metadata's markers and the recipe's layers lose a prefix together."""
    tensors, metadata = load_file(good(FP8)), metadata_of(good(FP8))
    manifest = json.loads(metadata["quant_core"])
    manifest["layers"] = [["module." + name for name in names] for names in manifest["layers"]]
    manifest["checksums"] = {"module." + name: value for name, value in manifest["checksums"].items()}
    metadata["quant_core"] = json.dumps(manifest)
    path, fixed = tmp_path / "wrapped.safetensors", tmp_path / "fixed.safetensors"
    save_file({"module." + name: tensor for name, tensor in tensors.items()}, path, metadata=metadata)
    report = doctor(path)
    assert codes(report) == {"prefix-unknown"}
    result = repair(path, fixed, report)
    assert result.report.findings == [] and loads_here(fixed)


# ---------------------------------------------------------------- no model


@pytest.mark.parametrize(
    "name",
    [
        "diffusion_model.blocks.0.up.lora_up.weight",
        "lora_unet_blocks_0_up.lora_down.weight",
        "base_model.model.blocks.0.up.lora_A.weight",
        "blocks.0.up.lora_B.default.weight",
        "lora_unet_blocks_0_up.hada_w1_a",
        "lora_unet_blocks_0_up.lokr_w2",
    ],
)
def test_a_lora_is_no_model_to_repair(name, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file({name: torch.ones(4, 4), name.rpartition(".")[0] + ".alpha": torch.ones(())}, path)
    report = doctor(path)
    assert codes(report) == {"is-a-lora"} and not report.repairable
    assert "LoRA" in report.findings[0].cause and not report.findings[0].edits


def test_a_file_without_tensors_does_not_load(tmp_path):
    save_file({}, tmp_path / "empty.safetensors")
    assert codes(doctor(tmp_path / "empty.safetensors")) == {"no-tensors"}


# ---------------------------------------------------------------- the report


def test_report_as_data(broken):
    report = doctor(broken(FP8, without("comfy_quant")))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["verdicts"] == {COMFYUI: "loads, wrong output", QUANT_CORE: "does not load"}
    (finding,) = data["findings"]
    assert finding["level"] == "fatal" and finding["layer"] == LAYER
    assert finding["mirrors"].startswith("comfy/ops.py _load_quantized_module")
    assert finding["repair"] == ["add the marker {'format': 'float8_e4m3fn'} to blocks.0.up"]
    assert len(data["unchecked"]) == 3


def test_the_worst_comes_first(broken):
    def change(tensors, metadata, layer):
        tensors["blocks.0.up.weight"].zero_()
        del tensors["blocks.1.up.weight_scale"]
        tensors["blocks.0.down.weight_scale"].mul_(float("nan"))
        tensors["blocks.1.down.comfy_quant"] = marker({"format": "int8_tensorwise", "convrot": True})

    levels = [finding.level for finding in doctor(broken(INT8, change)).findings]
    assert levels == [Level.FATAL, Level.WRONG, Level.ADVICE]


def test_every_rule_fills_its_texts():
    for rule in RULES.values():
        assert rule.comfyui or rule.quant_core
        assert not rule.cause.endswith(".") and not rule.fix.endswith(".")


# ---------------------------------------------------------------- the command


def test_command(broken, good, tmp_path, capsys):
    assert main(["doctor", str(good(FP8))]) == 0
    assert "no findings" in capsys.readouterr().out
    path, fixed = broken(FP8, without("comfy_quant")), tmp_path / "fixed.safetensors"
    assert main(["doctor", str(path)]) == 1
    out = capsys.readouterr().out
    assert "marker-missing (comfyui: wrong output, quant_core: fatal)" in out
    assert f"layer: {LAYER}" in out and "not checked:" in out
    assert main(["doctor", str(path), "--fix", str(fixed), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["repaired"]["report"]["findings"] == [] and fixed.exists()


def test_command_for_one_loader(good, capsys):
    assert main(["doctor", str(good(NF4)), "--loader", "quant_core", "--quick"]) == 0
    assert "no findings" in capsys.readouterr().out
    assert main(["doctor", str(good(NF4)), "--loader", "comfyui"]) == 1
    assert "not-comfyui" in capsys.readouterr().out


def test_command_that_cannot_repair(broken, tmp_path, capsys):
    path = broken(INT8, without("weight_scale"))
    assert main(["doctor", str(path), "--fix", str(tmp_path / "fixed.safetensors")]) == 1
    assert "nothing can be repaired without loss" in capsys.readouterr().err
