"""The bitsandbytes backend against the format's formula, the library's own layer, and DiffSynth-Studio's files."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quant_core.backends.bitsandbytes import BitsAndBytesLinear, BitsAndBytesNF4Config
from quant_core.backends.bitsandbytes.layout import BLOCKSIZES, CODEBOOKS
from quant_core.constraints import violations
from quant_core.registry import QUANT_BACKENDS, make_backend

METHODS = ("bitsandbytes_nf4", "bitsandbytes_fp4")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def marker_key(method: str) -> str:
    return "weight.quant_state.bitsandbytes__" + method.removeprefix("bitsandbytes_")


def marker_tensor(value: object) -> torch.Tensor:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.tensor(list(text), dtype=torch.uint8)


def make_linear(out_features=64, in_features=128, bias=True, dtype=torch.float32, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    linear = nn.Linear(in_features, out_features, bias=bias)
    return linear.to(dtype)


def quantize(linear: nn.Linear, method: str = "bitsandbytes_nf4", **options) -> BitsAndBytesLinear:
    return make_backend(method, options).create_quantized_linear(linear)


def shell(linear: nn.Linear, method: str = "bitsandbytes_nf4", **options) -> BitsAndBytesLinear:
    return make_backend(method, options).create_quantized_linear_shell(linear, linear.weight.dtype)


def packed_bytes(layer: BitsAndBytesLinear) -> dict[str, bytes]:
    return {k: bytes(v.contiguous().view(torch.uint8).flatten().tolist()) for k, v in layer.packed_state().items()}


def unpadded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without the spaces that quant_core appends to the marker's JSON, for comparing with other tools."""
    return {k: marker_tensor(bytes(v.tolist()).rstrip()) if "quant_state" in k else v for k, v in tensors.items()}


def decode(tensors: dict[str, torch.Tensor], method: str = "bitsandbytes_nf4") -> torch.Tensor:
    """The stored weight in float64, by the formula: codebook[code] * absmax of the element's block."""
    info = json.loads(bytes(tensors[marker_key(method)].tolist()))
    data = tensors["weight"].contiguous().view(torch.uint8).flatten()
    rows, columns = info["shape"]
    codes = torch.stack([data >> 4, data & 15], dim=1).flatten()[: rows * columns].long()
    absmax = tensors["weight.absmax"]
    if "nested_offset" in info:
        nested_scale = tensors["weight.nested_absmax"].double().repeat_interleave(info["nested_blocksize"])
        absmax = tensors["weight.nested_quant_map"].double()[absmax.long()] * nested_scale[: absmax.numel()]
        absmax = absmax + info["nested_offset"]
    scale = absmax.double().repeat_interleave(info["blocksize"])[: codes.numel()]
    return (tensors["weight.quant_map"].double()[codes] * scale).view(rows, columns)


