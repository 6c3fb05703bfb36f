"""How to speculate, decided: which method, how many drafts, how they are checked, and what the method needs.

Plain data that travels between processes. Methods are known to ``speculate/registry.py``; here a method is a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

VERIFY_MODES = ("match", "rejection", "synthetic")
VerifyMode = Literal["match", "rejection", "synthetic"]
MAX_DRAFTS = 16
# What a draft length that adapts is chosen from. Each has graphs of its own, so they lie further apart as they grow.
_LENGTHS = (0, 1, 2, 3, 5, 7, 11, 16)
_INITIAL_LENGTH = 3


@dataclass(frozen=True)
class Needs:
    """What a drafter needs of the engine. The engine and the scheduler know this of a method, and nothing else."""

    default_drafts: int = 5  # most drafts of a step, if the user names no number
    max_drafts: int = MAX_DRAFTS  # most that the user may name
    # It keeps keys and values of its own under the target's page ids. A page that a request without drafts has filled
    # is then of no use to a request with them.
    own_keys: bool = False
    # After steps that propose nothing it goes over the tokens which it was not shown, in the next pass.
    catches_up: bool = False
    # Slots of the cache after a row's tokens that a proposal writes, for each draft.
    slots_per_draft: int = 0
    # Its keys at a slot depend on the next token: it pairs a token with the hidden state before it. A page is then
    # known by its tokens and the one after them.
    looks_ahead: bool = False
    # Where the number of drafts adapts, it is also shown the tokens of steps that propose nothing: no gaps in its keys.
    follows: bool = False
    noted_steps: int = 0  # most steps whose hidden states it keeps before it follows them
    taps: int = 0  # most layers of the target whose hidden states it reads
    is_causal: bool = True  # whether a token of its passes sees none after it; otherwise all of its request in the pass
    from_text: bool = False  # its drafts follow from the request's tokens alone
    is_certain: bool = False  # it draws nothing: its drafts have no distribution
    host_drafts: bool = False  # the host proposes, and stages drafts before the step that checks them


NO_NEEDS = Needs()


@dataclass(frozen=True)
class SpeculativeConfig:
    method: str  # as the registry knows it
    num_drafts: int  # most tokens drafted ahead of a step
    # match: drafts that equal the target's own choice. rejection: speculative sampling, the same distribution but other
    # tokens than without drafts. synthetic: at random with given rates, for benchmarks; the text means nothing.
    verify: VerifyMode = "match"
    model: str | None = None  # of a method that drafts with a checkpoint: a folder, a .gguf file, a hub id or an alias
    # synthetic: entry i is the probability that the first i + 1 drafts are all accepted.
    acceptance_rates: tuple[float, ...] = ()
    # Whether the engine chooses how many to draft, from none to ``num_drafts``, by what they cost and how they fare.
    adaptive: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the method's own keys, all of them
    needs: Needs = NO_NEEDS

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many drafts a step may have, fewest first."""
        if not self.adaptive:
            return (self.num_drafts,)
        return (*(k for k in _LENGTHS if k < self.num_drafts), self.num_drafts)

    @property
    def initial_length(self) -> int:
        return min(_INITIAL_LENGTH, self.num_drafts) if self.adaptive else self.num_drafts

    def lowered(self, num_drafts: int) -> SpeculativeConfig:
        """With at most so many drafts, where the number is the engine's to choose."""
        most = max(1, min(self.num_drafts, num_drafts))
        if not self.adaptive or most == self.num_drafts:
            return self
        return replace(self, num_drafts=most, acceptance_rates=self.acceptance_rates[:most])

    @property
    def foresees(self) -> bool:
        """Whether acceptance is known without verification: a draft is accepted if it is the token that comes.

        Speculative sampling draws drafts with noise of their own: equal tokens are rarer than accepted ones.
        """
        return self.verify != "rejection" or self.needs.is_certain

    @property
    def depends_on_text_alone(self) -> bool:
        """Whether the host can tell from the tokens that came which drafts would have been accepted."""
        return self.needs.from_text and not self.is_synthetic

    def num_made(self, num_checked: int) -> int:
        """By a step, where the next one checks so many.

        From the text alone they cost next to nothing to make: a step makes as many as there may be, or none. So a
        change of the number that is checked is no other kind of step.
        """
        makes_most = self.adaptive and self.depends_on_text_alone and num_checked > 0
        return self.num_drafts if makes_most else num_checked

    @property
    def is_synthetic(self) -> bool:
        """Whether text means nothing, which every output has to say."""
        return self.verify == "synthetic"
