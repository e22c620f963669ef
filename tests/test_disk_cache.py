"""The disk cache: one process, several at once, killed ones, full disks, damaged files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quant_core import CheckpointError, disk_cache
from quant_core.checkpoint import CheckpointWriter
from quant_core.disk_cache import DiskCache, entry_key, file_identity

ROOT = Path(__file__).parent.parent
NBYTES = 100_000
LIMIT = 10 * NBYTES

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals, users and resource limits of POSIX")


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def write_file(path: Path, number: int, nbytes: int = NBYTES) -> None:
    """A file of exactly ``nbytes`` that says which entry it is, written by the rules of the format alone."""
    weight = random.Random(number).randbytes(nbytes - 200)
    header = json.dumps({"weight": {"dtype": "U8", "shape": [len(weight)], "data_offsets": [0, len(weight)]}})
    path.write_bytes((192).to_bytes(8, "little") + header.encode().ljust(192) + weight)


def put(cache: DiskCache, number: int, nbytes: int = NBYTES) -> Path | None:
    with cache.entry(key_of(number)) as path:
        if path is not None:
            write_file(path, number, nbytes)
    return cache.get(key_of(number))


def names(folder: Path) -> list[str]:
    """Everything in the folder, but for the lock that stays and the notes of use."""
    return sorted(path.name for path in folder.iterdir() if path.suffix not in (".lock", ".used"))


def held(cache: DiskCache) -> list[int]:
    """The numbers of the entries that are there, found without the cache's own reading."""
    return [number for number in range(50) if f"quantcore-{key_of(number)}.safetensors" in names(cache.folder)]


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache", LIMIT)


# ------------------------------------------------------------------ one process


def test_an_entry_comes_back(cache, tmp_path):
    assert cache.get(key_of(1)) is None and cache.size() == len(cache) == cache.clear() == 0
    assert not cache.folder.exists()
    path = put(cache, 1)
    write_file(tmp_path / "expected.safetensors", 1)
    assert path.read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert load_file(path)["weight"].shape == (NBYTES - 200,)  # the library takes what these tests write
    assert (cache.size(), len(cache)) == (NBYTES, 1)
    assert names(cache.folder) == [path.name]
    assert cache.get(key_of(2)) is None


def test_it_appears_when_it_is_complete(cache):
    with cache.entry(key_of(1)) as path:
        write_file(path, 1)
        assert cache.get(key_of(1)) is None and len(cache) == 0
        assert DiskCache(cache.folder, LIMIT).clear() == 0 and path.exists()
    assert cache.get(key_of(1)) is not None


def test_the_writer_of_checkpoints_leaves_nothing_else(cache):
    layout = {"a": (torch.float32, (4,)), "b": (torch.float32, (2,))}
    with cache.entry(key_of(1)) as path, CheckpointWriter(path, layout, {}, {"recipe": 1}) as writer:
        writer.write("a", torch.arange(4.0))
        writer.write("b", torch.ones(2))
    assert torch.equal(load_file(cache.get(key_of(1)))["a"], torch.arange(4.0))
    assert len(names(cache.folder)) == 1

    with pytest.raises(CheckpointError), cache.entry(key_of(2)) as path, CheckpointWriter(path, layout, {}, None) as w:
        w.write("a", torch.arange(4.0))  # b is missing
    assert held(cache) == [1] and len(names(cache.folder)) == 1


class Interrupt(BaseException):
    """Like the exception by which a user cancels a run."""


@pytest.mark.parametrize("exception", [Interrupt, RuntimeError, CheckpointError, KeyboardInterrupt])
def test_an_exception_passes_and_leaves_nothing(cache, exception):
    put(cache, 1)
    with pytest.raises(exception), cache.entry(key_of(2)) as path:
        write_file(path, 2)
        raise exception
    assert held(cache) == [1] and len(names(cache.folder)) == 1


def test_something_that_is_no_model_file_is_refused(cache):
    with pytest.raises(CheckpointError, match="not a safetensors file"), cache.entry(key_of(1)) as path:
        path.write_bytes(b"half" * 1000)
    assert names(cache.folder) == []


