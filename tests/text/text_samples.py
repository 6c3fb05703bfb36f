"""Texts and conversations that show where tokenizers differ."""

from __future__ import annotations

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\r\n\r\n mixed \n\n\n",
    "I'm sure they'll say it's fine, don't you think? WE'VE SEEN IT.",
    "Numbers 1234567890, 3.14159, 1,000,000 and 12:34",
    "x1y22z333 ½ ² Ⅻ ٣٤",
    "Café naïve résumé Ångström",
    "e\u0301 combining, \u1e9b\u0323 and \ufb01 ligature",
    "你好\uff0c世界\uff01日本語のテキスト 한국어",
    "Россия и مرحبا بالعالم",
    "emoji 😀👍🏽🇺🇸❤️👨‍👩‍👧‍👦",
    "def foo(x):\n    return x ** 2  # comment\n\tif x: pass\n",
    '{"key": [1, 2.5e-3, null], "s": "a\\"b"}',
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>text after<|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "zero\u200bwidth\u00a0nbsp\u3000wide",
    "\x00\x01\x7f control",
    "https://example.org/a?b=c&d=%20e#f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The quick brown fox jumps over the lazy dog. " * 20,
]

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "Erzähl mir was 🙂"},
        {"role": "assistant", "content": "Gern.\n\n1. Erstens"},
        {"role": "user", "content": "<|im_end|> inside"},
    ],
]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
