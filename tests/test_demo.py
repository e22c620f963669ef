"""The demo on its real trained model, against sentence-transformers, formulas, DiffSynth-Studio and known figures.

The whole-model error is the relative Frobenius error of the last hidden states over the tokens of demo/held_out.txt,
a text set chosen once, before any method was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quant_core import QuantizeConfig

ROOT = Path(__file__).absolute().parent.parent


@pytest.fixture(scope="module")
def texts():
    return (ROOT / "demo" / "held_out.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def output_error(minilm, texts):
    """``error(change)``: the whole-model error after ``change(model)`` has changed the model in place."""
    ids, visible = minilm.tokenize(texts)

    @torch.no_grad()
    def states(model):
        return model(ids, visible)[visible]

    reference = states(minilm.load_minilm())

    def error(change):
        model = minilm.load_minilm()
        change(model)
        return minilm.relative_error(reference, states(model))

    return error


def test_encoder_is_the_one_of_sentence_transformers(minilm):
    # From sentence-transformers 6.2.0 with transformers 5.24.0: the first components, and the cosine similarities.
    sentences = [
        "The ferry leaves the island at seven in the morning.",
        "A boat departs early every day.",
        "Mix the pigment with linseed oil, not with water.",
    ]
    ids, visible = minilm.tokenize(sentences)
    with torch.no_grad():
        embeddings = minilm.pool(minilm.load_minilm()(ids, visible), visible)
    first = [
        [0.0696805716, 0.0658023208, 0.0277790371, 0.0586152263],
        [0.0202569813, 0.0849375799, 0.0305734109, 0.1140404791],
        [-0.0373178869, -0.0209119357, 0.0417933017, -0.0462228060],
    ]
    torch.testing.assert_close(embeddings[:, :4], torch.tensor(first), atol=1e-5, rtol=0)
    similarity = embeddings @ embeddings.T
    expected = torch.tensor([0.5364345312, 0.0310983472, 0.0497862026])
    torch.testing.assert_close(similarity[[0, 0, 1], [1, 2, 2]], expected, atol=1e-5, rtol=0)


# Whole-model error in percent that these formats reach on this model with other held-out text, weights only.
KNOWN_FIGURES = [
    ("comfy_kitchen_int8_w8a8", {"convrot": False, "per_channel": False}, 31.0),
    ("comfy_kitchen_int8_w8a8", {"convrot": False}, 3.3),
    ("comfy_kitchen_int8_w8a8", {}, 2.3),
    ("comfy_kitchen_fp8_w8a8", {}, 6.4),
    ("comfy_kitchen_nvfp4_w4a4", {}, 25.6),
    ("comfy_kitchen_int4_w4a8", {}, 22.3),
    ("comfy_kitchen_int4_convrot_w4a4", {}, 42.5),
    ("bitsandbytes_nf4", {}, 25.4),
    ("bitsandbytes_nf4", {"compress_statistics": False}, 25.3),
    ("bitsandbytes_fp4", {}, 37.3),
    ("torchao_int8_w8a16", {}, 3.3),
    ("torchao_nvfp4_w4a16", {}, 25.6),
]


@pytest.mark.parametrize(("method", "options", "percent"), KNOWN_FIGURES)
def test_weights_are_no_worse_than_the_known_figure(output_error, method, options, percent):
    config = QuantizeConfig(method=method, mode="dequant_once", backend_config_kwargs=options)

    def change(model):
        assert len(config.quantize_model(model)) == 36
        config.dequantize_model(model, torch.float32)

    assert output_error(change) * 100 <= percent


def int8_rows(weight):
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def fp8_tensor(weight):
    scale = weight.abs().amax() / 448
    return (weight / scale).float().to(torch.float8_e4m3fn).double() * scale


def int8_rows_rotated(weight):
    """Rotate each group of 256, 64 or 16 columns by the regular Hadamard matrix, round the rows, rotate back."""
    group = next(g for g in (256, 64, 16) if weight.shape[1] % g == 0)
    base = torch.ones(4, 4, dtype=torch.float64) - 2 * torch.eye(4, dtype=torch.float64).flip(0)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < group:
        hadamard = torch.kron(hadamard, base)
    hadamard /= group**0.5
    rotated = (weight.unflatten(1, (-1, group)) @ hadamard.T).flatten(1)
    return (int8_rows(rotated).unflatten(1, (-1, group)) @ hadamard).flatten(1)


@pytest.mark.parametrize(
    ("method", "options", "formula"),
    [
        ("comfy_kitchen_int8_w8a8", {"convrot": False}, int8_rows),
        ("comfy_kitchen_int8_w8a8", {}, int8_rows_rotated),
        ("comfy_kitchen_fp8_w8a8", {}, fp8_tensor),
        ("torchao_int8_w8a16", {}, int8_rows),
    ],
)
def test_weights_are_no_worse_than_the_formula(output_error, method, options, formula):
    """The same text for both: the formula in float64, with no code of quant_core in it."""
    config = QuantizeConfig(method=method, mode="dequant_once", backend_config_kwargs=options)

    def ours(model):
        config.quantize_model(model)
        config.dequantize_model(model, torch.float32)

    def plain(model):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(formula(module.weight.detach().double()).float())

    assert output_error(ours) <= output_error(plain) * 1.01


PEER_METHODS = [
    ("bitsandbytes_nf4", {}),
    ("bitsandbytes_fp4", {}),
    ("torchao_int8_w8a16", {}),
    ("torchao_int8_w8a8", {}),
    ("torchao_fp8_w8a16", {}),
    ("torchao_nvfp4_w4a16", {}),
    ("comfy_kitchen_int8_w8a8", {"convrot_groupsize": 64}),
    ("comfy_kitchen_fp8_w8a8", {}),
]


@pytest.mark.parametrize(("method", "options"), PEER_METHODS)
def test_running_model_is_no_worse_than_the_peers(output_error, peer_quant, method, options):
    """The same model and text through DiffSynth-Studio's quantized layers, each as it runs."""

    def change(config_class):
        def quantize(model):
            config_class(method=method, backend_config_kwargs=options).quantize_model(model)

        return quantize

    assert output_error(change(QuantizeConfig)) <= output_error(change(peer_quant.QuantizeConfig)) * 1.001