@pytest.mark.parametrize("size", [0, 5, 40, NBYTES - 1, NBYTES + 1])
def test_a_damaged_entry_is_never_returned_and_is_replaced(cache, size, caplog):
    path = put(cache, 1)
    whole = path.read_bytes()
    path.write_bytes((whole + b"x")[:size])
    assert cache.get(key_of(1)) is None
    assert path.name in caplog.text
    assert put(cache, 1) == path and path.read_bytes() == whole


@pytest.mark.parametrize("damage", ["a scale", "zeros after the header"])
def test_damaged_bytes_of_small_tensors_are_found(damage, cache, caplog):
    layout = {"weight": (torch.uint8, (NBYTES,)), "scale": (torch.float32, (4,))}

    def write():
        with cache.entry(key_of(1)) as path, CheckpointWriter(path, layout, {}, {"recipe": 1}) as writer:
            writer.write("weight", torch.arange(NBYTES).to(torch.uint8))
            writer.write("scale", torch.arange(1.0, 5.0))
        return cache.get(key_of(1))

    path = write()
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    end = start + json.loads(whole[8:start])["scale"]["data_offsets"][1]
    broken = whole[: end - 1] + b"\x7f" + whole[end:] if damage == "a scale" else whole[:start].ljust(len(whole), b"\0")
    assert len(broken) == len(whole)
    path.write_bytes(broken)
    assert cache.get(key_of(1)) is None
    assert f"{path}: tensor 'scale' is damaged" in caplog.text
    assert write() == path and path.read_bytes() == whole


def test_a_folder_in_the_place_of_an_entry(cache):
    (cache.folder / f"quantcore-{key_of(1)}.safetensors").mkdir(parents=True)
    assert put(cache, 1) is None
    assert put(cache, 2) is not None
    cache.clear()
    assert held(cache) == [1]


# ------------------------------------------------------------------ the limit


def test_the_least_recently_used_make_room(cache):
    for number in range(10):
        put(cache, number)
    assert held(cache) == list(range(10))
    assert cache.get(key_of(0)) and cache.get(key_of(3))  # used now
    put(cache, 10)
    assert held(cache) == [0, *range(2, 11)]
    put(cache, 11, 3 * NBYTES)
    assert held(cache) == [0, 3, 6, 7, 8, 9, 10, 11]
    assert cache.size() == LIMIT


def test_reading_an_entry_does_not_change_its_file(cache):
    path = put(cache, 1)
    before = path.stat()
    assert cache.get(key_of(1)) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


def test_room_is_made_before_writing_when_the_size_is_known(cache):
    for number in range(10):
        put(cache, number)
    with cache.entry(key_of(20), 4 * NBYTES) as path:
        assert held(cache) == [4, 5, 6, 7, 8, 9]
        write_file(path, 20, 4 * NBYTES)
    assert held(cache) == [4, 5, 6, 7, 8, 9, 20]


@pytest.mark.parametrize("nbytes", [0, NBYTES])
def test_replacing_a_damaged_entry_costs_no_other(cache, nbytes):
    for number in range(10):
        put(cache, number)
    path = cache.folder / f"quantcore-{key_of(5)}.safetensors"
    path.write_bytes(b"\xff" * NBYTES)
    with cache.entry(key_of(5), nbytes) as new:
        write_file(new, 5)
    assert held(cache) == list(range(10)) and cache.get(key_of(5)) is not None


def test_a_smaller_limit_holds_from_the_next_write_on(cache):
    for number in range(10):
        put(cache, number)
    smaller = DiskCache(cache.folder, 3 * NBYTES)
    with smaller.entry(key_of(20)) as path:
        assert held(smaller) == [7, 8, 9]
        write_file(path, 20)
    assert held(smaller) == [8, 9, 20]


def test_an_entry_larger_than_the_limit_is_not_kept(cache, caplog):
    put(cache, 1)
    with cache.entry(key_of(2), LIMIT + 1) as path:
        assert path is None
    assert "it takes 0.00 GB, the cache may take 0.00 GB" in caplog.text
    caplog.clear()
    assert put(cache, 3, LIMIT + NBYTES) is None  # found out when it was written
    assert "may take" in caplog.text
    assert held(cache) == [1] and len(names(cache.folder)) == 1


def test_an_entry_larger_than_the_disk_is_not_begun(cache, caplog):
    huge = DiskCache(cache.folder, 1 << 62)
    with huge.entry(key_of(1), 1 << 61) as path:
        assert path is None
    assert "the disk has" in caplog.text


