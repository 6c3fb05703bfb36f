"""A step's updates by client: each gets those of its own requests.

A decode batch keeps its composition for many steps, so the indices of each client's requests are found once for each
composition, and a step costs one pick from each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from slipstream.engine.wire import client_of
from slipstream.output import TokenUpdates

Pick = Callable[[Sequence[Any]], Sequence[Any]]


class _Share(NamedTuple):
    """One client's part of a composition."""

    client: int
    request_ids: Sequence[str]
    own_index: dict[int, int]  # from the index in the step to the index in the client's part
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
        for client, request_ids, own_index, pick in self._shares:
            others = {own_index[i]: update for i, update in updates.others.items() if i in own_index}
            drafts = (pick(updates.num_drafts), pick(updates.num_accepted)) if updates.num_drafts else ((), ())
            yield client, TokenUpdates(request_ids, pick(updates.token_ids), *drafts, others, updates.time)

    def _share_out(self, request_ids: Sequence[str]) -> list[_Share]:
        found: dict[int, list[int]] = {}
        for i, request_id in enumerate(request_ids):
            found.setdefault(client_of(request_id), []).append(i)
        shares = []
        for client, indices in sorted(found.items()):
            own_index = {step_idx: own_idx for own_idx, step_idx in enumerate(indices)}
            shares.append(_Share(client, [request_ids[i] for i in indices], own_index, _picker(indices)))
        return shares


def _picker(indices: list[int]) -> Pick:
    """``itemgetter`` gives a bare item for a single index."""
    if len(indices) == 1:
        (only,) = indices
        return lambda column: (column[only],)
    return itemgetter(*indices)
