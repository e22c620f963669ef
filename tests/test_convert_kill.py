"""A conversion that is killed, or whose disk is full: never a bad file, and resuming gives the uninterrupted bytes."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
METHOD = "comfy_kitchen_fp8_w8a8"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and resource limits of POSIX")

_STUCK = 120  # seconds; a conversion here takes less than one

# The imports are made once: the children are forks, which is what makes many kills affordable.
_FORKS = """
import os, runpy, signal, sys
import torch
torch.set_num_threads(1)
import quant_core.cli
from quant_core import QuantizeConfig
QuantizeConfig(method=sys.argv[1]).backend.create_quantized_linear(torch.nn.Linear(64, 64))
for line in sys.stdin:
    limit, *arguments = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        if int(limit):
            import resource
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
        sys.argv = ["convert_process.py", *arguments]
        code = 0
        try:
            runpy.run_path(os.environ["CONVERT_PROCESS"])
        except OSError as error:
            print("oserror", error.errno, flush=True)
            code = 1
        except BaseException as error:
            print("failed", repr(error), flush=True)
            code = 3
        os._exit(code)
    # A child that is killed may leave half a line: these start on one of their own.
    print("\\npid", child, flush=True)
    print("\\nexit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Server:
    """Starts conversions as forks of one warm process."""

    def __init__(self):
        environment = {**os.environ, "CONVERT_PROCESS": str(HERE / "convert_process.py"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _FORKS, METHOD]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=HERE.parent,
            start_new_session=True,
        )

    def _stop(self):
        """Ends the process and its forks, so that whoever reads from them goes on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def run(self, source, out, resume=False, kill_after=None, limit=0, shard_size=None):
        """Return ``(exit code, lines)``; ``kill_after``: kill that many seconds after the start."""
        arguments = [str(limit), str(source), str(out), METHOD, str(resume)]
        arguments += [] if shard_size is None else [str(shard_size)]
        self.process.stdin.write("\t".join(arguments) + "\n")
        self.process.stdin.flush()
        lines = []
        watchdog = threading.Timer(_STUCK, self._stop)
        watchdog.start()
        try:
            return self._follow(lines, kill_after)
        finally:
            watchdog.cancel()

    def _follow(self, lines, kill_after):
        while True:
            text = self.process.stdout.readline()
            assert text, f"the server ended, or a conversion took {_STUCK} s; it said {lines}"
            line = text.strip()
            if line.startswith("pid") and kill_after is not None:
                time.sleep(kill_after)
                with contextlib.suppress(ProcessLookupError):  # it was done before
                    os.kill(int(line.split()[1]), signal.SIGKILL)
            if line.startswith("exit"):
                return int(line.split()[1]), lines
            if line:
                lines.append(line)


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.process.stdin.close()
    server.process.wait(30)
    server.process.stdout.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "source.safetensors"
    generator = torch.Generator().manual_seed(0)
    state = {}
    for i in range(24):
        state[f"blocks.{i}.up.weight"] = torch.randn(768, 1024, generator=generator).bfloat16()
        state[f"blocks.{i}.up.bias"] = torch.randn(768, generator=generator).bfloat16()
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def whole(server, source, tmp_path_factory):
    """``(bytes of the uninterrupted file, seconds that it took)``"""
    out = tmp_path_factory.mktemp("whole") / "o.safetensors"
    assert server.run(source, out)[0] == 0  # also waits for the server's imports
    began = time.perf_counter()
    assert server.run(source, out)[0] == 0
    return out.read_bytes(), time.perf_counter() - began


def killed_and_resumed(server, source, whole, folder, count, seed):
    """Kill at random moments of the whole time, resume, and compare: ``count`` times at least, and until a third of
    the kills came in the middle (the speed of a shared machine varies, and a run may be done before its kill)."""
    expected, seconds = whole
    out = folder / "o.safetensors"
    chosen = random.Random(seed)
    kills = in_the_middle = 0
    while kills < count or in_the_middle < count // 3:
        assert kills < 6 * count, f"only {in_the_middle} of {kills} kills came in the middle"
        kills += 1
        code, _ = server.run(source, out, resume=True, kill_after=chosen.uniform(0.0, 0.95) * seconds)
        assert code in (0, -9)
        assert not out.exists() or out.read_bytes() == expected  # it may have been done before the kill
        in_the_middle += (folder / ".o.safetensors.partial").exists()
        if code:
            assert server.run(source, out, resume=True)[0] == 0
        assert out.read_bytes() == expected
        assert [p.name for p in folder.iterdir()] == ["o.safetensors"]
        out.unlink()


def test_kill_and_resume(server, source, whole, tmp_path):
    killed_and_resumed(server, source, whole, tmp_path, 12, seed=0)


@pytest.mark.slow
def test_kill_and_resume_at_fifty_moments(server, source, whole, tmp_path):
    killed_and_resumed(server, source, whole, tmp_path, 50, seed=1)


def test_killed_twice(server, source, whole, tmp_path):
    out = tmp_path / "o.safetensors"
    for _ in range(3):
        server.run(source, out, resume=True, kill_after=whole[1] * 0.3)
    assert server.run(source, out, resume=True)[0] == 0
    assert out.read_bytes() == whole[0]


def test_killed_in_shards(server, source, whole, tmp_path):
    folders = [tmp_path / "whole", tmp_path / "killed"]
    assert server.run(source, folders[0] / "o.safetensors", shard_size=5_000_000)[0] == 0
    for moment in (0.2, 0.5, 0.8):
        server.run(
            source, folders[1] / "o.safetensors", resume=True, kill_after=whole[1] * moment, shard_size=5_000_000
        )
    assert server.run(source, folders[1] / "o.safetensors", resume=True, shard_size=5_000_000)[0] == 0
    a, b = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert a == b and "o.safetensors.index.json" in a and len(a) > 3


def full_disks(server, source, whole, folder, count, seed):
    chosen = random.Random(seed)
    out = folder / "o.safetensors"
    out.write_bytes(b"an older file")
    for _ in range(count):
        limit = chosen.randrange(3000, len(whole[0]))
        code, lines = server.run(source, out, limit=limit)
        assert code == 1 and lines[-1].startswith("oserror"), lines
        assert out.read_bytes() == b"an older file" and [p.name for p in folder.iterdir()] == ["o.safetensors"]


def test_full_disk(server, source, whole, tmp_path):
    """A limit on the size of files acts like a full disk: a write that fails, or is shorter than asked for."""
    full_disks(server, source, whole, tmp_path, 5, seed=2)


@pytest.mark.slow
def test_full_disk_at_twenty_moments(server, source, whole, tmp_path):
    full_disks(server, source, whole, tmp_path, 20, seed=3)


def test_full_disk_and_resume(server, source, whole, tmp_path):
    out = tmp_path / "o.safetensors"
    code, lines = server.run(source, out, resume=True, limit=len(whole[0]) // 2)
    assert code == 1 and not out.exists()
    code, lines = server.run(source, out, resume=True)
    assert code == 0 and out.read_bytes() == whole[0]
