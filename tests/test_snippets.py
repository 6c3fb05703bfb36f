"""What the pages tell people to type works: programs run with a tiny model, commands pass the real command line.

What is not run has its reason here.
"""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli import main
from tests import tiny_models
from tests.snippets import PROGRAMS, ROOT, Command, Program, commands, programs

# Programs that are only compiled: words in them, and the reason.
NOT_RUN = {
    "from openai import": "needs a server; tests/server/test_openai_client.py has such clients",
    "EncoderInput(features)": "needs a model with an encoder; tests/models has one",
    "llm.transcribe(": "needs a speech model; tests/transcription has tiny ones",
    "registry.register(OPERATION)": "a fragment; tests/drill/test_sampling_operation.py registers one",
}
# Commands that are parsed and not run, and the reason. `generate` and `models` are run.
ONLY_PARSED = {
    "serve": "runs until it is ended; tests/server starts it",
    "bench": "takes minutes; tests/commands/test_bench.py and test_bench_serve.py run small ones",
    "chat": "a conversation; tests/commands/test_chat.py has some",
    "demo": "three answers of the default model; tests/commands/test_demo.py runs it",
    "transcribe": "needs a speech model; tests/commands/test_transcribe.py runs it",
    "tune": "needs a GPU",
    "doctor": "tries out compilers; tests/commands/test_doctor.py runs it",
    "train": "takes minutes; tests/train runs small ones",
    "--version": "tests/test_cli.py runs it",
}
# Modules whose `run` does what the command says.
RUNS = ("generate", "demo", "chat", "bench", "bench_serve", "serve", "doctor", "tune", "train", "models", "transcribe")
# Options that need another model than the tiny one.
HEADS = {"eagle3", "eagle", "mtp", "dflash", "draft_model", "--k", "--max-k", "--speculative-config", "--device"}
MODELS = ("smollm2-135m", "./my-model", "./large", "./small", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-Embedding-0.6B")


def where(snippet: Program | Command) -> str:
    return f"{snippet.page.relative_to(ROOT)}:{snippet.line}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.build("llama"), tmp_path_factory.mktemp("tiny"))


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", programs(), ids=where)
def test_programs_run(program: Program, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments find what the text around them speaks of."""
    text = program.text
    for model in MODELS:
        text = text.replace(f'"{model}"', repr(str(tiny)))
    body = compile(text, where(program), "exec")
    if any(words in text for words in NOT_RUN):
        return
    monkeypatch.chdir(tmp_path)
    with LLM(str(tiny), speculate="ngram", max_num_seqs=2) as llm:
        output = llm.generate("a b a b", SamplingParams(temperature=0, max_tokens=4, logprobs=1))[0]
        exec(body, {"__name__": "__main__", "LLM": LLM, "SamplingParams": SamplingParams, "llm": llm, "output": output})


def test_the_readmes_answer_is_the_models(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(program for program in programs() if program.page == ROOT / "README.md")
    names: dict[str, Any] = {}
    exec(compile(first.text, where(first), "exec"), names)
    names["llm"].close()
    expected = re.findall(r"print\(.*\)  # (.*)", first.text)
    assert expected and capsys.readouterr().out == "\n".join(expected) + "\n"


# --- commands -------------------------------------------------------------------------------------


def own_commands() -> list[Command]:
    return [command for command in commands() if command.words[0] == "slipstream"]


def completed(words: list[str]) -> list[str]:
    """With what a sentence about a command leaves out."""
    if words == ["train"]:
        return ["train", "eagle3", "--out", "head"]
    if words == ["transcribe"]:
        return ["transcribe", "talk.mp3"]
    has_prompt = len(words) > 1 and not words[1].startswith("-")
    if words[0] in ("generate", "tune") and not has_prompt:
        return [words[0], "llama-3.1-8b", *words[1:]]
    return [*words, "--out", "head"] if words[0] == "train" and "--out" not in words else words


@pytest.mark.parametrize("command", own_commands(), ids=where)
def test_commands_are_parsed(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the real command line, every option and value checked; the work itself is left out."""
    assert command.words[1] in (*ONLY_PARSED, "generate", "models")
    for name in RUNS:
        monkeypatch.setattr(f"slipstream.commands.{name}.run", lambda *_, **__: 0)
    monkeypatch.setattr("slipstream.commands.bench_serve.run_compare", lambda *_: 0)
    words = [re.sub(r"\bN\b", "1", word) for word in command.words[1:]]
    assert main(completed(words) if command.in_sentence else words) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [c for c in own_commands() if c.words[1] == "generate" and not HEADS & {*c.words}], ids=where
)
def test_commands_run(
    command: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a prompt"))
    words = [*command.words[1:]]
    words = [*(completed(words) if command.in_sentence else words), "--model", str(tiny), "--max-tokens", "4"]
    assert main(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize("words", [["models"], ["models", "--json"]], ids=" ".join)
def test_lists_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out


def test_other_programs_have_what_they_name() -> None:
    """Verbs of the Makefile, scripts with their options, modules, extras."""
    verbs = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in (c for c in commands() if c.words[0] != "slipstream"):
        program, *words = command.words
        plain = [word for word in words if not word.startswith("-") and "=" not in word]
        if program == "make":
            assert set(plain) <= verbs, f"{where(command)}: make {plain}"
        elif program == "python" and words[0] == "-m":
            assert importlib.util.find_spec(words[1]), f"{where(command)}: no module {words[1]}"
        elif program == "python":
            script = ROOT / words[0]
            assert script.is_file(), f"{where(command)}: there is no {words[0]}"
            options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
            missing = [option for option in sorted(options) if f'"{option}"' not in script.read_text(encoding="utf-8")]
            assert not missing, f"{where(command)}: {words[0]} has no {missing}"
        elif program == "pytest":
            paths = [word.partition("::")[0] for word in plain if "/" in word]
            assert all((ROOT / path).exists() for path in paths), f"{where(command)}: {paths}"
        assert program in PROGRAMS


def test_extras_exist() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for command in commands():
        for extra in re.findall(r"slipstream\[([\w,]+)\]", " ".join(command.words)):
            for name in extra.split(","):
                assert re.search(rf"^{name} = \[", declared, re.MULTILINE), f"{where(command)}: no extra {name}"
