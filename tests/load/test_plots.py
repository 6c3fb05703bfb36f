from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import ConfigError
from slipstream.load.plots import check_plots, distribution, draw, rate_over_time
from tests.load.runs import Run


def test_rate_over_time() -> None:
    """One event a second of two tokens each, and ten in the last second."""
    run = Run()
    run.ok(0.0, [0.5, 1.5, 2.5, 3.5], 4.0, tokens=8)
    run.ok(3.0, [3.9] * 9 + [4.0], 4.0)
    run.failed(0.0, 1.0, "connection reset")
    edges, rate = rate_over_time(run.records(), 4)
    np.testing.assert_allclose(edges, [0, 1, 2, 3, 4])
    np.testing.assert_allclose(rate, [2, 2, 2, 12])


def test_distribution() -> None:
    values, shares = distribution(np.array([3.0, np.nan, 1.0, 2.0, 2.0]))
    assert (values.tolist(), shares.tolist()) == ([1, 2, 2, 3], [0.25, 0.5, 0.75, 1])
    many = np.random.default_rng(0).permutation(100_000).astype(float)
    values, shares = distribution(many)
    assert len(values) <= 2000
    assert (values[0], values[-1], shares[-1]) == (0.0, 99_999.0, 1.0)
    np.testing.assert_allclose(shares, (values + 1) / 100_000)


def test_picture(tmp_path: Path) -> None:
    run, failed = Run(), Run()
    run.ok(0.0, [0.1, 0.2, 0.2], 0.3)
    failed.failed(0.0, 1.0, "connection reset")
    path = tmp_path / "run.png"
    check_plots(path)
    draw(path, [("1 stream", run.records()), ("8 streams", failed.records())], "title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--png must be a file such as run.png"):
        check_plots(tmp_path / "run.svg")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plots(tmp_path / "none" / "run.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ConfigError, match=r"--png needs matplotlib; install it with: pip install 'slipstream\[plots\]'"
    ):
        check_plots(tmp_path / "run.png")
