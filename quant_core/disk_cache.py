"""Keeps quantized models on a disk, so that a model is quantized once and from then on read as a file.

Several processes may use one folder at the same time. An entry is a complete safetensors file under a name made from
everything that its bytes depend on; it appears in one step and is never changed. What is being written lies in a
folder of its own, whose lock file the writer holds: the system drops that lock when the process ends, however it
ends. An age or a heartbeat would tell dead from alive by clocks, and take a slow or suspended writer for a dead one.
Should a network file system not honour locks between machines, the worst is an entry that fails to appear.

Only names made here are ever removed, so that the folder may hold other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .checkpoint.hashing import digest
from .checkpoint.header import read_header
from .checkpoint.writer import CHECKSUM_LENGTH, METADATA_KEY, sync_folder
from .errors import CheckpointError

logger = logging.getLogger("quant_core")

Identity = tuple[str, int, int, str]
"""A file's name, size, modification time in ns, and a digest of samples of its bytes."""

_ENTRY = re.compile(r"quantcore-[0-9a-f]{64}\.safetensors")
_USED = re.compile(r"quantcore-[0-9a-f]{64}\.used")
_WRITING = re.compile(r"quantcore-[0-9a-f]{64}-[0-9a-f]{16}\.writing")
_FOLDER_LOCK = "quantcore-cache.lock"
_LOCK = "lock"
_FILE = "entry.safetensors"

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_SMALL_BYTES = 1 << 16
_PATIENCE = 20.0  # seconds; the folder's lock is held for as long as deleting some large files takes


def file_identity(path: str | os.PathLike[str]) -> Identity:
    """Return what tells a file from another one, or from its own earlier content, without reading all of it.

    Name, size and time are not enough: models of one architecture have the same size and often the same name, and
    archives, container images and some copying tools give many files one time.
    """
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        last = max(0, status.st_size - _SAMPLE_BYTES)
        digest = hashlib.sha256()
        for position in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            file.seek(position)
            digest.update(file.read(_SAMPLE_BYTES))
    return os.path.basename(path), status.st_size, status.st_mtime_ns, digest.hexdigest()


