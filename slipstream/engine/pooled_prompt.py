"""From a text or a pair of texts to the tokens of a pooled request, cut to the limit where that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.errors import RequestError
from slipstream.pooling import Scoring
from slipstream.text.pair_template import PREFIX, SUFFIX, fill_pair
from slipstream.text.tokenizer import Tokenizer
from slipstream.values import MAX_INT32, Bounds, read_number

_TRUNCATION = Bounds(-1, MAX_INT32, is_integer=True)


class TextPair(NamedTuple):
    """Two texts that are read together: a query and a document, mostly."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a caller says of how texts become tokens."""

    # Longer texts are cut to so many tokens, special ones included, with -1 to what the model takes. None: refused.
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None  # of what the checkpoint puts before a text
    instruction: str | None = None  # in the template that judges pairs

    def __post_init__(self) -> None:
        read_number("truncate_prompt_tokens", self.truncate_prompt_tokens, _TRUNCATION)
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens must be at least 1, or -1 for what the model takes, not 0")

    def limit(self, max_model_len: int) -> int | None:
        given = self.truncate_prompt_tokens
        if given is None:
            return None
        return max_model_len if given == -1 else min(given, max_model_len)


class PooledTokens(NamedTuple):
    token_ids: tuple[int, ...]
    second_from: int = 0  # where the second text of a pair begins, if the model tells them apart


def encode_text(tokenizer: Tokenizer, text: str, limit: int | None) -> PooledTokens:
    return PooledTokens(tuple(tokenizer.encode_within(text, limit).ids))


def encode_pair(
    tokenizer: Tokenizer, pair: TextPair, scoring: Scoring, limit: int | None, instruction: str | None
) -> PooledTokens:
    if scoring.is_pair_template:
        parts = [
            tokenizer.encode(part, add_special_tokens=False) for part in (PREFIX, fill_pair(*pair, instruction), SUFFIX)
        ]
        if limit is not None:
            parts[1] = parts[1][: max(0, limit - len(parts[0]) - len(parts[2]))]
        return PooledTokens(tuple(token_id for part in parts for token_id in part))
    if instruction is not None:
        raise RequestError("this model reads queries and documents without an instruction; leave it out")
    found = tokenizer.encode_within(pair.first, limit, pair.second)
    return PooledTokens(tuple(found.ids), found.second_from)


def cut_ids(token_ids: Sequence[int], limit: int | None) -> Sequence[int]:
    return token_ids if limit is None else token_ids[:limit]
