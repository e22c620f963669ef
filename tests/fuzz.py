"""Runs damaged checkpoints through everything that reads one: ``python tests/fuzz.py [HEADERS] [BODIES] [FIRST]``.

Every case must end with a result, or with an error that quant_core raises on purpose, within 5 seconds and 200 MB.
A case is its number: the same number makes the same file. Cases run in a process of their own, which a hang or a crash
ends; the next process goes on with the case after it. Each failure is printed; the exit code is 1 if there was any.
"""

import faulthandler
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).absolute().parent
SECONDS, MEGABYTES = 5, 200
HEADERS, BODIES = 5000, 1000


def run_cases(cases, folder):
    """Run ``(kind of damage, number)`` cases; return the failures, and how many files could be read."""
    folder = Path(folder)
    (folder / "cases.json").write_text(json.dumps(cases))
    done, failures, opened = 0, [], 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    while done < len(cases):
        command = [sys.executable, str(HERE / "fuzz.py"), "--child", str(folder), str(done)]
        result = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True, timeout=3000)
        if "ready" not in result.stdout:
            raise RuntimeError(f"the good files already fail:\n{result.stderr[-3000:]}")
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
        failures += [(cases[number], problem) for number, problem, _ in lines if problem]
        opened += sum(could_be for *_, could_be in lines)
        done += len(lines)
        if result.returncode or not lines:
            if done < len(cases):
                failures.append((cases[done], f"ended the process ({result.returncode}): {result.stderr[-1500:]}"))
            done += 1
    return failures, opened


# ------------------------------------------------------------------ in the child


def child(folder, first):
    import logging

    import torch
    from fuzz_seeds import write_seeds

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    seeds_folder = folder / "seeds"
    if seeds_folder.exists():
        seeds = {kind: Path(path) for kind, path in json.loads((folder / "seeds.json").read_text()).items()}
    else:
        seeds_folder.mkdir()
        seeds = write_seeds(seeds_folder)
        (folder / "seeds.json").write_text(json.dumps({kind: str(path) for kind, path in seeds.items()}))
    for seed in seeds.values():  # libraries are imported, and buffers have their size, before memory is measured
        with tempfile.TemporaryDirectory() as place:
            problem, opened = _examined(seed, seeds["float"], Path(place))
            assert opened and not problem, f"{seed}: {problem}"
    limit = _Memory()
    print("ready", flush=True)
    for number, (damage, case) in enumerate(json.loads((folder / "cases.json").read_text())[first:], first):
        print(json.dumps([number, *_run(damage, case, seeds, limit)]), flush=True)


def _run(damage, case, seeds, memory):
    import fuzz_mutations

    chosen = random.Random(f"{damage} {case}")
    kind = chosen.choice(list(seeds))
    with tempfile.TemporaryDirectory() as place:
        path = getattr(fuzz_mutations, f"mutate_{damage}")(chosen, kind, seeds[kind], place)
        memory.start()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        began = time.perf_counter()
        problem, opened = _examined(path, seeds["float"], Path(place))
        faulthandler.cancel_dump_traceback_later()
        seconds, used = time.perf_counter() - began, memory.used()
    if seconds > SECONDS or used > MEGABYTES:
        problem += f"{seconds:.1f} s, {used:.0f} MB"
    return problem and f"{kind}: {problem}", opened


def _examined(path, source, folder):
    """Do all that can be done with a checkpoint; return what was wrong, and whether it could be read."""
    import traceback

    from fuzz_seeds import INT8, small_model

    from quant_core import CheckpointError, QuantizationError, QuantizeConfig, load_quantized_model
    from quant_core.checkpoint import open_checkpoint
    from quant_core.checkpoint.formats import dequantize_layer, stored_layers
    from quant_core.checkpoint.recognize import recognize_layers
    from quant_core.convert import convert
    from quant_core.doctor import doctor, repair
    from quant_core.plan import plan
    from quant_core.verify import verify

    def every_layer():
        checkpoint = open_checkpoint(path)
        for layer in stored_layers(checkpoint).values():
            dequantize_layer(checkpoint, layer, slice(0, 64))
            dequantize_layer(checkpoint, layer)

    def every_tensor():
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)

    def planned_and_converted():
        made = plan(path, QuantizeConfig(method=INT8), requantize=True)
        made.to_json()
        convert(made, folder / "converted" / "out.safetensors", threads=1)

    def examined():
        report = doctor(path)
        json.dumps(report.to_dict())
        if report.repairable:
            repair(path, folder / "repaired.safetensors", report)

    ours = (CheckpointError, QuantizationError, OSError)
    steps = {
        "read": (every_tensor, ours),
        "recognize": (lambda: recognize_layers(open_checkpoint(path)), ours),
        "dequantize": (every_layer, ours),
        "plan and convert": (planned_and_converted, ours),
        "doctor": (lambda: doctor(path), ()),
        "repair": (examined, (CheckpointError, ValueError)),
        "verify": (lambda: verify(path, source), ours),
        "load": (lambda: load_quantized_model(small_model(), path), ours),
    }
    problems, opened = [], True
    for name, (step, allowed) in steps.items():
        try:
            step()
        except allowed:
            opened = opened and name != "read"
        except Exception as error:  # whatever it is, it is the finding
            if type(error) is ValueError and "name the layers to quantize" in str(error):
                continue  # a plan of nothing
            problems.append(f"{name}: {traceback.format_exc()[-1200:]}")
    return "\n".join(problems), opened


class _Memory:
    """The peak of this process's memory over what it was; nothing where the system does not tell it (Linux does)."""

    def __init__(self):
        self.status = Path("/proc/self/status")
        self.before = 0.0
        if self.status.exists():
            import resource

            # Memory that is asked for and never touched shows in no peak: a limit makes it an error.
            limit = (self._read("VmSize") + 3 * MEGABYTES) * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (int(limit), resource.RLIM_INFINITY))

    def start(self):
        if self.status.exists():
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.before = self._read("VmRSS")

    def used(self):
        return self._read("VmHWM") - self.before if self.status.exists() else 0.0

    def _read(self, key):
        line = next(line for line in self.status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) / 1024


def all_cases(headers, bodies, first=0):
    return [["header", first + n] for n in range(headers)] + [["body", first + n] for n in range(bodies)]


def main(arguments):
    if arguments[:1] == ["--child"]:
        faulthandler.enable()
        child(Path(arguments[1]), int(arguments[2]))
        return 0
    headers, bodies, first = (int(a) if a else b for a, b in itertools.zip_longest(arguments, (HEADERS, BODIES, 0)))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        failures, opened = run_cases(all_cases(headers, bodies, first), folder)
    for case, problem in failures:
        print(case, problem, "\n")
    seconds = time.perf_counter() - began
    print(f"{headers + bodies} cases in {seconds:.0f} s: {opened} could be read, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
