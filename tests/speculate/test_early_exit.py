"""The target's first layers as a drafter: on the target's own keys, for every kind of layer that has them in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.errors import ConfigError
from tests import tiny_models

PROMPTS = [[7, 9, 7, 9, 7, 9], [*range(40, 75)], [5] * 19]
SIM: dict[str, Any] = {"device": "sim", "steps_in_flight": 3, "cudagraph_mode": "full_and_piecewise"}


def save_with_idle_layers(variant: str, folder: Path, num_used: int) -> Path:
    """Layers from this one on leave their input as it is."""
    model = tiny_models.build(variant)
    for layer in model.model.layers[num_used:]:
        for name, parameter in layer.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.data.zero_()
    return tiny_models.save(model, folder)


def generate(folder: Path, **options: Any) -> tuple[list[list[int]], int, int]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    given = {"dtype": "float64", "max_num_seqs": 2, "max_model_len": 128, **options}
    with LLM(str(folder), **given) as llm:
        tokens = [output.token_ids for output in llm.generate(PROMPTS, params)]
        drafts = llm.stats.drafts
        return tokens, sum(drafts.num_drafts_at), sum(drafts.num_accepted_at)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("place", [{}, {"dtype": "float32"}, {**SIM, "cudagraph_capture_sizes": (4, 8)}], ids=str)
def test_right_drafts_are_accepted_and_wrong_ones_change_nothing(
    variant: str, place: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_with_idle_layers(variant, tmp_path, 2)
    expected = generate(folder, **place)[0]
    for exit_layer in (2, 1):
        config = {"method": "early_exit", "num_speculative_tokens": 3, "exit_layer": exit_layer}
        tokens, num_drafts, num_accepted = generate(folder, **place, speculative_config=config)
        assert tokens == expected
        assert num_drafts == num_accepted if exit_layer == 2 else num_drafts > num_accepted


def test_keys_of_another_slot_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the first pass begins one token too early, so that its token is another one."""
    from slipstream.speculate import early_exit

    folder, inner = save_with_idle_layers("llama", tmp_path, 2), early_exit.prepare_first_pass
    early = lambda rows, ids, starts, firsts, *rest: inner(rows, ids, starts, firsts - 1, *rest)  # noqa: E731
    monkeypatch.setattr(early_exit, "prepare_first_pass", early)
    config = {"method": "early_exit", "num_speculative_tokens": 3, "exit_layer": 2}
    _, num_drafts, num_accepted = generate(folder, speculative_config=config)
    assert num_drafts > num_accepted


@pytest.mark.parametrize(
    ("variant", "given", "message"),
    [
        ("llama", {"exit_layer": 3}, "exit_layer 3 must be at least 1 and below the target's 3 layers"),
        ("llama", {"exit_layer": 0}, "exit_layer must be an integer from 1 to"),
        ("llama", {"model": "x"}, "takes no model; leave out 'x'"),
        ("qwen3-next", {}, "cannot draft with this target: it has recurrent layers"),
    ],
)
def test_what_does_not_fit_is_refused(variant: str, given: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build(variant), tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_engine(EngineOptions(model=str(folder), speculative_config={"method": "early_exit", **given}))


def test_three_quarters_of_the_layers_draft_by_default(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("llama"), tmp_path)
    engine = build_engine(EngineOptions(model=str(folder), speculate="early_exit"))
    assert getattr(engine.core.runner.speculator, "_num_layers") == 2  # noqa: B009
