"""The needs that all heads over the target's hidden states share."""

from __future__ import annotations

from slipstream.speculative_config import Needs

NUM_NOTED_STEPS = 16  # at most; a power of two
# Most heads are trained on three layers of the target.
HEAD_NEEDS = Needs(
    default_drafts=7,
    own_keys=True,
    slots_per_draft=1,
    looks_ahead=True,
    follows=True,
    noted_steps=NUM_NOTED_STEPS,
    taps=3,
)
