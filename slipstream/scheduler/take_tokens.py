"""One request's share of a collected step, where there is more to it than new tokens."""

from __future__ import annotations

from slipstream.scheduler.request_state import RequestState
from slipstream.types import FinishReason, RowStatus, StepResult, TokenUpdate

_FINISH_REASONS: dict[RowStatus, FinishReason] = {
    RowStatus.STOPPED: "stop",
    RowStatus.LENGTH: "length",
    RowStatus.ERROR: "error",
}
_NAN_ERROR = "the model produced logits that are not numbers for this request; its output was discarded"


def take_tokens(state: RequestState, result: StepResult, i: int) -> TokenUpdate | None:
    """Add the tokens to the request's, and say what became of it. None if the step has brought it nothing."""
    request, token_ids, status = state.request, result.token_ids[i], result.statuses[i]
    state.token_ids += token_ids
    reason = None if status is RowStatus.RUNNING else _FINISH_REASONS.get(status)
    stop_reason: int | None = None
    if reason != "error" and request.stop_token_ids:
        # The device knows only the first few stop ids; a longer list is completed here.
        end = next((i for i, token_id in enumerate(token_ids) if token_id in request.stop_token_ids), None)
        if end is not None:
            reason, stop_reason = "stop", token_ids[end]
            if end + 1 < len(token_ids):
                del state.token_ids[end + 1 - len(token_ids) :]
                token_ids = token_ids[: end + 1]
    scored = result.prompt_logprobs.get(i)
    if not token_ids and reason is None and scored is None:
        return None
    error = _NAN_ERROR if reason == "error" else None
    update = TokenUpdate(request.request_id, token_ids, reason, stop_reason, error, state.num_cached_tokens or 0)
    update.num_drafts = result.num_drafts[i]
    update.num_accepted = min(result.num_accepted[i], len(token_ids))
    update.prompt_logprobs, update.vector = scored, result.vectors.get(i)
    if result.logprobs is not None and request.params.logprobs is not None:
        update.logprobs = result.logprobs[i][: len(token_ids)]
    return update