def entry_key(
    sources: Sequence[Identity],
    recipe: Mapping[str, Any],
    loras: Sequence[tuple[Identity, float]],
    compute_dtype: str,
    versions: Mapping[str, str | None],
) -> str:
    """Return the key of an entry: the SHA-256 of all that its bytes depend on, in hex.

    Args:
        sources: :func:`file_identity` of every file of the model.
        recipe: what ``Recipe.to_dict`` gives.
        loras: what is baked in, with its strength, in the order of baking.
        compute_dtype: by name.
        versions: of the code that makes the bytes: quant_core, and the library of each method.
    """
    parts = [sources, recipe, loras, compute_dtype, versions]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class DiskCache:
    """Quantized models in a folder, the least recently used of which make room for new ones.

    Args:
        folder: made when the first entry is written.
        limit_bytes: how much the entries may take together; 0 turns the cache off, and has the next write empty it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> Path | None:
        """Return the file of an entry, and note that it was used; None when there is no complete one.

        Another process may remove the file before it is opened: FileNotFoundError then means the same as None. A file
        that is open stays readable.
        """
        if self.limit_bytes <= 0 or not self._is_complete(self._path(key)):
            return None
        self._note_use(key)
        return self._path(key)

    @contextlib.contextmanager
    def entry(self, key: str, nbytes: int = 0) -> Iterator[Path | None]:
        """Write an entry: the block gets a path to write a safetensors file to, which the cache takes when it ends.

        The path is None where nothing can be kept: the folder cannot be written, or the entry is larger than the
        limit or the free space. A block that ends in an exception leaves nothing behind. An OSError, such as that of
        a full disk, is logged and not raised: a cache never fails the work that it is to save.

        Args:
            key: of the entry, from :func:`entry_key`.
            nbytes: what the file will take, as far as that is known. Room is made for it before it is written.

        Raises:
            CheckpointError: the block wrote something that is no complete safetensors file.
        """
        writing = self._begin(key, nbytes)
        if writing is None:
            yield None
            return
        try:
            yield writing.file
            self._publish(key, writing.file)
        except OSError as error:
            self._not_kept(error)
        finally:
            writing.remove()

    def size(self) -> int:
        """Return the bytes of all entries."""
        return sum(entry.size for entry in self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def clear(self, keep_bytes: int = 0) -> int:
        """Remove entries, the least recently used first, until they take ``keep_bytes`` at most.

        Returns:
            The bytes freed. An entry that a process on Windows has open stays.

        Raises:
            OSError: the folder cannot be written, or another process does not let go of it.
        """
        if not self.folder.is_dir():
            return 0
        with self._locked():
            return self._remove_stale() + self._evict(keep_bytes)

    # ------------------------------------------------------------------ writing

    def _begin(self, key: str, nbytes: int) -> _Writing | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._remove_stale()
                fits = self._fits(nbytes)
                self._evict(self.limit_bytes - nbytes if fits else self.limit_bytes, spare=key if fits else "")
                free = shutil.disk_usage(self.folder).free
                if fits and nbytes > free:
                    self._not_kept(f"it takes {_gb(nbytes)}, the disk has {_gb(free)} free")
                elif fits:
                    return _Writing(self.folder / f"quantcore-{key}-{secrets.token_hex(8)}.writing")
        except OSError as error:
            self._not_kept(error)
        return None

    def _publish(self, key: str, file: Path) -> None:
        """Give a complete file its name, in which no other process sees less than all of it."""
        nbytes = file.stat().st_size
        read_header(file)
        with open(file, "r+b") as opened:  # after a power failure the name must not stand for bytes that were not kept
            os.fsync(opened.fileno())
        with self._locked():
            if not self._fits(nbytes):
                return
            self._evict(self.limit_bytes - nbytes, spare=key)
            # Another process may have been faster, with the same bytes, and have its file open already.
            if not self._is_complete(self._path(key)):
                os.replace(file, self._path(key))
            self._note_use(key)
        sync_folder(self.folder)

    def _fits(self, nbytes: int) -> bool:
        if self.limit_bytes <= 0:
            logger.info("%s keeps nothing, its limit is 0", self.folder)
        elif nbytes > self.limit_bytes:
            self._not_kept(f"it takes {_gb(nbytes)}, the cache may take {_gb(self.limit_bytes)}")
        return 0 < self.limit_bytes >= nbytes

    def _not_kept(self, reason: object) -> None:
        logger.warning("the quantized model is not kept in %s, and will be quantized again: %s", self.folder, reason)

    # ------------------------------------------------------------------ entries

    def _path(self, key: str) -> Path:
        return self.folder / f"quantcore-{key}.safetensors"

    def _is_complete(self, path: Path) -> bool:
        try:
            _check_entry(path)
        except FileNotFoundError:
            return False
        except (CheckpointError, OSError) as error:
            logger.warning("an entry of the cache is not used: %s", error)
            return False
        return True

    def _note_use(self, key: str) -> None:
        # In a file beside the entry: whoever reads the entry takes a new modification time for a rewritten file, and
        # the access time is changed by every backup.
        used = self._path(key).with_suffix(".used")
        now = time.time_ns()
        with contextlib.suppress(OSError):  # a folder that may only be read serves all the same
            used.touch()
            os.utime(used, ns=(now, now))  # finer than the clock that touch() takes

    def _entries(self) -> list[_Entry]:
        """Return the entries, the least recently used first."""
        found = []
        for path in self._named(_ENTRY):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                used = status.st_mtime_ns
                with contextlib.suppress(FileNotFoundError):
                    used = path.with_suffix(".used").stat().st_mtime_ns
                found.append(_Entry(used, path, status.st_size))
        return sorted(found)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if pattern.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _evict(self, limit: int, spare: str = "") -> int:
        """Remove the least recently used entries until ``limit`` holds; the folder is locked. Returns the bytes freed.

        Args:
            limit: in bytes.
            spare: key of an entry that is to be replaced: it stays, and does not count.
        """
        entries = [entry for entry in self._entries() if entry.path != self._path(spare)]
        total, freed = sum(entry.size for entry in entries), 0
        for entry in entries:
            if total - freed <= limit:
                break
            try:
                entry.path.unlink()
            except OSError as error:  # Windows removes no file that a process has open
                logger.info("%s stays: %s", entry.path, error.strerror)
                continue
            entry.path.with_suffix(".used").unlink(missing_ok=True)
            logger.info("%s was removed from the cache (%s)", entry.path, _gb(entry.size))
            freed += entry.size
        return freed

    def _remove_stale(self) -> int:
        """Remove what processes that are gone were writing; the folder is locked. Returns the bytes freed."""
        freed = 0
        for folder in self._named(_WRITING):
            with contextlib.suppress(OSError):  # its writer is just removing it, or it is none of ours
                lock = _lock(folder / _LOCK)
                if lock is not None:
                    freed += _remove_folder(folder, lock)
                    logger.info("%s was removed: its writer ended before it was complete", folder)
        for used in self._named(_USED):
            if not used.with_suffix(".safetensors").exists():
                with contextlib.suppress(OSError):
                    used.unlink()
        return freed

    # ------------------------------------------------------------------ the folder's lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder: nobody else begins, publishes or removes anything meanwhile.

        Raises:
            TimeoutError: another process holds it for very long.
            OSError: the folder cannot be written.
        """
        deadline = time.monotonic() + _PATIENCE
        path = self.folder / _FOLDER_LOCK
        while (lock := _lock(path)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has held {path} for {_PATIENCE:.0f} seconds; end it or wait for it"
                )
            time.sleep(0.02)
        with lock:
            yield


