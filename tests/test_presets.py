"""Presets: data that is complete, and methods that run natively where the data says so."""

from __future__ import annotations

import pytest
import torch

from quant_core import QUANT_METHODS
from quant_core.backends import load_all_backends
from quant_core.backends.comfy_kitchen import FORMATS
from quant_core.presets import _cuda_target, policies, preset, targets, this_target

# The oldest compute capability of each NVIDIA target.
CAPABILITY = {"turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "blackwell": (10, 0)}


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("target", targets())
def test_every_choice_is_a_method_of_comfyuis_formats(policy, target):
    load_all_backends()
    recipe = preset(policy, target)
    assert recipe.method in QUANT_METHODS and recipe.method in FORMATS


def test_a_policy_keeps_to_its_bits():
    bits = {"8 bit": "_w8", "8 bit floating point": "_w8", "4 bit": "_w4", "smallest": "_w4"}
    assert set(bits) == set(policies())
    for policy, part in bits.items():
        assert all(part in preset(policy, target).method for target in targets())


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cards_have_their_target(capability):
    target = _cuda_target(capability)
    assert CAPABILITY[target] <= capability
    assert all(other > capability for other in CAPABILITY.values() if other > CAPABILITY[target])
    assert _cuda_target((6, 1)) == "any"


def test_this_machine():
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert this_target() == "cpu"
    assert preset("8 bit").method == "comfy_kitchen_int8_w8a8"


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="8 bit"):
        preset("tiny")
    with pytest.raises(ValueError, match="blackwell"):
        preset("8 bit", "toaster")
