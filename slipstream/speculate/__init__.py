"""Proposing and verifying drafts: one file per method; verify.py serves them all."""
