"""Each client gets what is its own of a step, and all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.split_updates import UpdateSplitter
from slipstream.engine.wire import client_of, client_prefix
from slipstream.output import TokenUpdate, TokenUpdates


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[TokenUpdates]]:
    """Steps of some clients' requests; a composition may come again, as the same object."""
    num_clients = draw(st.integers(1, 4))
    owners = st.lists(st.integers(0, num_clients - 1), max_size=12)
    compositions = [
        tuple(f"{client_prefix(client, 3)}{serial}" for serial, client in enumerate(draw(owners))) for _ in range(3)
    ]
    found = []
    for _ in range(6):
        ids = draw(st.sampled_from(compositions))
        tokens = [draw(st.lists(st.integers(0, 9), max_size=3)) for _ in ids]
        drafts = [draw(st.integers(0, 3)) for _ in ids] if draw(st.booleans()) else []
        ends = draw(st.sets(st.integers(0, len(ids) - 1))) if ids else set()
        others = {i: TokenUpdate(ids[i], tokens[i], "stop", time=7.0) for i in ends}
        found.append(TokenUpdates(ids, tokens, drafts, drafts, others, time=7.0))
    return num_clients, found


@given(steps())
def test_parts_are_the_whole(drawn: tuple[int, list[TokenUpdates]]) -> None:
    num_clients, compositions = drawn
    splitter = UpdateSplitter(num_clients)
    for updates in compositions:
        parts = dict(splitter.split(updates))
        for client, part in parts.items():
            assert list(part) == [update for update in updates if client_of(update.request_id) == client]
            assert part.time == updates.time and len(part) > 0
        assert sum(map(len, parts.values())) == len(updates)
