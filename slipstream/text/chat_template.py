"""From a conversation to the text a model was trained on, through the model's own Jinja template.

Knows the names templates expect (``raise_exception``, ``strftime_now``, ``tojson``, the ``generation`` tag) and what a
well-formed conversation is. Templates come with the model, so they run in a sandbox and see plain JSON data only.
Knows nothing of tokens.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import RequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """One model's template. Compiled on first use, so that a broken template does not stop plain completions."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the names a template may use, such as ``bos_token``, with their text."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None
        self._tests_for_none = False  # whether it asks if a message has no content
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text. ``variables`` are extra names for the template, such as ``enable_thinking``."""
        template = self._template()
        conversation = check_messages(messages)
        if not self._tests_for_none:
            # Most templates join texts, and would fail at None or write it out.
            conversation = [{**message, "content": message["content"] or ""} for message in conversation]
        names: dict[str, Any] = {**self._special_tokens, **_plain("chat template variables", dict(variables or {}))}
        names["messages"] = conversation
        names["tools"] = None if tools is None else _plain("tools", list(tools))
        names["documents"] = None
        names["add_generation_prompt"] = add_generation_prompt
        try:
            return template.render(names)
        except RecursionError:
            raise RequestError("the chat template recurses without end; use another template or a raw prompt") from None
        except Exception as error:  # a template may raise anything
            reason = one_line(error)
            raise RequestError(f"the model's chat template rejects this conversation: {reason}") from error

    def _template(self) -> jinja2.Template:
        with self._lock:
            if self._compiled is None:
                environment = _environment()
                try:
                    self._tests_for_none = _tests_for_none(environment.parse(self.source))
                    self._compiled = environment.from_string(self.source)
                except jinja2.TemplateError as error:
                    reason = one_line(error)
                    raise RequestError(
                        f"the model's chat template is not valid Jinja ({reason}); send a raw prompt instead"
                    ) from error
            return self._compiled


def _tests_for_none(source: nodes.Template) -> bool:
    """Whether a template tests if ``content`` is none, which is how it recognises a message with tool calls."""
    return any(_named(test.node) == "content" for test in source.find_all(nodes.Test) if test.name == "none")


def _named(node: nodes.Node) -> Any:
    """What an expression looks up: ``x`` of ``x``, ``message.x`` and ``message['x']``."""
    if isinstance(node, nodes.Getitem):
        return node.arg.value if isinstance(node.arg, nodes.Const) else None
    return getattr(node, "attr", getattr(node, "name", None))


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as plain JSON data, each message with a role and a content; anything else is a RequestError.

    The content is a text, or None beside tool calls. The arguments of those are objects, as templates expect them;
    OpenAI's API has them as JSON in a text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of objects with 'role' and 'content'")
    if not messages:
        raise RequestError("messages is empty; send at least one message with 'role' and 'content'")
    return [_check_message(idx, message) for idx, message in enumerate(messages)]


def _check_message(idx: int, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{idx}] must be an object with 'role' and 'content', not {type(message).__name__}")
    checked: dict[str, Any] = _plain(f"messages[{idx}]", dict(message))
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"messages[{idx}] needs a 'role' such as 'user', 'assistant' or 'system'")
    content = checked.get("content")
    if isinstance(content, list):
        checked["content"] = _join_parts(idx, content)
    elif content is None:
        if not checked.get("tool_calls"):
            raise RequestError(f"messages[{idx}] needs a 'content' text")
        checked["content"] = None
    elif not isinstance(content, str):
        raise RequestError(f"messages[{idx}]: 'content' must be a text, not {type(content).__name__}")
    calls = checked.get("tool_calls")
    for call_idx, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(given := function.get("arguments"), str):
            function["arguments"] = _parse_arguments(f"messages[{idx}].tool_calls[{call_idx}]", given)
    return checked


def _parse_arguments(where: str, given: str) -> dict[str, Any]:
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        reason = one_line(error)
        raise RequestError(f"{where}: 'arguments' must be an object or its JSON as a text ({reason})") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}: 'arguments' must be a JSON object, not {type(arguments).__name__}")
    return arguments


def _join_parts(idx: int, parts: list[Any]) -> str:
    """Content given as a list of text parts, joined by line breaks: most templates only know plain text."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise RequestError(f"messages[{idx}]: only text content is supported; remove the other parts")
        texts.append(text)
    return "\n".join(texts)


def _plain(what: str, value: Any) -> Any:
    """A copy made of JSON types only: a template gets nothing with methods of its own and cannot change our data."""
    if type(value) is dict and all(type(part) is str for item in value.items() for part in item):
        return value.copy()  # a message of text, as most are
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} must be plain JSON data ({one_line(error)})") from error


def one_line(error: BaseException) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: Jinja's own filter would escape ``<``, ``>``, ``&`` and quotes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
