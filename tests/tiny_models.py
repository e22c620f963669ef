"""Small models that several test files use."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=256, hidden=512):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Two blocks of two Linears, with what surrounds blocks in a diffusion model: a projection in and a head."""

    def __init__(self, width=256, hidden=512):
        super().__init__()
        self.proj_in = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, 32)

    def forward(self, x):
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
ALL_LINEARS = ["proj_in", *BLOCK_LINEARS, "head"]


def tiny_model(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return TinyModel().to(dtype)


def state_bytes(module):
    """``{key: (dtype, shape, bytes)}`` of a module's plain state dict, to compare byte for byte."""
    return {k: tensor_bytes(v) for k, v in module.state_dict().items()}


def tensor_bytes(tensor):
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data


def relative_error(reference, value):
    reference, value = reference.double(), value.double()
    return ((value - reference).norm() / reference.norm()).item()
