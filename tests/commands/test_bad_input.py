"""Every kind of bad input ends with one line that says what to do, and exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slipstream.checkpoints.hub import ALIASES, DEFAULT_MODEL
from tests.commands.run_cli import RunCli, assert_one_line_error


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "broken"))


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt(cli: RunCli, prompt: str) -> None:
    assert_one_line_error(cli("generate", prompt), "the prompt is empty; give a text")


def test_prompt_longer_than_the_context(cli: RunCli, tiny_model: Path) -> None:
    outcome = cli("generate", "a" * 600, "--model", tiny_model)
    assert_one_line_error(outcome, "tokens", "the context holds 512", "shorten the prompt")


def test_unknown_model(cli: RunCli) -> None:
    outcome = cli("generate", "x", "--model", "smolm2-135m")
    assert_one_line_error(outcome, "unknown model 'smolm2-135m'; did you mean 'smollm2-135m'?")


def test_missing_folder(cli: RunCli, tmp_path: Path) -> None:
    outcome = cli("generate", "x", "--model", tmp_path / "nowhere")
    assert_one_line_error(outcome, "nowhere", "check the path")


def test_half_downloaded_weights(cli: RunCli, broken_model: Path) -> None:
    file = broken_model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert_one_line_error(cli("generate", "x", "--model", broken_model), "half-downloaded", "download it again")


def test_half_downloaded_gguf(cli: RunCli, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "half.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x05\x00\x00\x00\x00\x00\x00\x00" * 2)
    assert_one_line_error(cli("generate", "x", "--model", file), "half.gguf", "again")


def test_wrong_checksum(cli: RunCli) -> None:
    alias = ALIASES[DEFAULT_MODEL]
    alias.path.parent.mkdir(parents=True)
    with alias.path.open("wb") as file:
        file.truncate(alias.source.fingerprint.size)
    assert_one_line_error(cli("generate", "x"), "wrong checksum", "delete it and run again")


def test_corrupt_safetensors(cli: RunCli, broken_model: Path) -> None:
    file = broken_model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:24] = b"\xff" * 16
    file.write_bytes(content)
    assert_one_line_error(cli("generate", "x", "--model", broken_model), "corrupt", "download it again")


def test_unsupported_architecture(cli: RunCli, broken_model: Path) -> None:
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    outcome = cli("generate", "x", "--model", broken_model)
    assert_one_line_error(outcome, "'GPT2LMHeadModel' is not supported", "supported: LlamaForCausalLM")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file(cli: RunCli, broken_model: Path, name: str) -> None:
    (broken_model / name).unlink()
    assert_one_line_error(cli("generate", "x", "--model", broken_model), str(broken_model))


def test_config_that_is_no_json(cli: RunCli, broken_model: Path) -> None:
    (broken_model / "config.json").write_text("{")
    assert_one_line_error(cli("generate", "x", "--model", broken_model), "is not valid JSON", "download it again")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "-1", "temperature must be a number of at least 0"),
        ("--temperature", "nan", "temperature must be a number"),
        ("--temperature", "hot", "'--temperature'"),
        ("--top-p", "1.5", "top_p must be a number above 0 and at most 1"),
        ("--top-k", "-2", "top_k must be an integer of at least -1"),
        ("--max-tokens", "0", "max_tokens must be an integer of at least 1"),
        ("--seed", "-1", "seed must be an integer of at least 0"),
        ("--stop", "", "stop must be non-empty"),
        ("--stop-token-ids", "-1", "stop_token_ids must be an integer of at least 0"),
        ("--max-k", "-1", "max_k must be an integer of at least 0"),
    ],
)
def test_sampling_parameter_out_of_range(cli: RunCli, option: str, value: str, message: str) -> None:
    # Refused before any model is looked for: there is none in this test's cache.
    assert_one_line_error(cli("generate", "x", option, value), message)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--stop-token-ids", "999", "not a token id below 272"),
        ("--max-model-len", "0", "max_model_len must be a positive integer"),
        ("--max-model-len", "513", "beyond the model's context of 512; lower it"),
        ("--max-num-seqs", "0", "max_num_seqs must be a positive integer"),
        ("--block-size", "3", "block_size must be a power of two"),
        ("--dtype", "float8", "dtype must be one of auto, float64"),
        ("--device", "cdu", "device must be one of auto, cpu"),
        (
            "--attention-backend",
            "flash",
            "attention_backend must be one of auto, cpu, triton, flashinfer, flex, reference",
        ),
        ("--kv-cache-memory-bytes", "10", "raise kv_cache_memory_bytes"),
        ("--num-gpu-blocks-override", "1", "lower max_tokens or raise kv_cache_memory_bytes"),
    ],
)
def test_option_that_does_not_fit(cli: RunCli, tiny_model: Path, option: str, value: str, message: str) -> None:
    assert_one_line_error(cli("generate", "x", "--model", tiny_model, option, value), message)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--port", "99999", "--port must be from 0 to 65535, not 99999"),
        ("--port", "-1", "--port must be from 0 to 65535, not -1"),
        ("--max-queue", "-1", "--max-queue must be at least 0, not -1"),
        ("--max-connections", "0", "--max-connections must be at least 1, not 0"),
        ("--api-server-count", "0", "--api-server-count must be from 1 to 64, not 0"),
        ("--header-timeout-s", "nan", "--header-timeout-s must be at least 0.1, not nan"),
        ("--api-key", "", "--api-key must be printable ASCII"),
    ],
)
def test_server_option_out_of_range(cli: RunCli, option: str, value: str, message: str) -> None:
    assert_one_line_error(cli("serve", "nothing", option, value), message)


def test_serve_takes_the_model_as_an_option_too(cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    monkeypatch.setattr("slipstream.server.run.serve", lambda engine, settings: served.append(engine.model) or 0)
    assert cli("serve", "mine").code == cli("serve", "--model", "mine").code == 0
    assert served == ["mine", "mine"]
    assert_one_line_error(cli("serve", "mine", "--model", "other"), "two models are named, mine and other")


COMMANDS = [("generate", "x"), ("chat",), ("bench",), ("bench", "--shape", "llama-3.1-8b"), ("serve", "--port", "0")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--speculate", "ngrm"), "unknown method 'ngrm' in speculate; did you mean 'ngram'?"),
        (
            ("--speculate", "medusa"),
            "unknown method 'medusa' in speculate; known are ngram, draft_model, eagle, eagle3, mtp, dflash, "
            "early_exit, certain_tokens",
        ),
        (
            ("--speculate", "eagle3"),
            "eagle3 needs a model: name one as draft_model, or as model in speculative_config",
        ),
        (
            ("--speculate", "mtp", "--draft-model", "x"),
            "mtp drafts with layers of the target itself and takes no model; leave out 'x'",
        ),
        (("--speculate", "ngram", "--k", 0), "k must be an integer from 1 to 16, not 0"),
        (("--speculate", "ngram", "--k", 17), "k must be an integer from 1 to 16, not 17"),
        (("--k", 4), "k has no effect without speculate: name a method"),
        (
            ("--speculate", "draft_model"),
            "draft_model needs a model: name one as draft_model, or as model in speculative_config",
        ),
        (
            ("--speculative-config", '{"method": "ngram", "num_spec_tokens": 4}'),
            "unknown key 'num_spec_tokens' in speculative_config; did you mean 'num_speculative_tokens'?",
        ),
        (
            ("--speculative-config", '["ngram"]'),
            'speculative_config must be a JSON object such as {"method": "ngram"}',
        ),
        (
            ("--speculative-config", '{"method": "ngram", "verify": "synthetic"}'),
            "verify 'synthetic' needs acceptance_rates: 7 numbers from 1 down to 0, entry i for the probability that "
            "the first i + 1 drafts are all accepted, not None",
        ),
        (
            ("--speculate", "ngram", "--speculative-config", '{"method": "ngram"}'),
            "speculate and speculative_config conflict; use one of them",
        ),
    ],
)
def test_speculation_is_checked_before_any_model_is_looked_for(
    cli: RunCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    options: tuple[object, ...],
    line: str,
) -> None:
    # The default model without its head: with it, some of these arguments would name it.
    monkeypatch.setattr("slipstream.checkpoints.hub._HEADS", tmp_path / "heads")
    # Users of a name before its owner: a module that is imported for the first time would keep the replacement.
    for owner in ("commands.bench.shape_config", "engine.build.resolve_model", "checkpoints.hub.resolve_model"):
        monkeypatch.setattr(f"slipstream.{owner}", lambda name: pytest.fail(f"looked for {name}"))
    outcome = cli(*command, *options)
    assert_one_line_error(outcome)
    assert outcome.err == f"error: {line}\n"


def test_speculative_config_that_is_no_json(cli: RunCli) -> None:
    outcome = cli("generate", "x", "--speculative-config", "{method: ngram}")
    assert_one_line_error(outcome, "'--speculative-config'", "is not JSON")


def test_a_draft_model_that_is_not_there(cli: RunCli, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("--speculate", "draft_model", "--draft-model", tmp_path / "nowhere")
    assert_one_line_error(cli("generate", "x", "--model", tiny_model, *arguments), "nowhere", "check the path")


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("command", [("generate", "x"), ("bench", "--batch", 1)])
def test_a_draft_model_that_does_not_fit(
    cli: RunCli, tiny_model: Path, broken_model: Path, tmp_path: Path, command: tuple[object, ...]
) -> None:
    arguments = (*command, "--model", tiny_model, "--speculative-config", json.dumps({"model": str(broken_model)}))
    change(broken_model / "config.json", max_position_embeddings=64)
    outcome = cli(*arguments, *(("--output-dir", tmp_path / "out") if "bench" in command else ()))
    assert_one_line_error(outcome, "the draft model's context of 64 is shorter than the target's")
    file = broken_model / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    vocab = model["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    change(file, model=model)
    outcome = cli(*arguments)
    assert_one_line_error(outcome, "has another vocabulary than the target", "use a draft model of the same family")
    assert not (tmp_path / "out").exists()
