"""Chooses a method for every layer so that the model's output suffers least within a budget of bytes.

Every layer has a price in bytes and a cost in squared output error with every method. Which method each gets is a
multiple-choice knapsack. It is solved by the slopes of each layer's lower convex hull (Sinha and Zoltners 1979,
https://doi.org/10.1287/opre.27.3.503), which also gives a bound that no choice can be below.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from .backend import QuantBackend
from .choice import Weight, check_fit
from .config import MixedQuantizeConfig, QuantizeConfig, Recipe
from .layout import Formats, tensor_size
from .measure import relative_error
from .selection import choose_layers
from .sites import find_sites, name_endings

Source: TypeAlias = str | os.PathLike[str] | nn.Module
Progress = Callable[[int, int, str], None]

FLOAT = ""
"""In place of a method: the layer stays in float."""

_SAMPLED_ROWS = 512
"""How many rows of a weight its error is measured on; relative errors of weights hardly differ between rows."""


@dataclass(frozen=True)
class Option:
    """A layer with one method.

    Attributes:
        method: empty where the layer stays in float.
        nbytes: what the layer's tensors take.
        error: relative error of its weight.
        cost: what it adds to the squared relative error of the output.
    """

    method: str
    nbytes: int
    error: float
    cost: float


@dataclass(frozen=True)
class Allocation:
    """The result of :func:`allocate`.

    Attributes:
        recipe: with every layer in the part of its method; None where every layer stays in float.
        choice: ``{layer: its option}``.
        weights: how many weights the layers have together.
        bound: no choice within the budget has a smaller squared output error.
        curve: ``(bytes, predicted relative output error)`` from the smallest model to the best: to see where more
            bytes stop to help.
    """

    recipe: Recipe | None
    choice: dict[str, Option]
    weights: int
    bound: float
    curve: list[tuple[int, float]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """What the layers take together."""
        return sum(option.nbytes for option in self.choice.values())

    @property
    def bits(self) -> float:
        """Bits a weight, scales included."""
        return 8 * self.nbytes / self.weights

    @property
    def predicted_error(self) -> float:
        """The predicted relative error of the output; without sensitivities, of the weights."""
        return math.sqrt(sum(option.cost for option in self.choice.values()))

    @property
    def gap(self) -> float:
        """By how much a better choice could lower the predicted error at most, as a share of it."""
        return 1 - math.sqrt(self.bound) / self.predicted_error if self.predicted_error else 0.0


def allocate(
    source: Source,
    candidates: Sequence[str],
    *,
    nbytes: int | None = None,
    bits: float | None = None,
    max_error: float | None = None,
    sensitivity: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Allocation:
    """Choose a method for every layer of a model.

    Args:
        source: a float checkpoint file, of which one layer is in memory at a time, or a model in memory.
        candidates: methods. A layer that one does not fit has one less to choose from; to stay in float is always
            possible.
        nbytes: how many bytes the layers may take together, or
        bits: how many bits a weight they may take on average, or
        max_error: how large the predicted relative error of the output may be.
        sensitivity: from :func:`quant_core.sensitivity.measure_sensitivity`; it also says which layers there are to
            choose for. None takes the layers by structure, and a layer's share of the weights' energy in place of its
            sensitivity, which is a poor stand-in.
        progress: called as ``progress(done, total, layer name)``.

    Raises:
        ValueError: not exactly one budget, no layer, an unknown method or layer, or the smallest choice exceeds the
            budget; the message says what it takes.
    """
    if sum(given is not None for given in (nbytes, bits, max_error)) != 1:
        raise ValueError("give one budget: nbytes, bits or max_error")
    options, energies, weights = _options(source, list(dict.fromkeys(candidates)), sensitivity, progress)
    total = sum(weights.values())
    if sensitivity is None:
        everything = sum(energies.values()) or 1.0
        sensitivity = {layer: energy / everything for layer, energy in energies.items()}
    priced = {
        layer: [Option(o.method, o.nbytes, o.error, sensitivity[layer] * o.error**2) for o in choices]
        for layer, choices in options.items()
    }
    if bits is not None:
        nbytes = math.floor(bits * total / 8)
    choice, bound, curve = solve(priced, nbytes, max_error)
    return Allocation(_recipe(choice), choice, total, bound, curve)


# ------------------------------------------------------------------ the knapsack


def solve(
    options: Mapping[str, Sequence[Option]], nbytes: int | None, max_error: float | None = None
) -> tuple[dict[str, Option], float, list[tuple[int, float]]]:
    """Choose an option for every layer: the least cost within ``nbytes``, or the fewest bytes within ``max_error``.

    Returns:
        ``(the choice, a lower bound of its cost, the curve)``; see :class:`Allocation`.

    Raises:
        ValueError: nothing is small enough, or good enough.
    """
    hulls = {layer: hull(choices) for layer, choices in options.items()}
    choice = {layer: steps[0] for layer, steps in hulls.items()}
    size, cost = sum(o.nbytes for o in choice.values()), math.fsum(o.cost for o in choice.values())
    if nbytes is not None and size > nbytes:
        raise ValueError(f"the smallest choice takes {size:,} bytes, the budget is {nbytes:,}; allow smaller methods")
    steps = sorted(
        (
            ((before.cost - after.cost) / (after.nbytes - before.nbytes), layer, after)
            for layer, one in hulls.items()
            for before, after in zip(one, one[1:], strict=False)
        ),
        key=lambda step: (-step[0], step[1]),
    )
    curve = [(size, math.sqrt(max(cost, 0.0)))]
    enough, bound, unfit = False, cost, []
    for slope, layer, after in steps:
        before = choice[layer]
        more, gain = after.nbytes - before.nbytes, before.cost - after.cost
        curve.append((curve[-1][0] + more, math.sqrt(max(curve[-1][1] ** 2 - gain, 0.0))))
        if max_error is not None:
            enough = enough or math.sqrt(max(cost, 0.0)) <= max_error
            if not enough:
                choice[layer], size, cost = after, size + more, cost - gain
        elif not enough and nbytes is not None and size + more <= nbytes:
            choice[layer], size, cost = after, size + more, cost - gain
            bound = cost
        elif not enough and nbytes is not None:
            # A part of this step would fill the budget exactly: no choice of whole steps does better.
            bound, enough = cost - slope * (nbytes - size), True
            unfit.append((layer, after))
        else:
            unfit.append((layer, after))
    if max_error is not None:
        if math.sqrt(max(cost, 0.0)) > max_error:
            raise ValueError(f"no choice of these methods has a predicted error of {max_error}")
        return choice, cost, curve
    assert nbytes is not None
    for layer, after in unfit:  # what is left of the budget goes to the next steps that it is enough for
        if choice[layer].cost > after.cost and size - choice[layer].nbytes + after.nbytes <= nbytes:
            size += after.nbytes - choice[layer].nbytes
            choice[layer] = after
    return choice, max(bound, 0.0), curve


def hull(options: Sequence[Option]) -> list[Option]:
    """Return the options of a layer on the lower convex hull of cost over bytes, from the smallest to the best."""
    best: list[Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.cost)):
        if best and option.cost >= best[-1].cost:
            continue
        while len(best) > 1 and _slope(best[-2], option) >= _slope(best[-2], best[-1]):
            best.pop()
        best.append(option)
    return best


def _slope(small: Option, large: Option) -> float:
    return (small.cost - large.cost) / (large.nbytes - small.nbytes)


# ------------------------------------------------------------------ prices and errors


def _options(
    source: Source, candidates: list[str], sensitivity: Mapping[str, float] | None, progress: Progress | None
) -> tuple[dict[str, list[Option]], dict[str, float], dict[str, int]]:
    """Return every layer's options (without costs), its squared norm, and its number of weights."""
    formats = Formats()
    configs = {method: QuantizeConfig(method=method) for method in candidates}
    names, weights = _weights(source, sensitivity)
    options: dict[str, list[Option]] = {}
    energies, counts = {}, {}
    for index, (layer, weight) in enumerate(weights):
        shape, dtype = tuple(weight.shape), weight.dtype
        choices = [Option(FLOAT, tensor_size(dtype, shape), 0.0, 0.0)]
        rows = weight[torch.linspace(0, shape[0] - 1, min(shape[0], _SAMPLED_ROWS)).long()].float()
        for method, config in configs.items():
            if check_fit(layer, Weight(shape, dtype), config, formats.is_packed(method, {})) is None:
                fallback = config.backend.layer_options(*shape)
                stored = formats.form(method, fallback, shape, dtype).tensors.values()
                error = _error(formats.backend(method, fallback), rows)
                choices.append(Option(method, sum(tensor_size(*entry) for entry in stored), error, 0.0))
        options[layer], counts[layer] = choices, weight.numel()
        energies[layer] = rows.double().square().mean().item() * weight.numel()
        if progress is not None:
            progress(index + 1, len(names), layer)
    return options, energies, counts


