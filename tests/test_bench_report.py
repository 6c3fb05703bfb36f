"""``make bench-report``: it runs what fits the machine, goes on after a failure, and then writes the pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import readme
import report
from report import ON_A_CPU, ON_A_GPU, Benchmark, plan

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("benchmark", [*ON_A_GPU, *ON_A_CPU], ids=lambda b: " ".join(b.arguments))
def test_every_benchmark_fills_a_part_and_has_its_options(benchmark: Benchmark) -> None:
    assert benchmark.part in readme.PAGES["docs/benchmarks.md"]
    script, *words = benchmark.arguments
    if script == "-m":  # `slipstream bench serve`, whose options are checked by `tests/test_snippets.py`
        assert benchmark.server is not None
        return
    text = (ROOT / script).read_text(encoding="utf-8")
    for option in [*(word for word in words if word.startswith("--")), "--output-dir"]:
        assert f'"{option}"' in text, f"{script} has no {option}"


def test_every_part_is_measured() -> None:
    measured = {benchmark.part for benchmark in plan(True, Path("question.jsonl"), [])}
    pages = {re.sub(r", (one stream|a batch)$", "", part) for part in readme.PAGES["docs/benchmarks.md"]}
    # One stream is the smallest batch of others; the texts are Spec-Bench's; the pair's files are not fetched by it.
    assert measured == pages - {"one stream", "same texts", "a real pair"}


def test_what_fits() -> None:
    assert plan(False, Path("question.jsonl"), []) == [*ON_A_CPU]
    assert plan(True, None, ["startup", "host"]) == [b for b in ON_A_GPU if b.part in ("startup", "host")]


def test_a_failure_is_named_and_the_pages_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Any] = []

    def run(benchmark: Benchmark) -> bool:
        ran.append(benchmark)
        return benchmark.part != "host"

    monkeypatch.setattr(report, "plan", lambda *_: [b for b in ON_A_GPU if b.part in ("host", "startup")])
    monkeypatch.setattr(report, "run", run)
    monkeypatch.setattr(readme, "main", lambda: ran.append("pages") or 0)
    assert report.main([]) == 1
    assert [b if isinstance(b, str) else b.part for b in ran] == ["host", "startup", "pages"]
    assert "error: no new figures of host;" in capsys.readouterr().err
    ran.clear()
    assert report.main(["--list"]) == 0 and not ran


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_use_public_names(path: Path) -> None:
    """What a benchmark measures is what users have, and a rename in the package does not break it unseen."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    allowed = {"_asdict", "_fields", "_replace", "_sleep"}  # of a named tuple, and of torch.cuda
    private = [node.attr for node in attributes if re.match(r"_[a-z]", node.attr) and node.attr not in own | allowed]
    imported = [
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not private + imported, f"{path.name} uses {private + imported}"
