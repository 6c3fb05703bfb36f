"""Imports point downward: a room knows the rooms below it, never those above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "slipstream"
# From the top of the house to the bottom. Rooms on one line may use each other.
FLOORS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"server"},
    {"load"},
    {"train"},
    {"llm"},
    {"transcription"},
    {"pooled_tasks"},
    {"engine"},
    {"grammar"},
    {"runner"},
    {"speculate"},
    {"graphs"},
    {"sampling"},
    {"models"},
    {"checkpoints"},
    {"audio"},
    {"text"},
    {"weights"},
    {"attention"},
    {"kernels"},
    {"distributed"},
    {"device"},
    {"scheduler"},
    {"config"},
    {"model_config"},
    {"cache_spec", "encoder_config", "experts_config", "source_encoder_config", "speculative_config"},
    {"host_drafting"},
    {"columns"},
    {"plan"},
    {"request", "output"},
    {"pooling", "encoder_input"},
    {"sampling_params"},
    {"structured"},
    {"parameters"},
    {"fields"},
    {"values"},
    {"errors"},
]
RANK = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The scheduler is pure decision: it can be tested, and reasoned about, without a tensor library.
NO_TORCH = (
    "scheduler",
    "load",
    "request",
    "plan",
    "output",
    "host_drafting",
    "columns",
    "pooling",
    "encoder_input",
    "fields",
    "sampling_params",
    "structured",
    "parameters",
    "config",
    "model_config",
    "cache_spec",
    "encoder_config",
    "source_encoder_config",
    "experts_config",
    "speculative_config",
    "values",
    "errors",
)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the direction"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return  # the public surface may name anything
    assert room in RANK, f"{room} is not in the plan of the house"
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "slipstream" and len(parts) > 1 and parts[1] in RANK:
            assert parts[1] == room or RANK[parts[1]] > RANK[room], f"{path} imports {name}, which is above it"
        if room in NO_TORCH:
            assert parts[0] != "torch", f"{path} imports torch"
