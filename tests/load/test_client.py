from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from slipstream.load.client import LoadClient, Script
from slipstream.load.figures import take_samples
from slipstream.load.poller import Poller, SelectorPoller, make_poller
from slipstream.load.records import OK, UNFINISHED, Recorder, Records
from slipstream.load.target import Target
from tests.load.virtual_server import START, Act, Answer, VirtualServer
from tests.load.wire import DONE, LAST_CHUNK, ROLE, STREAM_HEAD, chat, chunk, event, plain, usage

Serve = Callable[..., VirtualServer]


@pytest.fixture(params=[make_poller, SelectorPoller])
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    servers: list[VirtualServer] = []

    def start(answer: Answer | Sequence[Act]) -> VirtualServer:
        poller: Poller = request.param()
        function: Answer = answer if callable(answer) else lambda _request, _connection: answer
        servers.append(VirtualServer(function, poller))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def stream(first_s: float, gap_s: float, num_tokens: int, *, told: int | None = None) -> list[Act]:
    """The role at once, the first token after ``first_s``, the others at equal gaps, the end 10 ms after the last."""
    acts = [Act(0.001, STREAM_HEAD + chunk(event(chat(ROLE))))]
    acts += [Act(first_s + idx * gap_s, chunk(event(chat(" a")))) for idx in range(num_tokens)]
    end = event(chat({}, "length")) + (b"" if told is None else event(usage(9, told))) + DONE
    return [*acts, Act(first_s + (num_tokens - 1) * gap_s + 0.010, chunk(end) + LAST_CHUNK)]


def run(client: LoadClient) -> Records:
    client.run(START)
    return client.recorder.records(START, {"cpu_s": 0.0, "wall_s": 1.0, "num_events": 1})


def test_first_token_gaps_and_end_are_exact(serve: Serve) -> None:
    server = serve(stream(0.200, 0.030, 5, told=5))
    records = run(server.client([b"{}"], streams=1))
    samples = take_samples(records)
    np.testing.assert_allclose(samples.ttft, [200.0])
    np.testing.assert_allclose(samples.itl, [30.0] * 4)
    np.testing.assert_allclose(samples.tpot, [30.0])
    np.testing.assert_allclose(samples.e2e, [200.0 + 4 * 30.0 + 10.0])
    assert records.prompt_tokens.tolist() == [9]


def test_the_request_on_the_wire(serve: Serve) -> None:
    server = serve(stream(0.1, 0.1, 2))
    run(server.client(['{"é": 1}'.encode()], streams=1))
    head, _, body = server.requests[0][2].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    assert dict(line.split(": ") for line in lines[1:]) == {
        "Host": "server:1",
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Authorization": "Bearer key",
        "Content-Length": "9",
    }
    assert body == '{"é": 1}'.encode()


def test_closed_loop_keeps_streams_and_connections(serve: Serve) -> None:
    """Seven requests of 0.2 s each on three streams: three rounds, on three connections."""
    server = serve(stream(0.1, 0.09, 2))
    bodies = [b"%d" % idx for idx in range(7)]
    records = run(server.client(bodies, streams=3))
    assert server.num_connections == 3
    np.testing.assert_allclose(np.sort(records.start), [0, 0, 0, 0.2, 0.2, 0.2, 0.4], atol=1e-9)
    assert (records.outcome == OK).all()
    assert sorted(request[2].rpartition(b"\r\n")[2] for request in server.requests) == bodies
    np.testing.assert_array_equal(records.start, records.due)


def test_open_loop_sends_when_due_and_reuses_connections(serve: Serve) -> None:
    server = serve(stream(0.1, 0.09, 2))
    due = (0.05, 0.10, 0.10, 0.30, 2.0)
    records = run(server.client([b"{}"] * 5, due=due))
    np.testing.assert_allclose([request[0] - START for request in server.requests], due, atol=1e-9)
    np.testing.assert_allclose(np.sort(records.start), due, atol=1e-9)
    assert server.num_connections == 3  # those under way at 0.10; later ones find an idle connection
    assert (records.outcome == OK).all()


def test_answers_of_two_streams_do_not_mix(serve: Serve) -> None:
    server = serve(lambda request, _: stream(0.1 + 0.01 * request, 0.02 + 0.01 * request, 3 + request))
    records = run(server.client([b"{}"] * 4, streams=4))
    assert sorted(records.num_events.tolist()) == [3, 4, 5, 6]
    samples = take_samples(records)
    np.testing.assert_allclose(np.sort(samples.ttft), [100, 110, 120, 130])
    expected = sorted([20.0] * 2 + [30.0] * 3 + [40.0] * 4 + [50.0] * 5)
    np.testing.assert_allclose(np.sort(samples.itl), expected)


TOKEN = STREAM_HEAD + chunk(event(chat(" a")))


