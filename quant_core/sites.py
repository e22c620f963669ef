"""Finds the Linears of a model and decides which of them a recipe may replace.

A *site* is one ``nn.Linear`` object with every name it is reached by: a Linear that sits at two places of a model is
one site, and is replaced at both.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

logger = logging.getLogger("quant_core")

FLOAT_WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def name_matches(name: str, entries: Iterable[str]) -> bool:
    """The matching rule: the dotted ``name`` equals an entry, or ends with ``"." + entry``."""
    entries = entries if isinstance(entries, (set, frozenset)) else set(entries)
    return not entries.isdisjoint(name_endings(name))


def name_endings(name: str) -> list[str]:
    """Return every entry that matches ``name``: itself, and what follows each of its dots."""
    return [name, *(name[place + 1 :] for place, letter in enumerate(name) if letter == ".")]


@dataclass
class LinearSite:
    """One Linear of a model.

    Attributes:
        names: the dotted names it is reached by, in model order; ``names[0]`` is used in messages and files.
        module: the Linear itself.
        obstacle: why it must not be replaced, empty when it may be.
    """

    names: tuple[str, ...]
    module: nn.Module
    obstacle: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    def replace(self, model: nn.Module, new: nn.Module) -> None:
        """Put ``new`` at every place of the model where this Linear is."""
        for name in self.names:
            parent, _, child = name.rpartition(".")
            # Assigning to _modules keeps the position in containers such as Sequential and ModuleDict.
            model.get_submodule(parent)._modules[child] = new


def find_sites(model: nn.Module) -> list[LinearSite]:
    """Return the model's Linears in model order, each with its obstacle.

    Raises:
        ValueError: the model is itself a Linear, which cannot be replaced in place.
    """
    if isinstance(model, nn.Linear):
        raise ValueError(
            f"the model is itself a {type(model).__name__}, which cannot be replaced in place; "
            "wrap it: torch.nn.Sequential(linear)"
        )
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(id(module), []).append(name)
            modules[id(module)] = module
    attention = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    users = _weight_users(model)
    return [
        LinearSite(tuple(names[key]), module, _obstacle(module, key in attention, users))
        for key, module in modules.items()
    ]


def _weight_users(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """``{id(parameter): [(module, dotted name of the parameter), ...]}``, to see tied weights."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, f"{prefix}.{key}" if prefix else key))
    return users


def _obstacle(module: nn.Module, is_attention_output: bool, users: dict[int, list[tuple[nn.Module, str]]]) -> str:
    if is_attention_output:
        return "it is the output projection of a MultiheadAttention, which reads the float weight itself"
    if type(module) is not nn.Linear:
        if "weight" not in module._parameters:
            return f"it is quantized already ({type(module).__name__})"
        return f"it is a {type(module).__name__}: a subclass of nn.Linear would lose its own forward"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed by a hook (weight_norm or a like), not stored"
    if weight.numel() == 0:
        return f"its weight {list(weight.shape)} has no elements"
    if weight.dtype not in FLOAT_WEIGHTS:
        return f"its weight is {weight.dtype}, not a float weight to quantize from"
    strangers = [name for user, name in users[id(weight)] if type(user) is not nn.Linear]
    if strangers:
        return f"its weight is tied to {strangers[0]}, which would keep the float copy"
    return ""


def select_sites(
    model: nn.Module,
    sites: Sequence[LinearSite],
    target_modules: Sequence[str] | None,
    exclude_modules: Sequence[str] | None,
) -> list[LinearSite]:
    """Return the sites that a target list and an exclude list select.

    A Linear with several names is selected when a target matches one of them and no exclusion matches any. Selected
    Linears that must not be replaced are an error when a target asked for them, and otherwise left in float and
    logged.

    Raises:
        ValueError: an entry matches no Linear; a targeted Linear must not be replaced; nothing is left to select.
    """
    if not sites:
        raise ValueError(f"{type(model).__name__} has no nn.Linear: there is nothing to quantize")
    for title, entries in (("target_modules", target_modules), ("exclude_modules", exclude_modules)):
        for entry in entries or ():
            _check_entry(model, sites, title, entry)
    selected = []
    for site in sites:
        if target_modules is not None and not any(name_matches(n, target_modules) for n in site.names):
            continue
        if any(name_matches(n, exclude_modules or ()) for n in site.names):
            continue
        if not site.obstacle:
            selected.append(site)
        elif target_modules is not None:
            raise ValueError(f"layer {site.name!r} cannot be quantized: {site.obstacle}. Take it out of target_modules")
        else:
            logger.warning("layer %r is left in float: %s", site.name, site.obstacle)
    if not selected:
        reasons = "; ".join(f"{s.name}: {s.obstacle or 'excluded'}" for s in sites[:5])
        raise ValueError(f"no layer of {type(model).__name__} is left to quantize ({reasons})")
    return selected


def _check_entry(model: nn.Module, sites: Sequence[LinearSite], title: str, entry: str) -> None:
    if any(name_matches(n, [entry]) for site in sites for n in site.names):
        return
    container = next((n for n, m in model.named_modules() if name_matches(n, [entry]) and n), None)
    if container is not None:
        inside = [n for site in sites for n in site.names if n.startswith(container + ".")]
        if not inside and title == "exclude_modules":
            return  # A norm or a convolution: it would not have been quantized anyway.
        kind = type(model.get_submodule(container)).__name__
        listed = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
        advice = f"; name its Linears instead: {listed}" if inside else ""
        raise ValueError(f"{title} entry {entry!r} is a {kind}, not a Linear{advice}")
    suffixes = list(dict.fromkeys(s for site in sites for n in site.names for s in _suffixes(n)))
    near = difflib.get_close_matches(entry, suffixes, n=3, cutoff=0.5)
    hint = (
        f" Nearest: {', '.join(near)}."
        if near
        else f" The model's Linears: {', '.join(s.name for s in sites[:5])}, ..."
    )
    raise ValueError(
        f"{title} entry {entry!r} matches no layer. An entry is a dotted name, or the end of one after a dot.{hint}"
    )


def _suffixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.partition(".")[2]
