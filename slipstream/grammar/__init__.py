"""Structured output on the host: what is legal next for each constrained request, as masks of tokens."""
