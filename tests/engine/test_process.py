"""The engine in a process of its own: the same tokens, the same errors, and another one when it dies."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from slipstream.checkpoints.checkpoint import open_checkpoint
from slipstream.config import EngineOptions
from slipstream.device.cpu import CpuDevice
from slipstream.engine import link, supervisor, worker
from slipstream.engine.build import build_engine
from slipstream.engine.driver import Add, Finish, Stop
from slipstream.engine.process import EngineProcess
from slipstream.engine.pulse import PulseMonitor
from slipstream.engine.resolve import resolve
from slipstream.engine.stats import EngineStats
from slipstream.engine.wire import (
    EngineBack,
    EngineLost,
    Leave,
    Pulse,
    Ready,
    Refused,
    RestartFailed,
    Stats,
    client_address,
    decode,
    encode,
    engine_address,
    watch_address,
)
from slipstream.errors import ConfigError, EngineError, ModelError, RequestError
from slipstream.llm import LLM
from slipstream.models.registry import architecture_of
from slipstream.output import LogprobRow, RequestOutput, TokenUpdate, TokenUpdates
from slipstream.sampling_params import SamplingParams
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
    stats.drafts.add(4, 2)
    for message in (
        Add(request),
        Finish("a"),
        Stop(),
        Ready(config, GREEDY, (1, 2)),
        Refused("ConfigError", "no"),
        TokenUpdates.from_list([update]),
        Stats(stats),
        Pulse(1.5),
        Leave("1.0:"),
        EngineLost(2, "it died", 2),
        RestartFailed("no memory"),
        EngineBack(3, 1, Ready(config, GREEDY, (1, 2))),
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
        # Bit for bit: a single prompt shares its steps with no other.
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
    started = SimpleNamespace(Popen=lambda *_, **__: pytest.fail("started for nothing"))
    monkeypatch.setattr(supervisor, "subprocess", started)
    with pytest.raises(ConfigError, match="unknown method 'medusa' in speculate"):
        EngineProcess(EngineOptions(model=str(tmp_path / "nothing"), speculate="medusa"), lambda updates: None)


def test_a_dead_engine_is_replaced(folder: Path) -> None:
    with LLM(str(folder), own_process=True, max_model_len=512, max_num_seqs=1) as llm:
        running = running_process(llm)
        # One after the other: the last of them cannot end before the kill, however long this test is held up.
        stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, n=64))
        next(stream)
        os.kill(running.pid, signal.SIGKILL)
        last = list(stream)[-1]
        assert last.outputs[-1].finish_reason == "abort"
        assert "ended with code -9" in (last.error or "")
        deadline = time.monotonic() + 60
        while True:
            try:
                assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 16
                break
            except EngineError as error:
                assert "being restarted" in str(error)
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert running.num_restarts == 1


def test_errors_of_the_build_come_out_as_they_are(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="beyond the model's context"):
        LLM(str(folder), own_process=True, max_model_len=10**6)
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "nothing"), own_process=True)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 60
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
        "print(llm.client.running.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    wait_for_end(int(ran.stdout))


def test_the_engine_ends_if_its_server_dies_while_it_starts(folder: Path) -> None:
    program = (
        "import os, pathlib, signal, tempfile\nfrom slipstream.config import EngineOptions\n"
        "from slipstream.engine.supervisor import _Child\nfolder = pathlib.Path(tempfile.mkdtemp())\n"
        f"child = _Child(EngineOptions(model={str(folder)!r}), folder, 0, 1, 300.0)\n"
        "print(child.process.pid, folder, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    pid, folder = ran.stdout.split()
    wait_for_end(int(pid))
    assert not Path(folder).exists(), "its sockets stayed"


def test_an_engine_that_is_told_nothing_leaves_nothing(tmp_path: Path) -> None:
    """Its server died between starting it and telling it what to load."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    command = [sys.executable, "-m", "slipstream.engine.worker", str(folder), "0", "1", str(os.getpid())]
    assert subprocess.run(command, input=b"", check=False, timeout=60).returncode == 3
    assert not folder.exists()


def test_closing_while_the_engine_is_away(folder: Path) -> None:
    for pause_s in (0.0, 0.5):
        llm = LLM(str(folder), own_process=True)
        running = llm.client.running
        assert isinstance(running, EngineProcess)
        os.kill(running.pid, signal.SIGKILL)
        time.sleep(pause_s)
        llm.close()


