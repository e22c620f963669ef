"""LoRAs of the library peft on quantized layers, trained in plain PyTorch."""

import peft
import pytest
import torch
from tiny_models import tensor_bytes
from torch import nn

from quant_core import QUANT_METHODS, QuantizeConfig, backends

WIDTH, TOKENS, STEPS = 256, 8, 30
backends.load_all_backends()
METHODS = sorted(n for n, s in QUANT_METHODS.items() if s.backend in ("bitsandbytes", "torchao", "comfy_kitchen"))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block())
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x):
        return self.head(self.blocks(x))


LAYERS = ["q", "k", "v", "out", "up", "down"]


def base_bytes(model):
    """``{key: bytes}`` of everything but the LoRA; tensors of torchao by the plain ones inside."""
    state = {}
    for key, value in model.state_dict().items():
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else [""]
        for name in names:
            tensor = getattr(value, name) if name else value
            state[f"{key.removeprefix('base_model.model.').replace('.base_layer', '')}.{name}"] = tensor
    return {key: tensor_bytes(tensor) for key, tensor in state.items() if ".lora_" not in key}


@pytest.fixture
def make_lora_model():
    """A function that quantizes the transformer and adds LoRAs to it, as docs/training.md says."""

    def make(method, dtype):
        torch.manual_seed(0)
        model = Transformer().to(dtype)
        QuantizeConfig(method=method, exclude_modules=["head"]).quantize_model(model)
        before = base_bytes(model)
        lora = peft.LoraConfig(r=4, lora_alpha=4, target_modules=LAYERS)
        # peft has its own class for torchao's tensors, which refuses int4; its plain one trains every method.
        lora._register_custom_module({type(model.blocks[0].up): peft.tuners.lora.Linear})
        return peft.get_peft_model(model, lora), before

    return make


def data(dtype):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, TOKENS, WIDTH, generator=generator).to(dtype), torch.randn(4, TOKENS, 32, generator=generator)


def train(model, x, target):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("method", METHODS)
def test_a_lora_is_trained_beside_quantized_layers(method, make_lora_model):
    assert QuantizeConfig(method=method).backend.capabilities()["is_differentiable"]
    model, before = make_lora_model(method, torch.bfloat16)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(LAYERS) and all(".lora_" in name for name in trained)
    losses = train(model, *data(torch.bfloat16))
    assert losses[-1] < 0.6 * losses[0]
    assert base_bytes(model) == before


@pytest.mark.parametrize("method", ["comfy_kitchen_fp8_w8a8", "bitsandbytes_nf4", "torchao_int8_w8a16"])
def test_a_trained_lora_is_saved_and_loaded(method, make_lora_model, tmp_path):
    x, target = data(torch.float32)
    model, _ = make_lora_model(method, torch.float32)
    losses = train(model, x, target)
    assert losses[-1] < 0.6 * losses[0]
    expected = model(x)
    model.save_pretrained(tmp_path)
    again, _ = make_lora_model(method, torch.float32)
    peft.set_peft_model_state_dict(again, peft.load_peft_weights(str(tmp_path), device="cpu"))
    assert torch.equal(again(x), expected)