def library_state(linear: nn.Linear, method: str, nested: bool, blocksize: int = 64) -> dict[str, torch.Tensor]:
    """The state dict of bitsandbytes' own Linear4bit for the same weight."""
    import bitsandbytes as bnb

    quant_type = method.removeprefix("bitsandbytes_")
    layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    layer.weight = bnb.nn.Params4bit(
        linear.weight.detach(), quant_type=quant_type, compress_statistics=nested, blocksize=blocksize
    ).to("cpu")
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return layer.state_dict()


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("shape", [(64, 128), (5, 48), (33, 101), (3, 1), (1, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_weight_is_the_formula(method, shape, blocksize, nested):
    layer = quantize(make_linear(*shape), method, blocksize=blocksize, compress_statistics=nested)
    truth = decode(layer.packed_state(), method)
    assert truth.shape == shape
    torch.testing.assert_close(layer.dequantize_weight(torch.float64), truth, rtol=0, atol=1e-7)


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("method", METHODS)
def test_codes_are_the_nearest(method, blocksize):
    linear = make_linear(48, 200)
    layer = quantize(linear, method, blocksize=blocksize, compress_statistics=False)
    flat = linear.weight.detach().double().flatten()
    blocks = -(-flat.numel() // blocksize)
    absmax = nn.functional.pad(flat, (0, blocks * blocksize - flat.numel())).view(blocks, -1).abs().amax(dim=1)
    assert torch.equal(layer.weight_absmax.double(), absmax)
    scaled = flat / absmax.repeat_interleave(blocksize)[: flat.numel()]
    best = (scaled[:, None] - layer.weight_quant_map.double()).abs().amin(dim=1)
    chosen = layer.dequantize_weight(torch.float64).flatten() / absmax.repeat_interleave(blocksize)[: flat.numel()]
    torch.testing.assert_close((chosen - scaled).abs(), best, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("method", "expected"), [("bitsandbytes_nf4", 0.09), ("bitsandbytes_fp4", 0.11)])
def test_output_error_of_every_source_dtype(method, expected, dtype):
    linear = make_linear(256, 256, dtype=dtype)
    layer = quantize(linear, method)
    x = torch.randn(2, 5, 256, dtype=dtype)
    y, reference = layer(x), linear(x)
    assert y.dtype == dtype and y.shape == (2, 5, 256)
    error = ((y - reference).double().norm() / reference.double().norm()).item()
    assert error == pytest.approx(expected, rel=0.2)
    truth = x.double() @ decode(layer.packed_state(), method).T + linear.bias.detach().double()
    assert ((y.double() - truth).norm() / truth.norm()).item() < {2: 6e-3, 4: 1e-6, 8: 1e-6}[dtype.itemsize]


def test_float64_weight_is_stored_as_float32():
    layer = quantize(make_linear(dtype=torch.float64))
    assert json.loads(bytes(layer.weight_quant_state.tolist()))["dtype"] == "float32"
    assert layer.compute_dtype == torch.float64 and layer.bias.dtype == torch.float64


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_zero_weight_and_zero_blocks_are_zeros(method, nested):
    linear = make_linear()
    with torch.no_grad():
        linear.weight.zero_()
    assert not quantize(linear, method, compress_statistics=nested).dequantize_weight().any()
    linear = make_linear()
    with torch.no_grad():
        linear.weight[3] = 0
    weight = quantize(linear, method, compress_statistics=nested).dequantize_weight()
    assert not weight[3].any() and weight.isfinite().all() and weight[2].any()


def test_weight_that_is_a_view():
    columns_first = make_linear(128, 64).weight.detach().t()
    linear = nn.Linear(128, 64, bias=False)
    linear.weight = nn.Parameter(columns_first)
    assert not linear.weight.is_contiguous()
    dense = nn.Linear(128, 64, bias=False)
    dense.weight = nn.Parameter(columns_first.contiguous())
    assert packed_bytes(quantize(linear)) == packed_bytes(quantize(dense))


def test_weight_of_many_pieces_equals_the_library_in_one():
    linear = make_linear(1030, 1021, bias=False, dtype=torch.bfloat16)  # more than a million, and not a whole block
    actual = unpadded(quantize(linear).state_dict())
    for key, value in library_state(linear, "bitsandbytes_nf4", nested=True).items():
        assert torch.equal(actual[key], value), key


def test_the_float_layer_is_left_alone():
    linear = make_linear()
    before = copy.deepcopy(linear.state_dict())
    layer = quantize(linear)
    layer.load_state_dict({**layer.state_dict(), "bias": torch.zeros(64)})
    assert all(torch.equal(before[k], v) for k, v in linear.state_dict().items())


def test_codebooks_are_the_library_s():
    from bitsandbytes.functional import get_4bit_type

    for quant_type, values in CODEBOOKS.items():
        torch.testing.assert_close(torch.tensor(values), get_4bit_type(quant_type, device="cpu"), rtol=0, atol=1e-7)


# ---------------------------------------------------------------------- files of others


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(64, 128), (33, 101)])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("method", METHODS)
def test_state_dict_is_the_library_s_byte_for_byte(method, dtype, shape, nested):
    linear = make_linear(*shape, dtype=dtype)
    expected = library_state(linear, method, nested)
    actual = unpadded(quantize(linear, method, compress_statistics=nested).state_dict())
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype and torch.equal(actual[key], value), key


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_library_reads_our_tensors(method, nested):
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    layer = quantize(make_linear(dtype=torch.bfloat16), method, compress_statistics=nested)
    tensors = layer.packed_state()
    stats = {k.removeprefix("weight."): v for k, v in tensors.items() if k != "weight"}
    weight = Params4bit.from_prequantized(tensors["weight"], stats, device="cpu")
    assert torch.equal(dequantize_4bit(weight.data, weight.quant_state), layer.dequantize_weight(torch.bfloat16))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("blocksize", [64, 256])
@pytest.mark.parametrize("method", METHODS)
def test_reads_the_library_s_tensors_whatever_the_options(method, blocksize, nested):
    linear = make_linear(dtype=torch.bfloat16)
    state = library_state(linear, method, nested, blocksize)
    layer = shell(linear, method)
    layer.load_state_dict(state, assign=True)
    assert (layer.layout.blocksize, layer.layout.nested) == (blocksize, nested)
    assert layer.state_dict().keys() == state.keys()
    torch.testing.assert_close(layer.dequantize_weight(torch.float64), decode(state, method), rtol=0, atol=1e-7)


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = make_linear(96, 128, dtype=torch.bfloat16, seed=1)
        self.second = make_linear(64, 96, bias=False, dtype=torch.bfloat16, seed=2)

    def forward(self, x):
        return self.second(nn.functional.silu(self.first(x)))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_reads_the_file_of_diffsynth(peer_quant, tmp_path, method, nested):
    from quant_core import QuantizeConfig

    options = {"compress_statistics": nested}
    config = peer_quant.QuantizeConfig(method=method, backend_config_kwargs=options)
    theirs = TwoLinears()
    config.quantize_model(theirs, compute_device="cpu")
    tensors, metadata = config.flatten_state_dict(theirs.state_dict())
    save_file(tensors, tmp_path / "peer.safetensors", metadata=metadata)

    ours = TwoLinears()
    QuantizeConfig(method=method, load_prequantized=True).prepare_for_prequantized_load(ours)
    ours.load_state_dict(load_file(tmp_path / "peer.safetensors"), assign=True)
    own = TwoLinears()
    QuantizeConfig(method=method, backend_config_kwargs=options).quantize_model(own)
    for name in ("first", "second"):
        layer = getattr(ours, name)
        expected = unpadded(getattr(own, name).packed_state())
        assert layer.packed_state().keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in layer.packed_state().items())
        stored = {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}
        torch.testing.assert_close(layer.dequantize_weight(torch.float64), decode(stored, method), rtol=0, atol=1e-7)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_diffsynth_reads_our_file(peer_quant, tmp_path, method, nested):
    from quant_core import QuantizeConfig

    config = QuantizeConfig(method=method, backend_config_kwargs={"compress_statistics": nested})
    ours = TwoLinears()
    config.quantize_model(ours)
    tensors, metadata = config.flatten_state_dict(ours.state_dict())
    save_file(tensors, tmp_path / "ours.safetensors", metadata=metadata)

    peer = peer_quant.QuantizeConfig(
        method=method,
        load_prequantized=True,
        mode="dequant_once",
        backend_config_kwargs={"compress_statistics": nested},
    )
    theirs = TwoLinears()
    peer.prepare_for_prequantized_load(theirs, compute_dtype=torch.bfloat16)
    stored = load_file(tmp_path / "ours.safetensors")
    theirs.load_state_dict(peer.unflatten_state_dict(stored, metadata), assign=True)
    peer.dequantize_model(theirs, compute_dtype=torch.bfloat16, compute_device="cpu")
    # The second layer's rows are no whole blocks, which the library decodes wrongly on a CPU: compare the first.
    assert torch.equal(theirs.first.weight, ours.first.dequantize_weight(torch.bfloat16))
    assert theirs.second.weight.shape == (64, 96)


# ---------------------------------------------------------------------- nothing touches the packed bytes


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_casts_copies_and_forwards_keep_every_byte(storage):
    layer = quantize(make_linear(), quant_storage=storage)
    before, weight = packed_bytes(layer), layer.dequantize_weight(torch.float32)
    x = torch.randn(3, 128)
    layer.eval()
    for cast in ("half", "bfloat16", "double", "float"):
        getattr(layer, cast)()
        with torch.no_grad():
            layer(x.to(layer.compute_dtype))
        assert packed_bytes(layer) == before, cast
        assert layer.bias.dtype == layer.compute_dtype
    layer.to(torch.bfloat16).to("cpu", torch.float32)
    twin = copy.deepcopy(layer)
    layer(x.requires_grad_()).sum().backward()
    assert packed_bytes(layer) == before and packed_bytes(twin) == before
    assert torch.equal(twin.dequantize_weight(torch.float32), weight)
    with torch.no_grad():
        layer.weight.view(torch.uint8).zero_()
    assert packed_bytes(twin) == before


@pytest.mark.parametrize("shape", [(64, 128), (5, 48)])
@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_that_of_the_dequantized_weight(method, shape):
    layer = quantize(make_linear(*shape, dtype=torch.float64), method)
    x = torch.randn(2, 3, shape[1], dtype=torch.float64, requires_grad=True)
    layer(x).pow(2).sum().backward()
    reference = x.detach().clone().requires_grad_()
    weight, bias = decode(layer.packed_state(), method), layer.bias.detach()
    nn.functional.linear(reference, weight, bias).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in layer.parameters())


