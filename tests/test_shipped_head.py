"""The draft head in the package: small, whole, described, taken without being asked for, and of use.

Who gets it and who does not is in ``models/test_shipped_head.py``, with a stand-in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import slipstream
from slipstream import LLM, SamplingParams
from slipstream import llm as llm_module
from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.checkpoints.hub import DEFAULT_MODEL, shipped_head
from slipstream.commands import serve
from slipstream.commands.session import open_model
from slipstream.config import EngineOptions
from slipstream.models.heads.registry import read_head
from slipstream.models.registry import architecture_of
from slipstream.server.settings import ServerSettings
from slipstream.speculate.options import read_speculation
from slipstream.text.tokenizer import Tokenizer
from slipstream.train.export import default_taps
from tests.commands.run_cli import RunCli, make_runner
from tests.server.conftest import start_server

MAX_BYTES = 32_000_000
MAX_DRAFT_VOCAB = 16_000
LEAST_TOKENS_PER_STEP = 1.3
# What a missing one means differs from engine to engine.
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
PROMPTS = [
    "What is the capital of France?",
    "Write a short email to a colleague that moves our meeting to Friday.",
    "Explain in a few sentences how a bicycle stays upright.",
]
GREEDY = {"temperature": 0, "max_tokens": 48}


@pytest.fixture(scope="module")
def head() -> Path:
    folder = shipped_head(DEFAULT_MODEL)
    assert folder is not None, "the package lacks the default model's head"
    return folder


@pytest.fixture(scope="module")
def config(head: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((head / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def tensors(head: Path) -> dict[str, Tensor]:
    return load_file(head / "model.safetensors")


# --- the files ------------------------------------------------------------------------------------


def test_it_is_small_and_nothing_lies_beside_it(head: Path) -> None:
    assert {path.name for path in head.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert sum(path.stat().st_size for path in head.iterdir()) <= MAX_BYTES


def test_its_vocabulary_and_the_targets_agree(
    config: dict[str, Any], tensors: dict[str, Tensor], smollm2_tokenizer: Tokenizer
) -> None:
    size, target_size = config["draft_vocab_size"], config["vocab_size"]
    assert 0 < size <= MAX_DRAFT_VOCAB
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert d2t.shape == (size,) and t2d.shape == (target_size,)
    assert tensors["lm_head.weight"].shape == (size, config["hidden_size"])
    target_ids = torch.arange(size) + d2t
    assert torch.equal(target_ids, t2d.nonzero()[:, 0]), "d2t and t2d name other tokens"
    # A head that cannot draft the end of an answer fails there every time.
    assert t2d[smollm2_tokenizer.eos_token_id]


def test_every_weight_is_a_number_in_16_bits(tensors: dict[str, Tensor]) -> None:
    for name in tensors.keys() - {"d2t", "t2d"}:
        assert tensors[name].dtype == torch.bfloat16, name
        assert tensors[name].isfinite().all(), name


def test_every_flag_is_written_and_fits_the_target(config: dict[str, Any], smollm2_path: Path) -> None:
    for flag in FLAGS:
        assert config[flag] in (True, False), flag
    given = open_checkpoint(smollm2_path).config
    target = architecture_of(given).read_config(given)
    taps = list(default_taps(target))
    assert config[TAPS] == taps
    # Engines that count from 0 the layer whose output is tapped look here.
    assert config["eagle_config"] == {"use_aux_hidden_state": True, TAPS: [tap - 1 for tap in taps]}
    assert (config["target_hidden_size"], config["vocab_size"]) == (target.hidden_size, target.vocab_size)
    assert (config["torch_dtype"], config["tie_word_embeddings"]) == ("bfloat16", False)
    read_head(config, target, "eagle3")


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ("data", r"[\d,]+ texts, [\d,]+ tokens"),
        ("draft vocabulary", r"[\d,]+ tokens"),
        ("training", r"[\d,]+ steps .* in [\d,]+ s on \w+"),
        ("acceptance", r"by position: \d+%(, \d+%)+; \d\.\d\d tokens a step"),
    ],
)
def test_its_card_says_how_it_was_made_and_how_good_it_is(head: Path, row: str, arguments: str) -> None:
    card = (head / "README.md").read_text()
    assert card.startswith(f"# EAGLE-3 head for {DEFAULT_MODEL}\n")
    assert f"slipstream train eagle3 --model {DEFAULT_MODEL}" in card
    found = re.search(rf"^\| {row} \| (.*) \|$", card, re.MULTILINE)
    assert found and re.search(arguments, found[1]), f"the card says nothing of {row}"


# --- who uses it ----------------------------------------------------------------------------------


@pytest.fixture
def cli(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> RunCli:
    monkeypatch.chdir(tmp_path)  # a folder of the model's name would be another model
    return make_runner(capsys, monkeypatch)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    """As ``generate`` and ``chat`` open it, with two differences that make its figures repeatable.

    A number of drafts that adapts follows the machine's load. A prompt that was cached for a request without drafts is
    one that the head has not seen.
    """
    with open_model(EngineOptions(k=3, enable_prefix_caching=False)) as opened:
        yield opened


def test_it_is_taken_for_the_default_model(llm: LLM, head: Path) -> None:
    speculative = llm.config.speculative
    assert speculative is not None and speculative.method == "eagle3" and speculative.verify == "match"
    assert speculative.model == str(head)
    assert head.is_relative_to(Path(slipstream.__file__).parent)


def test_a_command_takes_it_unasked_and_leaves_it_when_told(cli: RunCli) -> None:
    arguments = ("generate", PROMPTS[0], "--max-tokens", 24, "--json")
    answers = []
    for more in ((), ("--speculate", "none")):
        outcome = cli(*arguments, *more)
        assert outcome.code == 0, outcome.err
        answers.append(json.loads(outcome.out))
    drafted, plain = answers
    assert "speculation" in drafted and "speculation" not in plain
    assert (drafted["token_ids"], drafted["text"]) == (plain["token_ids"], plain["text"])


@pytest.mark.parametrize(("arguments", "method"), [({}, "eagle3"), ({"speculate": "none"}, "none")])
def test_so_does_the_server(
    head: Path, arguments: dict[str, Any], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[EngineOptions] = []
    monkeypatch.setattr("slipstream.server.run.serve", lambda options, settings: served.append(options) or 0)
    monkeypatch.chdir(tmp_path)
    assert serve.run(None, EngineOptions(**arguments), ServerSettings()) == 0
    expected = str(head) if method == "eagle3" else None
    assert (served[0].speculate, served[0].draft_model) == (method, expected)


@pytest.mark.parametrize(("words", "method"), [({}, "eagle3"), ({"k": 2}, "eagle3"), ({"speculate": "none"}, None)])
@pytest.mark.parametrize("own_process", [False, True])
def test_so_does_the_library(
    head: Path,
    words: dict[str, Any],
    method: str | None,
    own_process: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One text and one default, whichever way the model is called."""
    built: list[EngineOptions] = []

    class Client:
        def __init__(self, connect: Callable[[Any], Any]) -> None:
            connect(None)

        in_thread = staticmethod(lambda build: build())

    monkeypatch.setattr(llm_module, "EngineClient", Client)
    monkeypatch.setattr(llm_module, "build_engine", built.append)
    monkeypatch.setattr("slipstream.engine.process.EngineProcess", lambda options, deliver: built.append(options))
    monkeypatch.chdir(tmp_path)
    LLM(DEFAULT_MODEL, own_process=own_process, **words)
    speculative = read_speculation(built[0])
    if method is None:
        assert speculative is None
    else:
        assert speculative is not None and (speculative.method, speculative.model) == (method, str(head))


# --- what it is good for --------------------------------------------------------------------------


def test_the_same_text_in_fewer_steps(llm: LLM) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    plain = llm.chat(chats, SamplingParams(**GREEDY, speculate=False))
    drafted = llm.chat(chats, SamplingParams(**GREEDY))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert [output.text for output in drafted] == [output.text for output in plain]
    for without, output in zip(plain, drafted, strict=True):
        assert without.speculation is not None and without.speculation.num_drafts == 0
        assert output.speculation is not None
        assert output.speculation.mean_length > LEAST_TOKENS_PER_STEP, output.text


def test_the_same_text_over_http() -> None:
    """As ``slipstream serve`` runs it, which takes the head without being asked to."""
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], **GREEDY}
    server = start_server(Path(DEFAULT_MODEL))
    try:
        url = f"{server.url}/v1/chat/completions"
        drafted, plain = (httpx.post(url, json=body | more, timeout=60).json() for more in ({}, {"speculate": False}))
    finally:
        server.stop()
    assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
    assert drafted["choices"][0]["speculation"]["mean_length"] > LEAST_TOKENS_PER_STEP
    assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert plain["choices"][0]["speculation"]["drafts"] == 0
