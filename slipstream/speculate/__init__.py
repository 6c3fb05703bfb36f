"""Drafting tokens ahead and checking them: one file per method; verify.py serves them all."""
