"""The allocator: exact on small problems, within its own bound on large ones, and true on a real model."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from quant_core import QuantizeConfig
from quant_core.allocation import FLOAT, Option, allocate, hull, solve
from quant_core.convert import convert
from quant_core.errors import QuantizationError
from quant_core.plan import plan
from quant_core.sensitivity import measure_sensitivity

INT8, NVFP4, W4A8 = "comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4", "comfy_kitchen_int4_w4a8"
CONVROT4 = "comfy_kitchen_int4_convrot_w4a4"


def random_problem(seed: int, layers: int, choices: int) -> dict[str, list[Option]]:
    generator = random.Random(seed)
    problem = {}
    for layer in range(layers):
        size = generator.randint(50, 400)
        problem[f"layer{layer}"] = [
            Option(f"m{i}", max(1, int(size * (i + 1 + generator.random()))), 0.0, generator.random() * 4.0**-i)
            for i in range(choices)
        ]
    return problem


def best_by_trying(problem, nbytes: int) -> float:
    """The least cost of all choices that fit."""
    sums = (
        (sum(o.nbytes for o in choice), math.fsum(o.cost for o in choice))
        for choice in itertools.product(*problem.values())
    )
    return min(cost for size, cost in sums if size <= nbytes)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_below_and_the_choice_near_the_best_of_all(seed):
    problem = random_problem(seed, layers=6, choices=4)
    smallest = sum(min(o.nbytes for o in options) for options in problem.values())
    largest = sum(max(o.nbytes for o in options) for options in problem.values())
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        budget = smallest + int(share * (largest - smallest))
        choice, bound, _ = solve(problem, budget)
        cost = math.fsum(option.cost for option in choice.values())
        assert sum(option.nbytes for option in choice.values()) <= budget
        best = best_by_trying(problem, budget)
        assert bound <= best + 1e-12 <= cost + 2e-12
        # No more than the step that no longer fitted lies between the bound and the choice.
        largest_step = max(
            a.cost - b.cost for o in problem.values() for a, b in itertools.pairwise([*hull(o), hull(o)[-1]])
        )
        assert cost - bound <= largest_step + 1e-12


def test_many_layers_leave_next_to_no_gap():
    problem = random_problem(1, layers=2000, choices=6)
    budget = int(1.5 * sum(min(o.nbytes for o in options) for options in problem.values()))
    choice, bound, curve = solve(problem, budget)
    cost = math.fsum(option.cost for option in choice.values())
    assert bound <= cost < 1.001 * bound
    assert all(a[0] < b[0] and a[1] >= b[1] for a, b in itertools.pairwise(curve))
    assert solve(problem, budget)[0] == choice


@pytest.mark.parametrize("seed", range(20))
def test_a_largest_error_is_kept(seed):
    problem = random_problem(seed, layers=5, choices=4)
    best = math.sqrt(math.fsum(min(o.cost for o in options) for options in problem.values()))
    for factor in (1.05, 1.5, 3.0):
        choice, _, _ = solve(problem, None, factor * best)
        assert math.sqrt(math.fsum(o.cost for o in choice.values())) <= factor * best
    with pytest.raises(ValueError, match="no choice"):
        solve(problem, None, 0.99 * best)


def test_what_is_too_small_says_what_it_takes():
    problem = random_problem(0, layers=3, choices=2)
    smallest = sum(min(o.nbytes for o in options) for options in problem.values())
    with pytest.raises(ValueError, match=f"{smallest:,} bytes, the budget is {smallest - 1:,}"):
        solve(problem, smallest - 1)
    assert sum(o.nbytes for o in solve(problem, smallest)[0].values()) == smallest


# ------------------------------------------------------------------ models and files


class Net(nn.Module):
    """Blocks whose output is added up, one of them a thousand times as loud as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(256, 256, bias=False)}) for _ in range(4))
        self.loudness = [1.0, 1000.0, 1.0, 1.0]

    def forward(self, x):
        return sum(loud * block["proj"](x) for loud, block in zip(self.loudness, self.blocks, strict=True))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def sensitivity(net):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    return measure_sensitivity(net, lambda model: model(x), [f"blocks.{n}.proj" for n in range(4)], NVFP4)


def test_sensitivity_is_the_layers_share_of_the_output(net, sensitivity):
    """An error of a layer's weight reaches the output by its share: about 1 for the loud one, 1e-6 for the others."""
    before = {name: parameter.clone() for name, parameter in net.named_parameters()}
    assert sensitivity["blocks.1.proj"] == pytest.approx(1.0, rel=0.05)
    assert all(sensitivity[f"blocks.{n}.proj"] == pytest.approx(1e-6, rel=0.3) for n in (0, 2, 3))
    assert all(torch.equal(before[name], parameter) for name, parameter in net.named_parameters())


