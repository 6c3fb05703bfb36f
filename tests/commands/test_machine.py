from __future__ import annotations

import subprocess

import pytest

from slipstream.commands import machine


def test_hardware_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", {"model name": "Intel(R) Xeon(R) CPU @ 2.10GHz"}.get)
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    assert machine.describe_hardware("cpu") == "Intel Xeon CPU @ 2.10GHz, 2 cores"
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    assert machine.describe_hardware("cuda") == "NVIDIA H200"
    assert machine.describe_hardware("cpu").startswith("Intel")


def test_unknown_processor_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: None)
    assert machine.cpu_name()
    assert machine.instruction_sets() == []


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = subprocess.CompletedProcess([], 0, stdout="NVIDIA H200\nNVIDIA H200\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: listing)
    assert machine.gpu_names() == ["NVIDIA H200", "NVIDIA H200"]


def test_no_driver_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert machine.gpu_names() == []
