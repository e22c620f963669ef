"""The torchao methods: registration, labels, options, support."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import quant_core
from quant_core import QuantizeConfig
from quant_core.registry import QUANT_METHODS, find_method

METHODS = [
    f"torchao_{name}"
    for name in (
        "int8_w8a16",
        "int8_w8a8",
        "fp8_w8a16",
        "fp8_w8a8",
        "int4_w4a16",
        "int4_w4a8",
        "nvfp4_w4a16",
        "nvfp4_w4a4",
        "mxfp8_w8a8",
        "mxfp4_w4a4",
    )
]


def make_backend(method, **options):
    return QuantizeConfig(method=method, backend_config_kwargs=options).backend


def test_listing_methods_does_not_import_torchao():
    code = (
        "import sys, quant_core; quant_core.backends.load_all_backends(); "
        "assert 'torchao' not in sys.modules; print(sorted(m for m in quant_core.QUANT_METHODS if 'torchao' in m))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(sorted(METHODS))


@pytest.mark.parametrize("method", METHODS)
def test_described_like_the_peer(method, peer_quant, capsys):
    peer_quant.describe_quant_method(method)
    expected = capsys.readouterr().out
    if method == "torchao_int4_w4a8":  # preshuffled can be made by one GPU's kernel only
        expected = expected.replace("'preshuffled'", "<Int4PackingFormat.PLAIN: 'plain'>").replace(
            "<Int4PackingFormat.PLAIN: 'plain'>", "'plain'"
        )
    quant_core.describe_quant_method(method)
    assert capsys.readouterr().out.split() == expected.split()
    assert QUANT_METHODS[method].backend == "torchao"


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("int8_w8a16", {"granularty": "per_row"}, "'granularty'.*Accepted: .*granularity.*Did you mean 'granularity'"),
        ("int8_w8a16", {"group_size": 0}, "group size"),
        ("int8_w8a16", {"group_size": -8}, "granularity"),
        ("int8_w8a16", {"granularity": "per_column"}, "per_row"),
        ("int8_w8a16", {"granularity": None}, "granularity"),
        ("int8_w8a16", {"version": 1}, "version must be 2"),
        ("int8_w8a16", {"set_inductor_config": "yes"}, "true or false"),
        ("int8_w8a8", {"granularity": "per_group(32)"}, "granularity"),
        ("int8_w8a8", {"act_mapping_type": "other"}, "symmetric"),
        ("fp8_w8a16", {"weight_dtype": "int8"}, "weight_dtype must be"),
        ("fp8_w8a16", {"weight_dtype": "float9"}, "float9"),
        ("fp8_w8a8", {"granularity": ["per_row", "per_tensor"]}, "granularity"),
        ("fp8_w8a8", {"packing_format": "sparse_2d_data_2d_metadata"}, "2:4"),
        ("fp8_w8a8", {"activation_value_ub": -1}, "positive"),
        ("fp8_w8a8", {"mm_config": {"fast": True}}, "use_fast_accum"),
        ("fp8_w8a8", {"weight_dtype": "float8_e5m2"}, "weight_dtype"),
        ("int4_w4a16", {"group_size": 0}, "32, 64, 128, 256"),
        ("int4_w4a16", {"group_size": True}, "integer"),
        ("int4_w4a16", {"group_size": 100}, "32, 64, 128, 256"),
        ("int4_w4a16", {"int4_packing_format": "tile_packed_to_4d"}, "plain"),
        ("int4_w4a16", {"int4_choose_qparams_algorithm": "hqq"}, "hqq"),
        ("int4_w4a8", {"int4_packing_format": "preshuffled"}, "plain"),
        ("mxfp8_w8a8", {"block_size": 16}, "32"),
        ("mxfp8_w8a8", {"weight_dtype": "float8_e5m2"}, "matching input/weight dtypes"),
        ("mxfp8_w8a8", {"weight_dtype": "float8_e5m2", "activation_dtype": "float8_e5m2"}, "activation_dtype must be"),
        ("mxfp4_w4a4", {"scaling_mode": "round"}, "rceil"),
        ("nvfp4_w4a4", {"step": "prepare"}, "calibration"),
    ],
)
def test_bad_options_are_refused_at_construction(method, options, match):
    with pytest.raises(ValueError, match=match):
        QuantizeConfig(method=f"torchao_{method}", backend_config_kwargs=options)


def test_options_survive_json():
    options = {"granularity": "per_row", "kernel_preference": "torch", "mm_config": {"use_fast_accum": False}}
    recipe = QuantizeConfig(method="torchao_fp8_w8a8", backend_config_kwargs=options)
    again = quant_core.recipe_from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again.backend.config == recipe.backend.config
    assert not again.backend.config.mm_config.use_fast_accum


def test_support_says_what_runs():
    native = [m for m in METHODS if make_backend(m).support("cpu").kind == "native"]
    assert native == ["torchao_int8_w8a16", "torchao_int8_w8a8"]
    for method in METHODS:
        support = make_backend(method).support("cpu")
        assert support.kind == "native" or support.reason
    if not torch.cuda.is_available():
        assert make_backend("torchao_fp8_w8a8").support("cuda").kind == "refused"
    emulating = make_backend("torchao_mxfp8_w8a8", kernel_preference="emulated")
    assert emulating.support("cpu").kind == "native"


def test_backend_needs_a_torchao_config():
    backend = quant_core.QUANT_BACKENDS[find_method("torchao_int8_w8a16").backend](None)
    with pytest.raises(ValueError, match="Int8WeightOnlyConfig"):
        backend.create_quantized_linear(nn.Linear(4, 4))
