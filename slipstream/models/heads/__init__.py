"""Networks that draft on the target's hidden states."""
