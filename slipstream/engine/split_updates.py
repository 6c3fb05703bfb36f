"""A step's updates by client: each gets those of its own requests.

A batch that decodes keeps its composition for many steps, so whose request is at which place is found once for each
composition, and a step costs one pick from each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from slipstream.engine.wire import client_of
from slipstream.types import TokenUpdates

Pick = Callable[[Sequence[Any]], Sequence[Any]]


class _Share(NamedTuple):
    """What one client has of a composition."""

    client: int
    request_ids: Sequence[str]
    places: dict[int, int]  # from a place in the step to the place in the client's part
    pick: Pick


class UpdateSplitter:
    def __init__(self, num_clients: int) -> None:
        self._num_clients = num_clients
        self._known_ids: Sequence[str] = ()
        self._shares: list[_Share] = []

    def split(self, updates: TokenUpdates) -> Iterator[tuple[int, TokenUpdates]]:
        if not updates:
            return
        if self._num_clients == 1:
            yield 0, updates
            return
        if updates.request_ids is not self._known_ids:
            self._shares = self._share_out(updates.request_ids)
            self._known_ids = updates.request_ids
        for client, request_ids, places, pick in self._shares:
            others = {places[at]: update for at, update in updates.others.items() if at in places}
            drafts = (pick(updates.num_drafts), pick(updates.num_accepted)) if updates.num_drafts else ((), ())
            yield client, TokenUpdates(request_ids, pick(updates.token_ids), *drafts, others, updates.time)

    def _share_out(self, request_ids: Sequence[str]) -> list[_Share]:
        found: dict[int, list[int]] = {}
        for place, request_id in enumerate(request_ids):
            found.setdefault(client_of(request_id), []).append(place)
        return [
            _Share(client, [request_ids[at] for at in places], {at: i for i, at in enumerate(places)}, _picker(places))
            for client, places in sorted(found.items())
        ]


def _picker(places: list[int]) -> Pick:
    """``itemgetter`` gives a bare item for a single place."""
    if len(places) == 1:
        (only,) = places
        return lambda column: (column[only],)
    return itemgetter(*places)
