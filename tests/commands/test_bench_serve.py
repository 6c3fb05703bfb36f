from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands.run_cli import Outcome, RunCli, assert_one_line_error
from tests.load.scripted import ScriptedServer, answer_words, scripted_server, slowly
from tests.load.wire import STREAM_HEAD, chat, chunk, event, plain

SMALL = ("--prompt-len", 12, "--output-len", 5, "--warmup", 0)


def bench(cli: RunCli, server: ScriptedServer, folder: Path, *more: object) -> Outcome:
    return cli("bench", "serve", "--url", server.url, *SMALL, "--output-dir", folder, *more)


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    found = json.loads(outcome.out)["rows"]
    assert isinstance(found, list)
    return found


def test_closed_loops_one_after_another(cli: RunCli, tmp_path: Path) -> None:
    with scripted_server() as server:
        outcome = bench(cli, server, tmp_path, "--concurrency", "1,3", "--requests", 6, "--warmup", 2)
    assert outcome.code == 0, outcome.err
    for part in ("org/Tiny-Model", "HTTP"):
        assert part not in outcome.err
    assert re.search(r"1 stream .* 3 streams", outcome.out)
    assert "time to first token, ms: mean" in outcome.out
    assert "written to" in outcome.err
    (file,) = tmp_path.iterdir()
    assert "tiny-model+serve" in file.name
    results = json.loads(file.read_text())
    assert {"hardware", "torch", "commit", "date"} <= results.keys()
    assert [(row["case"], row["batch"]) for row in results["rows"]] == [
        ("tiny-model+serve", 1),
        ("tiny-model+serve", 3),
    ]
    for row in results["rows"]:
        assert (row["requests"], row["failed"], row["output_tokens"]) == (6, 0, 30)
        assert (row["tokens_counted_by"], row["prompt_tokens_mean"]) == ("usage", 12.0)
        assert row["tok_s"] > 0
        for name in ("ttft", "itl", "tpot", "e2e"):
            assert 0 <= row[f"{name}_p50_ms"] <= row[f"{name}_p95_ms"] <= row[f"{name}_p99_ms"]
        assert (row["model"], row["loop"], row["warmup"]) == ("org/Tiny-Model", "closed", 2)
        assert "interrupted" not in row
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == 16  # no run knows the prompts of another, nor of warming up
    assert {len(prompt.split()) for prompt in prompts} == {12}
    assert all(body["ignore_eos"] and body["stream"] and body["max_tokens"] == 5 for body in server.bodies)


def test_open_loop_completions_and_all_that_is_sent(cli: RunCli, tmp_path: Path) -> None:
    png = tmp_path / "run.png"
    with scripted_server(key="sesame") as server:
        arguments = ("--rate", 50, "--burstiness", 2, "--requests", 10, "--api", "completions", "--api-key", "sesame")
        more = ("--vocab-size", 100, "--extra-body", '{"top_k": 3, "temperature": null}', "--no-include-usage")
        last = ("--no-ignore-eos", "--json", "--png", png, "--seed", 9, "--case", "mine", "--processes", 2)
        outcome = bench(cli, server, tmp_path / "out", *arguments, *more, *last)
    assert outcome.code == 0, outcome.err
    assert png.stat().st_size > 1000
    (row,) = rows_of(outcome)
    assert (row["case"], row["loop"], row["rate"], row["burstiness"], row["seed"]) == ("mine", "open", 50.0, 2.0, 9)
    assert 1 <= row["batch"] <= 10
    assert (row["tokens_counted_by"], row["output_tokens"], row["prompt_tokens_mean"]) == ("events", 50, None)
    assert len(row["client_cpu"]) == 2
    for body in server.bodies:
        assert (body["path"], body["key"], body["top_k"]) == ("/v1/completions", "Bearer sesame", 3)
        assert len(body["prompt"]) == 12
        assert {"temperature", "ignore_eos", "stream_options"}.isdisjoint(body)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 10


