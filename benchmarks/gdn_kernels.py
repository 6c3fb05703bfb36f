"""The kernels of gated delta nets beside the memory's bandwidth: one layer of Qwen3-Next's in bfloat16.

Convolution, delta rule and gated norm of a step in which each request decodes one token, or checks three drafts and so
leaves four states, or has a prompt. The time is that of a launch among others of its kind in a graph, median of many
after a warm-up. Results are compared with the definition's, for the first requests of a batch.

States and rings are taken from several pools in turn, more than the second-level cache holds, as a model's layers do.
The step's own tokens may be there, as after the projection that computed them: what moves little but those can look
faster than the memory. Bytes are the fewest that have to be moved, the bandwidth is that of an H200's data sheet.

    python benchmarks/gdn_kernels.py [--batch 1,8,64] [--prompt-len 2048,8192]
    python benchmarks/gdn_kernels.py --device cpu      # tries it out: small sizes, no figures that mean anything
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slipstream.attention.gdn import DeltaNetSpec
from slipstream.commands.results import collect_results, prepare_folder, write_results
from slipstream.device.operation import Operation
from slipstream.kernels.recurrent.causal_conv import causal_conv
from slipstream.kernels.recurrent.delta_rule import DeltaTokens, chunked_delta_rule, recurrent_delta_rule
from slipstream.kernels.recurrent.gated_norm import gated_norm
from slipstream.kernels.request_rows import RequestStates
from slipstream.models.registry import architecture_of
from slipstream.models.shapes import shape_config

SHAPE, NUM_DRAFTS = "qwen3-next-16l-64e", 3
SMALL = DeltaNetSpec(num_k_heads=1, num_v_heads=2, k_dim=16, v_dim=16, conv_width=4)
BANDWIDTH = 4.8e12  # bytes a second
ROTATED_BYTES, MAX_POOLS = 200e6, 48  # several times what the second-level cache holds
MIN_LAUNCHES, NUM_ROUNDS = 10, 20
NUM_CHECKED = 4  # requests of a batch whose results are compared: the definition runs on the CPU
MAX_ERROR = 3e-2  # of bfloat16, relative to the largest result


class Setting(NamedTuple):
    """What depends on where it runs."""

    device: str
    dtype: torch.dtype
    net: DeltaNetSpec
    batches: list[int]
    prompt_lens: list[int]


def setting_for(arguments: argparse.Namespace) -> Setting:
    if arguments.device == "cpu":
        return Setting("cpu", torch.float32, SMALL, [1, 3], [100])
    config = shape_config(SHAPE)
    net = architecture_of(config).read_config(config).cache_specs[0]
    assert isinstance(net, DeltaNetSpec)
    sizes = [[int(size) for size in text.split(",")] for text in (arguments.batch, arguments.prompt_len)]
    return Setting("cuda", torch.bfloat16, net, *sizes)


def bundled(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation, from tensors by name."""
    arguments = dict(values)
    for name, bundle in (("tokens", DeltaTokens), ("requests", RequestStates)):
        if arguments.keys() >= set(bundle._fields):
            arguments[name] = bundle(*[arguments.pop(field) for field in bundle._fields])
    return arguments


class KernelCase(NamedTuple):
    name: str
    op: Operation[Any, Any]
    batch: int
    count: int  # tokens of each request
    args: dict[str, Any]  # without the pool
    pool: str  # which argument is one; empty: none
    pools: list[Tensor]
    num_bytes: int  # that have to be moved

    def run(self, idx: int) -> Tensor:
        pool = {self.pool: self.pools[idx % len(self.pools)]} if self.pool else {}
        made: Tensor = self.op.body(**bundled({**self.args, **pool}))
        return made


