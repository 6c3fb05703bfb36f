"""Norms, activations and other work on each token by itself."""