@dataclass(frozen=True, order=True)
class _Entry:
    used: int
    path: Path
    size: int


class _Writing:
    """A folder for one entry that is being written, and whatever temporary files its writer puts beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / _FILE
        folder.mkdir()
        try:
            lock = _lock(folder / _LOCK)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        assert lock is not None  # the folder is new
        self._lock = lock

    def remove(self) -> None:
        try:
            _remove_folder(self.folder, self._lock)
        except OSError as error:  # a virus scanner may have it open; it is removed as stale later
            logger.info("%s stays for now: %s", self.folder, error)


def _check_entry(path: Path) -> None:
    """Read an entry's header, and compare its small tensors with the checksums that it holds of them.

    Markers and scales lie all over the file, so zeros that a power failure or a bad disk left are found without
    reading the weights, which would take as long as loading them.

    Raises:
        CheckpointError: it is no complete safetensors file, or has other bytes than were written.
        OSError: it cannot be read.
    """
    header = read_header(path)
    try:
        checksums = json.loads(header.metadata.get(METADATA_KEY, "{}")).get("checksums", {})
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: the entry {METADATA_KEY} of its metadata is damaged: {error}") from error
    with open(path, "rb") as file:
        for name, info in header.tensors.items():
            if name not in checksums or info.nbytes > _SMALL_BYTES:
                continue
            file.seek(info.start)
            if digest(file.read(info.nbytes))[:CHECKSUM_LENGTH] != checksums[name]:
                raise CheckpointError(f"{path}: tensor {name!r} is damaged: it has not the bytes that were written")


def _remove_folder(folder: Path, lock: BinaryIO) -> int:
    """Remove a folder of :class:`_Writing`, which has no folders in it. Returns the bytes freed."""
    lock.close()  # Windows removes no file that is open
    freed = 0
    for path in folder.iterdir():
        nbytes = path.stat().st_size
        path.unlink()
        freed += nbytes
    folder.rmdir()
    return freed


def _lock(path: Path) -> BinaryIO | None:
    """Lock a file, which is made if it is missing, until it is closed; None while somebody else has it.

    Raises:
        OSError: it cannot be made, or the file system has no locks.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115 -- it is the lock
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the second is what Windows says
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
