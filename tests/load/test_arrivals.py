from __future__ import annotations

import math

import numpy as np
import pytest

from slipstream.load.arrivals import draw_arrivals

COUNT = 40_000


@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_mean_and_burstiness(rate: float, burstiness: float) -> None:
    """Gaps have the mean 1 / rate and the coefficient of variation 1 / sqrt(burstiness), four standard errors apart."""
    gaps = np.diff(draw_arrivals(rate, burstiness, COUNT, seed=1), prepend=0.0)
    assert (gaps >= 0).all()
    variation = 1 / math.sqrt(burstiness)
    assert gaps.mean() * rate == pytest.approx(1.0, abs=4 * variation / math.sqrt(COUNT))
    # A gamma distribution of this shape has the excess kurtosis 6 / shape, which the error of its variance follows.
    spread = math.sqrt((2 + 6 / burstiness) / COUNT)
    assert gaps.var() * rate**2 == pytest.approx(variation**2, rel=4 * spread)


def test_a_shape_of_one_is_a_poisson_process() -> None:
    """Gaps are exponential, and the number of arrivals in a second has its mean as its variance."""
    times = draw_arrivals(10.0, 1.0, COUNT, seed=2)
    gaps = np.diff(times, prepend=0.0)
    for share in (0.1, 0.5, 0.9):
        below = (gaps < -math.log(1 - share) / 10.0).mean()
        assert below == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / COUNT))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10.0, abs=4 * math.sqrt(10.0 / len(counts)))
    assert counts.var() == pytest.approx(10.0, rel=4 * math.sqrt((2 + 1 / 10.0) / len(counts)))


def test_seed_and_infinite_rate() -> None:
    np.testing.assert_array_equal(draw_arrivals(3.0, 1.0, 9, seed=4), draw_arrivals(3.0, 1.0, 9, seed=4))
    assert (draw_arrivals(3.0, 1.0, 9, seed=4) != draw_arrivals(3.0, 1.0, 9, seed=5)).all()
    assert draw_arrivals(math.inf, 1.0, 3, seed=0).tolist() == [0.0] * 3
