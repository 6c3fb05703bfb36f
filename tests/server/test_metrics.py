from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.stats import EngineStats
from slipstream.server.metrics import ServerMetrics

Samples = dict[tuple[str, str | None], float]  # by name and position


def samples_of(stats: EngineStats, is_synthetic: bool = False) -> Samples:
    text = ServerMetrics(lambda: stats, lambda: 0, is_synthetic).text().decode()
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name.removeprefix("slipstream_"), s.labels.get("position")): s.value for s in found}


def test_drafts_are_counted_by_position() -> None:
    stats = EngineStats()
    for drafts in ((3, 2), (3, 0), (1, 1)):
        stats.drafts.add(*drafts)
    samples = samples_of(stats)
    assert samples["draft_steps_total", None] == 3
    assert samples["draft_tokens_total", None] == 7
    assert samples["accepted_tokens_total", None] == 3
    for position, (drafted, accepted) in enumerate(((3, 2), (2, 1), (2, 0))):
        assert samples["draft_tokens_per_position_total", str(position)] == drafted
        assert samples["accepted_tokens_per_position_total", str(position)] == accepted
    assert ("draft_tokens_per_position_total", "3") not in samples
    assert samples["mean_accepted_length", None] == 2.0


def test_an_engine_without_drafts() -> None:
    samples = samples_of(EngineStats())
    assert samples["draft_tokens_total", None] == 0
    assert samples["mean_accepted_length", None] == 1.0
    assert not [name for name, position in samples if position is not None]


def test_forced_acceptance_is_a_figure_of_its_own() -> None:
    assert ("synthetic_acceptance", None) not in samples_of(EngineStats())
    assert samples_of(EngineStats(), is_synthetic=True)["synthetic_acceptance", None] == 1


def test_a_refused_prefix_cache_is_a_figure_of_its_own() -> None:
    assert samples_of(EngineStats())["prefix_cache_refused", None] == 0
    assert samples_of(EngineStats(prefix_cache_refused=1))["prefix_cache_refused", None] == 1
