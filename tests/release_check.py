"""Builds sdist and wheel, checks what is in them, installs the wheel into a new environment and runs it.

PIP_ARGS="..." python -m tests.release_check [--no-run]

``--no-run`` stops before the installation, which downloads torch unless pip has it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"


def tracked(*patterns: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\n")) - {""}


def wheel_faults(names: Sequence[str], metadata: str, package: set[str], version: str) -> list[str]:
    """What is wrong with a wheel of these files."""
    there = {name for name in names if ".dist-info/" not in name}
    faults = [f"the wheel lacks {name}" for name in sorted(package - there)]
    faults += [f"the wheel has {name}, which is not part of the package" for name in sorted(there - package)]
    wanted = (f"Version: {version}", "License-Expression: Apache-2.0", "Classifier: Typing :: Typed")
    return faults + [f"the wheel's metadata lacks '{line}'" for line in wanted if line not in metadata.split("\n")]


def sdist_faults(names: Sequence[str], expected: set[str]) -> list[str]:
    there = {name.partition("/")[2] for name in names}
    return [f"the source distribution lacks {name}" for name in sorted(expected - there)]


def build() -> tuple[Path, Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True, stdout=sys.stderr)
    return next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))


def check(wheel: Path, sdist: Path) -> list[str]:
    from slipstream import __version__

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    faults = wheel_faults(names, metadata, tracked("slipstream"), __version__)
    with tarfile.open(sdist) as tar:
        return faults + sdist_faults(
            tar.getnames(), tracked("slipstream", "tests", "examples", "Makefile", "README.md", "LICENSE")
        )


def run(wheel: Path) -> None:
    """In an environment of its own, from a folder where no checkout is."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        python = Path(folder) / "venv" / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", *shlex.split(os.environ.get("PIP_ARGS", ""))]
        subprocess.run([*install, str(wheel)], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        question = ["generate", "What is the capital of France?", "--max-tokens", "12"]
        for words in (["--version"], ["doctor"], question):
            print("slipstream", *words, flush=True)
            command = [str(python.with_name("slipstream")), *words]
            subprocess.run(command, check=True, cwd=folder, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-run", action="store_true", help="build and check only")
    options = parser.parse_args()
    wheel, sdist = build()
    faults = check(wheel, sdist)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        return 1
    for path in (wheel, sdist):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 2**20:.1f} MiB")
    if not options.no_run:
        run(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
