"""Seeded damage to checkpoints: to bytes, and to what the JSON in them means."""

import copy
import json
import math
import shutil
import struct
from pathlib import Path

DEEP, LONG = "\x02deep\x02", "n" * 100_000
_HUGE = (2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63))
_VALUES = (
    *(None, True, False, 0, 1, 2, 3, 4, 16, 255, 256, 257, 0.5, -0.0, 1e308, math.nan, math.inf),
    *_HUGE,
    *("", "0", "\x00", "\x1flayer", "\ud800", "é漢🦆", "../../a", "a\\b", "CON", LONG, DEEP, "9" * 5000),
    *([], {}, [[]], [0], [1, 2, 3], [2**62, 0], [0, 2**62], [2**32, 2**32], [-1], ["a"], [None], [1.5, 2], [True]),
    *({"a": 1}, {"format": []}, {"layers": {}}, {"weight_map": {}}),
    *("int8_tensorwise", "nvfp4", "mxfp8", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16", "hybrid_mxfp8"),
    *("float8_e4m3fn", "float32", "bfloat16", "comfy_kitchen_int8_w8a8", "torchao_int8_w8a16", "bitsandbytes_nf4"),
    *("Int8Tensor", "Float8Tensor", "NVFP4Tensor", "MXTensor", "Int4Tensor", "dynamic"),
)
_SHAPES = ([], [0], [1], [1, 1], [256], [2**62, 0], [0, 2**62], [2**40, 0, 2**40], [1, 65536], [65536, 1], [64, 1024])
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U16": 2, "C64": 8}
_DTYPES = (*_SIZES, "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F8_E4M3FNUZ", "U64")
_LEAVES = (
    *("weight", "bias", "weight_scale", "weight_scale_2", "comfy_quant", "scale_weight", "input_scale", "SCB"),
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.quant_state.bitsandbytes__nf4"),
    *("_weight_qdata", "_weight_scale", "_weight_zero_point", "weight_s_rel", "weight_s_channel", "weight_codebook"),
    *("weight_zeros", "pre_quant_scale", "weight_correction", "weight_format", "scaled_fp8", ""),
)


def mutate_header(random, kind, seed, folder):
    """Write a copy of the seed with its header, index or metadata damaged; return the path to open."""
    damaged = _copied(seed, folder)
    if kind == "gguf":
        damaged.write_bytes(_gguf_header(random, damaged.read_bytes()))
        return damaged
    target = _some_file(random, damaged)
    if target.suffix == ".json":
        target.write_bytes(_json_bytes(random, json.loads(target.read_bytes()), random.randint(1, 3)))
        return damaged
    data = target.read_bytes()
    way = random.random()
    if way < 0.15:
        end = 8 + int.from_bytes(data[:8], "little")
        target.write_bytes(_flipped(random, data, end))
        return damaged
    header, body = _split(data)
    for _ in range(random.randint(1, 3)):
        _change_entry(random, header)
    if way < 0.6:
        body = _laid_out(header, body)
    target.write_bytes(_joined(random, header, body))
    return damaged


def mutate_body(random, kind, seed, folder):
    """Write a copy of the seed with its tensors' bytes damaged, markers by their meaning; return the path to open."""
    damaged = _copied(seed, folder)
    target = damaged if damaged.is_file() else random.choice(sorted(damaged.rglob("*.safetensors")))
    data = target.read_bytes()
    if kind == "gguf":
        start = data.rindex(b"norm.weight") + 40
        target.write_bytes(data[:start] + _flipped(random, data[start:], len(data) - start))
        return damaged
    header, body = _split(data)
    tensors = {name: body[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"}
    if random.random() < 0.5:
        header.get("__metadata__", {}).pop("quant_core", None)  # with it, checksums refuse most damage
    small = [name for name in tensors if name.endswith(".comfy_quant") or "quant_state" in name]
    for _ in range(random.randint(1, 3)):
        if small and random.random() < 0.5:
            name = random.choice(small)
            good = body[slice(*header[name]["data_offsets"])]
            marker = json.loads(random.choice([good, b'{"format": "nvfp4", "group_size": 16}']))
            tensors[name] = _json_bytes(random, marker, random.randint(1, 2))
            header[name]["shape"] = [len(tensors[name])]
        else:
            name = random.choice([name for name, raw in tensors.items() if raw])
            tensors[name] = _flipped(random, tensors[name], len(tensors[name]), keep_length=True)
    position = 0
    for name, raw in tensors.items():
        header[name]["data_offsets"] = [position, position := position + len(raw)]
    target.write_bytes(_joined(random, header, b"".join(tensors.values()), clean=True))
    return damaged


# ------------------------------------------------------------------ JSON


def _mutate_json(random, value, times):
    """Change random places of a JSON value."""
    root = [value]
    for _ in range(times):
        places = [(root, 0)]
        for container, key in places:
            inner = container[key]
            if isinstance(inner, dict | list) and len(places) < 2000:
                places.extend((inner, k) for k in (list(inner) if isinstance(inner, dict) else range(len(inner))))
        container, key = random.choice(places)
        way = random.randrange(10)
        if way < 6:
            container[key] = copy.deepcopy(random.choice(_VALUES))
        elif way == 6 and container is not root:
            container.pop(key)
        elif way == 7:
            container[key] = [container[key]]
        elif way == 8 and isinstance(container, dict):
            container[random.choice(["", "method", "format", "shape", "layers", LONG, "é🦆"])] = container.pop(key)
        else:
            other_container, other = random.choice(places)
            container[key] = json.loads(json.dumps(other_container[other]))
    return root[0]


def _dumps(value):
    text = json.dumps(value)
    return text.replace(json.dumps(DEEP), "[" * 50_000 + "]" * 50_000)


def _json_bytes(random, value, times):
    raw = _dumps(_mutate_json(random, value, times)).encode()
    return _flipped(random, raw, len(raw)) if random.random() < 0.1 else raw


# ------------------------------------------------------------------ safetensors


def _split(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _joined(random, header, body, clean=False):
    raw = _dumps(header)
    if not clean and random.random() < 0.05:
        raw = raw[:-1] + "," + raw[1:]  # every name twice
    encoded = (
        raw.encode() if random.random() < 0.9 else json.dumps(header, ensure_ascii=False).encode("utf-8", "replace")
    )
    length = len(encoded)
    if not clean and random.random() < 0.05:
        length = random.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
    return struct.pack("<Q", length) + encoded + body


def _change_entry(random, header):
    names = [name for name in header if name != "__metadata__"] or [""]
    name = random.choice(names)
    entry = header.setdefault(name, {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})
    metadata = header.get("__metadata__")
    way = random.randrange(12)
    if way < 4 and isinstance(metadata, dict) and metadata:
        _change_metadata(random, metadata)
    elif way < 6:
        entry["dtype"] = random.choice(_DTYPES)
    elif way < 8:
        shape = entry.get("shape")
        shape = shape if isinstance(shape, list) else [1]
        entry["shape"] = list(random.choice([*_SHAPES, shape[::-1], [1, *shape], [*shape, 1], shape[:-1]]))
    elif way == 8:
        stem = random.choice([name.rpartition(".")[0], "blocks.0.up", "blocks.0.down", "é🦆", "\ud800", "a\x00b", ""])
        header[f"{stem}.{random.choice(_LEAVES)}"] = header.pop(name)
    elif way == 9:
        header[random.choice([LONG, "", "scaled_fp8", ".weight", "weight", "__metadata__", "a" * 300])] = dict(entry)
    elif way == 10:
        header.pop(name)
    else:
        _mutate_json(random, entry, 1)
        if random.random() < 0.3:
            _mutate_json(random, header, 1)


def _change_metadata(random, metadata):
    key = random.choice(list(metadata))
    try:
        value = json.loads(metadata[key])
    except (TypeError, ValueError, RecursionError):
        value = metadata[key]
    metadata[key] = _dumps(_mutate_json(random, value, random.randint(1, 2)))


def _laid_out(header, body):
    """Give every tensor the offsets that its dtype and shape ask for, where they can be had; return a fitting body."""
    position = 0
    for name, entry in header.items():
        if name == "__metadata__" or not isinstance(entry, dict):
            continue
        shape, dtype = entry.get("shape"), entry.get("dtype")
        if not isinstance(shape, list) or not all(type(n) is int for n in shape) or not isinstance(dtype, str):
            continue
        size = math.prod(shape) * _SIZES.get(dtype, 1)
        if 0 <= size <= 1 << 20:
            entry["data_offsets"] = [position, position := position + size]
    return (body * (position // max(1, len(body)) + 1))[:position]


# ------------------------------------------------------------------ bytes


def _flipped(random, data, end, keep_length=False):
    data = bytearray(data)
    for _ in range(random.choice([1, 2, 8, 64])):
        place = random.randrange(end)
        length = random.choice([1, 1, 2, 4, 8])
        value = random.choice([bytes(length), b"\xff" * length, b"\x7f" * length, random.randbytes(length)])
        data[place : place + length] = value[: len(data) - place]
    if not keep_length and random.random() < 0.25:
        return bytes(data[: random.randrange(len(data))])
    if not keep_length and random.random() < 0.1:
        data += random.randbytes(random.choice([1, 8, 4096]))
    return bytes(data)


def _gguf_header(random, data):
    end = data.rindex(b"norm.weight") + 40
    data = bytearray(data)
    if random.random() < 0.6:
        # A whole number of the header: a count, a dimension, a type or an offset.
        for _ in range(random.randint(1, 2)):
            place = random.choice([8, 16, *_places(data, b"norm.weight", 24), *_places(data, b"down.weight", 32)])
            struct.pack_into(
                "<Q", data, place, random.choice([n for n in _HUGE if 0 <= n < 2**64] + [0, 1, 31, 32, 33])
            )
        return bytes(data)
    return _flipped(random, data, end)


def _places(data, text, count):
    start = data.rindex(text) + len(text)
    return range(start, start + count, 4)


# ------------------------------------------------------------------ files


def _copied(seed, folder):
    target = Path(folder) / seed.name
    shutil.copytree(seed, target) if seed.is_dir() else shutil.copyfile(seed, target)
    return target


def _some_file(random, path):
    """A file to damage: of several, an index or a config half of the time."""
    if path.is_file():
        return path
    texts, weights = sorted(path.rglob("*.json")), sorted(path.rglob("*.safetensors"))
    return random.choice(texts if random.random() < 0.5 else weights)