def test_bits_go_where_the_output_suffers(net, sensitivity):
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(2))
    made = allocate(net, [INT8, NVFP4, W4A8], bits=5.5, sensitivity=sensitivity)
    assert made.bits <= 5.5
    assert made.choice["blocks.1.proj"].method == INT8
    assert {made.choice[f"blocks.{n}.proj"].method for n in (0, 2, 3)} <= {NVFP4, W4A8}
    reference = net(x)
    made.recipe.quantize_model(net)
    error = ((net(x) - reference).norm() / reference.norm()).item()
    assert made.predicted_error < error < 0.02  # the activations are quantized too, which is not predicted


def test_a_file_is_allocated_as_its_model(net, sensitivity, tmp_path):
    import safetensors.torch

    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    from_file = allocate(tmp_path / "net.safetensors", [INT8, NVFP4], bits=5.5, sensitivity=sensitivity)
    assert from_file == allocate(net, [INT8, NVFP4], bits=5.5, sensitivity=sensitivity)
    made = plan(tmp_path / "net.safetensors", from_file.recipe)
    assert sum(row.bytes_after for row in made.quantized) == from_file.nbytes
    convert(made, tmp_path / "out.safetensors")
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert len(json.loads(file.metadata()["quant_core"])["recipe"]["configs"]) == 2


def test_with_enough_bytes_all_stay_in_float(net, sensitivity):
    made = allocate(net, [INT8], bits=32, sensitivity=sensitivity)
    assert made.recipe is None and made.predicted_error == 0.0 == made.gap
    assert {option.method for option in made.choice.values()} == {FLOAT}


def test_the_layers_are_those_of_the_blocks(net):
    net.stem = nn.Linear(256, 256)
    assert set(allocate(net, [INT8], bits=9).choice) == {f"blocks.{n}.proj" for n in range(4)}


def test_wrong_requests_are_named(net, sensitivity):
    for budgets in ({}, {"bits": 5, "nbytes": 10}):
        with pytest.raises(ValueError, match="one budget"):
            allocate(net, [INT8], **budgets)
    with pytest.raises(ValueError, match="no layer 'nowhere'"):
        allocate(net, [INT8], bits=9, sensitivity={"nowhere": 1.0})
    with pytest.raises(ValueError, match="no Linear 'nowhere'"):
        measure_sensitivity(net, lambda model: model(torch.ones(1, 256)), ["nowhere"])
    with pytest.raises(QuantizationError, match="zero"):
        measure_sensitivity(net, lambda model: model(torch.zeros(1, 256)), ["blocks.0.proj"])
    with pytest.raises(ValueError, match="smallest choice"):
        allocate(net, [INT8], bits=4, sensitivity=sensitivity)


def test_on_a_real_model_it_beats_every_uniform_method_of_its_size(monkeypatch):
    """MiniLM; sensitivities from one set of texts, errors from another."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "demo"))
    sys.modules.pop("minilm", None)
    import minilm

    texts = (Path(minilm.__file__).parent / "held_out.txt").read_text(encoding="utf-8").splitlines()
    texts = [text for text in texts if text.strip()]
    (ids, seen), (held_ids, held_seen) = minilm.tokenize(texts[::2]), minilm.tokenize(texts[1::2])
    model = minilm.load_minilm()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        sensitivity = measure_sensitivity(model, lambda m: m(ids, seen)[seen], layers, NVFP4)
        reference = model(held_ids, held_seen)[held_seen]

    def error(recipe) -> float:
        quantized = minilm.load_minilm()
        recipe.quantize_model(quantized)
        with torch.no_grad():
            return minilm.relative_error(reference, quantized(held_ids, held_seen)[held_seen])

    made = allocate(model, [INT8, NVFP4, W4A8, CONVROT4], bits=5.5, sensitivity=sensitivity)
    found = error(made.recipe)
    assert made.bits <= 5.5 and made.gap < 0.1
    assert found < 0.75 * min(error(QuantizeConfig(method=method)) for method in (NVFP4, W4A8))
    assert found == pytest.approx(made.predicted_error, rel=0.25)
    assert found < 0.9 * error(allocate(model, [INT8, NVFP4, W4A8, CONVROT4], bits=5.5).recipe)
