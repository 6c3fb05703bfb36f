"""Chat templates against transformers' rendering, and what is refused."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.errors import RequestError
from slipstream.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Each exercises something templates in the wild rely on.
TEMPLATES = {
    "chatml": CHATML,
    "special tokens and blocks on their own lines": """
{{ bos_token }}
    {%- for message in messages %}
        {% if message.role == 'system' %}
[SYS]{{ message.content | trim }}[/SYS]
        {% else %}
<{{ message.role }}>{{ message.content }}{{ eos_token }}
        {% endif %}
    {% endfor %}
{%- if add_generation_prompt -%} <assistant> {%- endif %}""",
    "loop controls and a namespace": """
{%- set state = namespace(seen=0) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
{%- set state.seen = state.seen + 1 -%}
{%- if state.seen > 2 -%}{%- break -%}{%- endif -%}
{{ state.seen }}:{{ message.content }};
{%- endfor -%}""",
    "tools as json": """
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- for message in messages %}{{ message | tojson }}
{% endfor %}""",
    "generation tag": (
        "{% for message in messages %}{{ message.role }}: "
        "{% generation %}{{ message.content }}\n{% endgeneration %}{% endfor %}"
    ),
    "last messages and slices": (
        "{{ messages[-1]['content'] }}|{{ messages[1:] | length }}|{{ messages | map(attribute='role') | join(',') }}"
    ),
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one user turn": [{"role": "user", "content": "Hello"}],
    "system first": [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": "Why <b>&\"'?"}],
    "several turns": [
        {"role": "user", "content": "Schöne Grüße 🙂"},
        {"role": "assistant", "content": "Danke!\n\n"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "{{ not a template }}"},
        {"role": "user", "content": "日本語"},
    ],
}

TOOLS = [{"type": "function", "function": {"name": "wetter", "description": '<Wie> "ist\'s"? & mehr ü'}}]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_equals_transformers(template: str, conversation: str, add_generation_prompt: bool) -> None:
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for tools in (None, TOOLS):
        expected, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, **tokens
        )
        ours = ChatTemplate(source, tokens).render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        assert ours == expected[0]


def test_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }}", {})
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages) == "off"
    assert template.render(messages, variables={"enable_thinking": True}) == "on"


def test_current_date() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render([{"role": "user", "content": "x"}])
    today = datetime.date.today()
    assert rendered in (today.isoformat(), (today - datetime.timedelta(days=1)).isoformat())


def test_the_caller_s_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate(CHATML, {}).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rendered = ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": parts}])
    assert rendered == "one\ntwo"


# Like Qwen2.5's: calls as JSON in tags, and results of tools as messages of the user.
TOOL_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == "tool" %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
    {%- elif message.tool_calls %}
<|im_start|>assistant
        {%- if message.content %}
{{ message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
        {%- endfor %}<|im_end|>
    {%- else %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}"""


def tool_conversation(content: Any, arguments: Any) -> list[dict[str, Any]]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return [
        {"role": "user", "content": "Rain in Köln?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, CHATML], ids=["of tools", "of texts alone"])
def test_a_tool_conversation_of_openais_api_equals_transformers(template: str) -> None:
    """OpenAI's messages have null and JSON in a text where those that transformers documents have '' and an object."""
    as_documented = tool_conversation("", {"city": "Köln", "days": [1, 2]})
    expected, _ = render_jinja_template([as_documented], chat_template=template, add_generation_prompt=True)
    of_openai = tool_conversation(None, '{"city": "Köln", "days": [1, 2]}')
    assert ChatTemplate(template, {}).render(of_openai) == expected[0]
    del of_openai[1]["content"]
    assert ChatTemplate(template, {}).render(of_openai) == expected[0]
    assert of_openai[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln", "days": [1, 2]}'


@pytest.mark.parametrize("test", ["m['content'] is none", "m.content is not none", "'x' if m.content is none"])
def test_a_template_that_asks_for_none_gets_it(test: str) -> None:
    source = "{% for m in messages %}{{ " + test + " }},{% endfor %}"
    messages = tool_conversation(None, "{}")
    expected, _ = render_jinja_template([messages], chat_template=source)
    assert ChatTemplate(source, {}).render(messages) == expected[0]


def test_arguments_left_empty_are_an_empty_object() -> None:
    rendered = ChatTemplate("{{ messages[1].tool_calls[0].function.arguments | tojson }}", {})
    assert rendered.render(tool_conversation(None, "")) == "{}"


@pytest.mark.parametrize("arguments", ["{half", "[1]", '"text"', "[" * 100_000])
def test_arguments_that_are_no_object_are_named(arguments: str) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[0\]: 'arguments' must be") as caught:
        ChatTemplate(TOOL_TEMPLATE, {}).render(tool_conversation(None, arguments))
    assert "\n" not in str(caught.value)


def test_tool_calls_need_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rendered = ChatTemplate("{{ messages[0].tool_calls[0].function.name }}", {}).render([message])
    assert rendered == "f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (None, "must be a list"),
        ([], "is empty"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] needs a 'role'"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] needs a 'role'"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\] needs a 'content'"),
        ([{"role": "user", "content": 5}], "must be a text, not int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "only text content"),
        ([{"role": "user", "content": object()}], "plain JSON"),
    ],
)
def test_malformed_conversations_are_request_errors(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(CHATML, {}).render(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages.nothing.deeper }}", "rejects this conversation"),
        ("{{ 1 + 'a' }}", "rejects this conversation"),
        ("{% if %}", "not valid Jinja"),
        ("{% for x in messages %}", "not valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|rejects"),
        ("{{ messages.append(1) }}", "unsafe|rejects"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe|rejects"),
    ],
)
def test_template_errors_are_one_line_request_errors(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)
