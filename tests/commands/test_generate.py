from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.commands.generate import drafts_line
from slipstream.llm import LLM
from slipstream.output import SYNTHETIC_NOTICE, DraftStats, RequestOutput
from tests.commands.run_cli import RunCli, assert_one_line_error


def expected_text(folder: Path, prompt: str, num_tokens: int) -> tuple[str, list[int]]:
    """Greedy continuation by transformers, with end-of-sequence ignored."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    out = model.generate(
        **ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    token_ids = out[0, ids["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(token_ids, skip_special_tokens=True), token_ids


def test_json_has_everything(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("generate", "Hello", "--model", tiny_model, "--max-tokens", 9, "--ignore-eos", "--raw", "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    answer = json.loads(outcome.out)
    text, token_ids = expected_text(tiny_model, "Hello", 9)
    assert answer["text"] == text
    assert answer["token_ids"] == token_ids
    assert answer["finish_reason"] == "length"
    assert answer["stop_reason"] is None
    assert answer["num_prompt_tokens"] == 5
    assert answer["model"] == str(tiny_model)
    assert answer["seed"] >= 0
    assert set(answer["timings"]) == {"first_token_s", "total_s", "tok_s"}
    assert 0 < answer["timings"]["first_token_s"] <= answer["timings"]["total_s"]
    assert answer["timings"]["tok_s"] > 0


def test_text_goes_to_stdout_and_figures_to_stderr(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("generate", "Hello", "--model", tiny_model, "--max-tokens", 9, "--ignore-eos", "--raw")
    assert outcome.code == 0
    assert outcome.out == expected_text(tiny_model, "Hello", 9)[0] + "\n"
    for heading in ("prompt tokens", "output tokens", "time to first token", "tokens per second"):
        assert heading in outcome.err


def test_chat_template_and_system_message_are_applied(cli: RunCli, tiny_model: Path) -> None:
    arguments = ("generate", "Hi", "--model", tiny_model, "--max-tokens", 2, "--json")
    plain = json.loads(cli(*arguments).out)
    # The template writes <s>user: Hi</s><s>assistant: with one token a character and one a special token.
    assert plain["num_prompt_tokens"] == len("user: Hi") + len("assistant: ") + 3
    with_system = json.loads(cli(*arguments, "--system", "Be kind").out)
    assert with_system["num_prompt_tokens"] == plain["num_prompt_tokens"] + len("system: Be kind") + 2


def test_prompt_from_standard_input(cli: RunCli, tiny_model: Path) -> None:
    arguments = ("--model", tiny_model, "--max-tokens", 4, "--raw", "--json")
    piped = json.loads(cli("generate", "-", *arguments, stdin="One\ntwo\n").out)
    given = json.loads(cli("generate", "One\ntwo", *arguments).out)
    assert piped["token_ids"] == given["token_ids"]
    assert_one_line_error(cli("generate", "-", *arguments, stdin=""), "the prompt is empty", "standard input")


def test_same_seed_same_text(cli: RunCli, tiny_model: Path) -> None:
    arguments = ("generate", "x", "--model", tiny_model, "--temperature", 1, "--max-tokens", 24, "--json", "--seed")
    first, again, other = (json.loads(cli(*arguments, seed).out) for seed in (5, 5, 6))
    assert first["seed"] == 5
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_repeated_options_reach_the_request(cli: RunCli, tiny_model: Path) -> None:
    arguments = ("generate", "Hello", "--model", tiny_model, "--max-tokens", 9, "--ignore-eos", "--raw", "--json")
    token_ids = json.loads(cli(*arguments).out)["token_ids"]
    stopped = json.loads(cli(*arguments, "--stop-token-ids", 271, "--stop-token-ids", token_ids[4]).out)
    assert stopped["token_ids"] == token_ids[: token_ids.index(token_ids[4]) + 1]
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == token_ids[4]


def test_system_without_a_template_is_refused(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("generate", "x", "--model", tiny_model, "--raw", "--system", "y")
    assert_one_line_error(outcome, "--system", "--raw", "use one of them")


def test_failed_request_is_one_line(cli: RunCli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(output: RequestOutput) -> RequestOutput:
        output.error = "the request\nbroke; try again"
        return output

    stream, generate = LLM.stream, LLM.generate
    monkeypatch.setattr(LLM, "stream", lambda *args: (fail(o) for o in stream(*args)))
    monkeypatch.setattr(LLM, "generate", lambda *args: [fail(o) for o in generate(*args)])
    arguments = ("generate", "x", "--model", tiny_model, "--max-tokens", 1)
    assert_one_line_error(cli(*arguments, "--json"), "the request broke; try again")
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert outcome.err == "error: the request broke; try again\n"


def test_interrupt_ends_with_130(cli: RunCli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LLM.stream

    def interrupted(*args: object) -> object:
        yield next(iter(stream(*args)))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    outcome = cli("generate", "x", "--model", tiny_model, "--ignore-eos")
    assert outcome.code == 130
    assert outcome.err == "error: interrupted\n"
    assert outcome.out.endswith("\n")


def test_as_a_process(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "generate", "Hello", "--raw", "--ignore-eos", "--max-tokens", "4"]
    done = subprocess.run([*command, "--model", str(tiny_model)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected_text(tiny_model, "Hello", 4)[0] + "\n"
    assert "tokens per second" in done.stderr


def test_several_continuations_and_logprobs(cli: RunCli, tiny_model: Path) -> None:
    asked = [
        "--model",
        tiny_model,
        "--max-tokens",
        4,
        "--ignore-eos",
        "--raw",
        "--temperature",
        1,
        "--seed",
        3,
        "--n",
        3,
    ]
    answer = json.loads(cli("generate", "Hello", *asked, "--logprobs", 2, "--prompt-logprobs", 0, "--json").out)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["choices"][0]["text"] == answer["text"]
    assert [entry[0]["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert all(entry[1]["rank"] == 1 or entry[0]["rank"] == 1 for entry in answer["logprobs"])
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 5
    shown = cli("generate", "Hello", *asked)
    assert shown.code == 0
    for choice in answer["choices"]:
        assert f"[{choice['index'] + 1}] {choice['text']}" in shown.out


def test_logit_bias_is_given_as_json(cli: RunCli, tiny_model: Path) -> None:
    bias = json.dumps({"65": 100})
    outcome = cli("generate", "x", "--model", tiny_model, "--max-tokens", 3, "--raw", "--logit-bias", bias, "--json")
    assert json.loads(outcome.out)["token_ids"] == [65] * 3


DRAFTS = DraftStats(num_steps=4, num_drafts_at=[4, 3, 3], num_accepted_at=[3, 1, 0])


def test_acceptance_in_words() -> None:
    assert drafts_line(DRAFTS) == "4 of 10 drafts accepted, mean length 2.00, by position 75% 33% 0%"
    assert drafts_line(DraftStats()) == "0 of 0 drafts accepted, mean length 1.00"
    assert drafts_line(DraftStats(is_synthetic=True)).endswith(" (SYNTHETIC)")


def test_drafts_change_the_figures_and_not_the_text(cli: RunCli, tiny_model: Path) -> None:
    arguments = ("generate", "one two one two", "--model", tiny_model, "--dtype", "float64", "--raw")
    arguments += ("--max-tokens", 60, "--ignore-eos")
    plain = json.loads(cli(*arguments, "--json").out)
    assert "speculation" not in plain
    drafted = json.loads(cli(*arguments, "--json", "--speculate", "ngram", "--k", 3).out)
    assert drafted["token_ids"] == plain["token_ids"]
    figures = drafted["speculation"]
    assert set(figures) == {"drafts", "accepted", "mean_length", "acceptance_by_position"}
    assert 0 <= figures["accepted"] <= figures["drafts"]
    assert figures["drafts"] > 0 and len(figures["acceptance_by_position"]) <= 3
    none = json.loads(cli(*arguments, "--json", "--speculate", "ngram", "--max-k", 0).out)
    assert (none["token_ids"], none["speculation"]["drafts"]) == (plain["token_ids"], 0)
    shown = cli(*arguments, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    assert shown.out == plain["text"] + "\n"
    assert f"{figures['accepted']} of {figures['drafts']} drafts accepted, mean length" in shown.err


def test_every_continuation_has_figures(cli: RunCli, tiny_model: Path) -> None:
    arguments = ("generate", "one two one two", "--model", tiny_model, "--raw", "--max-tokens", 20, "--ignore-eos")
    arguments += ("--n", 2, "--speculate", "ngram")
    choices = json.loads(cli(*arguments, "--json").out)["choices"]
    assert all(choice["speculation"]["drafts"] >= 0 for choice in choices)
    shown = cli(*arguments).err
    assert "[1] " in shown and "[2] " in shown and shown.count("drafts accepted") == 2


RATES = {"method": "ngram", "num_speculative_tokens": 2, "verify": "synthetic", "acceptance_rates": [0.8, 0.4]}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_synthetic_acceptance_is_the_first_thing_said(cli: RunCli, tiny_model: Path, command: str) -> None:
    arguments = ("--model", tiny_model, "--max-tokens", 20, "--ignore-eos", "--speculative-config", json.dumps(RATES))
    outcome = cli(command, *(("Hello",) if command == "generate" else ()), *arguments, stdin="Hello\n")
    assert outcome.code == 0
    assert outcome.err.startswith(f"WARNING: synthetic acceptance: {SYNTHETIC_NOTICE}\n")
    if command == "generate":
        assert "(SYNTHETIC)" in outcome.err
        answer = cli("generate", "Hello", *arguments, "--json")
        assert answer.err == f"WARNING: synthetic acceptance: {SYNTHETIC_NOTICE}\n"
        assert json.loads(answer.out)["speculation"]["synthetic"] == SYNTHETIC_NOTICE
