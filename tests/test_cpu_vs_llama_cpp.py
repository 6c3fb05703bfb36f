"""The comparison with llama.cpp on CPUs: its tools' output is read right, and rows say what was measured."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import llama_cpp_build
import quiet
from cpu_engine import memory_of, parse_options
from cpu_vs_llama_cpp_rows import Texts, Turns, memory_fields, rate_row, speculation_row, tables
from llama_cpp_build import TOOLS, UnavailableError, find_or_build, unpack
from llama_cpp_tools import (
    LlamaCpp,
    OutputError,
    Rate,
    read_batched,
    read_bench,
    read_completion,
    read_speculative,
)
from quiet import Quiet, busy_ticks, process_ticks

BENCH = '[{"n_prompt": 256, "n_gen": 0, "avg_ts": 518.5, "n_depth": 0}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 209.25}]'
BATCHED = """
main: n_kv_max = 2560
{"n_kv_max": 2560, "pp": 256, "tg": 64, "pl": 1, "t_tg": 0.3, "speed_tg": 200.5, "speed": 600.0}
{"n_kv_max": 2560, "pp": 256, "tg": 64, "pl": 8, "t_tg": 1.3, "speed_tg": 400.25, "speed": 700.0}

llama_perf_context_print: load time = 100.00 ms
"""
SPECULATIVE = """
encoded   39 tokens in    0.400 seconds, speed:   97.500 t/s
decoded  129 tokens in    2.500 seconds, speed:   51.600 t/s

