"""Tile sizes measured on a GPU: tables, and how they are measured."""
