"""A head's model card: training data, training time and acceptance, as a README beside its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_card(folder: Path, about: dict[str, Any], title: str) -> None:
    """``about`` is the content of ``curves.json``. A README that was not written here is not replaced."""
    path = folder / "README.md"
    kind = f"# {title.partition(' head for ')[0]} head for "
    if not path.exists() or path.read_text(encoding="utf-8", errors="replace").startswith(kind):
        path.write_text(_card(about, folder.name, title), encoding="utf-8")


def _card(about: dict[str, Any], name: str, title: str) -> str:
    settings, texts, vocabulary, method = about["settings"], about["texts"], about.get("vocabulary"), about["method"]
    model, acceptance = settings["model"], about["acceptance"][-1]
    given = "" if settings["prompts"] is None else " and answers to given prompts"
    duration = "" if texts["seconds"] is None else f", in {texts['seconds']:,.0f} s"
    rows = {
        "data": f"{texts['count']:,} texts, {texts['tokens']:,} tokens, all written by the target: both sides of "
        f"conversations, long contexts made of its own texts{given}; no data set{duration}",
        "draft vocabulary": "the target's"
        if vocabulary is None
        else f"{vocabulary['size']:,} tokens, {vocabulary['coverage']:.1%} of held-out texts",
        "training": f"{about['step']:,} steps of {settings['batch_tokens']:,} tokens, {_drafting(settings)}, learning "
        f"rate up to {settings['lr']:g}, in {about['elapsed_s']:,.0f} s on {about['hardware']}",
        "acceptance": f"held-out texts, greedy, by position: {', '.join(f'{share:.0%}' for share in acceptance)}; "
        f"{1 + sum(acceptance):.2f} tokens a step with {len(acceptance)} drafts",
        "weights": f"{about['num_parameters'] / 1e6:.1f} M in {about['dtype']}; the embedding is the target's",
        "format": f"{about['format']}; all flags are in config.json",
    }
    lines = [
        f"# {title}",
        "",
        f"Made by `slipstream train {method} --model {model}`. It drafts for that model and no other:",
        "",
        "```",
        f'slipstream generate "..." --model {model} --speculate {method} --draft-model {name}',
        "```",
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {text} |" for name, text in rows.items()]
    return "\n".join(lines) + "\n"


def _drafting(settings: dict[str, Any]) -> str:
    if "draft_steps" in settings:
        return f"{settings['draft_steps']} draft steps one after another"
    return f"blocks of {settings['block_size']} in one pass, {settings['anchors']} in each text"
