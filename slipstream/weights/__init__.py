"""Stored weights: one file for each format that checkpoints bring and for each layout that products read."""
