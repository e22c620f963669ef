"""torchao's safetensors form: both directions with the peer and torchao, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from quant_core import CheckpointError, QuantizeConfig


def make_model(dtype=torch.bfloat16, layers=2):
    torch.manual_seed(0)
    linears = [nn.Linear(256, 256) for _ in range(layers - 2)]
    return nn.Sequential(*linears, nn.Linear(256, 128), nn.Linear(128, 64, bias=False)).to(dtype).requires_grad_(False)


def flat_file(method, dtype=torch.bfloat16, **options):
    recipe = QuantizeConfig(method=method, backend_config_kwargs=options)
    model = make_model(dtype)
    recipe.quantize_model(model)
    return model, *recipe.flatten_state_dict(model.state_dict())


def load(method, tensors, metadata, dtype=torch.bfloat16, **options):
    recipe = QuantizeConfig(method=method, load_prequantized=True, backend_config_kwargs=options)
    model = make_model(dtype)
    recipe.prepare_for_prequantized_load(model, compute_dtype=dtype)
    model.load_state_dict(recipe.unflatten_state_dict(tensors, metadata), assign=True)
    return model


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert tensor.dtype == right[key].dtype, key
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), right[key].reshape(-1).view(torch.uint8)), key


ALL = [
    f"torchao_{weight}_{activation}"
    for weight, *activations in (
        ("int8", "w8a16", "w8a8"),
        ("fp8", "w8a16", "w8a8"),
        ("int4", "w4a16", "w4a8"),
        ("nvfp4", "w4a16", "w4a4"),
        ("mxfp8", "w8a8"),
        ("mxfp4", "w4a4"),
    )
    for activation in activations
]
PEER = ["torchao_int8_w8a16", "torchao_int8_w8a8", "torchao_fp8_w8a16", "torchao_nvfp4_w4a16"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ALL)
def test_through_a_file_and_back(method, dtype, tmp_path):
    model, tensors, metadata = flat_file(method, dtype)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata=metadata)
    with safe_open(path, "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        header = file.metadata()
    loaded = load(method, stored, header, dtype)
    x = torch.randn(3, 256).to(dtype)
    assert torch.equal(loaded(x), model(x))
    again, header_again = QuantizeConfig(method=method).flatten_state_dict(loaded.state_dict())
    assert_same_tensors(again, tensors)
    assert header_again == metadata


def assert_same_outputs(method, left, right):
    # torchao's float8 rounds once more before it adds the bias; everything else is bit-equal.
    tolerance = {"rtol": 0, "atol": 2**-7} if "fp8_" in method else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(left, right, **tolerance)


@pytest.mark.parametrize("method", PEER)
def test_the_peer_reads_our_file(method, peer_quant):
    model, tensors, metadata = flat_file(method)
    config = peer_quant.QuantizeConfig(method=method, load_prequantized=True)
    theirs = make_model()
    config.prepare_for_prequantized_load(theirs, compute_dtype=torch.bfloat16)
    theirs.load_state_dict(config.unflatten_state_dict(tensors, metadata), assign=True)
    x = torch.randn(3, 256).bfloat16()
    assert_same_outputs(method, theirs(x), model(x))


@pytest.mark.parametrize("method", PEER)
def test_we_read_the_peers_file(method, peer_quant):
    config = peer_quant.QuantizeConfig(method=method)
    theirs = make_model()
    config.quantize_model(theirs)
    tensors, metadata = config.flatten_state_dict(theirs.state_dict())
    model = load(method, tensors, metadata)
    x = torch.randn(3, 256).bfloat16()
    assert_same_outputs(method, model(x), theirs(x))
    _, ours, our_metadata = flat_file(method)
    assert_same_tensors(ours, tensors)
    assert our_metadata == metadata


@pytest.mark.parametrize("method", ALL)
def test_torchaos_own_reader_takes_our_file(method):
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import TensorSubclassAttributeJSONEncoder, is_metadata_torchao

    model, tensors, metadata = flat_file(method)
    for name in ("0.weight", "1.weight"):
        composite = model.state_dict()[name]
        assert metadata[name] == json.dumps(composite, cls=TensorSubclassAttributeJSONEncoder)
    assert is_metadata_torchao(metadata)
    rebuilt, leftover = unflatten_tensor_state_dict(tensors, metadata)
    assert leftover == {}
    again, _ = QuantizeConfig(method=method).flatten_state_dict(rebuilt)
    assert_same_tensors(again, tensors)


def test_other_tensors_in_the_same_dict_pass_through():
    recipe = QuantizeConfig(method="torchao_int8_w8a16")
    _, tensors, metadata = flat_file("torchao_int8_w8a16")
    others = {
        "norm.weight": torch.ones(4),
        "x.weight.absmax": torch.ones(2),
        "pos": torch.ones(1),
        "y._weight_norm": torch.ones(3),
    }
    rebuilt = recipe.unflatten_state_dict({**tensors, **others}, metadata)
    assert all(rebuilt[key] is value for key, value in others.items())
    flat, names = recipe.flatten_state_dict(rebuilt)
    assert_same_tensors(flat, {**tensors, **others})
    assert set(json.loads(names["tensor_names"])) == {*json.loads(metadata["tensor_names"]), *others}


def test_a_bare_linear_and_flat_keys():
    backend = QuantizeConfig(method="torchao_int8_w8a16").backend
    layer = backend.create_quantized_linear(nn.Linear(64, 32))
    tensors, metadata = backend.flatten_state_dict(layer.state_dict())
    assert set(tensors) == {"_weight_qdata", "_weight_scale", "_weight_zero_point", "bias"}
    for state in (backend.unflatten_state_dict(tensors, metadata), tensors):
        shell = backend.create_quantized_linear_shell(nn.Linear(64, 32), torch.float32)
        assert shell.state_dict()["weight"].is_meta
        shell.load_state_dict(state)
        assert torch.equal(shell.weight_qdata, layer.weight_qdata)
        assert torch.equal(shell(torch.ones(2, 64)), layer(torch.ones(2, 64)))


class CountingMetadata(dict):
    """Counts how often an entry is read, and how many characters that were."""

    reads = characters = 0

    def __getitem__(self, key):
        value = super().__getitem__(key)
        self.reads += 1
        self.characters += len(value)
        return value

    def __iter__(self):
        raise AssertionError("the whole file's metadata is walked for one layer")

    items = values = keys = __iter__


def test_cost_of_one_layer_does_not_grow_with_the_file():
    backend = QuantizeConfig(method="torchao_int8_w8a16").backend
    state = backend.create_quantized_linear(nn.Linear(64, 32).bfloat16()).state_dict()
    cost = {}
    for layers in (100, 400):
        tensors, metadata = backend.flatten_state_dict(
            {f"blocks.{i}.fc.{key}": value for i in range(layers) for key, value in state.items()}
        )
        counting = CountingMetadata(metadata)
        for i in range(layers):  # as disk offload asks: one layer's tensors, the whole file's metadata
            prefix = f"blocks.{i}.fc."
            own = {prefix + leaf: tensors[prefix + leaf] for leaf in ("_weight_qdata", "_weight_scale", "bias")}
            own[prefix + "_weight_zero_point"] = tensors[prefix + "_weight_zero_point"]
            rebuilt = backend.unflatten_state_dict(own, counting)
            assert set(rebuilt) == {prefix + "weight", prefix + "bias"}
        one_by_one = counting.reads, counting.characters
        counting.reads = counting.characters = 0
        assert len(backend.unflatten_state_dict(tensors, counting)) == 2 * layers
        assert (counting.reads, counting.characters) == one_by_one
        cost[layers] = one_by_one
        assert one_by_one[0] == layers
    assert cost[400][1] == 4 * cost[100][1]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("int8_w8a16", "int8_w8a8"),
        ("int8_w8a8", "int8_w8a16"),
        ("fp8_w8a16", "fp8_w8a8"),
        ("fp8_w8a8", "fp8_w8a16"),
        ("nvfp4_w4a16", "nvfp4_w4a4"),
        ("nvfp4_w4a4", "nvfp4_w4a16"),
        ("mxfp8_w8a8", "mxfp4_w4a4"),
        ("mxfp4_w4a4", "mxfp8_w8a8"),
        ("int4_w4a16", "int4_w4a8"),
        ("int4_w4a8", "int4_w4a16"),
        ("int8_w8a16", "fp8_w8a16"),
    ],
)
def test_another_method_is_named(written, read):
    model, tensors, metadata = flat_file(f"torchao_{written}")
    with pytest.raises(CheckpointError, match=rf"0\.weight: .*'torchao_{written}'.*expected 'torchao_{read}'"):
        load(f"torchao_{read}", tensors, metadata)
    # The layer refuses too, for a state dict that never was a file.
    recipe = QuantizeConfig(method=f"torchao_{read}", load_prequantized=True)
    shell = make_model()
    recipe.prepare_for_prequantized_load(shell)
    with pytest.raises(RuntimeError, match=f"0: .*torchao_{written}, expected torchao_{read}"):
        shell.load_state_dict(model.state_dict())


def test_lost_metadata():
    _, tensors, metadata = flat_file("torchao_int8_w8a16")
    for lost in (None, {}, {"format": "pt"}, {k: v for k, v in metadata.items() if k != "0.weight"}):
        with pytest.raises(CheckpointError, match=r"0\.weight: .*metadata has no entry"):
            load("torchao_int8_w8a16", tensors, lost)


@pytest.mark.parametrize("method", ALL)
def test_missing_tensor_is_named(method):
    _, tensors, metadata = flat_file(method)
    for key in tensors:
        if "_weight_" in key:
            rest = {k: v for k, v in tensors.items() if k != key}
            with pytest.raises(CheckpointError, match=rf"{key} missing"):
                load(method, rest, metadata)


def edit(entry, path, value):
    data = json.loads(entry)
    target = data
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("method", "path", "value", "match"),
    [
        ("int8_w8a16", ["_type"], "IntxUnpackedToInt8Tensor", "type 'IntxUnpackedToInt8Tensor'"),
        ("int8_w8a16", ["_type"], ["Int8Tensor"], "type"),
        ("int8_w8a16", ["_data"], None, "_data"),
        ("int8_w8a16", ["_data", "dtype", "_data"], "load", "unknown dtype 'load'"),
        ("int8_w8a16", ["_data", "dtype", "_data"], ["bfloat16"], "cannot be read"),
        ("int8_w8a16", ["_data", "dtype"], 3, "dtype is 3"),
        ("int8_w8a16", ["_data", "dtype"], {"_type": "Module", "_data": {}}, "unknown class 'Module'"),
        ("int8_w8a16", ["_data", "extra"], 1, "unknown: extra"),
        ("int8_w8a16", ["_data", "block_size"], [1, 3], "block_size"),
        ("int8_w8a16", ["_data", "block_size"], [0, 256], "block_size|positive"),
        ("int8_w8a16", ["_data", "block_size"], {"_type": "PerTensor", "_data": {}}, "block_size"),
        ("int8_w8a16", ["_data", "block_size"], ["a", "b"], "integers"),
        ("int8_w8a16", ["_data", "reduce_range"], 7, "reduce_range"),
        ("int8_w8a16", ["_tensor_data_names"], "qdata", "_tensor_data_names"),
        ("int8_w8a16", ["_tensor_data_names"], ["qdata", "scale"], "_weight_zero_point not listed"),
        ("int8_w8a8", ["_data", "act_quant_kwargs"], {"_type": "PerTensor", "_data": {}}, "act_quant_kwargs"),
        ("int8_w8a8", ["_data", "act_quant_kwargs", "_data", "granularity", "_data", "dim"], 0, "act_quant_kwargs"),
        ("int8_w8a8", ["_data", "act_quant_kwargs", "_data", "mapping_type", "_data"], "mro", "unknown MappingType"),
        ("int8_w8a8", ["_data", "act_quant_kwargs", "_data", "code"], 1, "has the fields"),
        ("int8_w8a8", ["_data", "act_quant_kwargs", "_data"], {}, "cannot be read"),
        ("nvfp4_w4a16", ["_data", "block_size"], 32, "block_size"),
        ("nvfp4_w4a16", ["_data", "is_swizzled_scales"], False, "scale is"),
        ("nvfp4_w4a16", ["_data", "is_swizzled_scales"], 1, "is_swizzled_scales"),
        ("mxfp8_w8a8", ["_data", "elem_dtype", "_data"], "float8_e5m2", "no method here makes"),
        ("mxfp8_w8a8", ["_data", "act_quant_kwargs"], None, "no method here makes"),
        ("int4_w4a16", ["_data", "shape"], [64, 256], "shape"),
        ("int4_w4a16", ["_data", "block_size"], [1, 64], "scale is"),
    ],
)
def test_damaged_metadata(method, path, value, match):
    _, tensors, metadata = flat_file(f"torchao_{method}")
    metadata["0.weight"] = edit(metadata["0.weight"], path, value)
    with pytest.raises(CheckpointError, match=rf"0\.weight: .*({match})"):
        load(f"torchao_{method}", tensors, metadata)


@pytest.mark.parametrize("entry", ["", "[]", "null", "{", "[" * 10000, '"x"', "{}", " " * 20000])
def test_metadata_that_is_no_object(entry):
    _, tensors, metadata = flat_file("torchao_int8_w8a16")
    metadata["0.weight"] = entry
    with pytest.raises(CheckpointError, match=r"0\.weight: "):
        load("torchao_int8_w8a16", tensors, metadata)


@pytest.mark.parametrize("method", ALL)
def test_wrong_inner_tensors_are_named(method):
    _, tensors, metadata = flat_file(method)
    for key in [k for k in tensors if k.startswith("0._weight_")]:
        value = tensors[key]
        wrong = [value.reshape(-1)[:-1], value.view(torch.int8) if value.element_size() == 1 else value.double()]
        if value.dtype == torch.int8:
            wrong[1] = value.view(torch.uint8)
        for bad in wrong:
            with pytest.raises(CheckpointError, match=r"0\.weight: .*(is torch|dimensions|block_size|shape)"):
                load(method, {**tensors, key: bad}, metadata)


def test_another_layers_tensor_and_a_float_weight_are_refused():
    recipe = QuantizeConfig(method="torchao_int8_w8a16", load_prequantized=True)
    model, tensors, metadata = flat_file("torchao_int8_w8a16")
    state = recipe.unflatten_state_dict(tensors, metadata)
    shell = make_model()
    recipe.prepare_for_prequantized_load(shell)
    with pytest.raises(RuntimeError, match=r"0: qdata is torch.int8 \[64, 128\], expected .* \[128, 256\]"):
        shell.load_state_dict({**state, "0.weight": state["1.weight"]}, assign=True)
    with pytest.raises(RuntimeError, match=r"0: weight is a plain torch.bfloat16 \[128, 256\] \(a float weight"):
        shell.load_state_dict(make_model().state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"0.weight"'):
        shell.load_state_dict({k: v for k, v in state.items() if k != "0.weight"})
    with pytest.raises(RuntimeError, match="another library"):
        shell.load_state_dict({**state, "0.weight": torch.zeros(4, 1, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="Unexpected"):
        shell.load_state_dict({**state, "0.other": torch.zeros(1)})


def test_asymmetric_int8_weight_is_refused():
    _, tensors, metadata = flat_file("torchao_int8_w8a16")
    tensors["0._weight_zero_point"] = torch.ones_like(tensors["0._weight_zero_point"])
    with pytest.raises(CheckpointError, match="zero_point is not 0"):
        load("torchao_int8_w8a16", tensors, metadata)


def test_static_activation_scale_is_refused():
    _, tensors, metadata = flat_file("torchao_int8_w8a8")
    data = json.loads(metadata["0.weight"])
    data["_tensor_data_names"].append("act_quant_scale")
    metadata["0.weight"] = json.dumps(data)
    tensors["0._weight_act_quant_scale"] = torch.ones(1, 1)
    with pytest.raises(CheckpointError, match="act_quant_scale is something this method does not use"):
        load("torchao_int8_w8a8", tensors, metadata)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("torchao_int4_w4a16", {"group_size": 32}),
        ("torchao_int8_w8a16", {"group_size": 32}),
        ("torchao_int8_w8a16", {"granularity": "per_tensor"}),
        ("torchao_fp8_w8a16", {"weight_dtype": "float8_e5m2"}),
        ("torchao_nvfp4_w4a16", {"use_dynamic_per_tensor_scale": False}),
        ("torchao_int8_w8a8", {"act_mapping_type": "asymmetric"}),
    ],
)
def test_options_are_taken_from_the_file(method, options):
    model, tensors, metadata = flat_file(method, **options)
    loaded = load(method, tensors, metadata)
    x = torch.randn(3, 256).bfloat16()
    assert torch.equal(loaded(x), model(x))


def test_shell_is_the_formats_shape():
    for method in ALL:
        recipe = QuantizeConfig(method=method)
        layer = recipe.backend.create_quantized_linear(nn.Linear(256, 48).bfloat16())
        shell = recipe.backend.create_quantized_linear_shell(nn.Linear(256, 48), torch.bfloat16)
        packed = layer.packed_state()
        assert {k: (t.shape, t.dtype) for k, t in shell.packed_state().items()} == {
            k: (t.shape, t.dtype) for k, t in packed.items()
        }
        assert shell.packed_bytes() == layer.packed_bytes()


def test_file_of_an_older_torchao():
    _, tensors, metadata = flat_file("torchao_int8_w8a16")
    for name in ("0", "1"):  # 0.16 had bfloat16 scales, no zero point, no reduced range
        data = json.loads(metadata[f"{name}.weight"])
        data["_tensor_data_names"].remove("zero_point")
        del data["_data"]["reduce_range"]
        metadata[f"{name}.weight"] = json.dumps(data)
        del tensors[f"{name}._weight_zero_point"]
        tensors[f"{name}._weight_scale"] = tensors[f"{name}._weight_scale"].bfloat16()
    model, _, _ = flat_file("torchao_int8_w8a16")
    x = torch.randn(3, 256).bfloat16()
    assert torch.equal(load("torchao_int8_w8a16", tensors, metadata)(x), model(x))
