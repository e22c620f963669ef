"""The adapters that a LoRA file may hold for a layer, and what each adds to the layer's weight.

Every adapter gives its change row by row, so that a large weight never has to be whole in memory.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError

Factors = tuple[torch.Tensor, ...]

# The tensors of an adapter by the end of their names, in the spellings of kohya, PEFT, diffusers, LyCORIS and others;
# an adapter's own name may come between. What they are called here is the key.
_ENDINGS = {
    "up": r"(\.(lora_up|lora_B|lora\.up|lora_linear_layer\.up)(\.[^.]+)?|_lora\.up)\.weight|\.lora_B",
    "down": r"(\.(lora_down|lora_A|lora\.down|lora_linear_layer\.down)(\.[^.]+)?|_lora\.down)\.weight|\.lora_A",
    "mid": r"\.lora_mid\.weight",
    "alpha": r"\.alpha",
    "diff": r"\.(diff|w_norm)",
    "diff_b": r"\.(diff_b|b_norm|(lora_B|lora_up)(\.[^.]+)?\.bias)",
    "dora_scale": r"\.dora_scale",
    **{key: rf"\.{key}" for key in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")},
    **{key: rf"\.{key}" for key in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    "lokr_t2": r"\.lokr_t2",
}
_PARTS = {key: re.compile(rf"({pattern})$") for key, pattern in _ENDINGS.items()}

# Adapters that are not baked: not additive, or without one accepted reading.
_REFUSED = {
    r"\.lora_magnitude_vector(\.|$)": "DoRA as PEFT stores it",
    r"\.(oft_blocks|oft_diag|oft_R|rescale)(\.|$)": "OFT",
    r"\.(a1|a2|b1|b2)\.weight$": "GLoRA",
    r"\.(set_weight|reshape_weight)$": "an adapter that replaces or reshapes weights",
}


@dataclass(frozen=True)
class Adapter:
    """One adapter for one tensor.

    Attributes:
        name: the layer's name in the LoRA file.
        kind: what people call it.
        checkpoint: the LoRA file.
        shape: ``(rows, columns)`` of what it adds; columns are those of a weight flattened after its first dimension.
        load: reads its factors, in float32.
        rows: ``rows(factors, start, stop)`` is the change of these rows, ``[stop - start, columns]`` float32, alpha
            included and strength not.
        dora_scale: name of the magnitudes of DoRA, one for each row; empty otherwise.
        bias: it changes the layer's bias and not its weight.
    """

    name: str
    kind: str
    checkpoint: Checkpoint
    shape: tuple[int, int]
    load: Callable[[], Factors]
    rows: Callable[[Factors, int, int], torch.Tensor]
    dora_scale: str = ""
    bias: bool = False

    def describe(self) -> str:
        """Return the kind and shape for people."""
        return f"{self.kind} of {self.shape[0]} x {self.shape[1]}"


def read_adapters(checkpoint: Checkpoint) -> tuple[list[Adapter], list[str]]:
    """Return the adapters of a LoRA file, and the tensors that belong to none.

    Raises:
        CheckpointError: it holds none, an adapter of a kind that is not baked, or a part of one.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    unread: list[str] = []
    for name in checkpoint.tensors:
        kind = next((kind for pattern, kind in _REFUSED.items() if re.search(pattern, name)), None)
        if kind is not None:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r} belongs to {kind}, which is not baked here. Convert it to a LoRA, or "
                "merge it with the tool that it was trained with"
            )
        for part, pattern in _PARTS.items():
            if match := pattern.search(name):
                found[name[: match.start()]][part] = name
                break
        else:
            unread.append(name)
    adapters = [adapter for name, parts in found.items() for adapter in _adapters(checkpoint, name, parts)]
    if not adapters:
        first = ", ".join(list(checkpoint.tensors)[:3]) or "none"
        raise CheckpointError(
            f"{checkpoint.path} holds no LoRA: no pair of up and down matrices among its tensors ({first})"
        )
    return adapters, unread


def _adapters(checkpoint: Checkpoint, name: str, parts: Mapping[str, str]) -> list[Adapter]:
    layer = _Layer(checkpoint, name, parts)
    adapters = []
    if "up" in parts or "down" in parts or "mid" in parts:
        adapters.append(layer.lora())
    if any(key.startswith("hada_") for key in parts):
        adapters.append(layer.loha())
    if any(key.startswith("lokr_") for key in parts):
        adapters.append(layer.lokr())
    if "diff" in parts:
        adapters.append(layer.difference("diff", bias=False))
    if "dora_scale" in parts and (len(adapters) != 1 or "diff" in parts):
        raise CheckpointError(
            f"{checkpoint.path}: {parts['dora_scale']!r} (DoRA) belongs to no single LoRA, LoHa or LoKr"
        )
    if "diff_b" in parts:
        adapters.append(layer.difference("diff_b", bias=True))
    if not adapters and "alpha" in parts:
        raise CheckpointError(
            f"{checkpoint.path}: {parts['alpha']!r} has no matrices beside it; download the file again"
        )
    return adapters


