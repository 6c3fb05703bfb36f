"""What all small heads over the target's own hidden states need."""

from __future__ import annotations

from slipstream.speculative_config import Needs

NUM_NOTED_STEPS = 16  # at most; a power of two
# Three layers of the target are what most heads are trained on.
HEAD_NEEDS = Needs(
    default_drafts=7,
    own_keys=True,
    slots_per_draft=1,
    looks_ahead=True,
    follows=True,
    noted_steps=NUM_NOTED_STEPS,
    taps=3,
)
