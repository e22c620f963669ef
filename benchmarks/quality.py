"""Output error at equal size: methods chosen for each layer by measurement, against one method for all.

Run: python benchmarks/quality.py [--bits 4.6,5,6,...]

The model is all-MiniLM-L6-v2 (36 Linears), the candidates are ComfyUI's own formats. Sensitivities are measured on
sentences of this repository's documentation, errors on the held-out texts of the demo; both are relative errors of the
last hidden states. Activations are quantized where the format does that on this machine.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = (
    "comfy_kitchen_int8_w8a8",
    "comfy_kitchen_fp8_w8a8",
    "comfy_kitchen_mxfp8_w8a8",
    "comfy_kitchen_nvfp4_w4a4",
    "comfy_kitchen_int4_w4a8",
    "comfy_kitchen_int4_convrot_w4a4",
)


def calibration_texts(count: int = 24) -> list[str]:
    """Sentences of the documentation, evenly taken."""
    sentences: list[str] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        sentences += [part.strip() for part in re.split(r"(?<=[.:])\s+", prose)]
    sentences = [text for text in sentences if 40 < len(text) < 300 and "|" not in text]
    return sentences[:: max(1, len(sentences) // count)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Output error at equal size.")
    parser.add_argument("--bits", default="4.6,5,5.5,6,6.57,7,8.04", help="bits a weight, separated by commas")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "demo")]
    import minilm

    from quant_core import QuantizeConfig
    from quant_core.allocation import allocate
    from quant_core.sensitivity import measure_sensitivity

    held_out = [
        text for text in (ROOT / "demo" / "held_out.txt").read_text(encoding="utf-8").splitlines() if text.strip()
    ]
    (ids, seen), (held_ids, held_seen) = minilm.tokenize(calibration_texts()), minilm.tokenize(held_out)
    model = minilm.load_minilm()
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        reference = model(held_ids, held_seen)[held_seen]

        def error(recipe) -> float:
            quantized = minilm.load_minilm()
            recipe.quantize_model(quantized)
            return 100 * minilm.relative_error(reference, quantized(held_ids, held_seen)[held_seen])

        began = time.perf_counter()
        sensitivity = measure_sensitivity(model, lambda m: m(ids, seen)[seen], layers)
        print(f"sensitivities of {len(layers)} layers: {time.perf_counter() - began:.0f} s\n")
        print(f"{'':44}{'bits':>6}{'error %':>9}{'predicted':>11}{'gap %':>7}")
        for method in CANDIDATES:
            uniform = allocate(model, [method], max_error=1e9, sensitivity=sensitivity)
            print(f"{method:44}{uniform.bits:6.2f}{error(QuantizeConfig(method=method)):9.2f}")
        for bits in map(float, options.bits.split(",")):
            for title, given in (("by sensitivity", sensitivity), ("by weight error only", None)):
                made = allocate(model, CANDIDATES, bits=bits, sensitivity=given)
                found = error(made.recipe)
                predicted = f"{100 * made.predicted_error:11.2f}{100 * made.gap:7.1f}" if given else ""
                print(f"{f'chosen for {bits:g} bits, {title}':44}{made.bits:6.2f}{found:9.2f}{predicted}", flush=True)


if __name__ == "__main__":
    main()
