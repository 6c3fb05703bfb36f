"""Attention: the metadata of a step, the protocols of backends and caches, and one file per backend."""
