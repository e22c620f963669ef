"""Checkpoints of every shape: rows of a tensor, files that change while open, parts, folders of diffusers models."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from quant_core import CheckpointError
from quant_core.checkpoint import open_checkpoint
from quant_core.checkpoint.reader import diffusion_prefix, part_of


@pytest.fixture
def path(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(10, 7, generator=generator, dtype=torch.bfloat16),
        "b.weight": torch.randn(6, 3, 2, 2, generator=generator),
        "c": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"author": "me"})
    return tmp_path / "model.safetensors"


def test_rows_are_slices_of_the_whole(path):
    checkpoint = open_checkpoint(path)
    for name in ("a.weight", "b.weight"):
        whole = checkpoint.read(name)
        for start, stop in [(0, 0), (0, 2), (3, 6), (0, len(whole))]:
            rows = checkpoint.read_rows(name, start, stop)
            assert rows.dtype == whole.dtype
            assert torch.equal(rows, whole[start:stop])
    assert checkpoint.read_rows("empty", 0, 0).shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "start", "stop"), [("a.weight", -1, 2), ("a.weight", 3, 11), ("a.weight", 4, 3), ("c", 0, 1)]
)
def test_rows_that_are_not_there(path, name, start, stop):
    with pytest.raises(IndexError, match=f"model.safetensors: tensor '{name}'"):
        open_checkpoint(path).read_rows(name, start, stop)


def test_identity_is_that_of_the_opened_file(path):
    (identity,) = open_checkpoint(path).identity()
    status = path.stat()
    assert (identity.path, identity.size, identity.mtime_ns) == (path, status.st_size, status.st_mtime_ns)


def rewrite(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(1, 1))  # whatever the clock's resolution, the time is another one


def replace(path):
    other = path.with_name("other")
    shutil.copyfile(path, other)
    os.utime(other, ns=(5, 5))
    os.replace(other, path)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("change", "message"), [(rewrite, "was rewritten"), (replace, "was rewritten"), (truncate, "was truncated")]
)
def test_a_file_that_changes_while_it_is_open(path, change, message):
    checkpoint = open_checkpoint(path)
    checkpoint.check_unchanged()
    change(path)
    for act in (
        checkpoint.check_unchanged,
        lambda: checkpoint.read("a.weight"),
        lambda: checkpoint.read_rows("b.weight", 0, 1),
    ):
        with pytest.raises(CheckpointError, match=rf"model\.safetensors {message}"):
            act()


def test_a_file_that_is_removed_while_it_is_open(path):
    checkpoint = open_checkpoint(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors was removed"):
        checkpoint.check_unchanged()


def test_a_change_in_one_of_several_shards_is_noticed(tmp_path):
    for index in range(2):
        save_file({f"l{index}.weight": torch.ones(2, 2)}, tmp_path / f"{index}.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert [i.path.name for i in checkpoint.identity()] == ["0.safetensors", "1.safetensors"]
    assert checkpoint.file_of("l1.weight") == tmp_path / "1.safetensors"
    rewrite(tmp_path / "1.safetensors")
    assert checkpoint.read("l0.weight").sum() == 4
    with pytest.raises(CheckpointError, match=r"1\.safetensors was rewritten"):
        checkpoint.check_unchanged()


def test_parts_of_an_all_in_one_checkpoint(tmp_path):
    names = {
        "model.diffusion_model.blocks.0.weight": "diffusion_model",
        "text_encoders.t5xxl.shared.weight": "text_encoders",
        "conditioner.embedders.0.weight": "text_encoders",
        "cond_stage_model.x.weight": "text_encoders",
        "first_stage_model.decoder.weight": "vae",
        "vae.decoder.weight": "vae",
        "logit_scale": "other",
    }
    save_file({name: torch.ones(1) for name in names}, tmp_path / "all.safetensors")
    checkpoint = open_checkpoint(tmp_path / "all.safetensors")
    assert diffusion_prefix(checkpoint) == "model.diffusion_model."
    assert part_of(checkpoint) == names


def test_a_file_without_the_prefix_is_one_diffusion_model(path):
    checkpoint = open_checkpoint(path)
    assert diffusion_prefix(checkpoint) == ""
    assert set(part_of(checkpoint).values()) == {"diffusion_model"}


def diffusers_model(root, name, sharded=False):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    stem = "diffusion_pytorch_model"
    save_file({f"{name}.weight": torch.ones(2, 2)}, folder / f"{stem}.safetensors")
    if sharded:
        index = {"weight_map": {f"{name}.weight": f"{stem}.safetensors"}}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["transformer", "unet"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_root_of_a_diffusers_model(name, sharded, tmp_path):
    diffusers_model(tmp_path, name, sharded)
    diffusers_model(tmp_path, "vae")
    for opened in (tmp_path, tmp_path / name):
        assert list(open_checkpoint(opened).tensors) == [f"{name}.weight"]


def test_a_root_with_weights_in_two_places_is_refused(tmp_path):
    diffusers_model(tmp_path, "transformer")
    save_file({"x.weight": torch.ones(2)}, tmp_path / "single.safetensors")
    with pytest.raises(CheckpointError, match=r"weights are in .*transformer and in .*; name the one to read"):
        open_checkpoint(tmp_path)
    diffusers_model(tmp_path, "unet")
    (tmp_path / "single.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"transformer and in .*unet"):
        open_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "unet")
    assert list(open_checkpoint(tmp_path).tensors) == ["transformer.weight"]