@pytest.mark.parametrize(
    ("acts", "reason", "after_s"),
    [
        ([Act(0.5, plain("500 Internal Server Error", b'{"error": "out of luck"}'))], "HTTP 500: out of luck", 0.5),
        ([Act(0.5, TOKEN), Act(0.7, closes=True)], "closed before the end of the stream", 0.7),
        ([Act(0.5, TOKEN), Act(0.7, resets=True)], "connection reset", 0.7),
        ([Act(0.5, closes=True)], "closed before an answer", 0.5),
        ([Act(0.5, b"\x16\x03\x01 what")], "the answer is not HTTP/1.1: \x16\x03\x01 what", 0.5),
        ([Act(0.5, TOKEN), Act(0.6, b"garbage\r\n")], "a chunk has no length: garbage", 0.6),
        ([], "silent for more than 60 s", 60.0),
        ([Act(0.5, TOKEN)], "silent for more than 60 s", 60.5),
    ],
)
def test_failures(serve: Serve, acts: list[Act], reason: str, after_s: float) -> None:
    """The one that fails is the second of three; the others are answered."""
    server = serve(lambda request, _: acts if request == 1 else stream(0.1, 0.1, 2))
    records = run(server.client([b"{}"] * 3, streams=1))
    assert records.failures == [reason]
    assert sorted(records.outcome.tolist()) == [OK, OK, 0]
    failed = records.outcome == 0
    # Silence is looked for four times a second.
    assert after_s <= (records.end - records.start)[failed][0] + 1e-9 < after_s + 0.6
    assert len(records.event_times) == 4


def test_a_server_that_trickles_is_not_silent(serve: Serve) -> None:
    pings = [Act(50.0 * idx, chunk(b": ping\n\n")) for idx in range(1, 5)]
    records = run(serve([Act(0.0, TOKEN), *pings, *stream(201.0, 1.0, 1)[2:]]).client([b"{}"], streams=1))
    assert records.failures == []
    assert records.outcome.tolist() == [OK]


def test_a_connection_that_was_closed_while_idle_is_no_failure(serve: Serve) -> None:
    """The server hangs up after each answer without saying so first; each request is sent again on a new one."""

    def answer(request: int, connection: int) -> list[Act]:
        return [Act(0.01, closes=True)] if request % 2 else stream(0.1, 0.1, 2)

    server = serve(answer)
    records = run(server.client([b"0", b"1", b"2"], streams=1))
    assert records.outcome.tolist() == [OK] * 3
    assert [request[2][-1:] for request in server.requests] == [b"0", b"1", b"1", b"2", b"2"]
    # The time of the first try counts.
    np.testing.assert_allclose(take_samples(records).ttft, [100.0, 110.0, 110.0])


def test_connection_that_the_server_gives_up_is_not_used_again(serve: Serve) -> None:
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    body = chunk(event(chat(" a", "stop"))) + LAST_CHUNK
    server = serve([Act(0.1, head + body), Act(0.1, closes=True)])
    records = run(server.client([b"{}"] * 3, streams=1))
    assert records.outcome.tolist() == [OK] * 3
    assert server.num_connections == 3


def test_refused_connections_fail_one_by_one() -> None:
    with socket.socket() as taken:  # so that no other program may listen there
        taken.bind(("127.0.0.1", 0))
        target = Target(socket.AF_INET, taken.getsockname(), "server:1", "/v1")
        for script in (Script([b"{}"] * 2000, 16), Script([b"{}"] * 2000, due=[0.0] * 2000)):
            client = LoadClient(target, target.head("chat"), script, timeout_s=60.0)
            client.run(0.0)
            assert client.recorder.num_failed == 2000
            assert client.recorder.failures == ["connection refused"]


def test_a_large_request_is_sent_in_parts(serve: Serve) -> None:
    body = bytes(range(256)) * 40_000
    server = serve(stream(0.1, 0.1, 2))
    records = run(server.client([body, body], streams=2))
    assert records.outcome.tolist() == [OK] * 2
    assert [request[2].endswith(body) for request in server.requests] == [True, True]


def test_an_answer_before_the_request_is_read(serve: Serve) -> None:
    """A server may refuse a large body as soon as it has seen the head."""
    refusal = plain("413 Content Too Large", b'{"error": "too large"}', "Connection: close")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(socket.AF_INET, listener.getsockname(), "server:1", "/v1")
        client = LoadClient(target, target.head("chat"), Script([b"x" * (32 << 20)], 1), timeout_s=60.0)
        refused: list[bool] = []

        def answer(_: Recorder) -> None:
            if not refused:
                connection, _ = listener.accept()
                connection.sendall(refusal)
                connection.close()  # with bytes that were not read, which resets the connection
                refused.append(True)

        client.run(0.0, answer)
    assert client.recorder.failures == ["HTTP 413: too large"]


def test_stop_counts_what_is_under_way(serve: Serve) -> None:
    server = serve(stream(0.1, 0.1, 10))
    client = server.client([b"{}"] * 9, streams=3)
    ticks: list[int] = []

    def on_tick(recorder: Recorder) -> None:
        ticks.append(recorder.num_ok)
        if recorder.num_ok >= 3:
            client.stop()

    client.run(START, on_tick)
    records = client.recorder.records(START, {"cpu_s": 0.0, "wall_s": 1.0, "num_events": 1})
    assert sorted(records.outcome.tolist()) == [UNFINISHED] * 3 + [OK] * 3
    assert len(server.requests) == 6
    assert ticks == sorted(ticks)
    # It was the first look after 1.01 s, when the first three had ended.
    np.testing.assert_allclose(records.end[records.outcome == UNFINISHED], 1.25, atol=0.02)


def test_recorder_counts(serve: Serve) -> None:
    server = serve(lambda request, _: [Act(0.1, plain("500 Oh", b"no"))] if request == 0 else stream(0.1, 0.1, 3))
    client = server.client([b"{}"] * 3, streams=1)
    client.run(START)
    recorder = client.recorder
    assert (recorder.num_ok, recorder.num_failed, recorder.num_events) == (2, 1, 6)
