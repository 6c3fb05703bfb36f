from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.llm import LLM
from slipstream.output import RequestOutput
from slipstream.sampling_params import SamplingParams
from tests.commands.run_cli import RunCli, assert_one_line_error

SHORT = ("--max-tokens", 6, "--ignore-eos")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every prompt the engine was given, special tokens included."""
    seen: list[str] = []
    stream = LLM.stream

    def recording(llm: LLM, token_ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        seen.append(llm.tokenizer.decode(token_ids, skip_special_tokens=False))
        return stream(llm, token_ids, params)

    monkeypatch.setattr(LLM, "stream", recording)
    return seen


def test_history_is_kept_until_reset(cli: RunCli, tiny_model: Path, prompts: list[str]) -> None:
    outcome = cli("chat", "--model", tiny_model, "--system", "Be kind", *SHORT, stdin="One\nTwo\n/reset\nThree\n")
    assert outcome.code == 0
    opening = "<s>system: Be kind</s>"
    assert prompts[0] == f"{opening}<s>user: One</s><s>assistant: "
    assert prompts[1].startswith(f"{opening}<s>user: One</s><s>assistant: ")
    assert prompts[1].endswith("</s><s>user: Two</s><s>assistant: ")
    assert prompts[2] == f"{opening}<s>user: Three</s><s>assistant: "
    assert "A new conversation." in outcome.err


def test_commands(cli: RunCli, tiny_model: Path, prompts: list[str]) -> None:
    outcome = cli("chat", "--model", tiny_model, stdin="/help\n\n/exit\nnever asked\n")
    assert outcome.code == 0
    assert outcome.out == ""
    assert prompts == []
    for name in ("/help", "/reset", "/exit"):
        assert name in outcome.err


def test_unknown_command_gets_a_hint(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("chat", "--model", tiny_model, stdin="/rest\n")
    assert outcome.code == 2
    assert outcome.err == "error: unknown command '/rest'; did you mean '/reset'?\n"


def test_full_context_offers_a_reset(cli: RunCli, tiny_model: Path, prompts: list[str]) -> None:
    lines = ["a" * 500, "/reset", "short"]
    outcome = cli("chat", "--model", tiny_model, *SHORT, stdin="\n".join(lines))
    assert outcome.code == 2
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "no longer fits into the context of 512" in errors[0]
    assert "/reset" in errors[0]
    # The turn that did not fit is forgotten, and the conversation goes on.
    assert prompts == ["<s>user: short</s><s>assistant: "]


def test_answer_that_fills_the_context_says_so(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("chat", "--model", tiny_model, "--max-model-len", 40, "--ignore-eos", stdin="Hello\n")
    assert outcome.code == 0
    assert "The context is full; /reset" in outcome.err


def test_interrupt_stops_one_answer_only(cli: RunCli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LLM.stream
    prompts: list[str] = []
    tokens_out = []

    def interrupted(llm: LLM, token_ids: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        prompts.append(llm.tokenizer.decode(token_ids, skip_special_tokens=False))
        for count, output in enumerate(stream(llm, token_ids, params)):
            yield output
            if len(prompts) == 1 and count == 8:
                raise KeyboardInterrupt
        tokens_out.append(llm.stats.num_tokens_out)

    monkeypatch.setattr(LLM, "stream", interrupted)
    outcome = cli("chat", "--model", tiny_model, "--max-tokens", 300, "--ignore-eos", stdin="One\nTwo\n")
    assert outcome.code == 0
    assert "Stopped." in outcome.err
    assert len(prompts) == 2
    partial = prompts[1].removeprefix("<s>user: One</s><s>assistant: ").partition("</s>")[0]
    assert 0 < len(partial) <= 9
    # The engine stopped computing the first answer: 300 tokens are the second one's.
    assert 300 < tokens_out[0] < 400


def test_model_without_a_template_is_refused(cli: RunCli, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    outcome = cli("chat", "--model", folder, stdin="Hi\n")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "no chat template; use `slipstream generate`" in outcome.err


@pytest.mark.parametrize("option", ["--n", "--logprobs", "--prompt-logprobs"])
def test_what_only_generate_can_show_is_refused(cli: RunCli, tiny_model: Path, option: str) -> None:
    assert_one_line_error(cli("chat", "--model", tiny_model, option, 2), "belong to generate")
