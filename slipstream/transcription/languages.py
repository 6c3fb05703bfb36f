"""The languages of Whisper's vocabulary: codes of ISO 639, and names in English."""

from __future__ import annotations

from collections.abc import Collection

from slipstream.errors import RequestError, nearest
from slipstream.values import describe_value

_TABLE = """
en english, zh chinese, de german, es spanish, ru russian, ko korean, fr french, ja japanese, pt portuguese, tr turkish,
pl polish, ca catalan, nl dutch, ar arabic, sv swedish, it italian, id indonesian, hi hindi, fi finnish, vi vietnamese,
he hebrew, uk ukrainian, el greek, ms malay, cs czech, ro romanian, da danish, hu hungarian, ta tamil, no norwegian,
th thai, ur urdu, hr croatian, bg bulgarian, lt lithuanian, la latin, mi maori, ml malayalam, cy welsh, sk slovak,
te telugu, fa persian, lv latvian, bn bengali, sr serbian, az azerbaijani, sl slovenian, kn kannada, et estonian,
mk macedonian, br breton, eu basque, is icelandic, hy armenian, ne nepali, mn mongolian, bs bosnian, kk kazakh,
sq albanian, sw swahili, gl galician, mr marathi, pa punjabi, si sinhala, km khmer, sn shona, yo yoruba, so somali,
af afrikaans, oc occitan, ka georgian, be belarusian, tg tajik, sd sindhi, gu gujarati, am amharic, yi yiddish, lo lao,
uz uzbek, fo faroese, ht haitian creole, ps pashto, tk turkmen, nn nynorsk, mt maltese, sa sanskrit, lb luxembourgish,
my myanmar, bo tibetan, tl tagalog, mg malagasy, as assamese, tt tatar, haw hawaiian, ln lingala, ha hausa, ba bashkir,
jw javanese, su sundanese, yue cantonese
"""
NAMES: dict[str, str] = {}
for _entry in _TABLE.replace("\n", " ").split(","):
    _code, _, _name = _entry.strip().partition(" ")
    NAMES[_code] = _name
_CODES = {name: code for code, name in NAMES.items()}


def find_language(given: str, known: Collection[str]) -> str:
    """The code of a language that is given by code or name; ``known``: the model's codes."""
    text = given.strip().lower()
    code = _CODES.get(text, text)
    if code not in known:
        hint = nearest(text, (*known, *(NAMES[own] for own in known if own in NAMES)))
        raise RequestError(f"this model does not know the language {describe_value(given)}{hint or '; give its code'}")
    return code


def name_language(code: str) -> str:
    return NAMES.get(code, code)
