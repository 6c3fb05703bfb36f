"""Spec-Bench's script: questions in, figures by hand, texts compared, and a whole run with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_bench
import spec_bench_noise
from slipstream.config import EngineOptions
from slipstream.engine.build import build_engine
from slipstream.engine.client import EngineClient
from slipstream.errors import ConfigError, EngineError
from slipstream.output import Logprob, RequestOutput
from slipstream.sampling.gumbel import gumbel_noise
from slipstream.sampling_params import SamplingParams
from spec_bench import PLAIN, Bench, Difference, Method, Setting, differences, judge
from spec_bench_noise import Noise, measure_noise
from spec_bench_questions import MT_BENCH, Question, read_questions
from spec_bench_report import plot, print_difference, print_tables
from spec_bench_runs import Answer, Run, Seen, Steps, joined
from tests import tiny_models

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["one two one two one two", "three one two"]},
    {"question_id": 82, "category": "qa", "turns": ["hello hello hello"]},
    {"question_id": 83, "category": "qa", "turns": ["x y x y x"]},
]


def put(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return put(tmp_path / "question.jsonl", QUESTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny"))


# --- questions ------------------------------------------------------------------------------------


def test_questions_by_kind_with_both_turns(questions: Path) -> None:
    assert read_questions(questions) == {
        "mt_bench": [Question("mt_bench", ("one two one two one two", "three one two"))],
        "qa": [Question("qa", ("hello hello hello",)), Question("qa", ("x y x y x",))],
    }


def test_limit_is_of_each_kind_and_kinds_can_be_chosen(tmp_path: Path) -> None:
    path = put(tmp_path / "q", [{"category": c, "turns": [str(i)]} for i in range(3) for c in (*MT_BENCH, "rag")])
    found = read_questions(path, limit=2)
    assert {kind: len(asked) for kind, asked in found.items()} == {"mt_bench": 2, "rag": 2}
    assert list(read_questions(path, kinds=["rag"])) == ["rag"]
    with pytest.raises(ConfigError, match=r"no questions of kind 'rga'.*rag"):
        read_questions(path, kinds=["rga"])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        {"category": "qa"},
        {"category": "qa", "turns": []},
        {"category": "qa", "turns": "text"},
        {"category": "qa", "turns": [1]},
        {"category": "qa", "turns": ["a", "b", "c"]},
        {"category": 3, "turns": ["a"]},
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: Any) -> None:
    path = put(tmp_path / "q.jsonl", [QUESTIONS[0], "", line])
    with pytest.raises(ConfigError, match=r"q\.jsonl, line 3") as caught:
        read_questions(path)
    assert "\n" not in str(caught.value)


def test_no_file_and_no_questions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the questions"):
        read_questions(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="has no questions"):
        read_questions(put(tmp_path / "empty", []))


# --- figures --------------------------------------------------------------------------------------


def test_lengths_of_a_run_by_hand() -> None:
    steps = Steps.from_updates(
        [
            Seen(["a"], [1], [0]),  # a's prompt
            Seen(["a", "b"], [3, 0], [2, 0]),  # a check: both drafts and the target's own; b's prompt goes on
            Seen(["a", "b"], [1, 1], [2, 0]),  # a check where nothing passed; b's prompt ends
            Seen(["a", "b"], [1, 4], [0, 3]),  # a step without drafts; a check where all passed
            Seen(["b"], [2], []),  # as an engine without drafts says it
        ]
    )
    # Checks: 3, 1 and 4 tokens. Steps: those, and two without drafts with 1 and 2.
    assert (steps.num_checks, steps.num_checked_tokens, steps.num_steps, steps.num_tokens) == (3, 8, 5, 11)
    assert steps.accepted_length == pytest.approx(8 / 3)
    assert steps.tokens_a_step == pytest.approx(11 / 5)
    assert (Steps().accepted_length, Steps().tokens_a_step) == (1.0, 1.0)


def run(seconds: float, *texts: list[int], steps: Steps | None = None) -> Run:
    return Run([Answer([7], ids, "", seed) for seed, ids in enumerate(texts)], seconds, steps or Steps())


def bench(**others: Any) -> Bench:
    arguments = spec_bench.parse(["--questions", "q", "--model", "some/Tiny-0.6B", "--device", "cpu"])
    vars(arguments).update(others)
    return Bench(arguments, {})


def test_rows_by_kind_and_over_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting(0.0, 32)
    plain = {setting: {"qa": run(2.0, [1, 2], [3, 4]), "rag": run(8.0, [5] * 6)}}
    drafted = {
        setting: {
            "qa": run(1.0, [1, 2], [3, 9], steps=Steps(2, 2, 1, 1)),
            "rag": run(2.0, [5] * 6, steps=Steps(3, 5, 1, 3)),
        }
    }
    apart = {setting: [Difference("qa", [7, 3], [9], [4], 1, gap=0.1)]}
    own = bench(near_tie=0.25)
    rows = own.rows(Method("ngram"), drafted, plain, apart)
    names = ("kind", "tok_s", "plain_tok_s", "ratio", "accepted_length", "tokens_a_step", "num_texts", "same_texts")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("qa", 4.0, 2.0, 2.0, 1.0, 1.0, 2, 1),
        ("rag", 3.0, 0.8, 4.0, 3.0, 1.667, 1, 1),
        ("overall", 3.3, 1.0, 3.333, 2.0, 1.4, 3, 2),  # 10 tokens in 3 s, against 10 s; 4 in 2 checks, 7 in 5 steps
    ]
    assert [(row["near_ties"], row["faults"]) for row in rows] == [(1, 0), (0, 0), (1, 0)]
    assert {(row["case"], row["batch"], row["k"], row["limit"]) for row in rows} == {
        ("Tiny-0.6B+ngram", 32, "adaptive", None)
    }
    assert [row["faults"] for row in bench().rows(Method("ngram"), drafted, plain, apart)] == [
        1,
        0,
        1,
    ]  # a CPU's tolerance
    assert [row["kind"] for row in bench(kinds=["qa", "rag"]).rows(Method("ngram"), drafted, plain, apart)] == [
        "qa",
        "rag",
    ]
    print_tables([*rows, *({**row, "temperature": 0.7} for row in rows)], "title")
    shown = capsys.readouterr().out
    assert shown.count("title, temperature") == 2 and "1 of 2" in shown and "4.00" in shown
    plot([*rows, *({**row, "temperature": 0.7} for row in rows)], tmp_path / "bars.png", "title")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_no_cell_of_the_table_is_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    """The longest names of Spec-Bench's kinds and of methods, and figures as long as they get."""
    row = {"case": "m+eagle3", "kind": "math_reasoning", "batch": 128, "k": 16, "temperature": 0.0, "ratio": 10.25}
    row |= {"accepted_length": 17.0, "tokens_a_step": 16.5, "tok_s": 123456.7, "plain_tok_s": 98765.4}
    row |= {"num_texts": 560, "same_texts": 123, "near_ties": 437}
    print_tables([row], "Spec-Bench, SmolLM2-135M, NVIDIA H200")
    title, *table = capsys.readouterr().out.splitlines()
    assert title.strip() == "Spec-Bench, SmolLM2-135M, NVIDIA H200, temperature 0"
    head, body = (line.strip("┃│ ") for line in table if line[0] in "┃│")  # one line each
    names = ["method", "questions", "batch", "accepted", "a step", "tokens/s", "plain", "speed-up", "same", "ties"]
    cells = ["eagle3, k = 16", "math_reasoning", "128", "17.00", "16.50", "123,457", "98,765", "10.25", "123 of 560"]
    assert [name.strip() for name in head.split("┃")] == names
    assert [cell.strip() for cell in body.split("│")] == [*cells, "437"]


