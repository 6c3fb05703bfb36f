"""Files with a known checksum: hashed once, then trusted, and downloaded by one process at a time.

A sidecar ``<file>.verified`` records the size, the modification time and the checksum of a file that was hashed. While
size and time stay the same the file is not read again, so the second start costs nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system; see exclusive()
    fcntl = None  # type: ignore[assignment]

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Fingerprint:
    """The expected size and checksum of a file."""

    size: int
    sha256: str


def is_verified(path: Path, expected: Fingerprint, sidecar: Path | None = None) -> bool:
    """Whether the file is the expected one. Reads it only if the sidecar does not confirm it, and then writes that.

    ``sidecar`` is given for files in folders that may be read-only.
    """
    sidecar = sidecar or sidecar_of(path)
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != expected.size:
        return False
    record = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": expected.sha256}
    if _read_record(sidecar) == record:
        return True
    if sha256_of(path) != expected.sha256:
        return False
    # A folder that cannot be written to only costs another hash at the next start.
    with contextlib.suppress(OSError):
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        sidecar.write_text(json.dumps(record), encoding="utf-8")
    return True


def sidecar_of(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _read_record(sidecar: Path) -> object:
    try:
        return json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def exclusive(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold ``lock`` against other processes; ``on_wait`` is called once if another one holds it already.

    The kernel drops the lock with its process, so there is no stale lock to detect. Where the system or the file
    system has no such locks two processes may fetch the same file twice; the final rename still makes that safe.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:
                pass
        yield
    finally:
        os.close(descriptor)
