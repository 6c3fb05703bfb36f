"""A prompt that asks a model that generates whether a document answers a query: its score is the odds of "yes".

The words are those that rerankers of this kind are trained with, for models whose chat marks messages as below.
"""

from __future__ import annotations

from slipstream.text.tokenizer import Tokenizer

_OPEN, _CLOSE = "<|im_start|>", "<|im_end|>"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
PREFIX = f"{_OPEN}system\n{_SYSTEM}{_CLOSE}\n{_OPEN}user\n"
SUFFIX = f"{_CLOSE}\n{_OPEN}assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def fill_pair(query: str, document: str, instruction: str | None = None) -> str:
    """What comes between prefix and suffix."""
    return f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"


def answer_ids(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The tokens for yes and for no; None where the template does not fit the vocabulary."""
    if any(tokenizer.token_id(mark) is None for mark in (_OPEN, _CLOSE)):
        return None
    yes, no = (tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no"))
    return (yes[0], no[0]) if len(yes) == len(no) == 1 else None