def test_empty_batch():
    layer = quantize(make_linear())
    x = torch.empty(2, 0, 128, requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 0, 64)
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_dequantize_to_linear():
    backend = make_backend("bitsandbytes_nf4")
    layer = backend.create_quantized_linear(make_linear())
    linear = backend.dequantize_to_linear(layer, torch.float32)
    assert type(linear) is nn.Linear
    torch.testing.assert_close(linear.weight.double(), decode(layer.packed_state()), rtol=0, atol=1e-7)
    assert torch.equal(linear.bias, layer.bias)


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_as_one_graph(grad):
    torch._dynamo.reset()
    graphs = 0

    def count(graph, example_inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    for seed in range(4):  # layers of one shape with other offsets share the graphs
        layer = quantize(make_linear(seed=seed))
        compiled = torch.compile(layer, fullgraph=True, backend=count if not grad else "aot_eager")
        x = torch.randn(3, 128, requires_grad=grad)
        y = compiled(x)
        assert torch.equal(y, layer(x))
        if grad:
            (actual,) = torch.autograd.grad(y.pow(2).sum(), x)
            (expected,) = torch.autograd.grad(layer(x).pow(2).sum(), x)
            torch.testing.assert_close(actual, expected)
    assert graphs <= 2


# ---------------------------------------------------------------------- loading


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((64, 128), {}),
        ((500, 300), {}),
        ((33, 101), {}),
        ((33, 101), {"compress_statistics": False}),
        ((500, 300), {"blocksize": 128}),
        ((64, 128), {"quant_storage": "float16"}),
    ],
)
def test_shell_has_the_shapes_of_a_quantized_layer(shape, options, dtype):
    linear = make_linear(*shape, dtype=dtype)
    expected, actual = quantize(linear, **options).state_dict(), shell(linear, **options).state_dict()
    assert list(actual) == list(expected)
    for key, value in actual.items():
        assert value.is_meta and value.dtype == expected[key].dtype and value.shape == expected[key].shape, key


