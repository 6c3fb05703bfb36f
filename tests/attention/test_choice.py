from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.attention import choice
from slipstream.attention.backends.flashinfer_paths import NOT_INSTALLED
from slipstream.attention.choice import choose_backend, make_backend
from slipstream.config import EngineOptions, Hardware, ModelConfig
from slipstream.device.cpu import CpuDevice
from slipstream.engine.resolve import resolve
from slipstream.errors import ConfigError
from tests.test_config import CPU, MODEL

H200 = Hardware("cuda", 140 << 30, True, 141 << 30, (9, 0))


def test_auto_is_a_function_of_the_device() -> None:
    assert [choose_backend("auto", device).name for device in ("cpu", "cuda", "sim")] == ["cpu", "triton", "reference"]
    assert all(choose_backend("auto", device).reason for device in ("cpu", "cuda", "sim"))


@pytest.mark.parametrize(("asked", "device"), [("triton", "cpu"), ("flashinfer", "cpu"), ("cpu", "cuda")])
def test_what_does_not_run_here_is_refused(asked: str, device: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend {asked} does not run on {device}; use "):
        choose_backend(asked, device)


def test_flashinfer_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineOptions(attention_backend="flashinfer", max_model_len=64), H200, MODEL)
    assert str(caught.value) == f"attention_backend flashinfer: {NOT_INSTALLED}"


@pytest.mark.parametrize(
    ("capability", "exact"), [((8, 0), "always"), ((9, 0), "prefill"), ((10, 0), "never"), ((12, 0), "always")]
)
def test_how_far_flashinfer_runs_ahead(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], exact: str
) -> None:
    monkeypatch.setattr(choice, "is_installed", lambda: True)
    model = replace(MODEL, head_dim=128)
    options = EngineOptions(attention_backend="flashinfer", max_model_len=64)
    assert resolve(options, replace(H200, capability=capability), model).scheduler.exact_lengths == exact
    assert resolve(replace(options, attention_backend="triton"), H200, model).scheduler.exact_lengths == "never"


def test_who_reads_a_common_beginning_once() -> None:
    def least(model: ModelConfig = MODEL, **options: Any) -> int | None:
        return resolve(EngineOptions(max_model_len=64, **options), H200, model).scheduler.least_saved

    auto = least()
    assert auto is not None and auto > 10_000
    assert least(cascade="always") == 1 and least(cascade="never") is None
    assert least(enable_prefix_caching=False) is None, "no pages are shared"
    assert least(attention_backend="flex") is None
    assert 1.5 * auto < (least(replace(MODEL, windows=(0, 32))) or 0) < 2 * auto
    assert least(replace(MODEL, windows=(32, 32))) is None
    with pytest.raises(ConfigError, match="cascade always needs attention_backend triton, not flex; use cascade auto"):
        least(cascade="always", attention_backend="flex")
    with pytest.raises(ConfigError, match="cascade must be one of auto, always, never"):
        least(cascade="sometimes")
    assert resolve(EngineOptions(), CPU, MODEL).scheduler.least_saved is None


def test_a_drafter_with_gaps_has_a_backend_that_can_begin_behind_them() -> None:
    config = replace(resolve(EngineOptions(), CPU, MODEL), attention_backend="flashinfer")
    assert type(make_backend(config, MODEL, CpuDevice(), for_drafter=True)).__name__ == "TritonBackend"