def test_a_limit_of_zero_turns_it_off(cache):
    put(cache, 1)
    off = DiskCache(cache.folder, 0)
    assert off.get(key_of(1)) is None
    assert put(off, 2) is None
    assert held(cache) == []


def test_clear_says_what_it_freed_and_can_keep_some(cache):
    for number in range(5):
        put(cache, number)
    cache.get(key_of(0))
    assert cache.clear(keep_bytes=2 * NBYTES + 1) == 3 * NBYTES
    assert held(cache) == [0, 4]
    assert cache.clear() == 2 * NBYTES
    assert [path.name for path in cache.folder.iterdir()] == ["quantcore-cache.lock"]


def test_nothing_else_in_the_folder_is_touched(cache):
    cache.folder.mkdir()
    key = key_of(1)
    others = [
        "model.safetensors",
        f"quantcore-{key}.safetensors.bak",
        f"my-quantcore-{key}.safetensors",
        f"quantcore-{key[:-1]}.safetensors",
        "notes.used",
        f"{key}.writing",
    ]
    for name in others:
        (cache.folder / name).write_bytes(b"mine" * 100)
    (cache.folder / f"quantcore-{key}-{'0' * 16}.writing").write_bytes(b"a file, no folder")
    kept = names(cache.folder) + ["notes.used"]
    small = DiskCache(cache.folder, NBYTES)
    for number in range(3):
        put(small, number)
    small.clear()
    assert sorted(names(cache.folder) + ["notes.used"]) == sorted(kept)
    assert (cache.folder / "notes.used").exists()


# ------------------------------------------------------------------ the key


def test_the_key_depends_on_everything(tmp_path):
    source, lora = ("a", 10, 123, "00"), ("l", 5, 9, "11")
    base = {
        "sources": [source],
        "recipe": {"method": "m", "exclude_modules": ["x"]},
        "loras": [(lora, 1.0)],
        "compute_dtype": "torch.bfloat16",
        "versions": {"quant_core": "1", "torchao": None},
    }
    others = {
        "sources": [[("a", 10, 124, "00")], [("a", 11, 123, "00")], [("a", 10, 123, "01")], [source, source], []],
        "recipe": [{"method": "m"}, {"method": "m", "exclude_modules": ["y"]}],
        "loras": [[(lora, 0.5)], [], [(lora, 1.0), (source, 1.0)], [(source, 1.0), (lora, 1.0)]],
        "compute_dtype": ["torch.float16"],
        "versions": [{"quant_core": "2", "torchao": None}, {"quant_core": "1", "torchao": "1"}],
    }
    keys = [entry_key(**base)]
    keys += [entry_key(**{**base, name: value}) for name, values in others.items() for value in values]
    assert len(set(keys)) == len(keys) == 15
    assert all(len(key) == 64 for key in keys)
    again = {**base, "recipe": {"exclude_modules": ["x"], "method": "m"}}  # the order of a JSON object means nothing
    assert entry_key(**again) == keys[0]


def test_the_identity_of_a_file(tmp_path):
    file = tmp_path / "model.safetensors"
    data = bytearray(os.urandom(3_000_000))
    file.write_bytes(data)
    os.utime(file, ns=(1, 1_700_000_000_000_000_000))
    before = file_identity(file)
    assert before[:3] == ("model.safetensors", len(data), 1_700_000_000_000_000_000)
    assert file_identity(file) == before

    # A fine-tune of the same name, size and time: nearly every byte differs.
    file.write_bytes(bytes(byte ^ 1 for byte in data))
    os.utime(file, ns=(1, 1_700_000_000_000_000_000))
    assert file_identity(file)[:3] == before[:3] and file_identity(file) != before

    for position in (0, len(data) - 1):  # the first and the last byte are among the samples
        changed = bytearray(data)
        changed[position] ^= 1
        file.write_bytes(changed)
        os.utime(file, ns=(1, 1_700_000_000_000_000_000))
        assert file_identity(file) != before

    for size in (0, 1, 4096, 5000):
        file.write_bytes(data[:size])
        assert file_identity(file)[1] == size


# ------------------------------------------------------------------ disks


