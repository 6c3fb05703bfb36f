"""From logits to tokens, one file per logits operation. Randomness is a pure function of (seed, position, token id)."""