class _Layer:
    """The tensors of one layer, about to become adapters."""

    def __init__(self, checkpoint: Checkpoint, name: str, parts: Mapping[str, str]) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self.parts = parts
        self.alpha = None
        if "alpha" in parts and math.prod(checkpoint.tensors[parts["alpha"]].shape) == 1:
            self.alpha = float(checkpoint.read(parts["alpha"]).float().reshape(()))
        elif "alpha" in parts:
            raise CheckpointError(f"{checkpoint.path}: {parts['alpha']!r} is not one number")

    def _shape(self, key: str) -> tuple[int, ...]:
        shape = self.checkpoint.tensors[self.parts[key]].shape
        if len(shape) < 2:
            raise self._misfit()
        return shape

    def _need(self, *keys: str) -> None:
        missing = [key for key in keys if key not in self.parts]
        if missing:
            there = next(name for key, name in self.parts.items() if key not in ("alpha", "dora_scale", "diff_b"))
            raise CheckpointError(
                f"{self.checkpoint.path}: {there!r} has no {' and no '.join(missing)} matrix beside it; download the "
                "file again"
            )

    def _misfit(self) -> CheckpointError:
        tensors = self.checkpoint.tensors
        shapes = ", ".join(f"{key} {list(tensors[n].shape)}" for key, n in self.parts.items() if key != "alpha")
        return CheckpointError(f"{self.checkpoint.path}: the matrices of {self.name!r} do not fit together ({shapes})")

    def _load(self, *keys: str) -> Factors:
        return tuple(self.checkpoint.read(self.parts[key]).float() for key in keys)

    def _scale(self, rank: int) -> float:
        return 1.0 if self.alpha is None else self.alpha / rank

    def _adapter(
        self,
        kind: str,
        shape: tuple[int, int],
        load: Callable[[], Factors],
        rows: Callable[[Factors, int, int], torch.Tensor],
    ) -> Adapter:
        dora_scale = self.parts.get("dora_scale", "")
        if dora_scale:
            scales = self.checkpoint.tensors[dora_scale].shape
            if not scales or scales[0] != shape[0] or math.prod(scales) != shape[0]:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {dora_scale!r} {list(scales)} belongs to DoRA with a magnitude for each "
                    f"input; only DoRA with one for each of the {shape[0]} outputs is baked here. Convert it to a "
                    "LoRA, or merge it with the tool that it was trained with"
                )
            kind += " with DoRA"
        return Adapter(self.name, kind, self.checkpoint, shape, load, rows, dora_scale)

    # ------------------------------------------------------------------ kinds

    def lora(self) -> Adapter:
        """``up @ down``; with a core in between (LoCon of Tucker form) ``up @ (core x down)`` for each kernel position.

        Hu et al., LoRA, 2021, equation 3. A convolution's down matrix has the kernel, ``[rank, in, kh, kw]``.
        """
        self._need("up", "down")
        up, down = self._shape("up"), self._shape("down")
        columns, rank = math.prod(down[1:]), math.prod(up[1:])
        keys = ["up", "down"]
        fits = rank == down[0] > 0
        if "mid" in self.parts:
            mid = self._shape("mid")
            keys.append("mid")
            columns = math.prod(down[1:]) * math.prod(mid[2:])
            fits = rank == mid[0] and mid[1] == down[0] > 0
        if not fits:
            raise self._misfit()
        kind = "LoRA" if "mid" not in self.parts else "LoCon (LoRA with lora_mid)"
        return self._adapter(
            kind, (up[0], columns), partial(self._load, *keys), partial(_lora_rows, self._scale(down[0]))
        )

    def loha(self) -> Adapter:
        """``(w1_a @ w1_b) * (w2_a @ w2_b)``, Hyeon-Woo et al., FedPara, 2021, with cores for convolutions."""
        self._need("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
        keys = ["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"]
        shapes = [self._shape(key) for key in keys]
        rank = shapes[1][0]
        if "hada_t1" in self.parts or "hada_t2" in self.parts:
            self._need("hada_t1", "hada_t2")
            keys += ["hada_t1", "hada_t2"]
            core, other = self._shape("hada_t1"), self._shape("hada_t2")
            outs, columns = shapes[0][1], shapes[1][1] * math.prod(core[2:])
            fits = core[:2] == (shapes[0][0], rank) and other[:2] == (shapes[2][0], shapes[3][0])
            fits = fits and shapes[2][1] == outs and shapes[3][1] == shapes[1][1] and core[2:] == other[2:]
        else:
            outs, columns = shapes[0][0], shapes[1][1]
            fits = shapes[0][1] == rank and shapes[2] == (outs, shapes[3][0]) and shapes[3][1] == columns
        if not fits or not rank or any(len(shape) != 2 for shape in shapes):
            raise self._misfit()
        return self._adapter(
            "LoHa", (outs, columns), partial(self._load, *keys), partial(_loha_rows, self._scale(rank))
        )

    def lokr(self) -> Adapter:
        """``kron(w1, w2)``, each given whole or as a product (LyCORIS, Yeh et al., 2023)."""
        keys: list[str] = []
        sizes: list[tuple[int, int]] = []
        rank = None
        for part in ("lokr_w1", "lokr_w2"):
            if part in self.parts:
                keys.append(part)
                shape = self._shape(part)
                sizes.append((shape[0], math.prod(shape[1:])))
                continue
            self._need(f"{part}_a", f"{part}_b")
            keys += [f"{part}_a", f"{part}_b"]
            first, second = self._shape(f"{part}_a"), self._shape(f"{part}_b")
            rank = second[0]
            if part == "lokr_w2" and "lokr_t2" in self.parts:
                core = self._shape("lokr_t2")
                keys.append("lokr_t2")
                fits = core[:2] == (first[0], second[0])
                sizes.append((first[1], second[1] * math.prod(core[2:])))
            else:
                fits = first[1] == second[0] > 0
                sizes.append((first[0], math.prod(second[1:])))
            if not fits or len(first) != 2:
                raise self._misfit()
        if min(sizes[1]) < 1:
            raise self._misfit()
        shape = (sizes[0][0] * sizes[1][0], sizes[0][1] * sizes[1][1])
        scale = 1.0 if rank is None else self._scale(rank)
        return self._adapter("LoKr", shape, partial(self._kronecker, tuple(keys)), partial(_lokr_rows, scale))

    def _kronecker(self, keys: tuple[str, ...]) -> Factors:
        factors = dict(zip(keys, self._load(*keys), strict=True))
        whole = []
        for part in ("lokr_w1", "lokr_w2"):
            if part in factors:
                whole.append(factors[part].flatten(1))
            elif part == "lokr_w2" and "lokr_t2" in factors:
                core = _tucker(factors["lokr_t2"], factors["lokr_w2_a"], factors["lokr_w2_b"])
                whole.append(core)
            else:
                whole.append(factors[f"{part}_a"] @ factors[f"{part}_b"].flatten(1))
        return tuple(whole)

    def difference(self, key: str, *, bias: bool) -> Adapter:
        """The difference of two tensors as it is; alpha does not concern it."""
        shape = self.checkpoint.tensors[self.parts[key]].shape
        if not shape:
            raise self._misfit()
        name = self.parts[key]

        def rows(_: Factors, start: int, stop: int) -> torch.Tensor:
            return self.checkpoint.read_rows(name, start, stop).float().reshape(stop - start, -1)

        kind = "difference of biases" if bias else "difference of weights"
        return Adapter(self.name, kind, self.checkpoint, (shape[0], math.prod(shape[1:])), tuple, rows, bias=bias)


# ------------------------------------------------------------------ formulas


def _lora_rows(scale: float, factors: Factors, start: int, stop: int) -> torch.Tensor:
    up, down, *core = factors
    down = down.flatten(1)
    if core:  # [rank, rank of down, kernel...]
        kernel = core[0].flatten(2)
        down = torch.einsum("mnk,ni->mik", kernel, down).flatten(1)
    return scale * (up[start:stop].flatten(1) @ down)


def _tucker(core: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``[outputs, inputs * kernel]`` of a core ``[i, j, kernel...]``, ``a [i, outputs]``, ``b [j, inputs]``."""
    return torch.einsum("ijk,ip,jr->prk", core.flatten(2), a, b).flatten(1)


def _loha_rows(scale: float, factors: Factors, start: int, stop: int) -> torch.Tensor:
    w1_a, w1_b, w2_a, w2_b, *cores = factors
    if cores:
        first = _tucker(cores[0], w1_a[:, start:stop], w1_b)
        second = _tucker(cores[1], w2_a[:, start:stop], w2_b)
    else:
        first, second = w1_a[start:stop] @ w1_b, w2_a[start:stop] @ w2_b
    return scale * (first * second)


def _lokr_rows(scale: float, factors: Factors, start: int, stop: int) -> torch.Tensor:
    w1, w2 = factors
    height = w2.shape[0]
    first, last = start // height, -(-stop // height)
    rows = torch.kron(w1[first:last].contiguous(), w2.contiguous())
    return scale * rows[start - first * height : stop - first * height]
