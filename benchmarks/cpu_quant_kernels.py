"""Products with quantised weights on a CPU, by type, shape and number of tokens: milliseconds and GB/s of weights.

Each shape is multiplied with as many copies in turn as no cache holds, as the layers of a model are. Times are the best
of many, and with one thread its own, for others may use the machine too.

    python benchmarks/cpu_quant_kernels.py --types Q4_K Q8_0 --planes 3 --isa native
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from slipstream.kernels import native
from slipstream.kernels.linear.dense_linear import cut_panels, panel_linear, panel_width
from slipstream.kernels.linear.quant_linear import default_planes, quant_linear
from slipstream.kernels.linear.quant_weights import KINDS, PanelMemory, QuantMatrix, pack_codes, pack_gguf

# (out, in) of the products of SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-1.5B.
SHAPES = {
    "135M qkv": (960, 576),
    "135M gate_up": (3072, 576),
    "135M down": (576, 1536),
    "0.5B gate_up": (9728, 896),
    "0.5B down": (896, 4864),
    "0.5B head": (151936, 896),
    "1.5B qkv": (2048, 1536),
    "1.5B gate_up": (17920, 1536),
    "1.5B down": (1536, 8960),
}
BYTES_IN_TURN = 160 << 20
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_matrix(kind: str, out_size: int, in_size: int) -> QuantMatrix | None:
    """Any codes, scales that are numbers; None if the inputs are no multiple of the type's block."""
    rng = np.random.default_rng(0)
    weights, num_bytes = KINDS[kind].file_block
    if not weights:
        codes = torch.randint(0, 1 << KINDS[kind].bits, (out_size, in_size), dtype=torch.uint8)
        scales = torch.rand(out_size, in_size // 64)
        segment = pack_codes(codes, scales, None, KINDS[kind].bits, 64)
    else:
        if in_size % weights:
            return None
        raw = rng.integers(0, 256, (out_size * in_size // weights, num_bytes), dtype=np.uint8)
        for offset in HALVES.get(kind, (0,)):
            raw[:, offset : offset + 2] = rng.normal(0, 0.01, (len(raw), 1)).astype(np.float16).view(np.uint8)
        segment = pack_gguf(torch.from_numpy(raw).view(out_size, -1), kind)
    assert segment is not None
    return QuantMatrix((segment,))


def best_ms(run: Callable[[int], object], num_copies: int, seconds: float, clock: Callable[[], float]) -> float:
    """Of one product, over all copies in turn."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        begin = clock()
        for i in range(num_copies):
            run(i)
        best = min(best, (clock() - begin) / num_copies)
        if time.perf_counter() > end:
            return best * 1000


def copies(matrix: QuantMatrix) -> list[QuantMatrix]:
    """In memory as a model's are."""
    (segment,) = matrix.segments
    memory, found = PanelMemory(), []
    for _ in range(max(1, BYTES_IN_TURN // matrix.nbytes)):
        panels = memory.take(matrix.nbytes).view(segment.panels.shape).copy_(segment.panels)
        found.append(QuantMatrix((replace(segment, panels=panels),)))
    return found


def measure(kind: str, shape: tuple[int, int], args: argparse.Namespace) -> list[str]:
    """One cell for each number of tokens."""
    if kind == "F32":
        width = panel_width(torch.device("cpu"), torch.float32)
        assert width is not None, "there are no C kernels here"
        packed = cut_panels(torch.randn(shape), width)
        num = max(1, BYTES_IN_TURN // packed.panels.nbytes)
        panels, nbytes = packed.panels.expand(num, *packed.panels.shape).contiguous(), packed.panels.nbytes

        def run(x: torch.Tensor, i: int) -> None:
            panel_linear(x, panels[i], None, shape[0], False)
    else:
        matrix = random_matrix(kind, *shape)
        if matrix is None:
            return []
        matrices, nbytes = copies(matrix), matrix.nbytes
        num = len(matrices)

        def run(x: torch.Tensor, i: int) -> None:
            quant_linear(x, matrices[i], None, args.planes)

    cells = []
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, shape[1])
        # One thread's own time does not count what others do with its core.
        clock = time.thread_time if args.threads == 1 else time.perf_counter
        ms = best_ms(partial(run, x), num, args.seconds, clock)
        cells.append(f"{ms:8.3f} ms {nbytes / ms / 1e6:5.1f} GB/s")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--types", nargs="*", default=["F32", *KINDS], choices=["F32", *KINDS])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 4, 8, 64])
    parser.add_argument("--planes", type=int, choices=[0, 2, 3])
    parser.add_argument("--isa", default="native")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    args = parser.parse_args()
    native.use_isa(args.isa)
    torch.set_num_threads(args.threads)
    if args.planes is None:
        args.planes = default_planes()
    print(f"{args.threads} threads, {args.isa}, activations {f'in {args.planes} bytes' if args.planes else 'float32'}")
    print(f"{'shape':14}{'type':6}" + "".join(f"{f'{n} tokens':>22}" for n in args.tokens))
    for name in args.shapes:
        for kind in args.types:
            if cells := measure(kind, SHAPES[name], args):
                print(f"{name:14}{kind:6}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