@posix
def test_a_folder_that_may_only_be_read(cache, tmp_path, caplog):
    path = put(cache, 1)
    path.chmod(0o644)
    cache.folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents):  # pytest's own folders are closed to others
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(parent.stat().st_mode | 0o055)
    try:
        with as_a_user():
            assert cache.get(key_of(1)) == path
            with cache.entry(key_of(2)) as new:
                assert new is None
            assert "is not kept in" in caplog.text and "Permission denied" in caplog.text
            with pytest.raises(PermissionError):
                cache.clear()
    finally:
        cache.folder.chmod(0o755)
    assert held(cache) == [1]


@contextlib.contextmanager
def as_a_user():
    """Not as root, who may write everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    cache = DiskCache(tmp_path / "file" / "cache", LIMIT)
    assert put(cache, 1) is None and cache.size() == cache.clear() == 0
    assert "is not kept in" in caplog.text


def test_an_error_of_the_disk_while_writing(cache, caplog):
    with cache.entry(key_of(1)) as path:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")
    assert "is not kept in" in caplog.text and "No space left" in caplog.text
    assert names(cache.folder) == []


# ------------------------------------------------------------------ several processes

PEER = """
import hashlib, json, logging, os, sys
from pathlib import Path
import numpy, torch
from safetensors.numpy import save
from quant_core.checkpoint import CheckpointWriter
from quant_core.disk_cache import DiskCache

logs = []
handler = logging.Handler()
handler.emit = lambda record: logs.append(record.getMessage())
logging.getLogger("quant_core").addHandler(handler)

def key_of(number):
    return hashlib.sha256(str(number).encode()).hexdigest()

def content(number, nbytes):
    return save({"weight": numpy.full(nbytes, number, dtype=numpy.uint8)})

def write(number, nbytes):
    with cache.entry(key_of(number), nbytes) as path:
        if path is not None:
            path.write_bytes(content(number, nbytes))

while line := sys.stdin.readline():
    folder, limit, code = json.loads(line)
    cache = DiskCache(Path(folder), limit)
    logs.clear()
    exec(code)
    print("done", flush=True)
