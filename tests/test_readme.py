"""The generated figures are those of the result files, and the rules by which they are chosen hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import plot_speculation
import plot_throughput
import readme
from figures import number
from result_files import Result, newest_first, read_result, select
from slipstream.commands.results import slug
from slipstream.errors import ConfigError

ROOT = Path(__file__).parent.parent
H200, CPU = "NVIDIA H200", "Intel Xeon Processor, 2 cores"
PARTS = {name: part for parts in readme.PAGES.values() for name, part in parts.items()}
EMPTY_PAGE = "\n".join(f"before <!-- generated: {name} --><!-- end --> after" for name in PARTS)
Rows = list[dict[str, Any]]


def put(folder: Path, kind: str, rows: Rows, hour: int = 1, hardware: str = H200) -> Path:
    date = f"2026-01-02T{hour:02}:00:00"
    path = folder / f"{date.replace(':', '-')}-{kind}-{slug(hardware)}.json"
    path.write_text(json.dumps({"hardware": hardware, "date": f"{date}+00:00", "rows": rows}))
    return path


def results(folder: Path) -> list[Result]:
    return newest_first(folder.glob("*.json"))


def decode_row(tok_s: float, case: str = "smollm2-135m", batch: int = 1, **others: Any) -> dict[str, Any]:
    alike = {"weights": "random", "prompt_len": 128, "output_len": 256, "tok_s_runs": [1.0, tok_s]}
    return {"case": case, "batch": batch, "tok_s": tok_s, **alike, **others}


def draft_row(tok_s: float, k: str, batch: int, rates: str = "high") -> dict[str, Any]:
    case = "llama-3.1-8b" if k == "0" else "llama-3.1-8b+eagle3"
    return {"case": case, "batch": batch, "tok_s": tok_s, "k": k, "rates": rates}


# --- the page itself ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_results() -> list[Result]:
    return results(ROOT / "benchmarks" / "results")


@pytest.mark.parametrize("name", readme.PAGES)
def test_a_page_is_what_the_results_say(name: str, own_results: list[Result]) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert readme.update(page, readme.PAGES[name], own_results) == page, f"{name} is out of date; run `make readme`"


def test_the_bars_are_what_the_results_say(own_results: list[Result]) -> None:
    rows = plot_throughput.newest_rows(select(own_results, "decode-throughput", H200))
    drawn = (ROOT / "docs" / "throughput.svg").read_text(encoding="utf-8")
    assert plot_throughput.draw(rows) == drawn, "docs/throughput.svg is out of date; run `make readme`"


def test_a_figure_changed_by_hand_is_found_in_every_part(own_results: list[Result]) -> None:
    changed = 0
    for name, parts in readme.PAGES.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        for part in readme.MARKED.finditer(page):
            digits = [at for at in range(*part.span(3)) if page[at].isdigit()]
            if digits:
                at = digits[-1]
                other = page[:at] + str((int(page[at]) + 1) % 10) + page[at + 1 :]
                assert readme.update(other, parts, own_results) == page
                changed += 1
    assert changed >= 13


def test_every_part_says_how_when_and_beside_what(own_results: list[Result]) -> None:
    for name, part in readme.PAGES["docs/benchmarks.md"].items():
        last = next(" ".join(t.split()) for t in part(own_results).split("\n\n") if t.startswith("Command: "))
        found = re.fullmatch(
            r"Command: `\S.*`\. Hardware: .+\. Date: 20\d\d-\d\d-\d\d( to 20\d\d-\d\d-\d\d)?\. Peer: .+\.", last
        )
        assert found, f"{name}: {last}"


def test_what_vllm_reached_is_in_one_file() -> None:
    files = [path.name for path in (ROOT / "benchmarks").glob("*.py") if "39881" in path.read_text()]
    assert files == ["vllm_figures.py"]


# --- which results are shown ----------------------------------------------------------------------


def test_the_newest_figure_wins_cell_by_cell(tmp_path: Path) -> None:
    put(tmp_path, "decode-throughput", [decode_row(1111.0), decode_row(7777.4, batch=8)], hour=1)
    put(tmp_path, "decode-throughput", [decode_row(2222.5)], hour=2)
    text = readme.decode_throughput(results(tmp_path))
    assert "| output tokens per second | batch 1 | 8 |\n" in text
    assert "| SmolLM2-135M: Slipstream | 2,223 | 7,777 |\n" in text
    assert "| SmolLM2-135M: vLLM | 622 | 4,836 |\n" in text
    assert "1,111" not in text and "best of 2 runs" in " ".join(text.split())


def test_cells_without_a_figure_stay_empty(tmp_path: Path) -> None:
    put(tmp_path, "decode-throughput", [decode_row(10.0, batch=128), decode_row(20.0, "llama-3.1-8b", 64)])
    text = readme.decode_throughput(results(tmp_path))
    assert "| SmolLM2-135M: Slipstream | | 10 |\n" in text
    assert "| Llama-3.1-8B shape: Slipstream | 20 | |\n" in text


@pytest.mark.parametrize("others", [{"weights": "model"}, {"output_len": 128}, {"prompt_len": 512}, {"batch": 3}])
def test_runs_of_another_kind_are_passed_over(tmp_path: Path, others: dict[str, Any]) -> None:
    put(tmp_path, "decode-throughput", [decode_row(5.0)], hour=1)
    put(tmp_path, "decode-throughput", [{**decode_row(9.0), **others}], hour=2)
    assert "Slipstream | 5 |" in readme.decode_throughput(results(tmp_path))


def test_other_hardware_and_other_benchmarks_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "decode-throughput", [decode_row(9.0)], hardware="NVIDIA A100")
    put(tmp_path, "smollm2-135m", [decode_row(9.0)])
    assert readme.decode_throughput(results(tmp_path)) == ""


def test_without_results_every_part_is_empty() -> None:
    assert readme.update(EMPTY_PAGE, PARTS, []) == EMPTY_PAGE


def test_adaptive_figures_are_of_one_run(tmp_path: Path) -> None:
    batches = {1: 2.0, 8: 1.5, 64: 1.25, 128: 1.1}
    plain = [draft_row(100.0 * b, "0", b) for b in batches]
    adaptive = [draft_row(100.0 * b * ratio, "adaptive", b) for b, ratio in batches.items()]
    few = [draft_row(104.0, "adaptive", 1, "low"), draft_row(8 * 120.0, "adaptive", 8, "low")]
    none = [draft_row(99.0, "adaptive", 1, "zero"), draft_row(8 * 98.0, "adaptive", 8, "zero")]
    put(tmp_path, "speculative-throughput-llama-3.1-8b", plain + adaptive + few + none, hour=1)
    put(tmp_path, "speculative-throughput-llama-3.1-8b", [draft_row(777.0, "adaptive", 1)], hour=2)
    put(tmp_path, "speculative-throughput-llama-3.1-8b", [draft_row(300.0, "3", 1)], hour=3)
    changes = [{"case": "to zero", "batch": 1, "after_steps": 7}, {"case": "to high", "batch": 1, "after_steps": 31}]
    put(tmp_path, "draft-length-changes-llama-3.1-8b", changes)
    assert " ".join(readme.adaptive_lengths(results(tmp_path)).split("\n\n")[0].split()) == (
        "With draft lengths that adapt, against plain decoding in the same run: 2.00, 1.50 and 1.25 x at batch "
        "1, 8 and 64, 1.10 x at 128; 1.04 to 1.20 x where few drafts are accepted, and 0.98 to 0.99 x where none is. "
        "A change of acceptance is followed within 31 steps (`python benchmarks/speculative_throughput.py --change`)."
    )
    text = readme.eagle3(results(tmp_path))
    assert "| Slipstream, EAGLE-3, k = 3 | 300 | | |\n" in text
    assert "| Slipstream, EAGLE-3, k adapts | 200 | 1,200 | 8,000 |\n" in text
    assert "| vLLM, EAGLE-3, k = 3 | 388 | 2,917 | 14,579 |\n" in text
    assert "| Slipstream, plain, in the run where k adapts | 100 | 800 | 6,400 |\n" in text


def test_plain_beside_ngram_is_the_better_of_the_last_two(tmp_path: Path) -> None:
    for hour, (plain, drafted) in enumerate([(900.0, 1.0), (700.0, 2.0), (500.0, 650.0)]):
        row = {"case": "smollm2-135m+ngram-chat", "batch": 1, "tok_s": drafted, "plain_tok_s": plain, "k": "adaptive"}
        put(tmp_path, "speculation-ngram", [row, {**row, "k": 4, "tok_s": 3.0}], hour)
    text = readme.ngram(results(tmp_path))
    assert "| chat prompts: plain | 700 |\n| chat prompts: n-gram | 650 |\n" in text


def spec_row(method: str, kind: str, length: float, ratio: float, **others: Any) -> dict[str, Any]:
    row = {"case": f"smollm2-135m+{method}", "kind": kind, "batch": 1, "k": "adaptive", "temperature": 0.0}
    row |= {"limit": None, "output_len": 256, "accepted_length": length, "ratio": ratio}
    return {**row, "num_texts": 560, "same_texts": 500, "near_ties": 50, **others}


def test_spec_bench_shows_whole_runs(tmp_path: Path) -> None:
    rows = [spec_row("ngram", "mt_bench", 1.456, 1.125), spec_row("ngram", "overall", 1.5, 1.2)]
    rows += [spec_row("eagle3", "mt_bench", 2.25, 1.5, batch=32), spec_row("eagle3", "overall", 2.5, 1.75, batch=32)]
    rows += [spec_row("none", "mt_bench", 1.0, 1.0, k=0), {"case": "difference", "batch": 1, "gap": None}]
    put(tmp_path, "spec-bench", rows, hour=1)
    put(tmp_path, "spec-bench", [spec_row("ngram", kind, 3.0, 1.9, k=4) for kind in ("mt_bench", "overall")], hour=6)
    # Few questions of each kind, one kind alone, a run that broke off before its end.
    some = {"limit": {"limit": 5}, "kind": {"num_texts": 80}}
    for hour, others in enumerate(some.values(), 2):
        both = [spec_row("ngram", kind, 9.0, 9.0, **others) for kind in ("mt_bench", "overall")]
        put(tmp_path, "spec-bench", both, hour)
    put(tmp_path, "spec-bench", [spec_row("ngram", "mt_bench", 9.0, 9.0)], hour=5)
    found = results(tmp_path)
    text = readme.spec_bench(found, batch=1)
    assert "| greedy | n-gram | n-gram, k = 4 |\n" in text
    overall = "| overall | 1.50, 1.20 x | 3.00, 1.90 x |\n"
    assert f"| MT-bench | 1.46, 1.13 x | 3.00, 1.90 x |\n{overall}" in text
    assert "| overall | 2.50, 1.75 x |\n" in readme.spec_bench(found, batch=32)
    assert readme.spec_bench(found, batch=8) == ""
    words = " ".join(readme.same_texts(found).split())
    assert "Of 1,680 texts 1,500 are the plain run's, token for token; 150 leave it at a near-tie" in words
    assert "near-tie of bfloat16, 30 anywhere else." in words
    assert "9.00" not in text


def test_spec_bench_names_a_tolerance_that_was_measured(tmp_path: Path) -> None:
    def whole(method: str) -> Rows:
        return [spec_row(method, kind, 1.5, 1.2) for kind in ("mt_bench", "overall")]

    def noise(tolerance: float) -> dict[str, Any]:
        return {"case": "noise", "batch": 32, "largest": tolerance / 2, "tolerance": tolerance, "num_tokens": 9}

    def sentence() -> str:
        return " ".join(readme.same_texts(results(tmp_path)).split("\n\n")[0].split())

    why = "twice the largest change that computing the same token as part of a prompt makes)"
    put(tmp_path, "spec-bench", [*whole("ngram"), noise(0.864)], hour=2)
    assert f"50 leave it at a near-tie of bfloat16 (gaps below 0.86, {why}, 10 anywhere else." in sentence()
    # A column of an older run, which has a tolerance of its own or none.
    put(tmp_path, "spec-bench", [*whole("eagle3"), noise(0.7)], hour=1)
    assert f"(gaps below 0.70 to 0.86, {why}, 20 anywhere else." in sentence()
    put(tmp_path, "spec-bench", whole("eagle3"), hour=1)
    assert "near-tie of bfloat16, 20 anywhere else." in sentence()


def test_small_parts(tmp_path: Path) -> None:
    start = [("cold", 30.0), ("warm", 8.0), ("warm", 9.0)]
    put(tmp_path, "startup", [{"case": "smollm2-135m", "batch": 1, "caches": c, "first_token_s": s} for c, s in start])
    put(tmp_path, "host-loop", [{"case": "plain", "batch": b, "host_us": us} for b, us in ((1, 54.2), (128, 132.5))])
    us = {("triton", 512): 10.0, ("flashinfer", 512): 9.0, ("triton", 4096): 10.0, ("flashinfer", 4096): 26.0}
    rows: Rows = [{"case": n, "batch": 1, "query_len": 1, "context": c, "us": t} for (n, c), t in us.items()]
    put(tmp_path, "attention", rows, hour=1)
    put(tmp_path, "attention", [{**row, "common": 2048, "us": 1.0} for row in rows], hour=2)
    rows = [
        {"case": "smollm2-135m", "engine": e, "batch": 1, "tok_s": t}
        for e, t in (("slipstream", 38.26), ("transformers", 4.0))
    ]
    put(tmp_path, "smollm2-135m-vs-transformers", rows, hardware=CPU)
    found = results(tmp_path)
    assert " 9 s, 30 s with empty" in readme.startup(found)  # the mean of 8 and 9, halves up
    assert "takes the host 54 µs for one request and 133 µs for 128;" in readme.host(found)
    assert "0.90 to 2.6 x FlashInfer's speed, from 512 to 4,096 tokens" in readme.attention(found)
    assert "| Slipstream | 38.3 |\n| transformers | 4.00 |\n" in readme.cpu(found)


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"date": "2026"}', '{"hardware": "x", "date": "2026", "rows": [{"case": "a"}]}', "\xff"]
)
def test_a_broken_file_is_named_in_one_line(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "broken.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.json is no result file"):
        read_result(folder / "broken.json")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "broken.json" in error


def test_a_row_that_lacks_a_figure_names_the_part(tmp_path: Path) -> None:
    put(tmp_path, "startup", [{"case": "smollm2-135m", "batch": 1, "caches": "cold"}])
    with pytest.raises(ConfigError, match="'startup' lacks or misspells 'first_token_s'"):
        readme.update(EMPTY_PAGE, PARTS, results(tmp_path))


@pytest.mark.parametrize(
    "page",
    [
        EMPTY_PAGE.replace("generated: cpu", "generated: other"),
        EMPTY_PAGE + "<!-- generated: cpu --><!-- end -->",
        EMPTY_PAGE + "<!-- generated: other --><!-- end -->",
    ],
)
def test_each_part_has_its_place_once(page: str) -> None:
    with pytest.raises(ConfigError, match=r"<!-- generated: (cpu|other) -->"):
        readme.update(page, PARTS, [])


@pytest.mark.parametrize(("value", "places", "text"), [(132.5, 0, "133"), (4150.5, 0, "4,151"), (0.125, 2, "0.13")])
def test_halves_are_rounded_up(value: float, places: int, text: str) -> None:
    assert number(value, places) == text


def test_the_command_writes_page_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for name, parts in readme.PAGES.items():
        (tmp_path / name).write_text("\n".join(f"<!-- generated: {part} -->\n<!-- end -->" for part in parts))
    put(folder, "decode-throughput", [decode_row(1866.0)])
    put(folder, "speculative-throughput-llama-3.1-8b", [draft_row(300.0, "3", 1), draft_row(200.0, "0", 1)])
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main() == 0
    assert "| SmolLM2-135M: Slipstream | 1,866 |" in (tmp_path / "docs" / "benchmarks.md").read_text()
    assert ">1,866</text>" in (tmp_path / "docs" / "throughput.svg").read_text()
    picture = tmp_path / "docs" / "speculation.png"
    before = picture.read_bytes()
    assert before.startswith(b"\x89PNG")
    assert readme.main() == 0
    assert picture.read_bytes() == before


def test_a_quick_sweep_is_for_the_other_draft_lengths(tmp_path: Path) -> None:
    kind = "speculative-throughput-llama-3.1-8b"
    put(tmp_path, kind, [draft_row(500.0, "3", 1) | {"num_runs": 2}, draft_row(400.0, "1", 1)], hour=1)
    put(tmp_path, kind, [draft_row(450.0, k, 1) | {"num_runs": 1} for k in ("1", "3")], hour=2)
    found = plot_speculation.newest_rows(results(tmp_path), "llama-3.1-8b")
    assert {k: rows[1]["tok_s"] for k, rows in found.items()} == {"1": 450.0, "3": 500.0}


# --- serving --------------------------------------------------------------------------------------


def test_serving_beside_vllm(tmp_path: Path) -> None:
    def row(streams: int, tok_s: float, case: str = "smollm2-135m+serve") -> dict[str, Any]:
        return {"case": case, "batch": streams, "tok_s": tok_s, "ttft_p50_ms": 9.4, "ttft_p99_ms": 29.6}

    put(tmp_path, "smollm2-135m+serve", [row(128, 100.0)], hour=1)
    put(tmp_path, "smollm2-135m+serve", [row(128, 106_070.7), row(64, 5.0)], hour=2)
    put(tmp_path, "smollm2-135m+serve+eagle3", [row(128, 120_000.0, "smollm2-135m+serve+eagle3")])
    part = readme.serving(results(tmp_path))
    assert "| streams | 128 |" in part, "64 streams have no figure of vLLM's beside them"
    assert "| Slipstream: tokens per second | 106,071 |" in part and "| 9 / 30 |" in part
    assert "120,000" in part and "19,750" in part and "175 / 253" in part
    assert readme.serving(results(tmp_path / "none")) == ""
