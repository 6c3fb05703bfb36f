"""What a model that only encodes texts has in addition to the shape that decoders share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderConfig:
    """Embeddings and biases of positions; every token attends to all tokens of its text."""

    num_token_types: int = 0  # rows of a table for the first and second text of a pair; 0: no table
    first_position: int = 0  # the row of the position table that a text's first token has
    relative_buckets: int = 0  # distances with a bias of their own on attention scores; 0: no such bias
    max_distance: int = 0  # farther ones share the last bucket
    # The prefix of the encoder's tensors in checkpoints that have a classifier around it.
    prefix: str = ""
