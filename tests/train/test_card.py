"""What a head's card says, from curves that are written down here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.train.card import write_card

ABOUT: dict[str, Any] = {
    "settings": {"model": "some/model", "prompts": None, "batch_tokens": 16384, "draft_steps": 3, "lr": 0.001},
    "method": "eagle3",
    "format": "eagle3",
    "texts": {"count": 24000, "tokens": 11797118, "seconds": 143.2},
    "vocabulary": {"size": 16000, "coverage": 0.98701},
    "hardware": "NVIDIA H200",
    "num_parameters": 14_390_000,
    "dtype": "bfloat16",
    "step": 2650,
    "elapsed_s": 300.4,
    "acceptance": [[0.01, 0.0, 0.0], [0.8, 0.6, 0.5]],
}


def test_data_steps_time_and_acceptance_are_named(tmp_path: Path) -> None:
    write_card(tmp_path, ABOUT, "EAGLE-3 head for some/model")
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# EAGLE-3 head for some/model\n")
    for text_part in (
        "24,000 texts, 11,797,118 tokens",
        "in 143 s",
        "16,000 tokens, 98.7% of held-out texts",
        "2,650 steps of 16,384 tokens, 3 draft steps",
        "in 300 s on NVIDIA H200",
        "by position: 80%, 60%, 50%; 2.90 tokens a step with 3 drafts",
        "14.4 M in bfloat16",
        "--model some/model --speculate eagle3",
    ):
        assert text_part in text, text_part
    assert "given prompts" not in text


@pytest.mark.parametrize("own", [True, False])
def test_a_readme_from_elsewhere_is_not_replaced(tmp_path: Path, own: bool) -> None:
    path = tmp_path / "README.md"
    path.write_text("# EAGLE-3 head for an older model\n" if own else "# Notes of mine\n")
    about = {**ABOUT, "texts": {**ABOUT["texts"], "seconds": None}, "settings": {**ABOUT["settings"], "prompts": "p"}}
    write_card(tmp_path, about, "EAGLE-3 head for some/model")
    if own:
        assert "given prompts; no data set |" in path.read_text()
    else:
        assert path.read_text() == "# Notes of mine\n"
