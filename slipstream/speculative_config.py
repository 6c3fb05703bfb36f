"""The configuration of speculation: method, draft length, verification, and the requirements of the method.

Plain data that can be sent between processes. Methods are in ``speculate/registry.py``; here a method is a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

VERIFY_MODES = ("match", "rejection", "synthetic")
VerifyMode = Literal["match", "rejection", "synthetic"]
MAX_DRAFTS = 16
# The lengths that an adaptive draft length is chosen from. Each has its own graphs, so long ones are sparse.
_LENGTHS = (0, 1, 2, 3, 5, 7, 11, 16)
_INITIAL_LENGTH = 3


@dataclass(frozen=True)
class Needs:
    """The requirements of a drafter. Engine and scheduler know nothing else of a method."""

    default_drafts: int = 5  # maximum drafts of a step, if the user sets no number
    max_drafts: int = MAX_DRAFTS  # largest number that the user may set
    # It has its own keys and values under the target's page ids. A page filled by a request without drafts then lacks
    # the drafter's, and is not shared with a request with drafts.
    own_keys: bool = False
    # After steps without proposals it processes the tokens that it missed, in its next pass.
    catches_up: bool = False
    # Of accepted drafts it goes over the last alone: it went over the others when it proposed them.
    goes_over_last: bool = False
    # Cache slots after a row's tokens that a proposal writes, per draft, and beside those.
    slots_per_draft: int = 0
    extra_slots: int = 0
    in_one_pass: bool = False  # it proposes any number of drafts in one pass, at the cost of the largest
    # Its keys at a slot depend on the next token: it pairs a token with the hidden state before it. The hash of a page
    # then includes the token after it.
    looks_ahead: bool = False
    # With an adaptive draft length it also processes the tokens of steps without proposals, so its keys have no gaps.
    follows: bool = False
    noted_steps: int = 0  # maximum steps whose hidden states it keeps before it processes them
    taps: int = 0  # maximum number of target layers whose hidden states it reads
    is_causal: bool = True  # its attention is causal; else tokens of a request in a pass see each other
    from_text: bool = False  # its drafts are a function of the request's tokens
    is_certain: bool = False  # it samples nothing: its drafts have no distribution
    host_drafts: bool = False  # the host proposes, and stages drafts before the step that checks them


NO_NEEDS = Needs()


@dataclass(frozen=True)
class SpeculativeConfig:
    method: str  # its name in the registry
    num_drafts: int  # maximum drafts of a step
    # match: accept drafts that equal the token the target samples. rejection: speculative sampling, the same
    # distribution but other tokens than without drafts. synthetic: at given rates, for benchmarks.
    verify: VerifyMode = "match"
    model: str | None = None  # of a method with a checkpoint: a folder, a .gguf file, a hub id or an alias
    # synthetic: entry i is the probability that the first i + 1 drafts are all accepted.
    acceptance_rates: tuple[float, ...] = ()
    # Whether the draft length adapts to acceptance and cost, from none to ``num_drafts``.
    adaptive: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the method's own keys
    needs: Needs = NO_NEEDS

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths that a step may have, ascending."""
        if not self.adaptive:
            return (self.num_drafts,)
        return (*(k for k in _LENGTHS if k < self.num_drafts), self.num_drafts)

    @property
    def initial_length(self) -> int:
        return min(_INITIAL_LENGTH, self.num_drafts) if self.adaptive else self.num_drafts

    def lowered(self, num_drafts: int) -> SpeculativeConfig:
        """With at most ``num_drafts`` drafts, if the draft length adapts."""
        most = max(1, min(self.num_drafts, num_drafts))
        if not self.adaptive or most == self.num_drafts:
            return self
        return replace(self, num_drafts=most, acceptance_rates=self.acceptance_rates[:most])

    @property
    def knows_acceptance(self) -> bool:
        """Whether acceptance is known without verification: a draft is accepted if it equals the next token.

        With speculative sampling, drafts have their own noise: equal tokens are rarer than accepted ones.
        """
        return self.verify != "rejection" or self.needs.is_certain

    @property
    def depends_on_text_alone(self) -> bool:
        """Whether the host can compute from collected tokens which drafts would have been accepted."""
        return self.needs.from_text and not self.is_synthetic

    def num_proposed(self, num_checked: int) -> int:
        """How many drafts a step proposes if the next one verifies ``num_checked``.

        Where drafts come from the text alone or from one pass, more of them cost next to nothing: a step proposes the
        maximum, or none. A change of the number that is verified then needs no different kind of step.
        """
        costs_nothing = self.depends_on_text_alone or self.needs.in_one_pass
        makes_most = self.adaptive and costs_nothing and num_checked > 0
        return self.num_drafts if makes_most else num_checked

    @property
    def keeps_tokens(self) -> bool:
        """Whether the tokens for a seed are those without drafts."""
        return self.verify == "match"

    @property
    def is_synthetic(self) -> bool:
        """Whether text is meaningless, which every output has to say."""
        return self.verify == "synthetic"
