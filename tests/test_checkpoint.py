"""Files: the safetensors rules, hostile headers, atomic writing, saving and loading quantized models."""

import hashlib
import json
import os
import stat
import struct
import tracemalloc

import blake3
import pytest
import torch
import toy_int9  # noqa: F401 -- registers toy_int9_w9a16
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import ALL_LINEARS, TinyModel, state_bytes, tensor_bytes, tiny_model

from quant_core import (
    CheckpointError,
    MixedQuantizeConfig,
    QuantizeConfig,
    checkpoint,
    load_quantized_model,
    register_model_config,
    save_quantized_model,
)
from quant_core.checkpoint.header import DTYPES, MAX_HEADER_BYTES, read_header

METHOD = "toy_int9_w9a16"


def write_raw(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# ---------------------------------------------------------------- headers


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "header is not JSON"),
        (b"[]", b"", "expected an object"),
        (b"\xff\xfe", b"", "header is not JSON"),
        (b"[" * 100_000, b"", "header is not JSON"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"x", "names 'a' twice"),
        ({"a": entry(dtype="Q4")}, b"1234", "unknown dtype 'Q4'"),
        ({"a": entry(shape=(-4,))}, b"1234", "impossible shape"),
        ({"a": entry(shape=(True,))}, b"1234", "impossible shape"),
        ({"a": entry(shape=(2.0, 2))}, b"1234", "impossible shape"),
        ({"a": entry(offsets=(4, 0))}, b"1234", "takes 4 bytes"),
        ({"a": entry(offsets=(0, 3))}, b"123", "takes 4 bytes, its offsets span 3"),
        ({"a": entry(shape=(2**62, 4))}, b"1234", "takes"),
        ({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456", "'b' overlaps"),
        ({"a": entry(), "b": entry(offsets=(6, 10))}, b"1234567890", "'b' leaves a hole"),
        ({"a": entry()}, b"123", "truncated: the tensors end"),
        ({"a": entry()}, b"12345", "longer than its header says"),
        ({"a": {"dtype": "U8"}}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": [1]}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": {"dtype": [], "shape": [4], "data_offsets": [0, 4]}}, b"1234", "unknown dtype"),
        (b'{"a":' + b"9" * 5000 + b"}", b"", "header is not JSON"),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "is not Unicode text"),
        ({"__metadata__": {"a": 1}}, b"", "must map strings to strings"),
    ],
)
def test_header_rules(tmp_path, header, data, message):
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1, 50])
def test_header_bomb_costs_nothing(tmp_path, length):
    path = write_raw(tmp_path / "bomb.safetensors", b"{}", length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="its header would take"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_many_names_and_one_twice_are_found_at_once(tmp_path):
    import time

    names = [f"n{i}" for i in range(200_000)]
    raw = ("{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}").encode()
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="names 'n199999' twice"):
        read_header(write_raw(tmp_path / "x.safetensors", raw))
    assert time.monotonic() - started < 20  # quadratic, it takes the better part of an hour


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
def test_pipes_are_neither_read_nor_replaced(tmp_path):
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="is a pipe or a device"):
        read_header(pipe)
    model = tiny_model()
    config = QuantizeConfig(method=METHOD)
    config.quantize_model(model)
    with pytest.raises(CheckpointError, match="a device or a pipe, not a file"):
        save_quantized_model(model, config, pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty or truncated"),
        (b"123", "empty or truncated"),
        (b"PK\x03\x04 a torch archive ....", "PyTorch pickle archive"),
        (b"\x80\x02}q\x00.......", "pickle; it can run code"),
        (b"GGUF\x03\x00\x00\x00....", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"just some text, long enough", "its header would take"),
    ],
)
def test_what_is_not_safetensors(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_quantized_model(tiny_model(), path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.safetensors"):
        load_quantized_model(tiny_model(), tmp_path / "nothing.safetensors")


def test_every_dtype_is_read_as_safetensors_reads_it(tmp_path):
    tensors = {}
    for dtype in DTYPES.values():
        raw = torch.randint(0, 2 if dtype == torch.bool else 100, (3 * dtype.itemsize,), dtype=torch.uint8)
        tensors[str(dtype)] = raw.view(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    path = tmp_path / "all.safetensors"
    save_file(tensors, path)
    ours = checkpoint.open_checkpoint(path)
    theirs = load_file(path)
    assert set(ours.tensors) == set(theirs)
    for name, value in theirs.items():
        assert tensor_bytes(ours.read(name)) == tensor_bytes(value)


# ---------------------------------------------------------------- shards


def sharded(folder, **overrides):
    save_file({"a.weight": torch.ones(2, 2)}, folder / "model-1.safetensors")
    save_file({"b.weight": torch.zeros(3)}, folder / "model-2.safetensors")
    weight_map = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors", **overrides}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_index_and_folder_read_alike(tmp_path):
    index = sharded(tmp_path)
    for path in (index, tmp_path):
        opened = checkpoint.open_checkpoint(path)
        assert sorted(opened.tensors) == ["a.weight", "b.weight"]
        assert torch.equal(opened.read("a.weight"), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"c": "model-3.safetensors"}, "shard 'model-3.safetensors' is missing"),
        ({"c": "../model-1.safetensors"}, "not the name of a file beside the index"),
        ({"c": "/etc/passwd"}, "not the name of a file beside the index"),
        ({"c": "..\\x.safetensors"}, "not the name of a file beside the index"),
        ({"c": "model-1.safetensors"}, "tensor 'c' is not in 'model-1.safetensors'"),
    ],
)
def test_index_tricks(tmp_path, overrides, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoint.open_checkpoint(sharded(tmp_path, **overrides))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": ' + "9" * 5000 + "}",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": [1]}}',
        "\x00",
    ],
)
def test_index_that_is_none(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index|not the name of a file|lists no tensor"):
        checkpoint.open_checkpoint(path)


def test_folder_without_safetensors(tmp_path):
    with pytest.raises(CheckpointError, match="found no safetensors file"):
        checkpoint.open_checkpoint(tmp_path)


# ---------------------------------------------------------------- saving


@pytest.fixture
def saved(tmp_path):
    model = tiny_model()
    config = QuantizeConfig(method=METHOD, exclude_modules=["proj_in", "head"])
    config.quantize_model(model)
    path = tmp_path / "model.safetensors"
    return model, config, path, save_quantized_model(model, config, path)


def test_saved_file_is_what_the_model_holds(saved):
    model, _, path, _ = saved
    with safe_open(path, "pt") as file:
        stored = {key: tensor_bytes(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 -- not a dict
        metadata = file.metadata()
    assert stored == state_bytes(model)
    manifest = json.loads(metadata["quant_core"])
    assert manifest["recipe"] == {"method": METHOD, "exclude_modules": ["proj_in", "head"]}
    assert manifest["layers"] == [["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]]
    for key, (_, _, data) in stored.items():
        assert blake3.blake3(data).hexdigest().startswith(manifest["checksums"][key])
    assert metadata["format"] == "pt"


def test_tensors_are_aligned(saved):
    for info in read_header(saved[2]).tensors.values():
        assert info.start % info.dtype.itemsize == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
def test_mode_is_0644(saved):
    assert stat.S_IMODE(saved[2].stat().st_mode) == 0o644


def test_hashes(saved, tmp_path, peer_quant):
    model, config, path, file_hash = saved
    # The structure hash, from its definition: names, and names with shapes, sorted and joined.
    state = load_file(path)
    parts = [*state, *(f"{k}:{'_'.join(map(str, v.shape))}" for k, v in state.items())]
    assert file_hash == hashlib.md5(",".join(sorted(parts)).encode()).hexdigest()
    again = save_quantized_model(model, config, tmp_path / "again.safetensors", metadata={"note": "other header"})
    assert (again, again.content) == (file_hash, file_hash.content)
    model.head.bias.data[0] += 1
    changed = save_quantized_model(model, config, tmp_path / "changed.safetensors")
    assert changed == file_hash
    assert changed.content != file_hash.content
    assert isinstance(file_hash, str)


def test_same_model_same_bytes(saved, tmp_path):
    model, config, path, _ = saved
    save_quantized_model(model, config, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_saving_through_a_link_writes_its_target(saved, tmp_path):
    model, config, path, _ = saved
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    path.write_bytes(b"old")
    save_quantized_model(model, config, link)
    assert link.is_symlink()
    load_quantized_model(tiny_model(), path)


def test_saving_below_a_file(saved):
    model, config, path, _ = saved
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        save_quantized_model(model, config, path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is a folder; name the file"):
        save_quantized_model(model, config, path.parent)


def test_longest_file_name(saved, tmp_path):
    model, config, _, _ = saved
    save_quantized_model(model, config, tmp_path / ("n" * 243 + ".safetensors"))


def test_failed_save_keeps_the_old_file(saved, monkeypatch):
    model, config, path, _ = saved
    before = path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_quantized_model(model, config, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_saving_what_is_not_quantized(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"holds no layer quantized by toy_int9_w9a16: call config.quantize_model"):
        save_quantized_model(tiny_model(), QuantizeConfig(method=METHOD), path)
    model = tiny_model()
    recipe = QuantizeConfig(method=METHOD)
    recipe.prepare_for_prequantized_load(model)
    with pytest.raises(ValueError, match="on the meta device"):
        save_quantized_model(model, recipe, path)
    assert list(tmp_path.iterdir()) == []


def test_saving_with_another_recipe(tmp_path):
    model = tiny_model()
    QuantizeConfig(method=METHOD).quantize_model(model)
    with pytest.raises(ValueError, match="is a Int9Linear, which bitsandbytes_nf4 did not make"):
        save_quantized_model(model, QuantizeConfig(method="bitsandbytes_nf4"), tmp_path / "x.safetensors")


# ---------------------------------------------------------------- loading


def test_loads_into_a_meta_model(saved):
    model, _, path, _ = saved
    with torch.device("meta"):
        loaded = TinyModel().to(torch.bfloat16)
    recipe = load_quantized_model(loaded, path)
    assert recipe.load_prequantized
    assert state_bytes(loaded) == state_bytes(model)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(loaded(x), model(x))


def test_compute_dtype_follows_the_model_or_the_argument(saved):
    loaded = tiny_model(torch.float16)
    load_quantized_model(loaded, saved[2])
    assert loaded.blocks[0].up.compute_dtype == torch.float16
    loaded = tiny_model(torch.float16)
    load_quantized_model(loaded, saved[2], compute_dtype=torch.float32)
    assert loaded.blocks[0].up.compute_dtype == torch.float32


def edit(path, change):
    """Rewrite a file's tensors and metadata with another library."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def swap_layers(tensors, metadata):
    a, b = "blocks.0.up.weight", "blocks.1.up.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def drop_scale(tensors, metadata):
    del tensors["blocks.0.up.weight_scale"]


def extra_tensor(tensors, metadata):
    tensors["blocks.0.up.weight_zero"] = torch.zeros(1)


def wrong_shape(tensors, metadata):
    tensors["blocks.0.up.weight_msb"] = torch.zeros(5, dtype=torch.uint8)


def float_weight(tensors, metadata):
    tensors["blocks.0.up.weight"] = torch.zeros(512, 256, dtype=torch.bfloat16)


def unknown_layer(tensors, metadata):
    metadata["quant_core"] = metadata["quant_core"].replace('"blocks.1.down"]', '"blocks.9.down"]')


def newer_manifest(tensors, metadata):
    metadata["quant_core"] = metadata["quant_core"].replace('"manifest":1', '"manifest":2')


def broken_manifest(tensors, metadata):
    metadata["quant_core"] = metadata["quant_core"][:-5]


def unknown_method(tensors, metadata):
    metadata["quant_core"] = metadata["quant_core"].replace(METHOD, "toy_int7_w7a16")


def recipe_without_method(tensors, metadata):
    metadata["quant_core"] = json.dumps({**json.loads(metadata["quant_core"]), "recipe": {}})


def recipe_of_wrong_type(tensors, metadata):
    metadata["quant_core"] = json.dumps({**json.loads(metadata["quant_core"]), "recipe": {"configs": 5}})


def missing_layers(tensors, metadata):
    metadata["quant_core"] = json.dumps({**json.loads(metadata["quant_core"]), "layers": []})


def no_checksums(change):
    def both(tensors, metadata):
        change(tensors, metadata)
        manifest = json.loads(metadata["quant_core"])
        manifest["checksums"] = {}
        metadata["quant_core"] = json.dumps(manifest)

    return both


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_layers, r"the bytes of 'blocks.0.up.weight' are not the ones that were saved|the bytes of 'blocks.1.up"),
        (drop_scale, r"Missing key\(s\).*blocks.0.up.weight_scale"),
        (extra_tensor, r"Unexpected key\(s\).*blocks.0.up.weight_zero"),
        (no_checksums(wrong_shape), r"blocks.0.up: weight_msb is torch.uint8 \[5\], expected torch.uint8 \[16384\]"),
        (no_checksums(float_weight), r"blocks.0.up: weight is torch.bfloat16 \[512, 256\] \(a float weight"),
        (unknown_layer, "'blocks.9.down' is quantized in the file, but the model has no Linear of that name"),
        (newer_manifest, "in a newer form than this"),
        (broken_manifest, "'quant_core' is not JSON"),
        (
            unknown_method,
            "model.safetensors: the recipe in the file cannot be used: unknown quantization method 'toy_int7",
        ),
        (recipe_without_method, "the manifest's recipe names no method"),
        (recipe_of_wrong_type, "the manifest's recipe names no method"),
        (missing_layers, "lists 0 groups of layers for 1 configs"),
    ],
)
def test_files_that_do_not_fit_leave_the_model_alone(saved, change, message):
    _, _, path, _ = saved
    edit(path, change)
    model = tiny_model(seed=3)
    before = state_bytes(model)
    with pytest.raises(ValueError, match=message):  # CheckpointError is a ValueError
        load_quantized_model(model, path)
    assert state_bytes(model) == before
    assert all(type(model.get_submodule(n)) is torch.nn.Linear for n in ALL_LINEARS)


def test_verification_can_be_left_out(saved):
    _, _, path, _ = saved
    edit(path, swap_layers)
    load_quantized_model(tiny_model(), path, verify=False)


def test_float_file_is_no_quantized_one(tmp_path):
    path = tmp_path / "float.safetensors"
    save_file(tiny_model().state_dict(), path)
    with pytest.raises(CheckpointError, match="holds no quantized layer: it is a float checkpoint"):
        load_quantized_model(tiny_model(), path)


def test_other_architecture(saved):
    with pytest.raises(CheckpointError, match="the model has no Linear of that name"):
        load_quantized_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), saved[2])


def test_wider_model(saved):
    with pytest.raises(CheckpointError, match=r"blocks.0.up: weight is torch.uint8 \[512, 256\], expected"):
        load_quantized_model(TinyModel(width=128), saved[2])


def test_registered_hash_replaces_a_manifest(saved, tmp_path):
    model, _, path, _ = saved
    foreign = tmp_path / "foreign.safetensors"
    save_file(load_file(path), foreign)
    with pytest.raises(CheckpointError, match="register_model_config"):
        load_quantized_model(tiny_model(), foreign)
    structure = checkpoint.structure_hash({k: v.shape for k, v in load_file(path).items()})
    register_model_config(
        model_hash=structure,
        model_name="tiny",
        quant_config={"method": METHOD, "load_prequantized": True, "exclude_modules": ["proj_in", "head"]},
    )
    try:
        loaded = tiny_model()
        load_quantized_model(loaded, foreign)
    finally:
        checkpoint.MODEL_CONFIGS.clear()
    assert state_bytes(loaded) == state_bytes(model)


@pytest.mark.parametrize("entry", [{}, {"model_hash": "x"}, {"model_hash": "", "quant_config": {"method": METHOD}}])
def test_bad_registration(entry):
    with pytest.raises(ValueError, match="model_hash|recipe"):
        register_model_config(entry)


def test_mixed_recipe_travels_in_the_file(tmp_path):
    recipe = MixedQuantizeConfig(
        configs=[
            QuantizeConfig(method=METHOD, target_modules=["up"], backend_config_kwargs={"per_channel": False}),
            QuantizeConfig(method=METHOD, target_modules=["down"]),
        ]
    )
    model = tiny_model()
    recipe.quantize_model(model)
    path = tmp_path / "mixed.safetensors"
    save_quantized_model(model, recipe, path)
    loaded = tiny_model()
    again = load_quantized_model(loaded, path)
    assert again.to_dict() == recipe.to_dict()
    assert state_bytes(loaded) == state_bytes(model)


@pytest.mark.parametrize("body", [b'{"a":[' + b"{}," * 1_000_000 + b"{}]}", b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"])
def test_header_of_countless_items_is_refused_before_it_is_parsed(tmp_path, body):
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(len(body).to_bytes(8, "little") + body)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"bomb\.safetensors: its header of \d+ bytes has more than"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()
