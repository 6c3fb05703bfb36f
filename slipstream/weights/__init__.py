"""Stored weights: one file for each checkpoint format and for each layout that products read."""
