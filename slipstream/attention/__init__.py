"""Attention: what a step tells a backend, what a backend promises, and one file per backend."""