def _error(backend: QuantBackend, rows: torch.Tensor) -> float:
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    quantized = backend.create_quantized_linear(linear)
    return relative_error(rows, backend.dequantize_to_linear(quantized, torch.float32).weight.detach())


def _weights(
    source: Source, sensitivity: Mapping[str, float] | None
) -> tuple[list[str], Iterator[tuple[str, torch.Tensor]]]:
    """Return the layers to choose for, and their float weights one at a time."""
    if isinstance(source, nn.Module):
        held = {site.name: site.module.weight.detach() for site in find_sites(source)}
        shapes = {f"{layer}.weight": tuple(weight.shape) for layer, weight in held.items()}
        names = _names(shapes, sensitivity)
        return names, ((layer, held[layer]) for layer in names)
    from .checkpoint.raw import RawReader
    from .checkpoint.reader import open_checkpoint

    checkpoint = open_checkpoint(source)
    names = _names({name: info.shape for name, info in checkpoint.tensors.items()}, sensitivity)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        reader = RawReader(checkpoint)
        try:
            for layer in names:
                info = checkpoint.tensors[f"{layer}.weight"]
                yield layer, reader.read_rows(f"{layer}.weight", 0, info.shape[0])
        finally:
            reader.close()

    return names, read()


def _names(shapes: Mapping[str, Sequence[int]], sensitivity: Mapping[str, float] | None) -> list[str]:
    if sensitivity is None:
        names = [layer for layer, decision in choose_layers(shapes).items() if decision.quantize]
    else:
        names = list(sensitivity)
        missing = [layer for layer in names if f"{layer}.weight" not in shapes]
        if missing:
            raise ValueError(f"the model has no layer {missing[0]!r}, of which a sensitivity is given")
    if not names:
        raise ValueError("the model has no layer to choose a method for; give the sensitivity of the layers meant")
    return names


def _recipe(choice: Mapping[str, Option]) -> Recipe | None:
    layers: dict[str, list[str]] = {}
    for layer, option in choice.items():
        if option.method != FLOAT:
            layers.setdefault(option.method, []).append(layer)
    parts = []
    for method, names in layers.items():
        wanted = set(names)
        others = [layer for layer in choice if layer not in wanted and wanted.intersection(name_endings(layer))]
        parts.append(QuantizeConfig(method=method, target_modules=names, exclude_modules=others or None))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else MixedQuantizeConfig(configs=parts)
