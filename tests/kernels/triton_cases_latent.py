"""Cases of latent attention, for ``triton_cases``. What must not be read holds NaN: stale slots, padding queries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.latent_cache import gather_latents, store_latents
from slipstream.kernels.attention.latent_decode import latent_decode
from slipstream.kernels.attention.latent_parts import PartTable, count_parts, schedule_parts
from slipstream.kernels.attention.latent_prompt import PromptKeys, PromptQueries, merge_attention, prompt_attention
from slipstream.kernels.attention.paged_attention import PagedRequests
from tests.kernels.triton_check import Case, Real, poisoned


class Sizes(NamedTuple):
    heads: int = 3
    latent: int = 24
    rope: int = 8
    nope: int = 12
    value: int = 10
    page_size: int = 4


class Batch(NamedTuple):
    """Requests of a step; a mixed one as well."""

    query_lens: list[int]  # of each request; 0: it does not run
    seq_lens: list[int]
    unused: tuple[int, ...] = ()  # slots for tokens after the last of each request
    padding: int = 0  # requests
    padded_slots: int = 0  # of each padding request
    spare: int = 0  # tokens of no request
    seq_starts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + sum(self.unused) + self.padding * self.padded_slots + self.spare

    def slots(self) -> list[int]:
        own = [n + more for n, more in zip(self.query_lens, self.unused or [0] * len(self.query_lens), strict=True)]
        return [*own, *[self.padded_slots] * self.padding]

    def seeing(self) -> Tensor:
        """Which tokens are of a request, and not before its first slot."""
        sees = torch.zeros(self.num_tokens, dtype=torch.bool)
        ends, starts = torch.tensor(self.slots()).cumsum(0), self.seq_starts or [0] * len(self.seq_lens)
        for end, room, count, length, first in zip(
            ends.tolist(), self.slots(), self.query_lens, self.seq_lens, starts, strict=False
        ):
            hidden = min(max(first - (length - count), 0), count)
            sees[end - room + hidden : end - room + count] = True
        return sees

    def _padded(self, values: list[int], more: int = 0) -> list[int]:
        return [*values, *[more] * self.padding]

    def requests(self, page_size: int) -> dict[str, Tensor | None]:
        num_reqs, max_pages = len(self.seq_lens) + self.padding, -(-max(self.seq_lens) // page_size)
        table = 1 + torch.randperm(num_reqs * max_pages).view(num_reqs, max_pages).int()
        for i, length in enumerate(self._padded(self.seq_lens)):
            table[i, -(-length // page_size) :] = 0
        starts = self._padded(list(self.seq_starts), 500)
        return {
            "query_start_loc": ints([0, *self.slots()]).cumsum(0).int(),
            "query_lens": ints(self._padded(self.query_lens)),
            "seq_lens": ints(self._padded(self.seq_lens)),
            "block_table": table,
            "seq_starts": ints(starts) if self.seq_starts else None,
        }


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw_cache(requests: dict[str, Tensor | None], sizes: Sizes) -> Tensor:
    """Numbers in the slots that are there, NaN in all others, the null page too; the last page takes padding."""
    table, lens, starts = requests["block_table"], requests["seq_lens"], requests["seq_starts"]
    assert table is not None and lens is not None
    cache = torch.full((table.numel() + 2, sizes.page_size, sizes.latent + sizes.rope), torch.nan)
    for i, length in enumerate(lens.tolist()):
        slot = torch.arange(0 if starts is None else min(int(starts[i]), length), length)
        entries = torch.randn(len(slot), cache.shape[2])
        cache[table[i, slot // sizes.page_size].long(), slot % sizes.page_size] = entries
    return cache


def hide(q: Tensor, batch: Batch) -> Tensor:
    """NaN in queries that see nothing."""
    q[~batch.seeing()] = torch.nan
    return q


def scheduled(
    requests: dict[str, Tensor | None], max_query_slots: int, num_programs: int, longer: int = 0
) -> PartTable:
    own = PagedRequests(**requests)
    num_reqs = own.seq_lens.shape[0]
    table = PartTable(poisoned(num_reqs + 1 + longer), poisoned(num_programs + 1, 2))
    schedule_parts.body(own, max_query_slots, table)
    return table


def decode_args(batch: Batch, sizes: Sizes, num_programs: int = 3, most: int = 17) -> dict[str, Any]:
    requests = batch.requests(sizes.page_size)
    table = scheduled(requests, most, num_programs, longer=2)
    counts = [n for n, slots in zip(batch.query_lens, batch.slots(), strict=False) if slots <= most]
    q = hide(torch.randn(batch.num_tokens, sizes.heads, sizes.latent + sizes.rope + 3), batch)
    return {
        # As slices of wider rows.
        "latent": Real(q[..., : sizes.latent]),
        "rope": Real(q[..., sizes.latent : sizes.latent + sizes.rope]),
        "cache": Real(draw_cache(requests, sizes)),
        **requests,
        **table._asdict(),
        "max_query_len": max(counts, default=1),
        "max_parts": sum(map(count_parts, batch.seq_lens)) + 1,
        "scale": 0.2,
    }


class _Converted:
    """A bundle that is converted like a tensor: by name alone, rope parts of queries and keys would be the same."""

    def to(self, kind: torch.dtype | str) -> _Converted:
        return type(self)(*(x.to(kind) for x in self))

    def double(self) -> _Converted:
        return self.to(torch.float64)


class _Queries(_Converted, PromptQueries):
    pass


class _Keys(_Converted, PromptKeys):
    pass


def prompt_args(batch: Batch, sizes: Sizes, first_key: int = 0, num_keys: int = 0, wide: bool = True) -> dict[str, Any]:
    """Keys of any numbers, NaN where the requests have none."""
    requests = batch.requests(sizes.page_size)
    num_keys = num_keys or max(batch.seq_lens) - first_key
    lens, starts = requests["seq_lens"], requests["seq_starts"]
    assert lens is not None
    slot = torch.arange(first_key, first_key + num_keys)
    gone = slot >= lens.unsqueeze(1)
    if starts is not None:
        gone |= slot < starts.unsqueeze(1)
    up = torch.randn(gone.numel(), sizes.heads, sizes.nope + sizes.value)
    rope = torch.randn(gone.numel(), sizes.rope)
    up[gone.flatten()], rope[gone.flatten()] = torch.nan, torch.nan
    q = hide(torch.randn(batch.num_tokens, sizes.heads, sizes.nope + sizes.rope), batch)
    return {
        "q": Real(_Queries(q[..., : sizes.nope], q[..., sizes.nope :])),
        "keys": Real(_Keys(up, rope)),
        **requests,
        "first_key": first_key,
        "num_keys": num_keys,
        "max_query_len": max(batch.query_lens),
        "scale": (sizes.nope + sizes.rope) ** -0.5,
        "wide": wide,
    }


def store_args(num_tokens: int, sizes: Sizes) -> dict[str, Any]:
    half, slots = sizes.rope // 2, torch.randperm(40)[:num_tokens]
    joint = torch.randn(num_tokens, 5 + sizes.latent + sizes.rope)
    q = torch.randn(num_tokens, sizes.heads, sizes.nope + sizes.rope)
    return {
        "q_rope": Real(q[..., sizes.nope :]),
        "latents": Real(3 * joint[:, 5:]),
        "gain": Real(torch.randn(sizes.latent)),
        "eps": 1e-6,
        "cos": torch.randn(num_tokens, 1, half).repeat(1, 1, 2),
        "sin": torch.randn(num_tokens, 1, half).repeat(1, 1, 2) * ints([-1, 1]).repeat_interleave(half),
        "cache": Real(torch.randn(40 // sizes.page_size, sizes.page_size, sizes.latent + sizes.rope)),
        "page_ids": slots // sizes.page_size,
        "offsets": slots % sizes.page_size,
    }


def gather_args(batch: Batch, sizes: Sizes, first_key: int, num_keys: int) -> dict[str, Any]:
    requests = batch.requests(sizes.page_size)
    args = {"cache": Real(draw_cache(requests, sizes)), **requests, "first_key": first_key, "num_keys": num_keys}
    return args | {"latent_dim": sizes.latent}


def schedule_args(batch: Batch, num_programs: int, most: int = 17, longer: int = 0) -> dict[str, Any]:
    starts, begins = poisoned(len(batch.slots()) + 1 + longer), poisoned(num_programs + 1, 2)
    return {**batch.requests(16), "max_query_slots": most, "part_starts": starts, "begins": begins}


def merge_args(num_tokens: int, num_heads: int, size: int, kind: torch.dtype) -> dict[str, Any]:
    """Parts without a result, whose numbers are not numbers, on either side and on both."""
    outs, lses = torch.randn(2, num_tokens, num_heads, size), 5 * torch.randn(2, num_tokens, num_heads)
    nothing = torch.tensor([-torch.inf, torch.inf, torch.nan])[torch.randint(0, 3, lses.shape)]
    gone = torch.rand(lses.shape) < 0.4
    gone[:, 0] = True
    lses, outs = torch.where(gone, nothing, lses), outs.masked_fill(gone.unsqueeze(3), torch.nan)
    names = ("first_out", "first_lse", "second_out", "second_lse")
    return {**dict(zip(names, (outs[0], lses[0], outs[1], lses[1]), strict=True)), "dtype": kind}


SMALL = Sizes()
DEEPSEEK = Sizes(heads=16, latent=512, rope=64, nope=128, value=128, page_size=16)
DECODES = {
    "one": (Batch([1], [1]), SMALL),
    "steps": (Batch([1, 1, 1, 1], [129, 128, 0, 7], padding=2, padded_slots=1), SMALL),
    "long": (Batch([1, 1], [1300, 200]), SMALL._replace(page_size=16)),
    "pairs": (Batch([2, 2, 1], [2, 150, 40], unused=(0, 0, 1), padding=1, padded_slots=2), SMALL._replace(page_size=1)),
    "verify": (Batch([4, 4, 3, 0], [4, 130, 70, 0], unused=(0, 0, 1, 4)), SMALL._replace(heads=5)),
    "many": (Batch([17, 17, 9], [17, 60, 9], unused=(0, 0, 8)), SMALL),
    "mixed": (Batch([1, 40, 4, 2, 17, 0], [300, 90, 4, 33, 140, 0], padding=2, spare=5), SMALL),
    "starts": (
        Batch([1, 2, 4, 1, 1], [140, 2, 300, 90, 60], padding=1, seq_starts=(129, 1, 37, 90, 0)),
        SMALL,
    ),
    "even": (Batch([1, 4], [70, 9]), Sizes(heads=16, latent=32, rope=16, page_size=64)),
}


PROMPTS = {
    "one": (Batch([1], [1]), SMALL, 0, 0),
    "whole": (Batch([70, 3, 40], [70, 3, 90], unused=(0, 1, 0), padding=1, spare=3), SMALL, 0, 0),
    "first-chunk": (Batch([40, 20, 9], [100, 20, 60]), SMALL._replace(value=33), 0, 48),
    # Of one request the end, of others nothing.
    "later-chunk": (Batch([40, 20, 9, 30], [100, 20, 60, 300]), SMALL, 48, 48),
    "starts": (Batch([20, 9, 30, 4], [90, 60, 30, 4], padding=2, seq_starts=(50, 58, 0, 4)), SMALL, 0, 0),
    "even": (Batch([33], [60]), Sizes(heads=2, nope=32, rope=16, value=16), 0, 0),
}
REAL_PROMPT = (Batch([150], [300]), DEEPSEEK, 128, 128)


def latent_decodes() -> Iterator[Case]:
    for name, (batch, sizes) in DECODES.items():
        yield Case(f"latent_decode-{name}", latent_decode, partial(decode_args, batch, sizes))


def latent_prompts() -> Iterator[Case]:
    for name, (batch, sizes, first, num) in PROMPTS.items():
        args = partial(prompt_args, batch, sizes, first, num, wide=name != "even")
        yield Case(f"prompt_attention-{name}", prompt_attention, args)
    for sizes, kind in (((1, 1, 1), torch.float32), ((5, 3, 10), torch.float16), ((3, 2, 64), torch.float32)):
        # In float16, neighbours of a rounded result are further apart than the results in float32.
        scale = 100.0 if kind == torch.float16 else 1.0
        args = partial(merge_args, *sizes, kind)
        yield Case(f"merge_attention-{'x'.join(map(str, sizes))}", merge_attention, args, scale)


def latent_caches() -> Iterator[Case]:
    for name, num_tokens, sizes in (
        ("odd", 5, SMALL),
        ("one", 1, SMALL._replace(page_size=1)),
        ("stores-only", 3, SMALL._replace(heads=0, page_size=8)),
        ("real", 1, DEEPSEEK._replace(page_size=8)),
    ):
        yield Case(f"store_latents-{name}", store_latents, partial(store_args, num_tokens, sizes))
    some = Batch([1, 4, 0, 2], [9, 40, 0, 21], padding=1)
    for name, batch, sizes, first, num in (
        ("all", some, SMALL, 0, 40),
        ("chunk", some, SMALL._replace(page_size=1), 7, 19),
        ("after-all", some, SMALL._replace(page_size=16), 48, 16),
        ("starts", some._replace(seq_starts=(3, 40, 0, 14)), SMALL, 2, 30),
    ):
        yield Case(f"gather_latents-{name}", gather_latents, partial(gather_args, batch, sizes, first, num))


def schedules() -> Iterator[Case]:
    mixed = Batch([1, 40, 4, 0, 17, 2], [9000, 70_000, 130, 0, 4097, 1], unused=(0, 0, 3, 1, 0, 20), padding=3)
    for name, batch, num_programs, longer in (
        ("one", Batch([1], [1]), 1, 0),
        ("more-programs-than-parts", Batch([1, 1], [129, 2]), 16, 3),
        ("mixed", mixed, 7, 60),
        ("none", Batch([40, 0], [50, 0], padding=2), 3, 1),
        ("long", Batch([1, 3], [200_000, 1030]), 132, 0),
        ("many", Batch([1] * 300, [(37 * i) % 1900 + 1 for i in range(300)]), 66, 0),
    ):
        yield Case(f"schedule_parts-{name}", schedule_parts, partial(schedule_args, batch, num_programs, longer=longer))


def of_deepseek() -> Iterator[Case]:
    """Of real sizes: few tokens, so that the interpreter can be asked as well."""
    one, checked = Batch([1], [40]), Batch([4], [20])
    for name, batch, heads in (("decode", one, 16), ("verify", checked, 16), ("many-heads", one, 128)):
        sizes = DEEPSEEK._replace(heads=heads)
        yield Case(f"latent_decode-deepseek-{name}", latent_decode, partial(decode_args, batch, sizes))
    yield Case("prompt_attention-deepseek", prompt_attention, partial(prompt_args, *REAL_PROMPT))


def latents() -> Iterator[Case]:
    # The real sizes first: of the variants of a kernel, only the first few are compiled in every run.
    yield from (*of_deepseek(), *latent_caches(), *schedules(), *latent_decodes(), *latent_prompts())
