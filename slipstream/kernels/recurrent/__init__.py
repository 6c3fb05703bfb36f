"""Layers that keep a state for each request: delta rule and causal convolution."""
