"""Limits that a caller asked for and a request cannot have: it is served nevertheless, and its caller is told."""

from __future__ import annotations

from slipstream.types import Request


def warn_of_lowered_limits(request: Request) -> str | None:
    """One line for the caller; None if the request has what was asked for."""
    wanted, prompt_len = request.params.max_tokens, len(request.prompt_token_ids)
    room = request.max_total_tokens - prompt_len
    if wanted is None or wanted <= room:
        return None
    context = f"the context holds {request.max_total_tokens} tokens, {prompt_len} are the prompt"
    return f"max_tokens was lowered from {wanted} to {room}: {context}"
