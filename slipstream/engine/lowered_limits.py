"""Limits that exceed the context: the request is served with lower ones, and the caller gets a warning."""

from __future__ import annotations

from slipstream.request import Request


def warn_of_lowered_limits(request: Request) -> str | None:
    """One line for the caller; None if no limit was lowered."""
    asked, prompt_len = request.params.max_tokens, len(request.prompt_token_ids)
    room = request.max_total_tokens - prompt_len
    if asked is None or asked <= room:
        return None
    context = f"the context holds {request.max_total_tokens} tokens, {prompt_len} are the prompt"
    return f"max_tokens was lowered from {asked} to {room}: {context}"
