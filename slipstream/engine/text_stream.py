"""One choice of a prompt, from tokens to text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.engine.admission import Submission
from slipstream.output import Completion, Logprobs
from slipstream.pooling import PooledVector
from slipstream.request import Request
from slipstream.text.detokenizer import Detokenizer, StopStringMatcher

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
    num_shown: int = 0  # tokens that were detokenised
    first_token_time: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    vector: PooledVector | None = None  # in place of tokens and text, where those were not asked for
    error: str | None = None
    state: Any = None  # for the reader's use
    checked: list[tuple[int, int]] = field(default_factory=list)  # (drafts, accepted) of verifications not yet counted
    token_ids: list[int] = field(init=False)  # shared with the completion
    # The text is read only at the end, and no stop string is searched for: it is detokenised in one go.
    is_text_late: bool = field(init=False)
    is_plain: bool = field(init=False)  # updates have nothing but tokens, until the end

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
        """Bring the completion's speculation statistics up to date."""
        if self.checked and (figures := self.completion.speculation) is not None:
            figures.add_all(self.checked)
        self.checked.clear()
