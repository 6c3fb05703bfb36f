"""How many pages all requests of a step begin with.

Requests share pages through the prefix cache alone. So a common page is full and its content collected: whoever filled
it computes behind it, and whoever found it there began behind it. While a request runs, pages are only added to it, and
those are its own until it has filled them. So the number belongs to who is in a step, not to when.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.attention.cascade import pays
from slipstream.scheduler.request_state import RequestState


def count_common_pages(states: Sequence[RequestState], num_tokens: int, page_size: int, least: int | None) -> int:
    """Leading pages that all have in common; 0 where reading them once would not pay."""
    if least is None or len(states) < 2:
        return 0
    first, second = states[0].page_ids, states[1].page_ids
    # Most batches end here: too little to share, or nothing.
    if first[0] != second[0] or not pays(len(states), num_tokens, len(first) * page_size, least):
        return 0
    num_common = len(first)
    for state in states:
        own = state.page_ids
        num_common = min(num_common, len(own))
        # The common ones are in front, and mostly all of those that are looked at.
        if own[:num_common] != first[:num_common]:
            num_common = next(i for i in range(num_common) if own[i] != first[i])
        if num_common == 0:
            return 0
    assert num_common <= min(state.num_remembered_pages for state in states), "a common page that is not filled"
    return num_common if pays(len(states), num_tokens, num_common * page_size, least) else 0
