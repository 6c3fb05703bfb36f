"""A request as the engine sees it: plain data, checked and complete.

Nothing here imports torch or knows how a step is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.encoder_input import EncoderInput
from slipstream.pooling import PoolingParams
from slipstream.sampling_params import SamplingParams

MAX_BAD_WORDS = 32
MAX_BAD_WORD_TOKENS = 8
MAX_DEVICE_STOP_IDS = 16  # checked on the device; the host checks the rest of a longer list


@dataclass(frozen=True, slots=True)
class Request:
    """One request in the engine: a prompt as token ids, with all parameters resolved."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with defaults and a seed filled in
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included unless they are ignored
    max_total_tokens: int  # prompt and output together; the prompt alone where nothing is drawn
    arrival_time: float = 0.0
    priority: int = 0  # lower runs first
    choice: int = 0  # index among a prompt's choices; part of the key of its noise
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    pooling: PoolingParams | None = None  # it ends with its prompt, in a vector, and no token is drawn
    second_from: int = 0  # of a pair of texts: the position at which the second begins; 0: there is one text
    encoder: EncoderInput | None = field(default=None, compare=False)  # what the model's encoder reads for it
    num_encoder_entries: int = 0  # of the encoder's output, which is kept in pages of its own

    @property
    def may_use_cache(self) -> bool:
        """Whether the prefix cache may be used.

        Prompt logprobs, and vectors made of more than the last hidden state, need every position computed.
        """
        pools_all = self.pooling is not None and self.pooling.needs_every_position
        return self.params.prompt_logprobs is None and not pools_all

    @property
    def draws(self) -> bool:
        """Whether tokens follow its prompt."""
        return self.pooling is None

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says which tokens may come next."""
        return self.params.structured is not None

    def num_drafts(self, most: int) -> int:
        """Maximum draft length of this request, given the engine's."""
        params = self.params
        if not self.draws:
            return 0
        return 0 if not params.speculate else most if params.max_k is None else min(most, params.max_k)
