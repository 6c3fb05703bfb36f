"""The pool of KV cache pages. Page 0 is the null page: padding points at it and nobody owns it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from slipstream.config import CacheConfig
from slipstream.errors import RequestError
from slipstream.types import Request

NULL_PAGE = 0


class PagePool:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        # First in, first out: a freed page rests as long as possible, which makes a stale read more likely to show.
        self._free = deque(range(NULL_PAGE + 1, num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise RuntimeError(f"{count} pages wanted, {len(self._free)} free")
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, page_ids: Iterable[int]) -> None:
        self._free.extend(page_ids)


def check_fits(request: Request, cache: CacheConfig) -> None:
    """Refuse a request that the whole cache could not hold at its full length."""
    if request.max_total_tokens > cache.num_usable_tokens:
        raise RequestError(
            f"the request may grow to {request.max_total_tokens} tokens, but the KV cache holds "
            f"{cache.num_usable_tokens}; lower max_tokens or raise kv_cache_memory_bytes"
        )