@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-7, 1 / 3, 1e30])
def test_marker_length_does_not_depend_on_the_values(factor):
    linear = make_linear()
    with torch.no_grad():
        linear.weight.mul_(factor)
    marker = quantize(linear).weight_quant_state
    assert marker.shape == shell(linear).weight_quant_state.shape
    assert json.loads(bytes(marker.tolist()))["shape"] == [64, 128]


@pytest.mark.parametrize("stored", [{"blocksize": 128}, {"compress_statistics": False}, {"quant_storage": "bfloat16"}])
@pytest.mark.parametrize("live", [False, True])
def test_loading_takes_the_layout_from_the_file(stored, live):
    linear = make_linear()
    source = quantize(linear, **stored)
    for first, second in ((source, {}), (quantize(linear), stored)):
        target = quantize(make_linear(seed=9), **second) if live else shell(linear, **second)
        target.load_state_dict(first.state_dict(), assign=not live)
        assert packed_bytes(target) == packed_bytes(first)
        assert target.layout == first.layout
        assert torch.equal(target.dequantize_weight(), first.dequantize_weight())
        assert target.state_dict().keys() == first.state_dict().keys()


def edit(state, changes):
    """Apply ``{key: new value}``: a tensor, a dict to update the marker with, a callable, or None to remove."""
    for key, change in changes.items():
        if change is None:
            del state[key]
        elif isinstance(change, dict):
            state[key] = marker_tensor(json.loads(bytes(state[key].tolist())) | change)
        else:
            state[key] = change(state[key]) if callable(change) else change
    return state


