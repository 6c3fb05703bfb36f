"""``tokenizer.json``: parsed into a ``tokenizers.Tokenizer``, or an error of one line.

The package checks most of a file itself. Some errors make it panic, which prints many lines and is no Exception in
Python; those are checked here first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slipstream.errors import ModelError
from slipstream.fields import Fields, read_json
from slipstream.values import describe_value


def read_tokenizer_file(file: Path) -> Tokenizer:
    content = read_json(file)
    _check_merges(content)
    for processor in _processors(content.section("post_processor")):
        _check_template(processor)
    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:  # the package raises bare Exceptions
        reraise_foreign(error)
        raise ModelError(f"{file} is not a valid tokenizer ({' '.join(str(error).split())}); get it again") from error


def reraise_foreign(error: BaseException) -> None:
    """Re-raise what the package did not raise, such as Ctrl-C. A panic of its native code is no Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def find_bad_merge(
    merges: Iterable[tuple[str, str]], vocabulary: Collection[str], prefix: str = ""
) -> tuple[str, str] | None:
    """The first merge whose result is no token. ``prefix`` marks tokens that continue a word, and is not part of it."""
    return next(
        (
            (left, right)
            for left, right in merges
            if left + right.removeprefix(prefix) not in vocabulary or not right.startswith(prefix)
        ),
        None,
    )


def _check_merges(content: Fields) -> None:
    model = content.section("model")
    merges, vocabulary = model.get("merges"), model.get("vocab")
    if not isinstance(merges, list) or not isinstance(vocabulary, dict):
        return  # another kind of model, or one that the package refuses itself
    prefix = model.text("continuing_subword_prefix", "")
    if (bad := find_bad_merge(_pairs(merges), vocabulary, prefix)) is not None:
        raise ModelError(f"{content.source} merges {describe_value(bad)} to what is no token; get it again")


def _pairs(merges: list[Any]) -> Iterator[tuple[str, str]]:
    """A merge is a list of two, in older files a text. The package refuses any other."""
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts):
            yield parts[0], parts[1]


def _processors(processor: Fields) -> Iterator[Fields]:
    yield processor
    several = processor.get("processors")
    for inner in several if isinstance(several, list) else []:
        if isinstance(inner, dict):
            yield Fields(inner, processor.source, f"{processor.prefix}processors.")


def _check_template(processor: Fields) -> None:
    """Every special token that a template adds to a text must have ids."""
    known = processor.get("special_tokens")
    for key in ("single", "pair"):
        pieces = processor.get(key)
        for piece in pieces if isinstance(pieces, list) else []:
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            name = special.get("id") if isinstance(special, dict) else None
            if isinstance(name, str) and isinstance(known, dict) and name not in known:
                raise processor.refuse("special_tokens", f"an object with the token {describe_value(name)}")