def test_a_refused_request_leaves_nothing_registered(folder: Path) -> None:
    with LLM(str(folder), own_process=True) as llm:
        running = llm.client.running
        assert isinstance(running, EngineProcess)
        os.kill(running.pid, signal.SIGKILL)
        process = running.supervisor.child.process
        assert process is not None
        process.wait(5)
        try:  # one that is sent before the death is noticed ends with it
            outputs = llm.generate([[1, 2], [3, 4]], GREEDY)
            assert all("ended with code -9" in (output.error or "") for output in outputs)
        except EngineError:
            pass
        assert not llm.client.output.submissions
        assert not llm.client.output.streams


def test_sockets_are_private(folder: Path) -> None:
    with LLM(str(folder), own_process=True) as llm:
        running = llm.client.running
        assert isinstance(running, EngineProcess)
        folder = running.supervisor.folder
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_figures_of_an_engine_that_is_not_done_preparing_travel(folder: Path) -> None:
    """Every number is of the kind that the other side expects: a bool is no integer there."""
    core = build_engine(EngineOptions(model=str(folder), device="cpu", max_num_seqs=2)).core
    for _ in range(2):
        assert decode(encode(Stats(core.stats))) == Stats(core.stats)
        while core.use_idle_time():
            pass
    assert core.stats.num_missing_graphs == 0


def test_a_request_that_cannot_be_read_is_the_only_one_to_fail(folder: Path) -> None:
    """The worker's own guard: whatever a client's checks let through, the engine goes on."""
    with LLM(str(folder), own_process=True) as llm:
        submission = llm.client.prepare([1, 2], GREEDY)
        (request,) = submission.requests
        odd = replace(submission, requests=(replace(request, prompt_token_ids=(True, "x")),))  # type: ignore[arg-type]
        answers: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        llm.client.submit(odd, answers.put)
        assert "the engine cannot read this request" in (answers.get(timeout=60).error or "")
        assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 16


def test_what_cannot_be_encoded_leaks_no_slot(folder: Path) -> None:
    with LLM(str(folder), own_process=True) as llm:
        submission = llm.client.prepare([1, 2], GREEDY, "mine")
        (request,) = submission.requests
        odd = replace(submission, requests=(replace(request, priority=2**70),))
        with pytest.raises(OverflowError):
            llm.client.submit(odd, lambda output: None)
        llm.client.submit(submission, (answers := queue.SimpleQueue[RequestOutput]()).put, every_token=False)
        assert answers.get(timeout=60).finish_reason == "length"


def running_process(llm: LLM) -> EngineProcess:
    running = llm.client.running
    assert isinstance(running, EngineProcess)
    return running


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_hung_engine_is_noticed_and_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(folder), own_process=True, max_model_len=512) as llm:
        running, pid = running_process(llm), running_process(llm).pid
        stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        next(stream)
        assert running.trouble is None
        monkeypatch.setattr(link, "UNWELL_S", 1.5)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "has not answered" in (running.trouble or ""))
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: running.trouble is None)  # it was only held up: nothing is lost
        assert running.pid == pid and running.num_restarts == 0
        monkeypatch.setattr(supervisor, "HUNG_S", 2.0)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not running.is_ready)
        monkeypatch.setattr(supervisor, "HUNG_S", 30.0)  # for the next one, which is slow to start on a busy machine
        last = list(stream)[-1]
        if last.finish_reason == "abort":  # else it had ended before
            assert "has not answered" in (last.error or "")
        wait_until(lambda: running.num_restarts == 1)
        assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 16


def test_an_engine_that_is_stuck_in_a_step_is_hung() -> None:
    """Its process is alive and says so; its main thread does not come back."""
    monitor = PulseMonitor(step_timeout_s=0.5)
    monitor.note_pulse(0.4)
    assert monitor.find_trouble(30.0) is None
    monitor.note_pulse(0.6)
    assert "has been at one step" in (monitor.find_trouble(30.0) or "")
    monitor.note_pulse(0.0)
    assert monitor.find_trouble(30.0) is None


