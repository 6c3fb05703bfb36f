"""Many clients at once, clients that vanish, and whether anything is left over."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest

from .conftest import MODEL_NAME, RunningServer


async def stream(client: httpx.AsyncClient, url: str, prompt: str, max_tokens: int, leave_after: int = 10**9) -> str:
    """One streamed completion; hangs up after so many events if told so."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    text, events = "", 0
    async with client.stream("POST", f"{url}/v1/completions", json={**body, "ignore_eos": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            events += 1
            if events >= leave_after:
                return text
    return text


def many(count: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=count, max_keepalive_connections=0))


def test_200_streams_at_once(server: RunningServer) -> None:
    async def run() -> list[str]:
        async with many(200) as client:
            return await asyncio.gather(*(stream(client, server.url, f"prompt {i % 20}", 12) for i in range(200)))

    texts = asyncio.run(run())
    assert all(texts)
    for i in range(20):
        assert len(set(texts[i::20])) == 1, "the same prompt, the same text, whatever ran beside it"
    server.wait_until_idle()


def test_100_clients_that_vanish_leave_nothing_behind(server: RunningServer) -> None:
    async def run() -> None:
        async with many(100) as client:
            await asyncio.gather(*(stream(client, server.url, f"vanish {i}", 400, 1 + i % 5) for i in range(100)))

    asyncio.run(run())
    server.wait_until_idle(30)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_hangs_up_without_streaming_is_aborted_too(server: RunningServer) -> None:
    body = {"model": MODEL_NAME, "prompt": "long", "max_tokens": 500, "ignore_eos": True, "n": 8}
    num_aborted, num_tokens = server.num_aborted(), server.metric("tokens_out_total")
    with server.engine_at_rest():  # nothing comes to its end by itself
        with server.send(body):
            server.wait_until_open(8)
        server.wait_until_open(0)
    server.wait_until_idle()
    assert server.num_aborted() == num_aborted + 8
    assert server.metric("tokens_out_total") - num_tokens < 8 * 500


@pytest.mark.slow
def test_five_minutes_of_traffic_end_as_they_began(server: RunningServer) -> None:
    def memory_kib(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))

    async def traffic(seconds: float) -> int:
        end, count = time.monotonic() + seconds, 0

        async def client_loop(client: httpx.AsyncClient, i: int) -> None:
            nonlocal count
            while time.monotonic() < end:
                count += 1
                leave = 3 if count % 7 == 0 else 10**9
                await stream(client, server.url, f"soak {i} {count % 50}", 4 + count % 30, leave)

        async with many(32) as client:
            await asyncio.gather(*(client_loop(client, i) for i in range(32)))
        return count

    asyncio.run(traffic(30))  # caches fill, pools grow
    server.wait_until_idle()
    pids = (server.process.pid, server.engine_pid)
    before, pages = [memory_kib(pid) for pid in pids], server.metric("free_pages")
    assert asyncio.run(traffic(300)) > 500
    server.wait_until_idle()
    after = [memory_kib(pid) for pid in pids]
    assert server.metric("free_pages") == pages
    for first, last in zip(before, after, strict=True):
        assert last < first * 1.05 + 8192, f"memory grew from {before} to {after} KiB"
