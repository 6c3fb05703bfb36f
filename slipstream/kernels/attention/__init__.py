"""Attention over pages, and what writes them."""
