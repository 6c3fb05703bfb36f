"""Case by case: which model is damaged, in which file, and how. A case is a seed and a number, and nothing else."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.corruption.gguf_image import damage_gguf
from tests.corruption.json_documents import damage_json
from tests.corruption.raw_bytes import damage_bytes
from tests.corruption.safetensors_image import damage_safetensors

Damage = Callable[[random.Random, bytes], tuple[bytes, str]]


class Target(NamedTuple):
    """A file of one of the tiny models, and the speculation that has it read where it belongs to a head."""

    model: str
    file: str  # empty where the model is one file
    method: str = ""
    head: str = ""


_FOLDERS = ("llama", "yarn", "dynamic", "qwen2", "gemma3", "phi3", "qwen3-next")
_TOKENIZERS = ("byte-level", "byte-fallback", "unigram", "word-piece", "word-level")
_TEXTS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SHARD = "model-00002-of-00008.safetensors"
# Groups are drawn first, so that each kind of file has its share.
GROUPS: dict[str, list[Target]] = {
    "gguf": [Target(f"{name}.gguf", "") for name in ("llama", "llama", "qwen3", "mixtral", "gemma3", "phi3-longrope")],
    "config": [Target(name, "config.json") for name in (*_FOLDERS, "qwen3-moe")],
    "tokenizer": [
        *(Target(f"llama-{name}", "tokenizer.json") for name in _TOKENIZERS),
        *(Target("llama", file) for file in _TEXTS),
    ],
    "safetensors": [
        *(Target(name, "model.safetensors") for name in ("llama", "phi3", "qwen3-next")),
        Target("qwen3-moe", "model.safetensors.index.json"),
        Target("qwen3-moe", _SHARD),
    ],
    "head": [
        Target("mtp", "config.json", "mtp"),
        Target("mtp", "model.safetensors", "mtp"),
        Target("mtp", "config.json", "eagle3", "eagle3-head"),
        Target("mtp", "model.safetensors", "eagle3", "eagle3-head"),
        Target("mtp", "config.json", "eagle", "eagle-head"),
        Target("mtp", "config.json", "eagle", "speculators-head"),
        Target("mtp", "pytorch_model.bin", "eagle", "eagle-head"),
    ],
}
# The length of the context is the one number that no tensor bears out, and a cache is as large as it, up to a share of
# memory: it gets a size of its own. That recurrent layers refuse prefix caching is a line that is no error.
_OPTIONS = ("--kv-cache-memory-bytes", str(1 << 24), "--no-enable-prefix-caching")
_SHARES = {"gguf": 35, "config": 25, "tokenizer": 15, "safetensors": 15, "head": 10}


class Case(NamedTuple):
    arguments: list[str]
    note: str  # which file, and what was done to it


def make_case(models: Path, work: Path, seed: int, number: int) -> Case:
    """Write the damaged model to ``work``, which must be empty, and say what to run."""
    rng = random.Random(f"{seed} {number}")
    group = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    target = rng.choice(GROUPS[group])
    model = models / target.model
    if not target.file:
        path = work / "model.gguf"
        damaged, note = _draw_damage(rng, model.name)(rng, model.read_bytes())
        path.write_bytes(damaged)
        return Case(_arguments(path), f"{model.name}: {note}")
    is_head = bool(target.head)
    source = models / target.head if is_head else model
    folder = work / "damaged"
    shutil.copytree(source, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    file = folder / target.file
    content = file.read_bytes()
    file.unlink()
    damaged, note = _draw_damage(rng, target.file)(rng, content)
    file.write_bytes(damaged)
    return Case(_arguments(model if is_head else folder, target.method, folder), f"{source.name}/{target.file}: {note}")


def intact_arguments(models: Path, target: Target) -> list[str]:
    """To run the model before any damage is done to it."""
    return _arguments(models / target.model, target.method, models / target.head)


def _arguments(model: Path, method: str = "", head: Path | None = None) -> list[str]:
    arguments = ["generate", "hello", "--model", str(model), "--max-tokens", "3", *_OPTIONS]
    if not method:
        return arguments
    config = {"method": method, "num_speculative_tokens": 2}
    return [
        *arguments,
        "--speculative-config",
        json.dumps(config if method == "mtp" else {**config, "model": str(head)}),
    ]


def _draw_damage(rng: random.Random, file: str) -> Damage:
    """To the bytes in three of ten cases, and where nothing is known of their meaning; else to what they mean."""
    if rng.random() < 0.3 or file.endswith(".bin"):
        return damage_bytes
    if file.endswith(".gguf"):
        return damage_gguf
    return damage_safetensors if file.endswith(".safetensors") else _damage_text


def _damage_text(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    text, note = damage_json(rng, content.decode())
    return text.encode(), note
