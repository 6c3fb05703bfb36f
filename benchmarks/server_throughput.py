"""What HTTP costs: 16 streams of SmolLM2 through the server against ``LLM.generate`` with the same prompts.

The server runs as users run it, in a process beside its engine; the clients are 16 connections in a third process.
Turns alternate, and each turn of one is compared with the turn of the other beside it. Both engines stay loaded; only
one works at a time.

    python benchmarks/server_throughput.py [--rounds 5] [--streams 16] [--output-len 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

MODEL = "smollm2-135m"
TARGET = 0.9
PROMPTS = [f"Write a short story about the number {i} and its friends." for i in range(64)]


def start_server(num_streams: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "slipstream", "serve", MODEL, "--port", "0", "--dtype", "float32"]
    command += ["--no-enable-prefix-caching", "--max-num-seqs", str(num_streams)]
    command += ["--speculate", "none"]  # as the other side: what is measured is HTTP
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving .* on (http\S+)", line):
            return process, found[1]
    raise SystemExit("the server did not start")


async def through_server(url: str, prompts: list[list[int]], output_len: int) -> float:
    """Output tokens per second, all streams counted, from the first request to the last event."""
    host, port = url.removeprefix("http://").split(":")
    start = time.perf_counter()
    counts = await asyncio.gather(*(_one_stream(host, int(port), prompt, output_len) for prompt in prompts))
    seconds = time.perf_counter() - start
    assert counts == [output_len] * len(prompts), counts
    return sum(counts) / seconds


async def _one_stream(host: str, port: int, prompt: list[int], output_len: int) -> int:
    """The tokens the server says it gave. No HTTP library: the clients share the two cores with what is measured."""
    fields = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    num_events, usage = 0, {}
    async for line in reader:
        if line.startswith(b"data: {"):
            num_events += 1
            if b'"usage"' in line:
                usage = json.loads(line[6:])["usage"]
    writer.close()
    assert num_events > output_len // 2, "the answer was not streamed"
    return usage["completion_tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()

    from slipstream import LLM, SamplingParams
    from slipstream.commands.results import collect_results, prepare_folder, write_results

    prepare_folder(options.output_dir)
    process, url = start_server(options.streams)
    pairs = []
    try:
        llm = LLM(MODEL, dtype="float32", enable_prefix_caching=False, max_num_seqs=options.streams)
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS[: options.streams]]
        params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
        for round_idx in range(-1, options.rounds):  # the first is a warm-up
            served = asyncio.run(through_server(url, prompts, options.output_len))
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            direct = sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - start)
            print(f"round {round_idx + 1}: server {served:.1f}, LLM.generate {direct:.1f} tokens/s", file=sys.stderr)
            if round_idx >= 0:
                pairs.append((served, direct))
        llm.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    ratio = median(served / direct for served, direct in pairs)
    rows = [
        {"case": MODEL, "batch": options.streams, "engine": engine, "tok_s": round(median(figures), 2)}
        | {"ratio": round(ratio, 3), "tok_s_runs": [round(figure, 2) for figure in figures]}
        for engine, figures in zip(("server", "LLM.generate"), zip(*pairs, strict=True), strict=True)
    ]
    served, direct = rows[0]["tok_s"], rows[1]["tok_s"]
    print(f"{options.streams} streams: {served} against {direct} tokens/s, {ratio:.2f} x (at least {TARGET})")
    path = write_results(collect_results(rows, device="cpu"), options.output_dir, f"{MODEL}-server")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
