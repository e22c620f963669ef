"""How much memory loading and quantizing a model in ComfyUI takes, beyond what the quantized model itself takes.

Run it with the Python of a ComfyUI:

    COMFYUI_PATH=... python benchmarks/load_memory.py MODEL [method ...]

MODEL is a float diffusion model; without a file of your own, ``tests/host/make_tiny.py FOLDER flux_mid`` writes one of
1.5 GB. Every method runs in a process of its own, Linux only. ``stock`` is ComfyUI's own loader, which keeps the float
weights in the file's map, or copies them where it has to cast them.

Anonymous memory is what cannot be dropped and read again from the file. Times are of the same run, as seconds and as
multiples of ``stock``; the machine's other work shows in them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ["stock", "comfy_kitchen_fp8_w8a8", "comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4", "bitsandbytes_nf4"]
MIB = 2**20


def anonymous() -> int:
    """Return this process's resident anonymous memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The largest anonymous memory while the block runs, over that at its start."""

    def __enter__(self) -> Peak:
        self.start = self.largest = anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.003):
            self.largest = max(self.largest, anonymous())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.extra = self.largest - self.start


def measure(model: str, method: str) -> dict:
    """Load a model in this process; return sizes in bytes and the time in seconds."""
    tiny = _module("make_tiny", ROOT / "tests" / "host" / "make_tiny.py")
    tiny.import_comfy()
    import comfy.sd
    import torch

    pack = _module("quantcore_pack", ROOT / "__init__.py", [str(ROOT)])
    asyncio.run(pack.comfy_entrypoint())
    load = importlib.import_module("quantcore_pack.nodes.host.loading").load_diffusion_model
    from quant_core import QuantizeConfig

    recipe = None if method == "stock" else QuantizeConfig(method=method)
    began = time.perf_counter()
    with Peak() as peak, torch.inference_mode():
        if recipe is None:
            patcher = comfy.sd.load_diffusion_model(model, model_options={"dtype": torch.bfloat16})
        else:
            patcher = load(model, recipe, torch.bfloat16)
    seconds = time.perf_counter() - began
    held = sum(tensor.nbytes for tensor in patcher.model.diffusion_model.state_dict().values())
    return {"peak": peak.extra, "held": held, "size": patcher.model_size(), "seconds": seconds}


def _module(name: str, path: Path, locations: list[str] | None = None):
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(model: str, methods: list[str]) -> None:
    print(f"{'method':36}{'model MiB':>10}{'peak MiB':>10}{'over it':>9}{'model_size':>12}{'s':>8}{'x stock':>9}")
    stock = None
    for method in methods or DEFAULT:
        command = [sys.executable, __file__, "--measure", model, method]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            print(f"{method:36}failed: {result.stderr.strip().splitlines()[-1]}")
            continue
        data = json.loads(result.stdout.splitlines()[-1])
        stock = data["seconds"] if method == "stock" else stock
        share = f"{data['seconds'] / stock:9.1f}" if stock else f"{'-':>9}"
        off = f"{100 * (data['size'] / data['held'] - 1):+.2f} %"
        print(
            f"{method:36}{data['held'] / MIB:10.0f}{data['peak'] / MIB:10.0f}{(data['peak'] - data['held']) / MIB:9.0f}"
            f"{off:>12}{data['seconds']:8.1f}{share}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:4])))
    elif len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(__doc__)
