"""Processing the tokens of a collected step: bounds become exact, and filled pages are offered to the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.output import FinishReason, TokenUpdate, TokenUpdates
from slipstream.plan import RowStatus, StepPlan, StepResult
from slipstream.scheduler.request_pages import RequestPages
from slipstream.scheduler.request_state import RequestState

_FINISH_REASONS: dict[RowStatus, FinishReason] = {
    RowStatus.STOPPED: "stop",
    RowStatus.LENGTH: "length",
    RowStatus.ERROR: "error",
}
_NAN_ERROR = "the model produced logits that are not numbers for this request; its output was discarded"

_NO_TOKEN_ERROR = (
    "no token was both legal in this request's grammar and allowed by its other parameters, or the model's logits "
    "were not numbers; leave out bad_words and logit_bias"
)


class TokenCollector:
    """Appends a step's tokens to its requests, and returns the updates."""

    def __init__(self, pages: RequestPages, has_drafts: bool) -> None:
        self._pages, self._has_drafts = pages, has_drafts

    def take_all(self, result: StepResult, states: Sequence[RequestState]) -> TokenUpdates:
        """For a step in which every request decodes, has new tokens and continues."""
        composition = result.plan.composition
        for state, new in zip(states, result.token_ids, strict=True):
            known = state.token_ids
            known += new
            state.num_draws_in_flight -= 1
            if len(known) > state.remember_beyond:
                self._pages.remember(state, len(known) - 1)
        if not self._has_drafts:
            return TokenUpdates(composition.request_ids, result.token_ids)
        if num_drafts := composition.num_drafts[0]:
            for state, new in zip(states, result.token_ids, strict=True):
                state.num_drafts_in_flight -= num_drafts
                state.num_computed -= num_drafts + 1 - len(new)
        return TokenUpdates(composition.request_ids, result.token_ids, result.num_drafts, result.num_accepted)

    def take_each(self, result: StepResult, states: Sequence[RequestState]) -> TokenUpdates:
        """Request by request, for steps whose requests are in different states."""
        composition = result.plan.composition
        ids: list[str] = []
        tokens: list[list[int]] = []
        drafts: list[int] = []
        accepted: list[int] = []
        others: dict[int, TokenUpdate] = {}
        shares = zip(states, result.token_ids, composition.samples, strict=True)
        for i, (state, token_ids, samples) in enumerate(shares):
            # Outputs are routed by the plan that launched them, not by the row's current owner.
            if state.generation != composition.generations[i]:
                continue
            if samples:
                num_drafts = composition.num_drafts[i]
                state.num_draws_in_flight -= 1
                state.num_drafts_in_flight -= num_drafts
                # The optimistic mirror counted every draft as accepted.
                state.num_computed -= num_drafts - max(0, len(token_ids) - 1)
            if state.finished:
                continue
            if state.gets_only_tokens and token_ids and not result.statuses[i] and i not in result.prompt_logprobs:
                state.token_ids += token_ids
            elif (update := take_tokens(state, result, i)) is not None:
                others[len(ids)], token_ids = update, update.token_ids
            if state.is_encoding:
                self._pages.remember_encoded(state)
            if len(state.token_ids) > state.remember_beyond and result.statuses[i] is not RowStatus.ERROR:
                # The step's last token is sampled, not computed; a prefill chunk is computed to its end.
                self._pages.remember(state, len(state.token_ids) - 1 if samples else _end(result.plan, i))
            if token_ids or len(ids) in others:
                ids.append(state.request.request_id)
                tokens.append(token_ids)
                drafts.append(result.num_drafts[i])
                accepted.append(min(result.num_accepted[i], len(token_ids)))
        return TokenUpdates(ids, tokens, drafts, accepted, others)


def take_tokens(state: RequestState, result: StepResult, i: int) -> TokenUpdate | None:
    """The update of one request, if there is more to it than new tokens. None if the step has nothing for it."""
    request, token_ids, status = state.request, result.token_ids[i], result.statuses[i]
    state.token_ids += token_ids
    reason = None if status is RowStatus.RUNNING else _FINISH_REASONS.get(status)
    stop_reason: int | None = None
    if reason != "error" and request.stop_token_ids:
        # The device checks only the first few stop ids; a longer list is completed here.
        end = next((i for i, token_id in enumerate(token_ids) if token_id in request.stop_token_ids), None)
        if end is not None:
            reason, stop_reason = "stop", token_ids[end]
            if end + 1 < len(token_ids):
                del state.token_ids[end + 1 - len(token_ids) :]
                token_ids = token_ids[: end + 1]
    scored = result.prompt_logprobs.get(i)
    if not token_ids and reason is None and scored is None:
        return None
    error = (_NO_TOKEN_ERROR if request.is_constrained else _NAN_ERROR) if reason == "error" else None
    update = TokenUpdate(request.request_id, token_ids, reason, stop_reason, error, state.num_cached_tokens or 0)
    update.num_drafts = result.num_drafts[i]
    update.num_accepted = min(result.num_accepted[i], len(token_ids))
    update.prompt_logprobs, update.vector = scored, result.vectors.get(i)
    if result.logprobs is not None and request.params.logprobs is not None:
        update.logprobs = result.logprobs[i][: len(token_ids)]
    return update


def _end(plan: StepPlan, i: int) -> int:
    return int(plan.num_computed_bounds[i]) + plan.composition.num_tokens[i]