def run_demo(folder, *arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "demo" / "run.py"), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def test_demo_saves_a_native_file_and_shows_every_layer(tmp_path, minilm):
    result = run_demo(tmp_path)
    assert result.returncode == 0, result.stdout
    path = tmp_path / "demo-output" / "minilm-comfy_kitchen_int8_w8a8.safetensors"
    assert "bit for bit" in result.stdout and str(path) in result.stdout
    with safe_open(path, "pt") as file:
        markers = [key for key in file.keys() if key.endswith(".comfy_quant")]  # noqa: SIM118
        assert len(markers) == 36
        for key in markers:
            layer = key.removesuffix(".comfy_quant")
            assert layer in result.stdout
            assert json.loads(bytes(file.get_tensor(key).tolist()))["format"] == "int8_tensorwise"
            assert file.get_tensor(f"{layer}.weight").dtype == torch.int8
        words = minilm.load_minilm().words.weight
        assert torch.equal(file.get_tensor("words.weight"), words)


def test_demo_converts_a_file_and_copies_what_it_keeps(tmp_path, minilm):
    source = minilm.model_folder() / "model.safetensors"
    result = run_demo(tmp_path, source, "--method", "bitsandbytes_nf4")
    assert result.returncode == 0, result.stdout
    path = tmp_path / "demo-output" / "model-bitsandbytes_nf4.safetensors"
    with safe_open(source, "pt") as before, safe_open(path, "pt") as after:
        stored = set(after.keys())
        changed = [name for name in before.keys() if f"{name}.absmax" in stored]  # noqa: SIM118
        assert len(changed) == 36
        for name in set(before.keys()) - set(changed):
            assert torch.equal(before.get_tensor(name), after.get_tensor(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.safetensors"], "missing.safetensors"),
        (["--method", "comfy_kitchen_int8_w8a9"], "comfy_kitchen_int8_w8a8"),
    ],
)
def test_demo_explains_what_it_cannot_do(tmp_path, arguments, message):
    result = run_demo(tmp_path, *arguments)
    assert result.returncode == 1
    assert message in result.stdout and "Traceback" not in result.stdout


def test_demo_compares_methods(tmp_path):
    methods = ["bitsandbytes_nf4", "comfy_kitchen_fp8_w8a8"]
    result = run_demo(tmp_path, "--method", methods[0], "--method", methods[1])
    assert result.returncode == 0, result.stdout
    for method in methods:
        rows = [line for line in result.stdout.splitlines() if method in line and "%" in line]
        assert len(rows) == 1 and "equal" in rows[0]
        assert (tmp_path / "demo-output" / f"minilm-{method}.safetensors").exists()