def test_joined_runs_add_up() -> None:
    both = joined([run(1.0, [1], steps=Steps(1, 2, 3, 4)), run(2.5, [2, 3], steps=Steps(10, 20, 30, 40))])
    assert (both.num_tokens, both.seconds, both.steps) == (3, 3.5, Steps(11, 22, 33, 44))


# --- texts that differ ----------------------------------------------------------------------------


def test_the_first_difference_is_found() -> None:
    plain = run(1.0, [1, 2, 3, 4], [5, 6], [8])
    drafted = run(1.0, [1, 2, 9, 4], [5], [8])
    first, second = differences("qa", plain, drafted)
    assert (first.prompt, first.ours, first.plain, first.seed) == ([7, 1, 2], [9, 4], [3, 4], 0)
    assert (second.prompt, second.ours, second.plain, second.seed) == ([7, 5], [-1], [6], 1)
    with pytest.raises(ConfigError, match="different questions"):
        differences("qa", plain, joined([Run([replace_prompt(a) for a in plain.answers], 1.0, Steps())]))


def replace_prompt(answer: Answer) -> Answer:
    return answer._replace(prompt=[0])


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[EngineClient]:
    options = EngineOptions(model=str(folder), device="cpu", dtype="float64", max_num_seqs=2, max_model_len=128)
    made = EngineClient.in_thread(lambda: build_engine(options))
    yield made
    made.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_gap_is_that_of_the_scores_that_the_engine_compares(client: EngineClient, temperature: float) -> None:
    """Expected values are transformers' logits, with the noise of the whole vocabulary."""
    prompt, seed = [5, 6, 7, 8], 2**40 + 3
    model = tiny_models.build("llama").double()
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0, -1]
    if temperature:
        words = torch.tensor([[3, 2**8]], dtype=torch.int32)
        at = torch.tensor([len(prompt)], dtype=torch.int32)
        scores = scores + temperature * gumbel_noise(words, at, torch.zeros_like(at), len(scores))[0]
    best, second = scores.topk(2).indices.tolist()
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=1, top_p=1.0, top_k=-1)
    answer = spec_bench.generate(client, [prompt], [params], 1).answers[0]
    assert answer.token_ids == [best]
    # The second and the least likely: one is among the log probabilities that an answer may carry, the other is not.
    last = int(scores.argmin())
    found = [Difference("qa", prompt, [other], [best], answer.seed) for other in (second, last, -1)]
    judge(client, found, temperature)
    for one, other in zip(found, (second, last), strict=False):
        assert one.gap == pytest.approx(float(scores[best] - scores[other]), abs=1e-4)
    assert found[2].gap is None