def make_pools(shape: tuple[int, ...], dtype: torch.dtype, device: str, num_bytes: int) -> list[Tensor]:
    """At least two: a kernel that starts early may read its states while the launch before it still writes its own."""
    count = min(MAX_POOLS, max(2, int(-(-ROTATED_BYTES // num_bytes)))) if device == "cuda" else 2
    return [torch.randn(shape, dtype=dtype, device=device) for _ in range(count)]


def kernel_cases(setting: Setting, batch: int, count: int, position: int) -> Iterator[KernelCase]:
    """A step in which each of so many requests has so many tokens: more than drafts means a prompt."""
    net, dtype, device = setting.net, setting.dtype, setting.device
    num_tokens, size = batch * count, dtype.itemsize
    values = net.num_v_heads * net.v_dim
    num_inputs, num_states = net.ring_lengths(count - 1 if count <= 1 + NUM_DRAFTS else NUM_DRAFTS)

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=kind, device=device)

    full = torch.ones(batch, dtype=torch.int32, device=device)
    order = torch.arange(batch, dtype=torch.int32, device=device)
    requests = {"slots": order + 1, "starts": order * count, "counts": full * count, "positions": full * position}
    qkv = draw(num_tokens, net.num_channels)
    rings = (net.conv_width - 1) * (position > 0) + min(count, num_inputs)
    moved = size * net.num_channels * (2 * num_tokens + batch * rings + net.conv_width)
    conv = {"x": qkv, "weight": draw(net.num_channels, net.conv_width), "bias": None, **requests, "max_count": count}
    shape: tuple[int, ...] = (batch + 1, num_inputs, net.num_channels)
    pools = make_pools(shape, dtype, device, moved)
    yield KernelCase("convolution", causal_conv, batch, count, conv, "inputs", pools, moved)
    is_prompt = count > num_states
    state_bytes = 4 * values * net.k_dim
    moved = size * num_tokens * (net.num_channels + values + 2 * net.num_v_heads)
    moved += batch * state_bytes * ((position > 0) + (1 if is_prompt else count))
    rule: dict[str, Any] = {
        "qkv": qkv,
        "a": draw(num_tokens, net.num_v_heads),
        "b": draw(num_tokens, net.num_v_heads),
        "a_log": (0.01 + 4 * torch.rand(net.num_v_heads, device=device)).log(),
        "dt_bias": draw(net.num_v_heads, kind=torch.float32),
        **requests,
    }
    shape = (batch + 1, num_states, net.num_v_heads, net.k_dim, net.v_dim)
    pools = make_pools(shape, torch.float32, device, moved)
    if is_prompt:
        yield KernelCase("delta rule, chunks", chunked_delta_rule, batch, count, rule, "states", pools, moved)
    else:
        rule["max_count"] = count
        name = "delta rule, decode" if count == 1 else "delta rule, verify"
        yield KernelCase(name, recurrent_delta_rule, batch, count, rule, "states", pools, moved)
    heads = (num_tokens, net.num_v_heads, net.v_dim)
    norm = {"x": draw(*heads), "gate": draw(*heads), "weight": draw(net.v_dim), "eps": 1e-6}
    yield KernelCase("gated norm", gated_norm, batch, count, norm, "", [], 3 * size * num_tokens * values)


def error_of(case: KernelCase) -> float:
    """The largest difference from the definition, by the largest result, in the first requests of the batch."""
    some, pool = min(case.batch, NUM_CHECKED), {}
    cuts = {"slots": some, "starts": some, "counts": some, "positions": some, "inputs": some + 1, "states": some + 1}
    cuts |= dict.fromkeys(("x", "gate", "qkv", "a", "b"), some * case.count)
    if case.pool:
        pool = {case.pool: case.pools[0].clone()}
    given = {**case.args, **pool}
    exact: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            value = value[: cuts.get(name, value.shape[0])].clone().cpu()
            value = value.float() if value.is_floating_point() else value
        exact[name] = value
    found = [case.op.body(**bundled(given))[: some * case.count], *(given[name][: some + 1] for name in pool)]
    expected = [case.op.body(**bundled(exact)), *(exact[name] for name in pool)]
    errors = [
        float((own.float().cpu() - right).abs().max() / right.abs().max())
        for own, right in zip(found, expected, strict=True)
    ]
    # A comparison with what is not a number is false, and max would pass over it.
    return max(errors) if all(error < MAX_ERROR for error in errors) else float("inf")


def microseconds(case: KernelCase, device: str) -> float:
    """Of one launch among others of its kind."""
    if device == "cpu":
        begin = time.perf_counter()
        case.run(0)
        return 1e6 * (time.perf_counter() - begin)
    num_launches = max(MIN_LAUNCHES, len(case.pools))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for idx in range(3):
            case.run(idx)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for idx in range(num_launches):
                case.run(idx)
        times = []
        for _ in range(NUM_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / num_launches)
    return statistics.median(times)


def measure_kernels(setting: Setting) -> list[dict[str, Any]]:
    sizes = [(batch, count, 64) for count in (1, 1 + NUM_DRAFTS) for batch in setting.batches]
    sizes += [(1, count, 0) for count in setting.prompt_lens]
    rows = []
    for batch, count, position in sizes:
        torch.manual_seed(0)
        for case in kernel_cases(setting, batch, count, position):
            if not (error := error_of(case)) < MAX_ERROR:
                raise SystemExit(f"{case.name} differs from its definition at batch {batch}, {count} tokens each")
            us = microseconds(case, setting.device)
            row = {"case": case.name, "batch": batch, "tokens_each": count, "us": round(us, 2), "error": error}
            row |= {"mb": round(case.num_bytes / 1e6, 3), "gb_s": round(case.num_bytes / us / 1e3, 1)}
            rows.append({**row, "of_bandwidth": round(1e6 * case.num_bytes / us / BANDWIDTH, 3)})
        print(f"kernels, batch {batch}, {count} tokens each", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--prompt-len", default="2048,8192")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no NVIDIA GPU to measure; --device cpu tries the script out at small sizes")
    prepare_folder(arguments.output_dir)
    with torch.inference_mode():
        rows = measure_kernels(setting_for(arguments))
    results = collect_results(rows, device=arguments.device)
    path = write_results(results, arguments.output_dir, "gdn-kernels")
    table = Table("kernel", title=f"a layer's delta net, {results.hardware}")
    for name in ("batch", "tokens each", "us", "MB", "GB/s", "of the bandwidth", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        names = ("case", "batch", "tokens_each", "us", "mb", "gb_s", "of_bandwidth")
        table.add_row(*(str(row[name]) for name in names), f"{row['error']:.1e}")
    Console(width=120).print(table)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