def test_data_set_and_trace(cli: RunCli, tmp_path: Path) -> None:
    asked = tmp_path / "question.jsonl"
    asked.write_text(
        '{"question_id": 1, "category": "qa", "turns": ["one two", "three"]}\n{"prompt": "x", "max_tokens": 2}'
    )
    trace = tmp_path / "trace.jsonl"
    entries = [{"timestamp": 100 * i, "input_length": 3 + i, "output_length": 4, "hash_ids": []} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, entries)))
    with scripted_server() as server:
        outcome = bench(cli, server, tmp_path / "a", "--dataset", asked, "--concurrency", "2", "--json")
        assert outcome.code == 0, outcome.err
        (row,) = rows_of(outcome)
        assert (row["requests"], row["output_tokens"], row["dataset"]) == (2, 5 + 2, "question.jsonl")
        assert sorted(body["messages"][0]["content"] for body in server.bodies) == ["one two", "x"]
        assert not any("ignore_eos" in body for body in server.bodies)
        server.bodies.clear()
        outcome = bench(cli, server, tmp_path / "b", "--trace", trace, "--json")
        assert outcome.code == 0, outcome.err
    (row,) = rows_of(outcome)
    assert (row["loop"], row["trace"], row["requests"], row["output_tokens"]) == ("open", "trace.jsonl", 4, 16)
    assert row["seconds"] > 0.2  # the trace lasts 0.3, and its first request may be late
    assert sorted(len(body["messages"][0]["content"].split()) for body in server.bodies) == [3, 4, 5, 6]


@pytest.mark.parametrize("limits", [("ttft:5000 tpot:0.000001",), ("ttft:5000", "tpot:0.000001")])
def test_goodput_as_one_text_or_as_several_words(cli: RunCli, tmp_path: Path, limits: tuple[str, ...]) -> None:
    with scripted_server(slowly(answer_words, 0.01)) as server:
        outcome = bench(cli, server, tmp_path, "--concurrency", "2", "--requests", 4, "--goodput", *limits, "--json")
    (row,) = rows_of(outcome)
    assert row["goodput_limits_ms"] == {"ttft": 5000.0, "tpot": 0.000001}
    assert 0.0 <= row["goodput_share"] <= 1.0


def test_failures_are_counted_and_named(cli: RunCli, tmp_path: Path) -> None:
    numbers = iter(range(100))

    def answer(body: dict[str, Any]) -> bytes:
        number = next(numbers)
        if number % 3 == 1:
            return plain("429 Too Many Requests", b'{"error": {"message": "slow down"}}')
        return answer_words(body)

    with scripted_server(answer) as server:
        outcome = bench(cli, server, tmp_path, "--concurrency", "1", "--requests", 9, "--json")
    assert outcome.code == 0
    (row,) = rows_of(outcome)
    assert (row["requests"], row["failed"], row["failures"]) == (6, 3, {"HTTP 429: slow down": 3})
    assert "WARNING: 1 stream: 3 of 9 requests failed: 3 x HTTP 429: slow down" in outcome.err


def test_nothing_measured_is_no_success(cli: RunCli, tmp_path: Path) -> None:
    half = STREAM_HEAD + chunk(event(chat(" a"))) + b"zz\r\n"
    with scripted_server(lambda _: half) as server:
        outcome = bench(cli, server, tmp_path, "--concurrency", "1", "--requests", 2)
    assert outcome.code == 2
    assert "2 of 2 requests failed: 2 x a chunk has no length: zz" in outcome.err


