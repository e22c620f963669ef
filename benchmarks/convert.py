"""CPU time and memory of converting a checkpoint, against the floor of the machine, in one run.

Run: python benchmarks/convert.py [FILE.safetensors] [--size GB] [--width 3072] [--methods A,B] [--peers]

Each case is a process of its own. CPU seconds count all threads, from after the imports (and a first small layer,
which loads the libraries) to the end; anonymous memory is what the process has beyond that point, at its peak. The
floor reads the file in pieces, looks for the range, casts to fp8 and writes: the least that a conversion does.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = (
    "comfy_kitchen_fp8_w8a8",
    "comfy_kitchen_int8_w8a8 convrot=false",
    "comfy_kitchen_int8_w8a8",
    "comfy_kitchen_mxfp8_w8a8",
    "comfy_kitchen_nvfp4_w4a4",
    "comfy_kitchen_int4_convrot_w4a4",
    "bitsandbytes_nf4",
    "torchao_int8_w8a16",
    "torchao_fp8_w8a16",
    "torchao_nvfp4_w4a16",
)

_FLOOR = """
import sys, time, torch
from quant_core.checkpoint.reader import open_checkpoint
torch.set_num_threads(1)
checkpoint = open_checkpoint(sys.argv[1])
wide = torch.empty(1 << 18)
narrow = torch.empty(1 << 18, dtype=torch.float8_e4m3fn)
buffer = torch.empty(1 << 19, dtype=torch.uint8)
print("ready", flush=True); sys.stdin.readline(); began = time.process_time()
with open(sys.argv[1], "rb", buffering=0) as source, open(sys.argv[2], "wb", buffering=0) as out:
    for info in checkpoint.tensors.values():
        for start in range(info.start, info.end, 1 << 19):
            size = min(1 << 19, info.end - start)
            source.seek(start)
            source.readinto(memoryview(buffer.numpy())[:size])
            values = buffer[:size].view(info.dtype)
            torch.aminmax(values)
            codes = narrow[: values.numel()].copy_(values)
            out.write(codes.view(torch.uint8).numpy())
print(time.process_time() - began, 0, flush=True); sys.stdin.readline()
"""

_OURS = """
import json, sys, time, torch
from torch import nn
from quant_core import QuantizeConfig
from quant_core.checkpoint.hashing import digest
from quant_core.cli import parse_options
from quant_core.convert import convert
from quant_core.plan import plan
recipe = QuantizeConfig(method=sys.argv[3], backend_config_kwargs=parse_options(sys.argv[4:]))
recipe.backend.create_quantized_linear(nn.Linear(512, 512, dtype=torch.bfloat16)); digest(b"")
print("ready", flush=True); sys.stdin.readline(); began = time.process_time()
planned = plan(sys.argv[1], recipe)
report = convert(planned, sys.argv[2])
assert report.bytes_after == planned.file_bytes
print(time.process_time() - began, planned.peak_bytes / 1e6, flush=True); sys.stdin.readline()
"""


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process now; Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measure(code: str, *arguments: str) -> tuple[float, float, float, float]:
    """Return ``(CPU seconds, wall seconds, peak anonymous MB, planned MB)`` of a case, all beyond its imports."""
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"{arguments} failed")
    base = peak = anonymous_bytes(process.pid)
    running = True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    process.stdin.write("\n")
    process.stdin.flush()
    result = process.stdout.readline().split()
    wall = time.perf_counter() - began
    running = False
    watcher.join()
    process.communicate("\n")
    if process.returncode or not result:
        raise RuntimeError(f"{arguments} failed")
    cpu, planned = map(float, result)
    return cpu, wall, (peak - base) / 1e6, planned


def measure_peer(command: list[str]) -> float:
    """Return the CPU seconds of a foreign command, its imports included."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time and memory of converting, against the floor.")
    parser.add_argument("file", nargs="?", type=Path, help="a bf16 checkpoint; made when it is left out")
    parser.add_argument("--size", type=float, default=2.0, metavar="GB")
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas; options after a space")
    parser.add_argument("--peers", action="store_true", help="also convert_to_quant, where it is installed (slow)")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    with tempfile.TemporaryDirectory() as folder:
        source = options.file
        if source is None:
            from make_checkpoint import write_checkpoint

            source = Path(folder) / "source.safetensors"
            write_checkpoint(source, options.size, options.width)
        out = str(Path(folder) / "out.safetensors")
        gigabytes = source.stat().st_size / 1e9
        print(f"{source.name}: {gigabytes:.2f} GB")
        print(f"{'case':40} {'CPU s/GB':>9} {'wall s/GB':>9} {'x floor':>8} {'peak MB':>8} {'planned':>8}")
        floor = 0.0
        for case in ("floor", *options.methods.split(","), "floor"):
            method, *extra = case.split()
            arguments = [str(source), out] + ([] if case == "floor" else [method, *extra])
            cpu, wall, peak, planned = measure(_FLOOR if case == "floor" else _OURS, *arguments)
            floor = floor or cpu
            ratio = cpu / floor
            print(
                f"{case:40} {cpu / gigabytes:9.2f} {wall / gigabytes:9.2f} {ratio:8.2f} {peak:8.1f} {planned:8.1f}",
                flush=True,
            )
        if options.peers:
            peer = ["convert_to_quant", "-i", str(source), "-o", out, "--simple", "--comfy_quant"]
            try:
                cpu = measure_peer(peer)
                print(f"{'convert_to_quant --simple (fp8)':40} {cpu / gigabytes:9.2f} {'':9} {cpu / floor:8.2f}")
            except (OSError, subprocess.CalledProcessError) as error:
                print(json.dumps({"peer": "convert_to_quant", "skipped": str(error)}))


if __name__ == "__main__":
    main()