# --- the tolerance --------------------------------------------------------------------------------


def test_figures_of_noise_by_hand() -> None:
    noise = Noise.from_changes([i / 1000 for i in range(1000, -1, -1)], batch=8)
    assert noise == pytest.approx((1.0, 0.5, 0.999, 1001, 8))
    assert noise.row == {
        "case": "noise",
        "batch": 8,
        "largest": 1.0,
        "median": 0.5,
        "p999": 0.999,
        "tolerance": 2.0,
        "num_tokens": 1001,
    }
    assert str(noise) == (
        "the same token's log probability differs by up to 1 between decoding and a prompt, median 0.5, 99.9th "
        "percentile 0.999, over 1,001 tokens: gaps below 2 are near-ties"
    )


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_in_float64_there_is_no_noise(client: EngineClient) -> None:
    """Log probabilities come as float32, and those of a token and of its neighbours are far apart."""
    noise = measure_noise(client, [[5, 6, 7], [8], [9, 9]], [GREEDY] * 3, 2)
    assert 18 < noise.num_tokens <= 18 * 5 and noise.batch == 2
    assert noise.largest < 1e-6


@pytest.mark.parametrize("in_prompt", [False, True])
def test_one_disturbed_token_is_found_exactly(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, in_prompt: bool
) -> None:
    """The last token of the second answer, either as it was decoded or as part of a prompt."""
    answers_to = spec_bench_noise.answers_to

    def disturbed(*others: Any) -> list[RequestOutput]:
        outputs = answers_to(*others)
        known = outputs[1].prompt_logprobs if in_prompt else outputs[1].outputs[0].logprobs
        if known is not None:
            last = known[-1]
            assert last is not None
            token, own = max(last.items(), key=lambda item: item[1].logprob)
            last[token] = Logprob(own.logprob - 0.375, own.rank, own.text)
        return outputs

    monkeypatch.setattr(spec_bench_noise, "answers_to", disturbed)
    noise = measure_noise(client, [[5, 6, 7], [8]], [GREEDY] * 2, 2)
    assert noise.largest == pytest.approx(0.375, abs=1e-6)
    assert noise.tolerance == pytest.approx(0.75, abs=2e-6)
    assert noise.median < 1e-6 and 12 < noise.num_tokens <= 12 * 5


