"""The bytes of single tokens, derived from the decoding rules of a tokenizer.

A token may be part of a character, and then no text can show it. Byte-level tokenizers write bytes as letters, by
GPT-2's table; SentencePiece spells a byte that is no token of its own as ``<0xE2>``, and a space as ``▁``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Speller = Callable[[str], bytes]  # from the vocabulary's spelling of a token to its bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """GPT-2's table: printable bytes are their own letters, the others take the letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}


_LETTERS = _byte_letters()


def build_speller(decoder: Any) -> Speller | None:
    """How ``decoder``, the part of a ``tokenizers.Tokenizer``, spells a token; None if that depends on other tokens."""
    if decoder is None:
        return None
    rules: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = rules["decoders"] if rules["type"] == "Sequence" else [rules]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _spell_byte_level
    spaces = _find_spaces(steps)
    # Stripping applies to the beginning of a text, not to single tokens, if tokens were joined before.
    strips_text = "Strip" not in kinds or "Fuse" in kinds[: kinds.index("Strip")]
    if spaces is None or not strips_text or not set(kinds) <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return None
    has_byte_tokens = "ByteFallback" in kinds

    def spell(token: str) -> bytes:
        if has_byte_tokens and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(found[1])
        for written, meant in spaces.items():
            token = token.replace(written, meant)
        return token.encode()

    return spell


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_LETTERS[letter] for letter in token])
    except KeyError:  # an added token, which is spelled literally
        return token.encode()


def is_byte_level(decoder: Any) -> bool:
    """Whether a text is the concatenation of its tokens' bytes."""
    return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"


def _find_spaces(steps: list[dict[str, Any]]) -> Mapping[str, str] | None:
    """Replacement rules; None if a rule is more than a replacement."""
    spaces: dict[str, str] = {}
    for step in steps:
        if step["type"] == "Metaspace":
            spaces[step["replacement"]] = " "
        elif step["type"] == "Replace":
            if "String" not in step["pattern"]:
                return None
            spaces[step["pattern"]["String"]] = step["content"]
    return spaces


class _Filled(dict[int, Any]):
    """Filled on demand: a vocabulary is large, and most texts use little of it."""

    def __init__(self, find: Callable[[int], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> Any:
        found = self[token_id] = self._find(token_id)
        return found


class TokenTable:
    """Tokens as bytes, and as text where they are whole characters."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        self.raw: dict[int, bytes] = _Filled(find)
        self.texts: dict[int, str | None] = _Filled(self._text)

    def _text(self, token_id: int) -> str | None:
        try:
            return self.raw[token_id].decode()
        except UnicodeDecodeError:
            return None
