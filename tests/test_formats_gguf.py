"""GGUF as a source: what llama.cpp's own package wrote and reads, and files that are damaged or hostile."""

from __future__ import annotations

import struct
import sys

import pytest
import torch
from safetensors.torch import save_file

from quant_core import CheckpointError
from quant_core.checkpoint import open_checkpoint
from quant_core.checkpoint.formats import dequantize_layer, stored_layers

gguf = pytest.importorskip("gguf")

Type = gguf.GGMLQuantizationType
LEGACY = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
K_QUANTS = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]


def weight(rows=37, columns=512, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def random_blocks(kind, rows, columns):
    """Blocks of random codes; the package has no quantizer for K-quants. Their float16 scales are made finite."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (rows * columns // weights, size), dtype=torch.uint8, generator=generator)
    places = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}[kind]
    for place in places:
        scale = (torch.rand(len(blocks), 1, generator=generator) / 100).half()
        blocks[:, place : place + 2] = scale.view(torch.uint8)
    return blocks.reshape(rows, -1).numpy()


def write(path, tensors, values=None):
    """Write ``{name: (array, type or None)}`` with the package's own writer."""
    writer = gguf.GGUFWriter(path, "flux")
    for key, value in (values or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", LEGACY + K_QUANTS, ids=lambda kind: kind.name)
def test_every_block_format(kind, tmp_path):
    blocks = gguf.quants.quantize(weight().numpy(), kind) if kind in LEGACY else random_blocks(kind, 37, 512)
    path = write(tmp_path / "a.gguf", {"blocks.0.l.weight": (blocks, kind)})
    theirs = gguf.GGUFReader(path).tensors[0]
    expected = torch.from_numpy(gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(37, 512).copy())

    checkpoint = open_checkpoint(path)
    info = checkpoint.tensors["blocks.0.l.weight"]
    assert (info.shape, info.dtype, info.nbytes) == ((37, 512), torch.bfloat16, blocks.nbytes)
    layer = stored_layers(checkpoint)["blocks.0.l"]
    assert (layer.family, layer.format, layer.method) == ("gguf", kind.name, None)
    assert (layer.shape, layer.keys) == ((37, 512), ("blocks.0.l.weight",))
    assert torch.equal(dequantize_layer(checkpoint, layer), expected)
    for start, stop in [(0, 1), (5, 36), (36, 37), (4, 4)]:
        assert torch.equal(dequantize_layer(checkpoint, layer, slice(start, stop)), expected[start:stop])
        assert torch.equal(checkpoint.read_rows("blocks.0.l.weight", start, stop), expected[start:stop].bfloat16())
    assert torch.equal(checkpoint.read("blocks.0.l.weight"), expected.bfloat16())


def test_q8_0_and_q4_k_follow_ggmls_description(tmp_path):
    """The formulas of ggml's block structures, in float64: an answer that the package has no part in."""
    eight = random_blocks_q8(9, 64)
    four = random_blocks(Type.Q4_K, 3, 512)
    path = write(tmp_path / "a.gguf", {"a.weight": (eight, Type.Q8_0), "b.weight": (four, Type.Q4_K)})
    checkpoint = open_checkpoint(path)
    layers = stored_layers(checkpoint)

    blocks = torch.from_numpy(eight).reshape(-1, 34)
    expected = blocks[:, :2].contiguous().view(torch.float16).double() * blocks[:, 2:].view(torch.int8).double()
    assert torch.equal(dequantize_layer(checkpoint, layers["a"]).double(), expected.reshape(9, 64))

    blocks = torch.from_numpy(four).reshape(-1, 144)
    d, dmin = (blocks[:, i : i + 2].contiguous().view(torch.float16).double() for i in (0, 2))
    packed = blocks[:, 4:16].to(torch.int32)
    # Eight scales and eight minimums of 6 bits in 12 bytes: the first four of each have their upper 2 bits lent out.
    scales = torch.cat([packed[:, :4] & 63, (packed[:, 8:] & 15) | (packed[:, :4] >> 6 << 4)], 1).double()
    minimums = torch.cat([packed[:, 4:8] & 63, (packed[:, 8:] >> 4) | (packed[:, 4:8] >> 6 << 4)], 1).double()
    codes = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = torch.cat([codes & 15, codes >> 4], 2).reshape(-1, 8, 32).double()
    expected = (d * scales).unsqueeze(-1) * codes - (dmin * minimums).unsqueeze(-1)
    torch.testing.assert_close(
        dequantize_layer(checkpoint, layers["b"]).double(), expected.reshape(3, 512), rtol=1e-6, atol=1e-6
    )


def random_blocks_q8(rows, columns):
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (rows * columns // 32, 34), dtype=torch.uint8, generator=generator)
    blocks[:, :2] = (torch.rand(len(blocks), 1, generator=generator) / 100).half().view(torch.uint8)
    return blocks.reshape(rows, -1).numpy()


def test_float_tensors_are_read_as_they_are(tmp_path):
    source = weight(6, 40)
    brain = source.bfloat16().view(torch.uint8)
    tensors = {
        "a.weight": (source.numpy(), None),
        "b.weight": (source.half().numpy(), None),
        "c.weight": (brain.numpy(), Type.BF16),
        "d.bias": (source[0].contiguous().numpy(), None),
    }
    checkpoint = open_checkpoint(write(tmp_path / "a.gguf", tensors, {"general.name": "tiny"}))
    assert stored_layers(checkpoint) == {}
    for name, expected in (
        ("a.weight", source),
        ("b.weight", source.half()),
        ("c.weight", source.bfloat16()),
        ("d.bias", source[0]),
    ):
        found = checkpoint.read(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert torch.equal(checkpoint.read_rows("c.weight", 2, 5), source.bfloat16()[2:5])
    assert checkpoint.metadata["general.name"] == "tiny"
    assert checkpoint.metadata["general.architecture"] == "flux"


def test_folded_tensors_get_their_own_shape_back(tmp_path):
    """ComfyUI-GGUF folds a tensor whose rows are no multiple of a block; its rows then begin inside of blocks."""
    source = weight(12, 80)
    blocks = gguf.quants.quantize(source.reshape(-1, 32).numpy(), Type.Q8_0)
    values = {"comfy.gguf.orig_shape.l.weight": [12, 80]}
    path = write(tmp_path / "a.gguf", {"l.weight": (blocks, Type.Q8_0)}, values)
    checkpoint = open_checkpoint(path)
    layer = stored_layers(checkpoint)["l"]
    assert layer.shape == (12, 80)
    full = dequantize_layer(checkpoint, layer)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, Type.Q8_0).reshape(12, 80).copy())
    assert torch.equal(full, expected)
    for start, stop in [(1, 2), (3, 11), (11, 12)]:
        assert torch.equal(dequantize_layer(checkpoint, layer, slice(start, stop)), full[start:stop])

    other = write(tmp_path / "b.gguf", {"l.weight": (blocks, Type.Q8_0)}, {next(iter(values)): [12, 81]})
    with pytest.raises(CheckpointError, match=r"'l.weight' \[30, 32\] cannot have the shape \[12, 81\]"):
        open_checkpoint(other)


# ---------------------------------------------------------------------- damaged files


def header(*, magic=b"GGUF", version=3, tensors=0, values=0, body=b""):
    return magic + struct.pack("<IQQ", version, tensors, values) + body


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor(name="l.weight", shape=(32, 4), kind=int(Type.Q8_0), offset=0):
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


HUGE = 2**63
HOSTILE = {
    "empty": (header()[:6], "past the end"),
    "version": (header(version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "endless tensors": (header(tensors=HUGE), "past the end"),
    "endless values": (header(values=HUGE), "past the end"),
    "endless name": (header(values=1, body=struct.pack("<Q", HUGE)), "a name of"),
    "name is no text": (header(values=1, body=struct.pack("<Q", 1) + b"\xff"), "not UTF-8"),
    "unknown value": (header(values=1, body=text("a") + struct.pack("<I", 77)), "unknown type 77"),
    "endless array": (header(values=1, body=text("a") + struct.pack("<IIQ", 9, 0, HUGE)), "past the end"),
    "endless strings": (header(values=1, body=text("a") + struct.pack("<IIQ", 9, 8, HUGE)), "past the end"),
    "array of arrays": (header(values=1, body=text("a") + struct.pack("<IIQ", 9, 9, 1)), "array of the unknown type 9"),
    "same key twice": (header(values=2, body=(text("a") + struct.pack("<IB", 0, 1)) * 2), "names 'a' twice"),
    "alignment": (
        header(values=1, body=text("general.alignment") + struct.pack("<II", 4, 3)),
        "general.alignment is 3",
    ),
    "same tensor twice": (header(tensors=2, body=tensor() * 2), "names tensor 'l.weight' twice"),
    "dimensions": (header(tensors=1, body=text("l") + struct.pack("<I", 2**31)), "dimensions"),
    "type": (header(tensors=1, body=tensor(kind=9999)), "type 9999"),
    "no whole blocks": (header(tensors=1, body=tensor(shape=(33, 4))), "multiples of 32"),
    "scalar block": (header(tensors=1, body=tensor(shape=())), "multiples of 32"),
    "shape": (header(tensors=1, body=tensor(shape=(32, HUGE))), "impossible shape"),
    "no data": (header(tensors=1, body=tensor()), "truncated or damaged"),
    "offset": (header(tensors=1, body=tensor(offset=HUGE) + bytes(4096)), "truncated or damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name, tmp_path):
    content, message = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="a.gguf") as caught:
        open_checkpoint(path)
    assert message in str(caught.value)


def test_mutated_headers_give_our_error_or_a_readable_file(tmp_path):
    blocks = gguf.quants.quantize(weight(4, 64).numpy(), Type.Q4_0)
    path = write(tmp_path / "a.gguf", {"l.weight": (blocks, Type.Q4_0), "n.weight": (weight(1, 8)[0].numpy(), None)})
    good = path.read_bytes()
    end = good.index(b"n.weight") + 40
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for turn in range(400):
        bad = bytearray(good)
        for place in torch.randint(0, end, (2,), generator=generator).tolist():
            bad[place] = int(torch.randint(0, 256, (1,), generator=generator))
        if turn % 4 == 0:
            bad = bad[: int(torch.randint(0, len(bad), (1,), generator=generator))]
        path.write_bytes(bad)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.tensors:
                checkpoint.read(name)
        except CheckpointError:
            refused += 1
    assert 50 < refused < 400


def test_a_gguf_file_is_recognized_by_its_content(tmp_path):
    save_file({"l.weight": weight(2, 8)}, tmp_path / "a.gguf")
    assert list(open_checkpoint(tmp_path / "a.gguf").tensors) == ["l.weight"]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf", {"l.weight": (weight(2, 8).numpy(), None)})
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ImportError, match=r"a\.gguf needs the package gguf, which is missing: pip install gguf"):
        open_checkpoint(path)