n_draft   = 3
n_predict = 129
n_drafted = 120
n_accept  = 84
accept    = 70.000%
"""
COMPLETION = """
common_perf_print: prompt eval time =     285.40 ms /    40 tokens (    7.13 ms per token,   140.15 tokens per second)
common_perf_print:        eval time =    2000.00 ms /   127 runs   (   15.75 ms per token,    63.50 tokens per second)
common_perf_print:       total time =    2300.00 ms /   167 tokens
"""
STATUS = "Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    2000 kB\nRssAnon:\t    1500 kB\nThreads:\t4\n"


# --- what llama.cpp's tools print -----------------------------------------------------------------


def test_bench_tells_prompt_from_decode() -> None:
    assert read_bench(BENCH) == [Rate(256, 0, 518.5), Rate(0, 64, 209.25)]


def test_the_line_of_the_batch_is_taken() -> None:
    assert read_batched(BATCHED, 8) == 400.25
    assert read_batched(BATCHED, 1) == 200.5


def test_a_text_with_drafts() -> None:
    found = read_speculative("some text that says decoded\n" + SPECULATIVE)
    assert found == (129, 2.5, 120, 84) and found.tok_s == pytest.approx(51.6)


def test_the_pass_over_the_prompt_is_not_decoding() -> None:
    assert read_completion(COMPLETION) == (127, 2.0, 0, 0)


@pytest.mark.parametrize("text", ["", "error: no such file", '[{"n_prompt": 1}]'])
def test_other_output_is_refused(text: str) -> None:
    with pytest.raises(OutputError):
        read_bench(text)
    with pytest.raises(OutputError):
        read_batched(BATCHED if text else text, 4)
    with pytest.raises(OutputError):
        read_speculative(text)
    with pytest.raises(OutputError):
        read_completion(text)


def test_a_tool_that_fails_says_why(tmp_path: Path) -> None:
    tool = tmp_path / "llama-bench"
    tool.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such model')\n")
    tool.chmod(0o755)
    with pytest.raises(OutputError, match="no such model"):
        LlamaCpp(tmp_path, 2).bench(tmp_path / "x.gguf", 256, 0)


def test_a_tool_is_asked_for_one_test(tmp_path: Path) -> None:
    tool = tmp_path / "llama-bench"
    print_arguments = f"open({str(tmp_path / 'asked')!r}, 'w').write(' '.join(sys.argv[1:]))"
    tool.write_text(f"#!{sys.executable}\nimport sys\n{print_arguments}\nprint({BENCH!r})\n")
    tool.chmod(0o755)
    assert LlamaCpp(tmp_path, 2).bench(Path("x.gguf"), 0, 64).tok_s == 209.25
    assert (tmp_path / "asked").read_text() == "-m x.gguf -t 2 -p 0 -n 64 -r 1 -o json"


# --- getting it -----------------------------------------------------------------------------------


def test_tools_that_are_there_are_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))

    def build(scratch: Path, tools: Path) -> None:
        tools.mkdir()
        for name in TOOLS:
            (tools / name).touch()

    monkeypatch.setattr(llama_cpp_build, "_build", build)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    tools = find_or_build()
    monkeypatch.delattr(llama_cpp_build, "_build")
    assert find_or_build() == tools and tmp_path in tools.parents


def test_without_a_compiler_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None if name == "c++" else f"/bin/{name}")
    with pytest.raises(UnavailableError, match=r"^building it needs c\+\+$"):
        find_or_build()


def test_only_llama_cpp_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "package.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in (
            "setup.py",
            "vendor/llama.cpp/CMakeLists.txt",
            "vendor/llama.cpp/src/a.c",
            "vendor/llama.cpp/.git",
        ):
            info = tarfile.TarInfo(f"package-1.0/{name}")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    source = unpack(archive, tmp_path)
    assert sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()) == [
        "CMakeLists.txt",
        "src/a.c",
    ]


# --- strangers on the machine ---------------------------------------------------------------------


def test_processor_time_is_read() -> None:
    assert busy_ticks("cpu  10 20 30 4000 500 1 2 3 0 0\ncpu0 1 1 1 1\n") == 66
    assert process_ticks("12 (a (b) c) S 7 12 12 0 -1 4194304 1 2 3 4 50 25 8 9 20 0 1 0") == (7, 75)


def test_the_quietest_of_several_tries_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 90.0, 100.0, 101.0, 200.0, 290.0])
    monkeypatch.setattr(quiet, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(quiet, "_own_s", lambda: 0.0)
    monkeypatch.setattr(quiet, "time", SimpleNamespace(perf_counter=iter(range(6)).__next__, sleep=lambda _: None))
    measured = iter("abc")
    taken = Quiet(limit=0.0, tries=3, pause_s=0.0)
    assert taken(lambda: next(measured)) == "b" and len(taken.shares) == 1


def test_a_quiet_measurement_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_busy_s", lambda: 5.0)
    monkeypatch.setattr(quiet, "_own_s", lambda: 5.0)
    taken, measured = Quiet(limit=0.1, tries=3), iter("abc")
    assert taken(lambda: next(measured)) == "a" and taken.shares == [0.0] and next(measured) == "b"


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_has_medians_bests_and_their_ratios() -> None:
    row = rate_row("a.gguf", 8, "decode", Turns([10.0, 30.0, 20.0], [16.0, 8.0, 10.0]), context_tokens=256)
    assert (row["case"], row["batch"], row["phase"], row["context_tokens"]) == ("a.gguf", 8, "decode", 256)
    assert (row["tok_s"], row["llama_cpp_tok_s"], row["ratio"]) == (20.0, 10.0, 2.0)
    assert (row["best_tok_s"], row["llama_cpp_best_tok_s"], row["ratio_of_bests"]) == (30.0, 16.0, 1.875)
    assert row["tok_s_runs"] == [10.0, 30.0, 20.0]


def test_without_llama_cpp_there_is_no_ratio() -> None:
    row = rate_row("a.gguf", 1, "prompt", Turns([10.0]))
    assert row["tok_s"] == 10.0 and row["llama_cpp_tok_s"] is None and row["ratio"] is None
    json.dumps(row)


def test_memory_is_compared_with_file_and_cache() -> None:
    memory = memory_of(STATUS)
    assert memory == {"rss_bytes": 2_048_000, "peak_rss_bytes": 3_072_000, "anonymous_bytes": 1_536_000}
    fields = memory_fields(memory, cache_bytes=24_000, file_bytes=1_000_000, without_model_bytes=1_024_000)
    assert fields["rss_to_file_and_cache"] == 2.0 and fields["model_rss_to_file_and_cache"] == 1.0
    assert memory_fields({}, 1, 1, None)["rss_to_file_and_cache"] is None


def answered(*token_ids: int, seconds: float, drafts: int = 0, accepted: int = 0) -> dict[str, object]:
    counts = {"num_tokens": len(token_ids), "num_drafts": drafts, "num_accepted": accepted}
    return {**counts, "seconds": seconds, "token_ids": list(token_ids)}


def test_drafts_are_compared_with_the_same_engine_without() -> None:
    plain, drafted, theirs_plain, theirs = (Texts() for _ in range(4))
    plain.add([answered(1, 2, 3, seconds=3.0), answered(4, seconds=1.0)])
    drafted.add([answered(1, 2, 3, seconds=1.5, drafts=4, accepted=2), answered(5, seconds=0.5)])
    theirs_plain.add([{"num_tokens": 8, "seconds": 2.0, "num_drafts": 0, "num_accepted": 0}])
    theirs.add([{"num_tokens": 8, "seconds": 1.6, "num_drafts": 8, "num_accepted": 2}])
    row = speculation_row("a.gguf+ngram", plain, drafted, theirs_plain, theirs)
    assert (row["tok_s"], row["plain_tok_s"], row["ratio_to_plain"]) == (2.0, 1.0, 2.0)
    assert (row["acceptance"], row["texts"], row["same_texts"]) == (0.5, 2, 1)
    assert (row["llama_cpp_tok_s"], row["llama_cpp_plain_tok_s"], row["llama_cpp_ratio_to_plain"]) == (5.0, 4.0, 1.25)
    alone = speculation_row("a.gguf+ngram", plain, drafted, None, None)
    assert alone["ratio_to_plain"] == 2.0 and alone["llama_cpp_tok_s"] is None


def test_every_row_is_in_a_table() -> None:
    memory = memory_fields(memory_of(STATUS), 1, 1, None)
    plain = Texts()
    plain.add([answered(1, seconds=1.0)])
    rows = [
        rate_row("a.gguf", 1, "decode", Turns([1.0])) | memory,
        {"case": "a.gguf", "batch": 1, "phase": "start", "first_token_s": 1.0, "first_token_s_runs": [1.0]},
        speculation_row("a.gguf+ngram", plain, plain, None, None),
    ]
    assert [table.row_count for table in tables(rows, "here")] == [1, 1, 1, 1]


def test_options_of_the_engine_are_json_where_they_can_be() -> None:
    given = ["dtype=float32", "max_num_seqs=8", "enable_prefix_caching=false", "speculate="]
    expected = {"dtype": "float32", "max_num_seqs": 8, "enable_prefix_caching": False, "speculate": ""}
    assert parse_options(given) == expected
