"""Writes a synthetic checkpoint with Flux's names and shapes, of any size, in bounded memory.

Run: python benchmarks/make_checkpoint.py OUT.safetensors [--size GB] [--width 3072] [--seed 0] [--dtype bfloat16]

The values are normally distributed, with a few rows twenty times as large: a stretch of one seeded sequence for each
tensor, so that the same arguments write the same bytes.
"""

import argparse
from pathlib import Path

import torch

from quant_core.checkpoint.header import build_header

_SEQUENCE = 1 << 22
_PIECE = 1 << 19


def flux_shapes(gigabytes: float, width: int, itemsize: int = 2) -> dict[str, tuple[int, ...]]:
    """Return ``{name: shape}`` of a Flux with as many blocks as come close to the size, two single to one double."""
    w = width
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, width: int) -> None:
        shapes[f"{name}.weight"] = (out, width)
        shapes[f"{name}.bias"] = (out,)

    for name, size in (("img_in", 64), ("txt_in", 4096)):
        linear(name, w, size)
    for name, size in (("time_in", 256), ("vector_in", 768), ("guidance_in", 256)):
        linear(f"{name}.in_layer", w, size)
        linear(f"{name}.out_layer", w, w)
    linear("final_layer.linear", 64, w)
    linear("final_layer.adaLN_modulation.1", 2 * w, w)
    doubles = singles = 0
    used = sum(_elements(s) for s in shapes.values()) * itemsize
    while True:
        is_single = doubles > 0 and singles < 2 * doubles
        block = dict(shapes)
        before = len(shapes)
        if is_single:
            prefix = f"single_blocks.{singles}"
            linear(f"{prefix}.linear1", 7 * w, w)
            linear(f"{prefix}.linear2", w, 5 * w)
            linear(f"{prefix}.modulation.lin", 3 * w, w)
            shapes[f"{prefix}.norm.query_norm.scale"] = shapes[f"{prefix}.norm.key_norm.scale"] = (128,)
        else:
            for stream in ("img", "txt"):
                prefix = f"double_blocks.{doubles}.{stream}"
                linear(f"{prefix}_attn.qkv", 3 * w, w)
                linear(f"{prefix}_attn.proj", w, w)
                linear(f"{prefix}_mlp.0", 4 * w, w)
                linear(f"{prefix}_mlp.2", w, 4 * w)
                linear(f"{prefix}_mod.lin", 6 * w, w)
                shapes[f"{prefix}_attn.norm.query_norm.scale"] = (128,)
                shapes[f"{prefix}_attn.norm.key_norm.scale"] = (128,)
        size = sum(_elements(s) for s in list(shapes.values())[before:]) * itemsize
        if used + size / 2 > gigabytes * 1e9 and doubles:
            return block
        used += size
        singles, doubles = (singles + 1, doubles) if is_single else (singles, doubles + 1)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def write_checkpoint(
    path: Path, gigabytes: float, width: int = 3072, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Write the file; return its size in bytes."""
    shapes = flux_shapes(gigabytes, width, dtype.itemsize)
    head, spans = build_header({name: (dtype, shape) for name, shape in shapes.items()}, {"format": "pt"})
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.randn(_SEQUENCE, generator=generator)
    sequence[torch.randint(_SEQUENCE, (64,), generator=generator)] *= 20
    sequence = (sequence * 0.02).to(dtype)
    with open(path, "wb") as file:
        file.write(head)
        for start, end in sorted(spans.values()):
            left = (end - start) // dtype.itemsize
            while left:
                count = min(left, _PIECE)
                offset = int(torch.randint(_SEQUENCE - count + 1, (1,), generator=generator))
                file.write(sequence[offset : offset + count].view(torch.uint8).numpy().data)
                left -= count
        return file.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a synthetic Flux checkpoint.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=float, default=2.0, metavar="GB", help="about (default: 2)")
    parser.add_argument("--width", type=int, default=3072, help="of the model; a layer grows with its square")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    size = write_checkpoint(options.out, options.size, options.width, options.seed, getattr(torch, options.dtype))
    print(f"{options.out}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
