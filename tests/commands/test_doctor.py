from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from slipstream.checkpoints.hub import ALIASES, DEFAULT_MODEL
from slipstream.commands import doctor
from tests.commands.run_cli import RunCli


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probe starts a process for each type, which imports torch."""
    monkeypatch.setattr("slipstream.device.cpu.dtype_works", lambda dtype: dtype != "bfloat16")


def report_of(cli: RunCli) -> dict[str, dict[str, str]]:
    report = json.loads(cli("doctor", "--json").out)
    return {finding["name"]: finding for finding in report["findings"]}


def test_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    split = [re.fullmatch(r"([\w-]+)(.*)", requirement) for requirement in project["dependencies"]]
    assert {match[1]: match[2] for match in split if match} == doctor.REQUIRED
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.MIN_PYTHON))


def test_table_ends_with_a_verdict(cli: RunCli) -> None:
    outcome = cli("doctor")
    assert outcome.code == 0
    assert outcome.err == ""
    assert outcome.out.splitlines()[-1] == "Ready: models run on cpu."
    for name in ("python", "torch", "cpu", "bfloat16", "attention: reference", "gpu", "cache", DEFAULT_MODEL):
        assert name in outcome.out


def test_findings(cli: RunCli) -> None:
    findings = report_of(cli)
    assert findings["torch"]["status"] == "ok"
    assert findings["attention: reference"]["status"] == "ok"
    assert findings["bfloat16"]["status"] == "note"
    assert "float32" in findings["bfloat16"]["fix"]
    assert findings["float16"]["status"] == "ok"
    assert "cpu is used" in findings["gpu"]["fix"]
    assert "slipstream generate" in findings[f"model {DEFAULT_MODEL}"]["fix"]


def test_default_model_in_the_cache(cli: RunCli) -> None:
    alias = ALIASES[DEFAULT_MODEL]
    alias.path.parent.mkdir(parents=True)
    with alias.path.open("wb") as file:
        file.truncate(alias.source.fingerprint.size)
    assert report_of(cli)[f"model {DEFAULT_MODEL}"]["status"] == "ok"


def test_missing_package_is_exit_code_1_and_says_how_to_get_it(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.REQUIRED, "no-such-package", ">=1.0")
    monkeypatch.setitem(doctor.REQUIRED, "torch", ">=99,<=100")
    outcome = cli("doctor", "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 1
    assert report["can_run"] is False
    assert "pip install 'no-such-package>=1.0'" in report["verdict"]
    assert "pip install 'torch>=99,<=100'" in report["verdict"]


def test_a_package_the_engine_can_spare_is_a_note(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.REQUIRED, "no-such-package", ">=1.0")
    monkeypatch.setitem(doctor.SPARED, "no-such-package", "nothing of note works")
    outcome = cli("doctor", "--json")
    report = json.loads(outcome.out)
    assert outcome.code == 0 and report["can_run"]
    assert "nothing of note works" in outcome.out and "pip install 'no-such-package>=1.0'" in outcome.out


def test_broken_torch_is_a_finding(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slipstream.device.cpu", None)
    outcome = cli("doctor", "--json")
    assert outcome.code == 1
    assert "import torch" in [finding["name"] for finding in json.loads(outcome.out)["findings"]]


def test_a_gpu_that_cannot_be_used_says_why(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_names", lambda: ["NVIDIA H200"])
    finding = report_of(cli)["gpu"]
    assert finding["status"] == "note"
    assert "NVIDIA H200" in finding["detail"]
    assert "a torch built for it" in finding["detail"]


def test_cache_that_cannot_be_written(cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file" / "cache"))
    assert "SLIPSTREAM_CACHE" in report_of(cli)["cache"]["fix"]


@pytest.mark.parametrize(
    ("version", "expected", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<=2.13.0", True),
        ("2.13.1", ">=2.11,<=2.13.0", False),
        ("2.11", ">=2.11,<=2.13.0", True),
        ("2.9.1", ">=2.11,<=2.13.0", False),
        ("2.12.0rc1", ">=2.11,<=2.13.0", True),
        ("13", ">=13", True),
        ("unknown", ">=1", False),
    ],
)
def test_satisfies(version: str, expected: str, fits: bool) -> None:
    assert doctor.satisfies(version, expected) is fits