def test_silence_counts_once_the_pulse_has_begun() -> None:
    monitor = PulseMonitor(step_timeout_s=300.0)
    for _ in range(50):
        monitor.note_silence(1.0)
    assert monitor.find_trouble(5.0) is None, "packages may take long to be imported"
    monitor.note_pulse(0.0)
    assert monitor.find_trouble(5.0) is not None
    monitor.note_message()
    assert monitor.find_trouble(5.0) is None
    monitor.note_silence(3600.0)
    assert monitor.find_trouble(5.0) is None, "this process itself was stopped for an hour"


def test_the_pulse_tells_how_long_a_step_takes() -> None:
    context = zmq.Context()
    folder = Path(tempfile.mkdtemp())
    inboxes = []
    for address in (watch_address(folder, 0), client_address(folder, 0), client_address(folder, 1)):
        inbox = context.socket(zmq.PULL)
        inbox.bind(address)
        inboxes.append(inbox)
    try:
        pulse = worker._Pulse(worker.WorkerArgs(str(folder), "0", "2", str(os.getppid())))

        def hear() -> float:
            assert all(inbox.poll(60_000) for inbox in inboxes)
            heard: list[Pulse] = [decode(inbox.recv_multipart()) for inbox in inboxes]
            assert heard[0] == heard[1] == heard[2], "the supervisor and every client hear the same"
            return heard[0].stuck_s

        assert hear() == 0.0, "nothing is stuck before the first message"
        pulse.note_progress()
        while (first := hear()) == 0.0:
            pass
        longest = hear()
        assert longest > first
        pulse.note_progress()
        while hear() >= longest:  # said before, and heard late
            pass
    finally:
        context.destroy(linger=0)
        shutil.rmtree(folder)


def test_requests_of_a_client_that_has_left_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last requests may arrive after the message that it has left, which another process sends."""
    monkeypatch.setattr(worker, "_Pulse", lambda args: SimpleNamespace(note_progress=lambda: None))
    folder = Path(tempfile.mkdtemp())
    context = zmq.Context()
    args = worker.WorkerArgs(str(folder), "0", "2", str(os.getppid()))
    at_work = worker.Worker(args)
    try:
        monkeypatch.setattr(at_work, "_send_stats", lambda: None)
        at_work._driver = SimpleNamespace(known={"1.0:4", "1.1:1", "0.0:4"})  # type: ignore[assignment]
        outbox = supervisor.open_push(context, engine_address(folder, 0))
        for message in (
            Leave("1.0:"),
            Add(make_request("1.0:5", [1])),
            Add(make_request("1.1:2", [1])),
            Add(make_request("0.0:5", [1])),
        ):
            outbox.send_multipart(encode(message))
        assert at_work._receive(True) == Finish("1.0:4")
        begun = [at_work._receive(True) for _ in range(2)]
        assert [message.request.request_id for message in begun if isinstance(message, Add)] == ["1.1:2", "0.0:5"]
    finally:
        context.destroy(linger=0)
        at_work._context.destroy(linger=0)
        shutil.rmtree(folder)


def test_a_restart_brings_its_own_limits(folder: Path) -> None:
    """With less memory the next engine takes less: what it would refuse is refused before, in one line."""
    with LLM(str(folder), own_process=True, num_gpu_blocks_override=32, max_model_len=400) as llm:
        running = running_process(llm)
        long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        assert len(llm.generate([1, 2], long)[0].token_ids) == 300
        waiting = llm.client.prepare([1, 2], long)
        supervised = running.supervisor
        supervised._options = replace(supervised._options, num_gpu_blocks_override=8, max_model_len=100)
        os.kill(running.pid, signal.SIGKILL)
        wait_until(lambda: running.num_restarts == 1)
        assert llm.config.cache.num_pages == 9 and llm.config.scheduler.max_model_len == 100
        with pytest.raises(RequestError, match="the KV cache holds"):
            llm.client.submit(waiting, lambda output: None)
        with pytest.raises(RequestError, match="the context holds 100"):
            llm.generate([list(range(150))], GREEDY)
        assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 16


def test_requests_that_have_ended_are_not_known_any_more(folder: Path) -> None:
    with LLM(str(folder), own_process=True) as llm:
        running = running_process(llm)
        llm.generate([[1, 2], [3, 4]], GREEDY)
        next(llm.stream([1, 2, 3], GREEDY))  # left at once
        wait_until(lambda: not running.link.known)