MARK = marker_key("bitsandbytes_nf4")
NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight.nested_absmax": None}, "weight.nested_absmax is missing"),
        ({"weight.nested_quant_map": None}, "weight.nested_quant_map is missing"),
        ({"weight.absmax": None}, "weight.absmax is missing"),
        ({"weight.quant_map": None}, "weight.quant_map is missing"),
        ({"weight": None}, "weight is missing"),
        ({MARK: None}, "was stored by another method"),
        ({MARK: None, "weight": torch.zeros(64, 128)}, "weight is a float weight (torch.float32)"),
        ({MARK: {"shape": [128, 64]}}, "says shape [128, 64], expected [64, 128]"),
        ({MARK: {"shape": None}}, "says shape None"),
        ({MARK: {"quant_type": "fp4"}}, "says quant_type 'fp4', expected nf4"),
        ({MARK: {"blocksize": 63}}, "says blocksize 63"),
        ({MARK: {"blocksize": 64.0}}, "says blocksize 64.0"),
        ({MARK: {"blocksize": 128}}, "weight.absmax is torch.uint8 [128], expected torch.uint8 [64]"),
        ({MARK: {"dtype": "float64"}}, "says dtype 'float64'"),
        ({MARK: {"nested_blocksize": 128}}, "says nested_blocksize 128, expected 256"),
        ({MARK: {"nested_offset": NAN}}, "says nested_offset nan"),
        ({MARK: {"nested_offset": "0.1"}}, "says nested_offset '0.1'"),
        ({MARK: marker_tensor({"quant_type": "nf4"})}, "has no 'blocksize'"),
        ({MARK: marker_tensor([1, 2])}, "is a JSON list, expected an object"),
        ({MARK: marker_tensor(b"\xff\xfe{}")}, "is not JSON"),
        ({MARK: marker_tensor(b"{'a'")}, "is not JSON"),
        ({MARK: marker_tensor(b"[" * 4000)}, "is not JSON"),
        ({MARK: torch.zeros(0, dtype=torch.uint8)}, "is not JSON"),
        ({MARK: torch.zeros(1 << 20, dtype=torch.uint8)}, "is 1048576 bytes long"),
        ({MARK: torch.zeros(9)}, "is torch.float32 [9]"),
        ({MARK: lambda t: t.to("meta")}, "is on the meta device"),
        ({"weight": lambda t: t[:-1]}, "weight is torch.uint8 [4095, 1], expected torch.uint8 [4096, 1]"),
        ({"weight": lambda t: t.flatten()}, "weight is torch.uint8 [4096]"),
        ({"weight": lambda t: t.to(torch.int8)}, "weight is torch.int8"),
        ({"weight": lambda t: t.to(torch.bfloat16)}, "weight is torch.bfloat16 [4096, 1]"),
        ({"weight.absmax": lambda t: t.float()}, "weight.absmax is torch.float32 [128], expected torch.uint8 [128]"),
        ({"weight.nested_absmax": lambda t: t.half()}, "weight.nested_absmax is torch.float16"),
        ({"weight.nested_absmax": lambda t: t.repeat(2)}, "weight.nested_absmax is torch.float32 [2]"),
        ({"weight.quant_map": lambda t: t.flip(0)}, "weight.quant_map is not the nf4 codebook"),
        ({"weight.quant_state.bitsandbytes__fp4": marker_tensor({})}, "load it with method 'bitsandbytes_fp4'"),
    ],
)
def test_refusals(changes, message):
    source = quantize(make_linear())
    state = edit(dict(source.state_dict()), changes)
    target = quantize(make_linear(seed=9))
    before = packed_bytes(target)
    for layer, assign in ((target, False), (shell(make_linear()), True)):
        for strict in (True, False):
            with pytest.raises(RuntimeError) as error:
                layer.load_state_dict(state, strict=strict, assign=assign)
            assert message in str(error.value)
    assert packed_bytes(target) == before


