"""The engine in a process of its own: the same tokens, the same errors, and another one when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import EngineOptions
from slipstream.device.cpu import CpuDevice
from slipstream.engine.build import build_engine
from slipstream.engine.driver import Add, Finish, Stop
from slipstream.engine.process import EngineProcess
from slipstream.engine.resolve import resolve
from slipstream.engine.stats import EngineStats
from slipstream.engine.wire import Ready, Refused, Stats, decode, encode
from slipstream.errors import ConfigError, EngineError, ModelError
from slipstream.llm import LLM
from slipstream.models.registry import architecture_of
from slipstream.models.weights import open_checkpoint
from slipstream.types import LogprobRow, SamplingParams, TokenUpdate, TokenUpdates
from tests import tiny_models
from tests.engine.drive import make_request

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_models.save(tiny_models.build("llama"), made)
    return made


def test_messages_survive_the_wire(folder: Path) -> None:
    options = EngineOptions(model=str(folder), speculative_config={"method": "ngram", "prompt_lookup_max": 3})
    hf_config = open_checkpoint(folder).config
    config = resolve(options, CpuDevice().hardware("auto"), architecture_of(hf_config).read_config(hf_config))
    request = make_request("a", [1, 2], stop_token_ids=(3,), bad_word_ids=((1, 2),), logit_bias={5: 1.5}, top_k=3)
    update = TokenUpdate("a", [1], "stop", "text", logprobs=[LogprobRow(1, [1, 2], [-0.5, -1.0])])
    update.prompt_logprobs = (1, [LogprobRow(2, [3], [-2.0])])
    update.num_drafts, update.num_accepted = 4, 2
    stats = EngineStats(num_steps=3)
    stats.count_drafts(4, 2)
    for message in (
        Add(request),
        Finish("a"),
        Stop(),
        Ready(config, GREEDY, (1, 2)),
        Refused("ConfigError", "no"),
        TokenUpdates.of([update]),
        Stats(stats),
    ):
        assert decode(encode(message)) == message


def test_same_tokens_as_in_a_thread(folder: Path) -> None:
    prompts = [list(range(1, n)) for n in (3, 9, 30)]
    with LLM(str(folder)) as llm:
        expected = llm.generate(prompts, GREEDY)
        alone = llm.generate(prompts[1], GREEDY)[0]
    with LLM(str(folder), own_process=True) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.stats.num_pages > 0
        # To the bit: one prompt shares its steps with nobody.
        assert llm.generate(prompts[1], GREEDY)[0].outputs[0].logprobs == alone.outputs[0].logprobs
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.text for o in outputs] == [o.text for o in expected]
    for own, other in zip(outputs, expected, strict=True):
        for entry, wanted in zip(own.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            # Prompts may share a step here and not there, and a batch of prompts rounds in its own way.
            assert {t: p.logprob for t, p in entry.items()} == pytest.approx(
                {t: p.logprob for t, p in wanted.items()}, abs=1e-4
            )


@pytest.mark.parametrize(
    "options",
    [{"speculate": "ngram", "k": 3}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}],
)
def test_drafts_in_a_process_of_their_own(folder: Path, options: dict[str, Any]) -> None:
    prompt = [1, 2, 3, 4] * 4
    with LLM(str(folder), dtype="float64") as llm:
        (plain,) = llm.generate([prompt], replace(GREEDY, max_tokens=60))
    with LLM(str(folder), dtype="float64", own_process=True, **options) as llm:
        assert llm.config.speculative is not None and llm.config.num_drafts == 3
        (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=60))
    assert output.token_ids == plain.token_ids
    assert output.speculation is not None and output.speculation.num_drafts > 0


def test_speculation_is_checked_before_the_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started for nothing"))
    with pytest.raises(ConfigError, match="unknown method 'medusa' in speculate"):
        EngineProcess(EngineOptions(model=str(tmp_path / "nothing"), speculate="medusa"), lambda updates: None)


def test_a_dead_engine_is_replaced(folder: Path) -> None:
    with LLM(str(folder), own_process=True, max_model_len=512) as llm:
        running = llm._client.running
        assert isinstance(running, EngineProcess)
        stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        next(stream)
        os.kill(running.pid, signal.SIGKILL)
        start = time.monotonic()
        last = list(stream)[-1]
        assert time.monotonic() - start < 2
        assert last.finish_reason == "abort"
        assert "ended with code -9" in (last.error or "")
        deadline = time.monotonic() + 60
        while not running.is_ready:
            with pytest.raises(EngineError, match="being restarted"):
                llm.generate([1, 2, 3], GREEDY)
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 16
        assert running.num_restarts == 1


def test_errors_of_the_build_come_out_as_they_are(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beyond the model's context"):
        LLM(str(folder), own_process=True, max_model_len=10**6)
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "nothing"), own_process=True)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        assert time.monotonic() < deadline, "the engine outlived its server"
        time.sleep(0.1)


def test_the_engine_ends_with_its_server(folder: Path) -> None:
    """Even if the server had no time to say so."""
    program = (
        "import os, sys, signal\nfrom slipstream.llm import LLM\n"
        f"llm = LLM({str(folder)!r}, own_process=True)\n"
        "print(llm._client.running.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    wait_for_end(int(ran.stdout))


def test_the_engine_ends_if_its_server_dies_while_it_starts(folder: Path) -> None:
    program = (
        "import os, signal\nfrom slipstream.config import EngineOptions\nfrom slipstream.engine.process import _Child\n"
        f"child = _Child(EngineOptions(model={str(folder)!r}))\n"
        "print(child.process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    wait_for_end(int(ran.stdout))


def test_closing_while_the_engine_is_away(folder: Path) -> None:
    for pause_s in (0.0, 0.5):
        llm = LLM(str(folder), own_process=True)
        running = llm._client.running
        assert isinstance(running, EngineProcess)
        os.kill(running.pid, signal.SIGKILL)
        time.sleep(pause_s)
        start = time.monotonic()
        llm.close()
        assert time.monotonic() - start < 10


def test_a_refused_request_leaves_nothing_registered(folder: Path) -> None:
    with LLM(str(folder), own_process=True) as llm:
        running = llm._client.running
        assert isinstance(running, EngineProcess)
        os.kill(running.pid, signal.SIGKILL)
        running._child.process.wait(5)
        with pytest.raises(EngineError):
            llm.generate([[1, 2], [3, 4]], GREEDY)
        assert not llm._client._output._callers
        assert not llm._client._output._streams


def test_sockets_are_private(folder: Path) -> None:
    with LLM(str(folder), own_process=True) as llm:
        running = llm._client.running
        assert isinstance(running, EngineProcess)
        place = running._child._folder
        assert place.stat().st_mode & 0o777 == 0o700
    assert not place.exists()


def test_figures_of_an_engine_that_is_not_done_preparing_travel(folder: Path) -> None:
    """Every number is of the kind that the other side expects: a bool is no integer there."""
    core = build_engine(EngineOptions(model=str(folder), device="cpu", max_num_seqs=2)).core
    for _ in range(2):
        assert decode(encode(Stats(core.stats))) == Stats(core.stats)
        while core.use_idle_time():
            pass
    assert core.stats.num_missing_graphs == 0
