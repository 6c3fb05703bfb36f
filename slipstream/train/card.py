"""A head's model card: training data, training time and acceptance, as a README beside its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TITLE = "# EAGLE-3 head for "


def write_card(folder: Path, about: dict[str, Any]) -> None:
    """``about`` is the content of ``curves.json``. A README that was not written here is not replaced."""
    path = folder / "README.md"
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace").startswith(_TITLE):
        path.write_text(_card(about, folder.name), encoding="utf-8")


def _card(about: dict[str, Any], name: str) -> str:
    settings, texts, vocabulary = about["settings"], about["texts"], about["vocabulary"]
    model, acceptance = settings["model"], about["acceptance"][-1]
    given = "" if settings["prompts"] is None else " and answers to given prompts"
    duration = "" if texts["seconds"] is None else f", in {texts['seconds']:,.0f} s"
    rows = {
        "data": f"{texts['count']:,} texts, {texts['tokens']:,} tokens, all written by the target: both sides of "
        f"conversations, long contexts made of its own texts{given}; no data set{duration}",
        "draft vocabulary": f"{vocabulary['size']:,} tokens, {vocabulary['coverage']:.1%} of held-out texts",
        "training": f"{about['step']:,} steps of {settings['batch_tokens']:,} tokens, {settings['draft_steps']} draft "
        f"steps one after another, learning rate up to {settings['lr']:g}, in {about['elapsed_s']:,.0f} s on "
        f"{about['hardware']}",
        "acceptance": f"held-out texts, greedy, by position: {', '.join(f'{share:.0%}' for share in acceptance)}; "
        f"{1 + sum(acceptance):.2f} tokens a step with {len(acceptance)} drafts",
        "weights": f"{about['num_parameters'] / 1e6:.1f} M in {about['dtype']}; the embedding is the target's",
        "format": f"{about['format']}; all flags are in config.json",
    }
    lines = [
        f"{_TITLE}{model}",
        "",
        f"Made by `slipstream train eagle3 --model {model}`. It drafts for that model and no other:",
        "",
        "```",
        f'slipstream generate "..." --model {model} --speculate eagle3 --draft-model {name}',
        "```",
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {text} |" for name, text in rows.items()]
    return "\n".join(lines) + "\n"
