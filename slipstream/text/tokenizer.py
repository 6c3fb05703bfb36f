"""Text to token ids and back, and conversations to token ids.

Wraps a ``tokenizers.Tokenizer`` built from a model folder or from the metadata of a GGUF file. Nothing is changed after
construction, so one tokenizer serves many threads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from slipstream.errors import ModelError, RequestError
from slipstream.fields import Fields, read_json_if_present
from slipstream.text.chat_template import ChatTemplate, Message, one_line
from slipstream.text.token_bytes import TokenTable, build_speller, is_byte_level
from slipstream.text.tokenizer_file import read_tokenizer_file, reraise_foreign
from slipstream.values import is_valid_text

_LONG_TEXT = 2000  # characters
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
# What converters fill a vocabulary with that is smaller than the embedding.
_FILLER = re.compile(r"\[PAD\d+\]")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class EncodedTexts(NamedTuple):
    """Token ids of a text or a pair, special tokens included."""

    ids: list[int]
    second_from: int = 0  # where tokens of the second type begin; 0: there are none


class Tokenizer:
    """A model's vocabulary, its special tokens and its chat template."""

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: Mapping[str, str],
        chat_template: str | None = None,
    ) -> None:
        """``named_tokens`` are the special tokens by role, such as ``{"eos_token": "</s>"}``."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = self._id_of(named_tokens.get("bos_token"))
        self.eos_token_id = self._id_of(named_tokens.get("eos_token"))
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template = ChatTemplate(chat_template, named_tokens) if chat_template else None
        self._spell = build_speller(backend.decoder)
        self._tables: dict[bool, TokenTable] = {}
        if is_byte_level(backend.decoder):
            self._tables = {False: TokenTable(self.token_bytes), True: TokenTable(self._shown_bytes)}

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json`` with its companions, as Hugging Face writes them.

        The special tokens that ``encode`` adds are those of ``tokenizer.json``; as in transformers, the flags
        ``add_bos_token`` and ``add_eos_token`` of older configs are ignored.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} holds no tokenizer.json; save the model's fast tokenizer there with "
                "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        backend = read_tokenizer_file(file)
        config = read_json_if_present(path / "tokenizer_config.json")
        others = _named_tokens(read_json_if_present(path / "special_tokens_map.json"))
        named = {role: text for role, text in others.items() if role not in config} | _named_tokens(config)
        _add_missing_tokens(backend, config, named)
        return cls(backend, named_tokens=named, chat_template=_find_template(path, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path) -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file describes; ``path`` is for messages."""
        from slipstream.text.gguf_tokenizer import adds_bos, build_backend, read_token_id

        fields = Fields.from_dict(metadata, str(path))
        backend = build_backend(fields)
        named = {}
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = read_token_id(fields, key)
            if token_id is not None and (token := backend.id_to_token(token_id)) is not None:
                named[f"{role}_token"] = token
        bos = named.get("bos_token") if adds_bos(fields) else None
        eos = named.get("eos_token") if fields.flag("tokenizer.ggml.add_eos_token") else None
        _surround(backend, bos, eos)
        template = fields.text("tokenizer.chat_template", "")
        return cls(backend, named_tokens=named, chat_template=template or None)

    def save(self, path: Path) -> None:
        """As a ``tokenizer.json``; the chat template is not part of it."""
        self._backend.save(str(path))

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer knows; the model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def agrees_with(self, other: Tokenizer) -> bool:
        """Whether every id that both vocabularies have is the same token, ignoring padding tokens."""
        own, others = (
            {idx: token for token, idx in tokenizer._backend.get_vocab(True).items() if not _FILLER.fullmatch(token)}
            for tokenizer in (self, other)
        )
        return all(others[idx] == token for idx, token in own.items() if idx in others)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in the text become their ids in either case."""
        try:
            if len(text) < _LONG_TEXT:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                # The same ids, and other threads can run meanwhile: `encode` holds the GIL.
                ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the prompt must be a text of valid Unicode characters") from error
        except BaseException as error:  # such as a character that the vocabulary has no token for
            reraise_foreign(error)
            raise RequestError(f"the model's tokenizer cannot encode this text ({one_line(error)})") from error
        return ids

    def encode_within(self, text: str, limit: int | None, second: str | None = None) -> EncodedTexts:
        """Token ids of a text or a pair with special tokens around them, cut to ``limit`` in all. Of a pair the longer
        text loses tokens first.
        """
        if limit is None and second is None:
            return EncodedTexts(self.encode(text))
        parts = [self._encode_plain(part) for part in ([text] if second is None else [text, second])]
        if limit is not None:
            room = limit - int(self._backend.num_special_tokens_to_add(second is not None))
            for part, size in zip(parts, _share_room([len(part) for part in parts], max(0, room)), strict=True):
                part.truncate(size)
        whole = self._backend.post_process(parts[0], None if second is None else parts[1], add_special_tokens=True)
        ids, types = list(whole.ids), list(whole.type_ids)
        return EncodedTexts(ids if limit is None else ids[:limit], types.index(1) if 1 in types else 0)

    def _encode_plain(self, text: str) -> Any:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the prompt must be a text of valid Unicode characters") from error
        except BaseException as error:
            reraise_foreign(error)
            raise RequestError(f"the model's tokenizer cannot encode this text ({one_line(error)})") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens; incomplete characters come out as U+FFFD. Ids without a token are skipped."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        return self._id_of(token)

    def token(self, token_id: int) -> str:
        """The vocabulary's spelling of a token, empty for an id without one."""
        token: str | None = self._backend.id_to_token(token_id)
        return token or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text, which may be part of a character; empty for an id without a token.

        Joined over a text they are its UTF-8, with a space before it where the tokenizer adds one.
        """
        token = self.token(token_id)
        if self._spell is None:
            return self.decode([token_id], skip_special_tokens=False).encode() if token else b""
        return self._spell(token)

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_token_ids else self.token_bytes(token_id)

    def token_table(self, skip_special_tokens: bool = True) -> TokenTable | None:
        """Bytes and texts of single tokens; None where a token's text depends on those around it."""
        return self._tables.get(skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the text this model expects; ``variables`` are extra names for its template."""
        if self._template is None:
            raise RequestError("this model has no chat template; send a plain prompt instead")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The template writes its own special tokens, so none are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def _id_of(self, token: str | None) -> int | None:
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id


def _share_room(sizes: list[int], room: int) -> list[int]:
    """How many tokens remain of each text: the longer one is cut to the other's length before both are."""
    if len(sizes) == 1 or sum(sizes) <= room:
        return [min(size, room) for size in sizes]
    first, second = sizes
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return [shorter, longer] if first <= second else [longer, shorter]


def _named_tokens(config: Fields) -> dict[str, str]:
    """The special tokens by role; a token is written as its text or as an object with ``content``."""
    named = {}
    for role in _NAMED_TOKENS:
        source, name = (config, role) if isinstance(config.get(role), str) else (config.section(role), "content")
        if text := _token_text(source, name):
            named[role] = text
    return named


def _token_text(fields: Fields, key: str) -> str:
    """Empty where there is none."""
    text = fields.text(key, "")
    if not is_valid_text(text):
        raise fields.refuse(key, "a text of valid Unicode characters")
    return text


def _add_missing_tokens(backend: Backend, config: Fields, named: Mapping[str, str]) -> None:
    """Tokens that only ``tokenizer_config.json`` lists, and the special flag of those with a role."""
    listed = config.section("added_tokens_decoder")
    for key in sorted(filter(_TOKEN_ID.fullmatch, listed), key=int):
        entry = listed.section(key)
        text, is_special = _token_text(entry, "content"), entry.flag("special")
        if text and backend.token_to_id(text) is None:
            flags = {key: entry.flag(key) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in entry}
            token = AddedToken(text, special=is_special, **flags)
            backend.add_special_tokens([token]) if is_special else backend.add_tokens([token])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    in_vocabulary = [text for text in named.values() if backend.token_to_id(text) is not None]
    if plain := [AddedToken(text, normalized=False) for text in in_vocabulary if text not in special]:
        backend.add_special_tokens(plain)


def _surround(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Let ``encode`` put these tokens around a text, and no others."""
    around = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=list(dict.fromkeys(around)))


def _find_template(path: Path, config: Fields) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} cannot be read as text; get it again") from error
    several = config.get("chat_template")
    if not isinstance(several, list):
        return config.text("chat_template", "") or None
    if not all(isinstance(entry, dict) for entry in several):
        raise config.refuse("chat_template", "a text or a list of objects with 'name' and 'template'")
    entries = [Fields(entry, config.source, "chat_template.") for entry in several]
    return next((entry.text("template") for entry in entries if entry.get("name") == "default"), None)
