"""Quantizes a layer in a process that has no memory left for it; run by test_errors.py."""

from __future__ import annotations

import asyncio
import importlib
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from make_tiny import import_comfy

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    import_comfy()
    import torch

    spec = importlib.util.spec_from_file_location("pack", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    sys.modules["pack"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["pack"])
    asyncio.run(sys.modules["pack"].comfy_entrypoint())
    quantizer = importlib.import_module("pack.nodes.host.quantizer")
    weight = torch.zeros(1, dtype=torch.bfloat16).expand(1 << 15, 1 << 16)
    target = quantizer.Target("comfy_kitchen_int8_w8a8", {})
    work = quantizer.LayerQuantizer({"blocks.0.large": target}, torch.device("cpu"))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
    try:
        work.replace_weight({"blocks.0.large.weight": weight}, "blocks.0.large.")
    except MemoryError as error:
        print(f"MemoryError: {error}")


if __name__ == "__main__":
    main()
