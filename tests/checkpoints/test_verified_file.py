"""Checksums that are computed once, and locks between processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.checkpoints.verified_file import Fingerprint, exclusive, is_verified


def test_sidecar_of_another_checksum_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    good = Fingerprint(3, hashlib.sha256(b"abc").hexdigest())
    assert is_verified(path, good)
    assert not is_verified(path, Fingerprint(3, "0" * 64))
    assert not is_verified(path, Fingerprint(4, good.sha256))
    assert not is_verified(tmp_path / "absent", good)
    (tmp_path / "f.verified").write_text("{corrupt")
    assert is_verified(path, good)


def test_the_lock_excludes_other_processes(tmp_path: Path) -> None:
    """Two real processes: the second one gets in only after the first is out, and says that it waits."""
    script = (
        "import sys, time, pathlib\n"
        "from slipstream.checkpoints.verified_file import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1]), on_wait=lambda: print('waits', flush=True)):\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        assert first.stdout and first.stdin and second.stdout and second.stdin
        # Whichever comes first holds it until told.
        holder, waiter = (first, second) if (line := first.stdout.readline()) == "in\n" else (second, first)
        assert line in ("in\n", "waits\n")
        assert holder.stdout and holder.stdin and waiter.stdout and waiter.stdin
        if holder is second:
            assert second.stdout.readline() == "in\n"
        else:
            assert waiter.stdout.readline() == "waits\n"
        holder.kill()  # a lock does not outlive its process, however that ends
        assert waiter.stdout.readline() == "in\n"
        waiter.stdin.write("\n")


def test_the_lock_is_freed_on_errors(tmp_path: Path) -> None:
    waited: list[bool] = []
    with pytest.raises(RuntimeError), exclusive(tmp_path / "lock", on_wait=lambda: waited.append(True)):
        raise RuntimeError
    with exclusive(tmp_path / "lock", on_wait=lambda: waited.append(True)):
        pass
    assert waited == []