def test_comparison(cli: RunCli, tmp_path: Path) -> None:
    with scripted_server() as server:
        for case in ("old", "new"):
            arguments = ("--concurrency", "1,2", "--requests", 4, "--case", case)
            assert bench(cli, server, tmp_path / case, *arguments).code == 0
    (old,), (new,) = ((tmp_path / case).iterdir() for case in ("old", "new"))
    outcome = cli("bench", "serve", "--compare", old, new)
    assert outcome.code == 0, outcome.err
    for part in ("a is old, b is new", "b to a", "2 streams", "time to first token, p50, ms"):
        assert part in outcome.out
    assert outcome.out.count(" x ") >= 2


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("--url", "http://127.0.0.1:1"), ["no server answers at http://127.0.0.1:1", "slipstream serve"]),
        (("--url", "https://127.0.0.1:1"), ["https is not supported"]),
        (("--concurrency", "0"), ["--concurrency must be positive numbers"]),
        (("--rate", "fast"), ["--rate fast", "must be a number above 0"]),
        (("--goodput", "speed:5"), ["--goodput knows ttft, tpot, e2e"]),
        (("tpot:5",), ["unexpected argument 'tpot:5'"]),
        (("--extra-body", "{oops"), ["is not JSON"]),
        (("--extra-body", "[1]"), ["--extra-body must be a JSON object"]),
        (("--dataset", "none.jsonl"), ["--dataset cannot be read"]),
        (("--png", "run.svg"), ["--png must be a file such as run.png"]),
        (("--compare", "a.json", "b.json"), ["a.json is no result of bench serve"]),
        (("--compare", "a.json"), ["'--compare' requires 2 arguments"]),
        (("--concurency", "1"), ["unknown option '--concurency'; did you mean '--concurrency'?"]),
    ],
)
def test_bad_options_are_one_line(
    cli: RunCli, tmp_path: Path, arguments: tuple[object, ...], phrases: list[str]
) -> None:
    folder = tmp_path / "results"
    assert_one_line_error(cli("bench", "serve", "--output-dir", folder, *arguments), *phrases)
    assert not folder.exists()


def test_refused_warm_up_is_one_line(cli: RunCli, tmp_path: Path) -> None:
    refusal = plain("400 Bad Request", b'{"error": {"message": "extra field: ignore_eos"}}')
    with scripted_server(lambda _: refusal) as server:
        outcome = bench(cli, server, tmp_path, "--warmup", 1, "--concurrency", "1")
    assert_one_line_error(outcome, "no request of the warm-up succeeded: HTTP 400", "--no-ignore-eos")


def test_more_streams_than_files(cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    with scripted_server() as server:
        outcome = bench(cli, server, tmp_path, "--concurrency", "200", "--processes", 1)
    assert_one_line_error(outcome, "200 streams need 264 open files in each client process, 256 are allowed")


def test_options_of_bench_do_not_reach_its_sub_command(cli: RunCli) -> None:
    outcome = cli("bench", "--batch", 4, "serve")
    assert_one_line_error(outcome, "--batch is an option of 'slipstream bench'", "after 'serve'")
    assert_one_line_error(cli("bench", "server"), "unknown command 'server'; did you mean 'serve'?")


def test_help_names_both(cli: RunCli) -> None:
    outcome = cli("bench", "--help")
    assert outcome.code == 0
    for part in ("--shape", "--prompt-len", "serve"):
        assert part in outcome.out
    assert "--concurrency" in cli("bench", "serve", "--help").out


@pytest.mark.parametrize("answered", [3, 0])
def test_ctrl_c_reports_what_there_is(tmp_path: Path, answered: int) -> None:
    """The third answer is the last one; the rest hang."""

    def answer(body: dict[str, Any]) -> bytes | None:
        return answer_words(body) if len(server.bodies) <= answered else None

    with scripted_server(answer) as server:
        command = [sys.executable, "-m", "slipstream", "bench", "serve", "--url", server.url, "--output-dir", tmp_path]
        more = ("--concurrency", "2,4", "--requests", 8, *SMALL)
        with subprocess.Popen(
            [str(part) for part in (*command, *more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + 60
            while len(server.bodies) < answered + 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if not answered:
        assert (out, list(tmp_path.iterdir())) == ("", [])
        assert "interrupted before a request had ended" in err
        return
    assert "3, 0, 2 unfinished" in out
    assert "interrupted: the figures are of the requests that had ended" in err
    (file,) = tmp_path.iterdir()
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["batch"], row["requests"], row["unfinished"], row["interrupted"]) == (2, 3, 2, True)