def test_only_a_gpu_has_noise_and_only_where_no_tolerance_is_given() -> None:
    own = bench()
    assert not own.measures_noise and own.near_tie == 0.0
    own.device = "cuda:0"
    assert own.measures_noise
    own.noise = Noise.from_changes([0.125, 0.25], 1)
    assert own.near_tie == 0.5
    given = bench(near_tie=0.1)
    given.device = "cuda:0"
    assert not given.measures_noise and given.near_tie == 0.1


def test_noise_is_of_some_questions_of_each_kind_and_of_few_at_a_time(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = bench(batch=[1, 64], output_len=3, max_model_len=128)
    own.questions = {kind: [Question(kind, (f"{kind} {i}", "more"))] * 20 for i, kind in enumerate(("qa", "rag"))}
    asked: list[Any] = []
    monkeypatch.setattr(spec_bench, "measure_noise", lambda *others: asked.append(others))
    own.noise_of(client)
    ((_, prompts, params, batch),) = asked
    assert (len(prompts), batch) == (32, 32)
    assert {(one.temperature, one.max_tokens) for one in params} == {(0.0, 3)} and len(params) == 32


# --- so many at a time ----------------------------------------------------------------------------


def test_no_more_run_at_a_time_than_asked_for(client: EngineClient) -> None:
    begun: list[int] = []
    submit, params = client.submit, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)

    def counted(request: Any, sink: Any, **others: Any) -> None:
        begun.append(len(running))
        running.add(request.request_id)
        submit(request, lambda output: (running.discard(output.request_id), sink(output)), **others)

    running: set[str] = set()
    client.submit = counted  # type: ignore[method-assign]
    try:
        whole = spec_bench.generate(client, [[i + 1] for i in range(5)], [params] * 5, 1)
    finally:
        del client.submit  # type: ignore[method-assign]
    assert begun == [0] * 5
    assert [len(answer.token_ids) for answer in whole.answers] == [5] * 5
    assert whole.steps == Steps(num_steps=20, num_tokens=20)  # four of each after the prompt's


# --- the whole script -----------------------------------------------------------------------------


def arguments(folder: Path, questions: Path, output: Path, *others: str) -> list[str]:
    base = ["--questions", str(questions), "--model", str(folder), "--output-dir", str(output)]
    return [*base, "--device", "cpu", "--max-model-len", "256", "--output-len", "16", *others]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.json")
    text = path.read_text()
    assert "Infinity" not in text and "NaN" not in text
    found: list[dict[str, Any]] = json.loads(text)["rows"]
    return found


