"""The journal of a conversion: a file beside the temporary one, from which a later run continues.

Its first line says what is being written from what; every further line names a tensor that is complete, with the
BLAKE3 of its bytes. Lines are added after the bytes, and the bytes are compared before a run builds on them: neither
the order in which a disk writes nor a torn last line matters.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError

logger = logging.getLogger("quant_core")


def journal_path(destination: Path) -> Path:
    """Return the name of the journal of a conversion to ``destination``."""
    return destination.with_name(f".{destination.name}.journal")


def partial_path(file: Path) -> Path:
    """Return the name that a file of a conversion has until it is complete."""
    return file.with_name(f".{file.name}.partial")


class Journal:
    """The open journal of one conversion; nobody else writes to its destination meanwhile.

    Args:
        destination: what is being written.
        identity: ``{"version": ..., "plan": hash, "source": [[file name, size, mtime], ...]}``.
        partials: the temporary files.
        resume: continue what an earlier run left, if it left anything.

    Attributes:
        done: ``{tensor name: digest}`` of what the earlier run completed; empty for a new conversion.

    Raises:
        CheckpointError: another process is writing to the destination, or what the earlier run left is of another
            source, plan or version.
    """

    def __init__(self, destination: Path, identity: Mapping[str, Any], partials: Sequence[Path], resume: bool) -> None:
        self.path = journal_path(destination)
        self.done: dict[str, str] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = self.path.exists()
        self._file: BinaryIO = open(self.path, "r+b" if found else "w+b", buffering=0)  # noqa: SIM115 -- see close
        try:
            _lock(self._file, destination)
            head = {**identity, "partials": [p.name for p in partials]}
            if found and resume and self._read(destination, head):
                return
            if found:
                self._remove_left_behind(destination)
            self._file.seek(0)
            self._file.truncate()
            for partial in partials:
                partial.unlink(missing_ok=True)
            self._add(head)
        except BaseException:
            self._file.close()
            raise

    def _read(self, destination: Path, head: Mapping[str, Any]) -> bool:
        """Take over the lines of an earlier run; False when not even its first line was completed."""
        lines = self._file.read().split(b"\n")
        torn = lines.pop()
        try:
            before, *entries = [json.loads(line) for line in lines]
        except ValueError:
            return False
        for key, what in (
            ("version", "it was begun by another version of quant_core"),
            ("source", "the source is another one or was changed"),
            ("plan", "the plan is another one (method, options or layers)"),
            ("partials", "it was divided into other shards"),
        ):
            if before.get(key) != head[key]:
                raise CheckpointError(
                    f"{destination} cannot be resumed: {what} (found {_short(before.get(key))}, expected "
                    f"{_short(head[key])}). Start again without resuming, which removes what was written"
                )
        self.done = {name: digest for name, digest in entries}
        self._file.seek(-len(torn), os.SEEK_END)
        self._file.truncate()
        return True

    def _remove_left_behind(self, destination: Path) -> None:
        self._file.seek(0)
        names = []
        with contextlib.suppress(ValueError):
            names = json.loads(self._file.readline()).get("partials", [])
        removed = 0
        for name in names:
            partial = destination.with_name(Path(str(name)).name)
            if partial.name.endswith(".partial") and partial.exists():
                removed += partial.stat().st_size
                partial.unlink()
        logger.warning("removed %d MB that an interrupted conversion to %s had left", removed >> 20, destination)

    def record(self, name: str, digest: str) -> None:
        """Note that a tensor is complete."""
        self._add([name, digest])

    def _add(self, line: Any) -> None:
        data = json.dumps(line).encode("utf-8") + b"\n"
        if self._file.write(data) != len(data):
            raise OSError(28, f"no space left for {self.path}")

    def close(self) -> None:
        """Close the journal and leave it for a later run."""
        self._file.close()

    def remove(self) -> None:
        """Delete the journal: the conversion is complete, or is not to be continued."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _lock(file: BinaryIO, destination: Path) -> None:
    try:
        if sys.platform == "win32":
            import msvcrt

            # A byte far behind the content: a locked byte cannot be read by others.
            file.seek(1 << 30)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise CheckpointError(f"{destination} is being written by another process; wait for it or end it") from error
