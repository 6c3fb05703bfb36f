"""Through the whole engine, heads draft what plain heads draft that see the whole text at once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.engine.core import EngineCore
from slipstream.speculate.eagle import EagleSpeculator
from tests import tiny_models
from tests.engine.drive import make_request, run
from tests.models.heads import plain_heads, tiny_heads
from tests.models.heads.plain_heads import PlainHead
from tests.models.heads.tiny_heads import Case, tiny_target

LONG = {"max_position_embeddings": 512}
PAGE = 4
# Method, head, and how many modules take turns.
HEADS: dict[str, tuple[str, Callable[[], Case], int]] = {
    "eagle": ("eagle", lambda: tiny_heads.eagle(LONG), 1),
    "eagle3": ("eagle3", lambda: tiny_heads.eagle3(body=LONG), 1),
    "mtp": ("mtp", tiny_heads.deepseek, 1),
    "mtp of three": ("mtp", functools.partial(tiny_heads.deepseek, 3), 3),
    "mtp of two": ("mtp", functools.partial(tiny_heads.qwen_mtp, 2), 2),
}


class Drafted(NamedTuple):
    tokens: list[int]
    room: int
    drafts: list[int]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_models.build("llama", num_hidden_layers=tiny_heads.NUM_LAYERS)
    return tiny_models.save(model, tmp_path_factory.mktemp("target"))


def make_core(method: str, case: Case, k: int, target: Path, folder: Path) -> EngineCore:
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": k}
    case.write(folder)
    if method == "mtp":
        (folder / "config.json").write_text(json.dumps(case.config | json.loads((target / "config.json").read_text())))
        save_file(load_file(target / "model.safetensors") | case.tensors, folder / "model.safetensors")
        tiny_models.write_tokenizer(folder)
        target = folder
    else:
        speculative["model"] = str(folder)
    options = {"dtype": "float64", "max_num_seqs": 3, "long_prefill_token_threshold": 5, "block_size": PAGE}
    return build_engine(
        EngineOptions.from_dict({"model": str(target), "speculative_config": speculative, **options})
    ).core


def watch(core: EngineCore) -> list[Drafted]:
    """What is drafted from now on, with all that was known then. Nothing may be read that no pass has written."""
    drafter, seen = core.runner.speculator, []
    assert isinstance(drafter, EagleSpeculator)
    for cache in drafter.caches.paged_memory():
        cache[1:] = torch.nan
    for kept in drafter._kept:
        kept[PAGE:] = torch.nan
    rows, right = drafter._rows, drafter.run

    def noting(batch: Any, noise: bool) -> Tensor:
        drafts = right(batch, noise)
        for row, ids in zip(batch.rows.tolist()[: batch.num_reqs], drafts.tolist(), strict=False):
            length = int(rows.num_tokens[row])
            if rows.step_start[row] and rows.num_computed[row] + 1 == length:
                tokens = rows.token_ids[row, :length].tolist()
                room = max(0, int(rows.max_total[row]) - length - 1)
                seen.append(Drafted(tokens, min(len(ids), room), ids))
        return drafts

    drafter.run = noting  # type: ignore[method-assign]
    return seen


def plain_drafts(plain: PlainHead, tokens: list[int], k: int, num_modules: int) -> list[int]:
    """At slot p module m takes the token at p + 1 and what module m - 1 makes at p - 1, the first the target's."""
    target = tiny_target()
    known, ids = torch.tensor(tokens[:-1]), tokens[1:]
    first = plain.combine(plain.features(*plain_heads.target_states(known, target.tensors, target.config)))
    inputs, made = [first], [plain.forward(0, torch.tensor(ids), first)]
    for idx in range(1, num_modules):
        inputs.append(torch.cat([torch.zeros_like(first[:1]), made[-1][:-1]]))
        made.append(plain.forward(idx, torch.tensor(ids), inputs[-1]))
    drafts: list[int] = []
    while len(drafts) < k:
        newest = made[len(drafts) % num_modules][-1:]
        drafts.append(plain.target_id(int(plain.logits(newest).argmax())))
        ids = [*ids, drafts[-1]]
        before = [newest, *(states[-1:] for states in made[:-1])]
        inputs = [torch.cat(pair) for pair in zip(inputs, before, strict=True)]
        made = [plain.forward(idx, torch.tensor(ids), states) for idx, states in enumerate(inputs)]
    return drafts


@torch.inference_mode()
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("name", HEADS)
def test_what_the_engine_drafts(name: str, k: int, target: Path, tmp_path: Path) -> None:
    method, make, num_modules = HEADS[name]
    case = make()
    core = make_core(method, case, k, target, tmp_path)
    seen = watch(core)
    shared = [3, 200, 17, 45, 90, 8, 131, 77, 5]
    prompts = [[*shared, 4], [*shared, 9, 1, 2], shared[:3], [60, 61]]
    run(core, [make_request(f"a{i}", prompt, 6) for i, prompt in enumerate(prompts)])
    # Again, over pages that are known and pages that others have used.
    run(core, [make_request(f"b{i}", [*prompt, 30 + i], 6) for i, prompt in enumerate(prompts)])
    assert core.scheduler.stats.num_cached_tokens > 0
    plain = case.plain(case.config, case.tensors, tiny_target().plain)
    assert sum(drafted.room > 0 for drafted in seen) > 20
    for tokens, room, drafts in seen:
        assert drafts[:room] == plain_drafts(plain, tokens, room, min(num_modules, k))
