"""How long ``import quant_core`` takes over ``import torch``: medians of fresh processes, taken in turn.

Run: python benchmarks/import_time.py [RUNS]
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    return time.perf_counter() - started


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    cases = {
        "import torch": "import torch",
        "import quant_core": "import torch, quant_core",
        "and list all methods": "import torch, quant_core; quant_core.backends.load_all_backends()",
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, code in cases.items():
            times[name].append(seconds(code))
    base = statistics.median(times["import torch"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:22} {median:6.2f} s   {median - base:+.2f} s   {median / base:.2f} x")


if __name__ == "__main__":
    main()
