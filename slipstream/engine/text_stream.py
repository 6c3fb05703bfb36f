"""One continuation of a prompt on its way from tokens to text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.engine.admission import Submission
from slipstream.engine.detokenizer import Detokenizer, StopStringMatcher
from slipstream.output import Completion, Logprobs
from slipstream.pooling import PooledVector
from slipstream.types import Request

if TYPE_CHECKING:
    from slipstream.engine.output_processor import Reader


@dataclass(slots=True, eq=False)
class TextStream:
    request: Request
    submission: Submission
    reader: Reader
    completion: Completion
    detokenizer: Detokenizer
    matcher: StopStringMatcher | None
    num_shown: int = 0  # tokens whose text has been made
    first_token_time: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    vector: PooledVector | None = None  # in place of tokens and text, where those were not asked for
    error: str | None = None
    state: Any = None  # the reader's own
    checked: list[tuple[int, int]] = field(default_factory=list)  # drafts and how many were accepted, not yet counted
    token_ids: list[int] = field(init=False)  # the completion's own
    # The text is read at the end alone, by the reader and by no search for stop strings: it is made in one go.
    is_text_late: bool = field(init=False)
    is_plain: bool = field(init=False)  # tokens of a stream that goes on are all there is to its updates

    def __post_init__(self) -> None:
        self.token_ids = self.completion.token_ids
        self.is_text_late = not self.reader.every_token and self.matcher is None
        self.is_plain = self.matcher is None and self.completion.logprobs is None

    @property
    def is_finished(self) -> bool:
        return self.completion.finish_reason is not None

    def show(self, text: str) -> None:
        self.completion.text += text
        self.completion.delta_text += text

    def count_drafts(self) -> None:
        """Bring the completion's figures of speculation up to date."""
        if self.checked and (figures := self.completion.speculation) is not None:
            for drafts, times in Counter(self.checked).items():
                figures.add(*drafts, times)
        self.checked.clear()
