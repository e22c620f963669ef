"""Damaged checkpoints: never a crash, a hang, much memory, or an error that quant_core does not raise on purpose.

A share of the cases runs here; ``python tests/fuzz.py`` runs all 6,000.
"""

import json
import struct

import fuzz
import pytest
import torch
from safetensors.torch import save_file

from quant_core import CheckpointError
from quant_core.checkpoint import open_checkpoint
from quant_core.checkpoint.formats import dequantize_layer, stored_layers
from quant_core.doctor import doctor

HEADERS, BODIES = 120, 60


def test_a_share_of_the_cases(tmp_path):
    failures, opened = fuzz.run_cases(fuzz.all_cases(HEADERS, BODIES), tmp_path)
    assert not failures, "\n".join(f"{case} {problem}" for case, problem in failures)
    # Files that are all refused at once, or all read, would have shown nothing.
    assert 0.25 < opened / (HEADERS + BODIES) < 0.9


def text(value):
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("kind", [["nvfp4"], {"a": 1}, 3, True])
def test_a_format_that_is_no_name(kind, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"l.weight": torch.ones(4, 4), "l.comfy_quant": text(json.dumps({"format": kind}))}, path)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: layer 'l' is marked with format"):
        stored_layers(open_checkpoint(path))


@pytest.mark.parametrize("shape", [[2**40, 64], [2**32, 2**32], [4, 33]])
def test_a_quant_state_with_a_shape_that_its_codes_do_not_fill(shape, tmp_path):
    """Memory of the claimed size would be asked for before the codes are looked at."""
    path = tmp_path / "a.safetensors"
    state = text(json.dumps({"shape": shape, "blocksize": 64, "dtype": "bfloat16"}))
    save_file(
        {
            "l.weight": torch.zeros(64, 1, dtype=torch.uint8),
            "l.weight.absmax": torch.ones(2),
            "l.weight.quant_state.bitsandbytes__nf4": state,
        },
        path,
    )
    with pytest.raises(CheckpointError, match=r"layer 'l': 'weight' is torch.uint8 \[64, 1\], expected \d+ bytes"):
        stored_layers(open_checkpoint(path))


@pytest.mark.parametrize("names", ["{", "3", '[1, "a"]', '{"a": 1}', "[" * 100_000])
def test_torchaos_list_of_names(names, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"l.weight": torch.ones(4, 4)}, path, metadata={"tensor_names": names})
    with pytest.raises(CheckpointError, match="'tensor_names' is not"):
        stored_layers(open_checkpoint(path))


@pytest.mark.parametrize("shape", [[2**62, 0], [0, 2**62], [2**20, 2**20, 0]])
def test_an_empty_tensor_of_endless_rows(shape, tmp_path):
    header = json.dumps({"l.weight": {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="'l.weight' has the impossible shape"):
        open_checkpoint(path)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_an_empty_quantized_weight(shape, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"l.weight": torch.empty(shape, dtype=torch.float8_e4m3fn)}, path)
    checkpoint = open_checkpoint(path)
    assert dequantize_layer(checkpoint, stored_layers(checkpoint)["l"]).shape == shape


def test_a_marked_weight_without_dimensions(tmp_path):
    path = tmp_path / "a.safetensors"
    marker = text('{"format": "float8_e4m3fn"}')
    save_file({"l.weight": torch.ones(()).to(torch.float8_e4m3fn), "l.comfy_quant": marker}, path)
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match="layer 'l' .* a weight without rows"):
        dequantize_layer(checkpoint, stored_layers(checkpoint)["l"])


@pytest.mark.parametrize("length", [640, 640 + 65536])
def test_a_header_whose_length_begins_like_a_pickle(length, tmp_path):
    """Its first bytes are 80 02, which also begin a pickle."""
    header = json.dumps({"l.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + header.ljust(length) + struct.pack("<f", 1.5))
    assert open_checkpoint(path).read("l.weight").item() == 1.5


def test_a_shard_whose_name_is_too_long(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"l.weight": "9" * 5000}}))
    with pytest.raises(CheckpointError, match=r"index\.json: shard '9+' (cannot be looked up|is missing)"):
        open_checkpoint(path)
    assert [finding.code for finding in doctor(path).findings] == ["file-unreadable"]