def test_refuses_nested_tensors_under_a_plain_marker():
    nested, plain = quantize(make_linear()), quantize(make_linear(), compress_statistics=False)
    state = {**nested.state_dict(), MARK: plain.state_dict()[MARK]}
    with pytest.raises(RuntimeError, match="has no 'nested_offset': they come from different files"):
        shell(make_linear()).load_state_dict(state, assign=True)


def test_a_failed_load_restores_the_nesting():
    layer = quantize(make_linear())
    weight = layer.dequantize_weight()
    state = quantize(make_linear(seed=3), compress_statistics=False).state_dict()
    state["weight.absmax"] = state["weight.absmax"][:-1]
    with pytest.raises(RuntimeError, match=r"weight.absmax is torch.float32 \[127\]"):
        layer.load_state_dict(state)
    assert torch.equal(layer.dequantize_weight(), weight)


@pytest.mark.parametrize(("written", "read"), [METHODS, METHODS[::-1]])
def test_refuses_the_other_method(written, read):
    state = quantize(make_linear(), written).state_dict()
    with pytest.raises(RuntimeError, match=f"load it with method '{written}'"):
        shell(make_linear(), read).load_state_dict(state, assign=True)


def test_unflatten_takes_one_layer():
    backend = make_backend("bitsandbytes_nf4")
    tensors, metadata = backend.flatten_state_dict(quantize(make_linear()).state_dict())
    assert metadata == {}
    layer = shell(make_linear())
    layer.load_state_dict(backend.unflatten_state_dict(tensors, {"format": "pt"}), assign=True)
    assert packed_bytes(layer) == packed_bytes(quantize(make_linear()))


# ---------------------------------------------------------------------- options and environment


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocksize": 63}, "32, 64, 128, 256, 512, 1024, 2048, 4096 or None, got 63"),
        ({"blocksize": 0}, "got 0"),
        ({"blocksize": 64.0}, "got 64.0"),
        ({"quant_storage": torch.int8}, "quant_storage must be one of uint8, float16, bfloat16, float32"),
        ({"quant_storage": "int4"}, "must be a torch dtype"),
        ({"compress_statistics": "no"}, "compress_statistics must be True or False"),
        ({"quant_type": "fp4"}, "does not accept 'quant_type'"),
        ({"block_size": 64}, "Did you mean 'blocksize'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_backend("bitsandbytes_nf4", options)


def test_the_library_takes_exactly_these_block_sizes():
    from bitsandbytes.functional import quantize_4bit

    taken = []
    for blocksize in [2**power for power in range(14)]:
        try:
            quantize_4bit(torch.ones(1, 64), blocksize=blocksize)
        except ValueError:
            continue
        taken.append(blocksize)
    assert tuple(taken) == BLOCKSIZES


def test_constraint_of_wide_storage():
    assert make_backend("bitsandbytes_nf4").constraints() == ()
    constraints = make_backend("bitsandbytes_nf4", {"quant_storage": "float32"}).constraints()
    assert [c.describe() for c in constraints] == ["in_features * out_features % 8 == 0"]
    assert violations(constraints, 8, 3) == []
    assert "15 is not a multiple of 8" in violations(constraints, 5, 3)[0]
    assert quantize(make_linear(3, 8), quant_storage=torch.float32).weight.shape == (3, 1)


def test_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="pip install .bitsandbytes>=0.50"):
        make_backend("bitsandbytes_nf4")


def test_declarations():
    backend = make_backend("bitsandbytes_nf4")
    assert backend.support("cuda").kind == "native" and backend.support("cpu").kind == "emulated"
    assert QUANT_BACKENDS["bitsandbytes"](BitsAndBytesNF4Config()).is_quantized_linear(quantize(make_linear()))


def test_shells_need_no_library():
    code = (
        "import sys, torch; from quant_core.registry import make_backend\n"
        "backend = make_backend('bitsandbytes_nf4')\n"
        "shell = backend.create_quantized_linear_shell(torch.nn.Linear(8, 8), torch.bfloat16)\n"
        "assert shell.check_packed({'weight': torch.zeros(8, 8)})\n"
        "assert 'bitsandbytes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
