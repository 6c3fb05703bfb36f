"""The pool of KV cache pages, and the prefix cache inside it.

A page is free, held by one or more requests, or cached: held by no request, but known by a hash of its content until
its memory is needed. Page 0 is the null page: padding points at it and no request holds it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

from slipstream.config import CacheConfig
from slipstream.errors import RequestError
from slipstream.request import Request

NULL_PAGE = 0
_ROOT = b""


def page_hashes(token_ids: Sequence[int], page_size: int, parent: bytes = _ROOT, num_after: int = 0) -> Iterator[bytes]:
    """The hash of every full page: of its tokens and, through ``parent``, of all pages before it.

    If a page's content depends on ``num_after`` tokens after it, of those as well. Cryptographic, because users choose
    the tokens: it must not be possible to make two different prompts share a page.
    """
    width = page_size + num_after
    for begin in range(0, len(token_ids) - width + 1, page_size):
        content = array("q", token_ids[begin : begin + width]).tobytes()
        parent = hashlib.blake2b(content, key=parent[:64], digest_size=16).digest()
        yield parent


def root_hash(cache_key: bytes) -> bytes:
    """What the hashes of a request's pages begin with, where they depend on more than its tokens."""
    return hashlib.blake2b(cache_key, digest_size=16).digest() if cache_key else _ROOT


def encoder_hashes(root: bytes, num_pages: int) -> list[bytes]:
    """The hash of every page of an encoder's output. ``root`` is of what the encoder reads."""
    return [
        hashlib.blake2b(idx.to_bytes(8), key=root[:64], person=b"encoder", digest_size=16).digest()
        for idx in range(num_pages)
    ]


class PagePool:
    def __init__(self, num_pages: int, page_size: int, caching: bool = True) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.caching = caching
        # First in, first out: a freed page is reused as late as possible, which makes a stale read more likely to show.
        self._free = deque(range(NULL_PAGE + 1, num_pages))
        self._num_holders = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # cached pages without a holder, least recent first
        self._undrafted: set[int] = set()  # cached pages without all of the drafter's keys

    @property
    def num_free(self) -> int:
        """Pages that can be taken now, cached ones included."""
        return len(self._free) + len(self._unheld)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Pages for one holder. Their content is lost: cached ones are evicted, least recently used first."""
        if count > self.num_free:
            raise RuntimeError(f"{count} pages requested, {self.num_free} free")
        taken = []
        for _ in range(count):
            if self._free:
                page_id = self._free.popleft()
            else:
                page_id, _ = self._unheld.popitem(last=False)
                self._forget(page_id)
            self._num_holders[page_id] = 1
            taken.append(page_id)
        return taken

    def give_back(self, page_ids: Sequence[int]) -> None:
        """Release one holder's pages. The last pages of a request are evicted first."""
        for page_id in reversed(page_ids):
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id] > 0:
                continue
            if page_id in self._hash_of:
                self._unheld[page_id] = None
            else:
                self._free.append(page_id)

    # --- the prefix cache -------------------------------------------------------------------------

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest cached prefix. They are not held yet: see ``hold``."""
        found = []
        for page_hash in hashes:
            page_id = self._page_of.get(page_hash)
            if page_id is None:
                break
            found.append(page_id)
        return found

    def hold(self, page_ids: Iterable[int]) -> None:
        for page_id in page_ids:
            self._num_holders[page_id] += 1
            self._unheld.pop(page_id, None)

    def num_unheld(self, page_ids: Iterable[int]) -> int:
        return sum(page_id in self._unheld for page_id in page_ids)

    def remember(self, page_id: int, page_hash: bytes, is_drafted: bool = True) -> None:
        """The page is full and its content final. Of two pages with the same content the first is kept in the cache,

        unless it lacks the drafter's keys and the second has them.
        """
        if not self.caching or page_id in self._hash_of:
            return
        if (first := self._page_of.get(page_hash)) is not None:
            if first not in self._undrafted or not is_drafted:
                return
            self._forget(first)
            if first in self._unheld:
                del self._unheld[first]
                self._free.append(first)
        self._page_of[page_hash] = page_id
        self._hash_of[page_id] = page_hash
        if not is_drafted:
            self._undrafted.add(page_id)

    def are_drafted(self, page_ids: Iterable[int]) -> bool:
        """Whether all of them hold the drafter's keys too."""
        return self._undrafted.isdisjoint(page_ids)

    def _forget(self, page_id: int) -> None:
        del self._page_of[self._hash_of.pop(page_id)]
        self._undrafted.discard(page_id)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Every page is in exactly one state, and held as often as the holders say."""
        expected = [0] * self.num_pages
        for page_ids in held:
            for page_id in page_ids:
                expected[page_id] += 1
        if expected != self._num_holders:
            wrong = next(i for i, (a, b) in enumerate(zip(expected, self._num_holders, strict=True)) if a != b)
            raise RuntimeError(f"page {wrong} has {self._num_holders[wrong]} holders, should have {expected[wrong]}")
        at_rest = sorted([*self._free, *self._unheld])
        if at_rest != [i for i in range(1, self.num_pages) if not expected[i]]:
            raise RuntimeError("a page was lost, or is free and held at the same time")
        if {page: h for h, page in self._page_of.items()} != self._hash_of:
            raise RuntimeError("the prefix cache's two tables disagree")
        if not self._undrafted <= self._hash_of.keys():
            raise RuntimeError("a page that is not cached is recorded as one without the drafter's keys")


def check_fits(request: Request, cache: CacheConfig) -> None:
    """Refuse a request that the whole cache could not hold at its full length."""
    room = cache.num_tokens_beside(request.num_encoder_entries)
    if request.max_total_tokens > room:
        beside = f" beside the {request.num_encoder_entries} entries of its encoder" * bool(request.num_encoder_entries)
        raise RequestError(
            f"the request may grow to {request.max_total_tokens} tokens, but the KV cache holds "
            f"{max(0, room)}{beside}; lower max_tokens or raise kv_cache_memory_bytes"
        )
