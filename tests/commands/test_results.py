from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from slipstream.commands import results
from slipstream.commands.results import collect_results, prepare_folder, slug, write_results
from slipstream.errors import ConfigError

ROW = {"case": "tiny", "batch": 1, "tok_s": 2.5, "k": 3, "accepted_len": 2.6}


def test_files_are_named_and_never_overwritten(tmp_path: Path) -> None:
    run = collect_results([ROW])
    paths = [write_results(run, tmp_path, "tiny+ngram") for _ in range(3)]
    assert len(set(paths)) == 3
    date = run.date[:19].replace(":", "-")
    assert paths[0].name == f"{date}-tiny+ngram-{slug(run.hardware)}.json"
    for path in paths:
        assert json.loads(path.read_text())["rows"] == [ROW]


def test_commit_is_the_checkouts() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert collect_results([]).commit == (done.stdout.strip() if done.returncode == 0 else None)


def test_no_git_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: str) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(results, "_git", missing)
    assert collect_results([ROW]).commit is None


def test_row_without_its_batch_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="lacks batch"):
        collect_results([{"case": "tiny"}])


def test_prepared_folder_is_empty_and_writable(tmp_path: Path) -> None:
    assert list(prepare_folder(tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --output-dir"):
        prepare_folder(tmp_path / "file" / "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("NVIDIA H200", "nvidia-h200"), ("Intel Xeon, 2 cores", "intel-xeon-2-cores"), ("a+B 3.1", "a+b-3.1")],
)
def test_slug(text: str, expected: str) -> None:
    assert slug(text) == expected