def test_a_whole_run_with_a_tiny_model(
    folder: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results"
    asked = arguments(folder, questions, output, "--methods", "none,ngram:3", "--batch", "1,2")
    assert spec_bench.main(asked) == 0
    rows = rows_in(output)
    # Two methods, two temperatures, two batches, two kinds and all together.
    assert len(rows) == 24
    for row in rows:
        assert row["same_texts"] == row["num_texts"] == {"mt_bench": 2, "qa": 2, "overall": 4}[row["kind"]]
        assert (row["near_ties"], row["faults"], row["limit"]) == (0, 0, None)
        assert row["tok_s"] > 0 and 1.0 <= row["tokens_a_step"] <= row["accepted_length"] <= 4.0
        if row["case"].endswith("+none"):
            assert (row["ratio"], row["accepted_length"], row["k"]) == (1.0, 1.0, 0)
    settings = {(row["temperature"], row["batch"]) for row in rows}
    assert settings == {(0.0, 1), (0.0, 2), (0.7, 1), (0.7, 2)}
    (picture,) = output.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr()
    assert "0 texts differ from the plain run's: 0 near-ties, 0 faults" in shown.out
    assert shown.err.count("ready after") == 2  # as many engines as methods
    assert shown.err.count("tokens/s") == 16


def test_a_text_that_differs_is_shown_counted_and_fails_on_a_cpu(
    folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = spec_bench.generate

    def wrong(client: EngineClient, *others: Any) -> Run:
        found = generate(client, *others)
        if client.config.speculative is not None:
            ids = found.answers[0].token_ids
            ids[2] = (ids[2] + 1) % 256
        return found

    monkeypatch.setattr(spec_bench, "generate", wrong)
    few = ("--limit", "1", "--kinds", "qa", "--batch", "1", "--temperature", "0.7")
    assert spec_bench.main(arguments(folder, questions, tmp_path / "a", *few)) == 1
    shown = capsys.readouterr().out
    assert "1 texts differ from the plain run's: 0 near-ties, 1 faults" in shown and "A FAULT" in shown
    drafted, difference = rows_in(tmp_path / "a")[-2:]
    assert (drafted["num_texts"], drafted["same_texts"], drafted["faults"], drafted["limit"]) == (1, 0, 1, 1)
    assert difference["case"] == "difference" and difference["gap"] > 0 and not difference["near_tie"]
    assert spec_bench.main(arguments(folder, questions, tmp_path / "b", *few, "--near-tie", "1e9")) == 0
    assert "a near-tie" in capsys.readouterr().out
    assert rows_in(tmp_path / "b")[-2]["near_ties"] == 1


def test_noise_that_is_measured_is_shown_kept_and_decides(
    folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU: two differences with gaps on both sides of the tolerance."""
    gaps = iter([0.49, 0.51])

    def judged(_client: EngineClient, found: Sequence[Difference], _temperature: float) -> None:
        for one in found:
            one.gap = next(gaps)

    def apart(kind: str, *_runs: Run) -> list[Difference]:
        return [Difference(kind, [1], [2], [3], 0) for _ in range(2)]

    measured: list[EngineClient] = []

    def planted(client: EngineClient, *others: Any) -> Noise:
        measured.append(client)
        assert measure_noise(client, *others).largest < 1e-3
        return Noise.from_changes([0.0, 0.25], 1)

    monkeypatch.setattr(Bench, "measures_noise", True)
    for name, stand_in in (("judge", judged), ("differences", apart), ("measure_noise", planted)):
        monkeypatch.setattr(spec_bench, name, stand_in)
    few = ("--kinds", "qa", "--batch", "1", "--temperature", "0")
    assert spec_bench.main(arguments(folder, questions, tmp_path / "a", *few)) == 1
    shown = capsys.readouterr().out
    assert "gaps below 0.5 are near-ties" in shown
    assert "2 texts differ from the plain run's: 1 near-ties, 1 faults" in shown
    plain, drafted, noise, tie, fault = rows_in(tmp_path / "a")
    assert (noise["case"], noise["batch"], noise["tolerance"], noise["num_tokens"]) == ("noise", 1, 0.5, 2)
    assert (plain["faults"], drafted["near_ties"], drafted["faults"]) == (0, 1, 1)
    assert tie["near_tie"] and not fault["near_tie"]
    assert len(measured) == 1 and measured[0].config.speculative is None  # by the plain engine alone


def test_what_was_measured_is_kept_when_a_method_fails(
    folder: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_method = Bench.run_method

    def failing(self: Bench, method: Method, *plain: Any) -> Any:
        if method != PLAIN:
            raise EngineError("out of memory")
        return run_method(self, method, *plain)

    monkeypatch.setattr(Bench, "run_method", failing)
    few = ("--limit", "1", "--kinds", "qa", "--batch", "1", "--temperature", "0")
    with pytest.raises(EngineError, match="out of memory"):
        spec_bench.main(arguments(folder, questions, tmp_path / "a", *few))
    assert [row["case"].split("+")[-1] for row in rows_in(tmp_path / "a")] == ["none"]


def test_differences_without_a_gap_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = Difference("qa", [1, 2], [-1], [5], 0, texts=("", "more"))
    row = spec_bench.difference_row(Method("ngram"), Setting(0.0, 1), found, 0.25)
    assert row["gap"] is None and not row["near_tie"]
    print_difference(row)
    assert "'' for 'more', no gap, A FAULT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "ngram,eagle"], "unknown method eagle"),
        (["--methods", "eagle3"], "--head"),
        (["--batch", "1,many"], "--batch and --temperature"),
        (["--temperature", "-1"], "at least"),
        (["--limit", "0"], "at least"),
        (["--methods", "ngram:0"], "at least 1"),
        (["--max-model-len", "100"], "--max-model-len"),
    ],
)
def test_wrong_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        spec_bench.parse(["--questions", "q", *words])
    assert message in capsys.readouterr().err.splitlines()[-1]