"""


class Peer:
    """Another process that uses the cache. It runs what it is sent; its imports are made once."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", PEER], **pipes, text=True, env=environment, cwd=ROOT)

    def send(self, cache: DiskCache, code: str) -> None:
        self._write(json.dumps([str(cache.folder), cache.limit_bytes, code]))

    def go(self) -> None:
        """Let code that waits for a line continue."""
        self._write("go")

    def _write(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def peers():
    """A function that gives a number of peers, new ones in the place of those that a test killed."""
    alive: list[Peer] = []

    def get(count: int) -> list[Peer]:
        alive[:] = [peer for peer in alive if peer.process.poll() is None]
        alive.extend(Peer() for _ in range(count - len(alive)))
        return alive[:count]

    yield get
    for peer in alive:
        peer.kill()


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
with cache.entry(key_of(1)) as path:
    with CheckpointWriter(path, {"a": (torch.uint8, (100_000,))}, {}, None) as writer:
        writer.write("a", torch.zeros(100_000, dtype=torch.uint8))
with cache.entry(key_of(2)) as path:
    with open(path, "wb") as file:
        file.write(bytes(100_000))
assert cache.get(key_of(1)) is None and cache.get(key_of(2)) is None
write(3, 50_000)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print(len([text for text in logs if "is not kept in" in text and "File too large" in text]), flush=True)
"""


@posix
def test_a_full_disk(cache, peers):
    """A limit on the size of files acts like one: a write that fails, or is shorter than asked for."""
    (peer,) = peers(1)
    peer.send(cache, FULL)
    assert (peer.says(), peer.says()) == ("2", "done")
    assert held(cache) == [3] and len(names(cache.folder)) == 1


MANY = """
seen = kept = 0
for round in range(40):
    number = round % 6 if round % 2 else 10 + round % 5 + 10 * (cache.limit_bytes % 10)
    path = cache.get(key_of(number))
    if path is not None:
        try:
            assert path.read_bytes() == content(number, 50_000)
            seen += 1
        except FileNotFoundError:
            pass
    else:
        write(number, 50_000)
        kept += 1
assert logs == [], logs
print(seen, kept, flush=True)
"""


def test_two_processes_write_the_same_and_different_keys(tmp_path, peers):
    both = peers(2)
    for peer in both:
        peer.send(DiskCache(tmp_path / "cache", LIMIT), "pass")
        assert peer.says() == "done"  # its imports are made, so that both run at once
    for number, peer in enumerate(both):
        peer.send(DiskCache(tmp_path / "cache", 400_000 + number), MANY)
    for peer in both:
        seen, kept = map(int, peer.says().split())
        assert seen > 5 and kept > 5
        assert peer.says() == "done"
    entries = [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".safetensors"]
    assert 0 < sum(path.stat().st_size for path in entries) <= 400_001
    assert all(len(load_file(path)["weight"].unique()) == 1 for path in entries)
    assert names(tmp_path / "cache") == sorted(path.name for path in entries)


WAITING = """
with cache.entry(key_of(1)) as path:
    data = content(1, 100_000)
    with open(path, "wb") as file:
        file.write(data[:50_000])
        file.flush()
        Path(str(path) + ".tmp").write_bytes(b"x" * 1000)
        print("writing", flush=True)
        sys.stdin.readline()
        file.write(data[50_000:])
    os.unlink(str(path) + ".tmp")
"""


@pytest.fixture
def writer(cache, peers):
    """A process in the middle of writing entry 1."""
    (peer,) = peers(1)
    peer.send(cache, WAITING)
    assert peer.says() == "writing"
    return peer


def test_what_another_process_writes_is_left_alone(cache, writer):
    small = DiskCache(cache.folder, NBYTES)
    assert put(small, 2) is not None and small.clear() == NBYTES
    assert len(names(cache.folder)) == 1 and cache.get(key_of(1)) is None
    writer.go()
    assert writer.says() == "done"
    assert cache.get(key_of(1)) is not None and held(cache) == [1]


def test_both_write_the_same_key(cache, writer):
    first = put(cache, 1)
    inode, data = first.stat().st_ino, first.read_bytes()
    with open(first, "rb") as opened:  # as a model that runs from it
        writer.go()
        assert writer.says() == "done"
        assert opened.read() == data
    assert first.stat().st_ino == inode and len(names(cache.folder)) == 1


def test_what_a_killed_process_left_is_removed(cache, writer, tmp_path):
    writer.kill()
    (left,) = names(cache.folder)
    shutil.copytree(cache.folder / left, tmp_path / left)
    assert cache.get(key_of(1)) is None and cache.size() == 0
    assert put(cache, 2) is not None
    assert held(cache) == [2] and len(names(cache.folder)) == 1

    shutil.move(tmp_path / left, cache.folder / left)
    assert cache.clear() == NBYTES + 51_000
    assert names(cache.folder) == []


def test_a_process_that_never_lets_go(cache, peers, monkeypatch, caplog):
    put(cache, 1)
    monkeypatch.setattr(disk_cache, "_PATIENCE", 0.2)
    (peer,) = peers(1)
    peer.send(cache, "with cache._locked(): print('holding', flush=True); sys.stdin.readline()")
    assert peer.says() == "holding"
    assert cache.get(key_of(1)) is not None  # reading waits for nobody
    assert put(cache, 2) is None and "another process has held" in caplog.text
    with pytest.raises(TimeoutError, match=r"quantcore-cache\.lock"):
        cache.clear()
    peer.kill()
    assert put(cache, 2) is not None  # the lock went with the process


def test_two_threads(cache):
    """Locks are those of open files, not of the process."""
    barrier = threading.Barrier(2, timeout=30)

    def write(number):
        with cache.entry(key_of(number)) as path:
            barrier.wait()
            write_file(path, number)
            barrier.wait()

    threads = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held(cache) == [1, 2] and len(names(cache.folder)) == 2


@posix
def test_a_removed_entry_stays_readable_for_who_has_it_open(cache):
    path = put(cache, 1)
    expected = path.read_bytes()
    with open(path, "rb") as file:
        assert cache.clear() == NBYTES
        assert file.read() == expected


@pytest.mark.skipif(sys.platform != "win32", reason="only Windows refuses to remove an open file")
def test_an_entry_in_use_stays_on_windows(cache):
    paths = [put(cache, number) for number in (1, 2)]
    with open(paths[0], "rb"):
        assert cache.clear() == NBYTES
        assert held(cache) == [1]
    assert cache.clear() == NBYTES
