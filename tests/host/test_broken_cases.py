"""What clumsy users do to the nodes: wrong files, odd names, full disks, damaged caches."""

from __future__ import annotations

import json
import pickle
import shutil
import sys

import pytest

NATIVE, ADAPTED = "comfy_kitchen_int8_w8a8", "bitsandbytes_nf4"


@pytest.fixture
def host(pack):
    """A function that returns a module of ``nodes/host``."""
    base = pack.load.__module__.rpartition(".")[0]
    return lambda name: sys.modules[f"{base}.{name}"]


@pytest.fixture
def output(make_tiny, tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


@pytest.fixture
def refuses(pack):
    """A function that runs what must raise a CheckpointError that matches, and returns the error's text."""
    from quant_core import CheckpointError

    def check(run, pattern) -> str:
        with pytest.raises(CheckpointError, match=pattern) as caught:
            run()
        return str(caught.value)

    return check


# ------------------------------------------------------------------ names of files


@pytest.mark.parametrize("prefix", ["name", "name/", "name//", "sub/name/", "sub/../name", "name/sub/.."])
def test_no_prefix_overwrites_a_file(prefix, host, output):
    for _ in range(3):
        host("files").output_file(prefix).touch(exist_ok=False)
    assert [path.name[-19:] for path in sorted(output.rglob("*.safetensors"))] == [
        f"_0000{number}_.safetensors" for number in (1, 2, 3)
    ]


def test_a_subfolder_that_is_a_link_to_elsewhere_is_named(host, output, tmp_path_factory):
    (output / "models").symlink_to(tmp_path_factory.mktemp("other"))
    with pytest.raises(ValueError, match="no link that leads out of it"):
        host("files").output_file("models/name")


# ------------------------------------------------------------------ files of another kind


class _Code:
    """Unpickles by running code."""

    def __reduce__(self):
        return (print, ("code of a model file ran",))


@pytest.mark.parametrize("content", [pickle.dumps(_Code()), b"no pickle"], ids=["code", "text"])
def test_a_file_that_could_run_code(content, refuses, host, online, tiny_flux, tmp_path, capsys):
    """torch's own text advises to load such a file without its protection; ours must not hand that on."""
    path = tmp_path / "model.ckpt"
    path.write_bytes(content)
    model = online(NATIVE)
    for read in (lambda: online(path=path), lambda: host("lora").read_lora(str(path), model)):
        text = refuses(read, "more than tensors")
        assert "model.ckpt" in text and "safetensors" in text and "weights_only" not in text
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [[1, 2], {1: 2}, {"step": 7}])
def test_a_pytorch_file_that_is_no_lora(content, refuses, host, online, tmp_path):
    import torch

    path = tmp_path / "lora.pt"
    torch.save(content, path)
    model = online(NATIVE)
    refuses(lambda: host("lora").read_lora(str(path), model), r"lora\.pt .*no(t a)? LoRA")


LAYER = "diffusion_model.double_blocks.0.img_attn.proj"  # 256 x 256
_LORA = {"lora_up.weight": (256, 4), "lora_down.weight": (4, 256)}
_LOHA = {"hada_w1_a": (256, 4), "hada_w1_b": (4, 256), "hada_w2_a": (256, 4), "hada_w2_b": (4, 256)}
BROKEN_LORAS = {
    "rank 0": ({"lora_up.weight": (256, 0), "lora_down.weight": (0, 256)}, "do not fit together"),
    "two ranks": ({**_LORA, "lora_down.weight": (2, 256)}, "do not fit together"),
    "one dimension": ({**_LORA, "lora_up.weight": (1024,)}, "do not fit together"),
    "an alpha for each rank": ({**_LORA, "alpha": (4,)}, "form that no LoRA has"),
    "no up": ({"lora_down.weight": (4, 256)}, "img_attn.proj' is in Flux, but"),
    "another LoHa": ({**_LOHA, "hada_w1_a": (192, 4), "hada_w2_a": (192, 4)}, "256 x 256, the LoRA 192 x 256"),
    "halves of two LoHas": ({**_LOHA, "hada_w2_a": (255, 4)}, "do not fit together"),
    "another LoKr": ({"lokr_w1": (3, 3), "lokr_w2": (7, 7)}, "256 x 256, the LoRA 21 x 21"),
    "half a LoKr": ({"lokr_w1": (16, 16)}, "are incomplete"),
}


