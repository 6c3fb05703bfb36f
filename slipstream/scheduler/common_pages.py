"""The number of pages at the start that all requests of a step share.

Requests share pages only through the prefix cache. So a shared page is full and collected: the request that filled it
and those that found it all compute tokens after it. While a request runs, pages are only appended, and those are its
own until they are full. So the number depends on the requests of a step, not on time.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.scheduler.cascade import pays
from slipstream.scheduler.request_state import RequestState


def count_common_pages(states: Sequence[RequestState], num_tokens: int, page_size: int, least: int | None) -> int:
    """Leading pages that all have in common; 0 if reading them once would not pay."""
    if least is None or len(states) < 2:
        return 0
    first, second = states[0].page_ids, states[1].page_ids
    # Most batches end here: they share nothing, or too little.
    if first[0] != second[0] or not pays(len(states), num_tokens, len(first) * page_size, least):
        return 0
    num_common = len(first)
    for state in states:
        own = state.page_ids
        num_common = min(num_common, len(own))
        # Common pages come first, and are usually all that is compared.
        if own[:num_common] != first[:num_common]:
            num_common = next(i for i in range(num_common) if own[i] != first[i])
        if num_common == 0:
            return 0
    assert num_common <= min(state.num_remembered_pages for state in states), "a common page that is not filled"
    return num_common if pays(len(states), num_tokens, num_common * page_size, least) else 0
