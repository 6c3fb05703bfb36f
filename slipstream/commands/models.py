"""``slipstream models``: the aliases, and the models in the caches."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from slipstream.checkpoints.hub import CachedModel, list_models
from slipstream.config import cache_dir


def run(*, as_json: bool) -> int:
    models = list_models()
    if as_json:
        listing = [{**asdict(model), "path": str(model.path) if model.path else None} for model in models]
        sys.stdout.write(json.dumps({"cache": str(cache_dir()), "models": listing}, indent=2) + "\n")
        return 0
    table = Table("name", "size", "here", "what it is")
    for model in models:
        table.add_row(model.name, _size(model), "yes" if model.cached else "no", model.description)
    console = Console()
    console.print(table)
    console.print(
        f"Cache: {cache_dir()}\nA model that is not here is fetched on first use: slipstream generate --model NAME ...",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _size(model: CachedModel) -> str:
    return "?" if model.size is None else f"{model.size / 1e6:,.0f} MB"