@pytest.mark.parametrize("method", [NATIVE, ADAPTED])
@pytest.mark.parametrize("case", BROKEN_LORAS)
def test_a_broken_lora_is_refused_before_sampling(case, method, refuses, host, online, tmp_path):
    import safetensors.torch
    import torch

    shapes, words = BROKEN_LORAS[case]
    path = tmp_path / "broken.safetensors"
    tensors = {f"{LAYER}.{name}": torch.ones(shape) for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, path)
    lora, model = host("lora"), online(method)
    text = refuses(lambda: lora.add_to_model(model, lora.read_lora(str(path), model), 1.0, lora.AUTO), words)
    assert text.startswith("broken.safetensors ")
    if "alpha" not in shapes:
        # In a file with a layer that fits, it is left out.
        fitting = LAYER.replace("img_attn", "txt_attn")
        tensors |= {f"{fitting}.{name}": torch.ones(shape) for name, shape in _LORA.items()}
        safetensors.torch.save_file(tensors, path)
        added = lora.add_to_model(model, lora.read_lora(str(path), model), 1.0, lora.AUTO)
        assert len(added.patches) + len(added.injections) == 1


def test_a_file_of_comfyuis_own_saver(refuses, online, tmp_path):
    """ComfyUI's ModelSave knows nothing of a method of another library, and writes what nobody can read."""
    import safetensors.torch

    path = tmp_path / "saved.safetensors"
    state = online(ADAPTED).model.diffusion_model.state_dict()  # what ModelSave writes
    safetensors.torch.save_file({f"model.diffusion_model.{key}": t.contiguous() for key, t in state.items()}, path)
    refuses(lambda: online(ADAPTED, path=path), r"saved\.safetensors .*ModelSave.*Save Quantized Checkpoint")


@pytest.mark.parametrize("change", ["rewritten", "replaced", "removed"])
def test_a_file_that_is_changed_while_it_is_read(
    change, pack, refuses, host, online, tiny_flux, assert_same, tmp_path, monkeypatch
):
    """Rewritten in place, it is a mixture of two models, which must not be used, let alone kept in the disk cache."""
    import torch

    from quant_core import QuantizeConfig

    method = "comfy_kitchen_fp8_w8a8"  # which every ComfyUI has itself
    monkeypatch.setenv("QUANTCORE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "flux.safetensors"
    shutil.copyfile(tiny_flux, path)
    quantize = host("quantizer").quantize_weight
    layers: list[torch.Tensor] = []

    def quantize_and_change(weight, config):
        if len(layers) == 3:
            if change == "rewritten":
                with open(path, "r+b") as file:
                    file.seek(path.stat().st_size // 2)
                    file.write(bytes(1_000_000))
            else:
                path.unlink()
            if change == "replaced":
                path.write_bytes(tiny_flux.read_bytes()[::-1])
        layers.append(weight)
        return quantize(weight, config)

    monkeypatch.setattr(host("quantizer"), "quantize_weight", quantize_and_change)

    def load():
        with torch.inference_mode():
            return pack.load(str(path), QuantizeConfig(method=method), cached=True)

    if change == "rewritten":
        refuses(load, r"flux\.safetensors was rewritten while it was being read")
        assert not list(tmp_path.glob("cache/*.safetensors"))
    else:
        loaded = load()
        assert len(layers) > 3
        assert_same(loaded, online(method))


# ------------------------------------------------------------------ disks


def test_a_disk_that_is_too_full_is_named_before_writing(host, online, output, monkeypatch):
    usage = shutil.disk_usage(output)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(OSError, match=r"x\.safetensors needs [5-6],\d+,\d+ bytes.* has 1,000,000 bytes free"):
        host("saving").save_model(output / "x.safetensors", online(NATIVE))
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("method", [NATIVE, ADAPTED])
@pytest.mark.parametrize("damage", ["a marker", "a scale", "all behind the header"])
def test_a_damaged_cache_entry_is_made_again(
    damage, method, pack, online, tiny_flux, assert_same, tmp_path, monkeypatch
):
    import torch

    from quant_core import QuantizeConfig

    monkeypatch.setenv("QUANTCORE_CACHE", str(tmp_path))

    def load():
        with torch.inference_mode():
            return pack.load(str(tiny_flux), QuantizeConfig(method=method), cached=True)

    expected = online(method)
    load()
    (entry,) = tmp_path.glob("*.safetensors")
    whole = entry.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    offsets = {name: info["data_offsets"] for name, info in json.loads(whole[8:head]).items() if name[:2] != "__"}
    ending = {"a marker": ("comfy_quant", "bitsandbytes__nf4"), "a scale": ("weight_scale", "absmax")}.get(damage)
    if ending is None:
        start, end = head, len(whole)
    else:
        start, end = (head + place for place in next(offsets[n] for n in offsets if n.endswith(ending)))
    entry.write_bytes(whole[:start].ljust(end, b"\0") + whole[end:])
    assert_same(load(), expected)
    assert entry.read_bytes() == whole
