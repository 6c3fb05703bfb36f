"""Prompts for JSON schemas: the schema itself, or the form of a document that has what is required.

Small models copy from a schema what is not part of a document, and write on until they are stopped. A form leaves that
out; the two examples show how short an answer may be. The grammar has the whole schema in either case.
"""

from __future__ import annotations

import json
from typing import Any

PROMPTS = ("form", "schema")
_SCHEMA_PROMPT = "Write one JSON document that conforms to this schema, with short values.\n\n%s"
_FORM_PROMPT = "Write one line of JSON of this form, with a short word for each string:\n%s"
_MOST_CHARACTERS = 1500  # of the schema or the form
_MOST_PROPERTIES, _MOST_DEPTH, _MOST_REFERENCES = 12, 3, 8
_EXAMPLES = (
    ('{"title": string}', '{"title": "Dune"}'),
    (
        '{"items": [{"id": string}], "from": {"city": string, "zip": integer}}',
        '{"items": [{"id": "a1"}], "from": {"city": "Rome", "zip": 184}}',
    ),
)

Message = dict[str, str]


def messages_for(schema: dict[str, Any], prompt: str) -> list[Message]:
    if prompt == "schema":
        return [{"role": "user", "content": _SCHEMA_PROMPT % json.dumps(schema)[:_MOST_CHARACTERS]}]
    found: list[Message] = []
    for form, answer in _EXAMPLES:
        found += [{"role": "user", "content": _FORM_PROMPT % form}, {"role": "assistant", "content": answer}]
    return [*found, {"role": "user", "content": _FORM_PROMPT % form_of(schema, schema)[:_MOST_CHARACTERS]}]


def form_of(schema: Any, root: dict[str, Any], depth: int = 0) -> str:
    """What is required, with the kinds of values; of a document that requires nothing two properties."""
    schema = _follow(schema, root)
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("enum"):
        return " or ".join(json.dumps(value) for value in schema["enum"][:2])
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key) and "properties" not in schema and "type" not in schema:
            return form_of(schema[key][0], root, depth)
    kind = _kind_of(schema)
    if kind == "object":
        properties = schema.get("properties", {})
        names = [name for name in schema.get("required", ()) if isinstance(name, str)]
        if not names and depth == 0:
            names = list(properties)[:2]
        if depth > _MOST_DEPTH:
            return "{}"
        parts = (
            f"{json.dumps(name)}: {form_of(properties.get(name, {}), root, depth + 1)}"
            for name in names[:_MOST_PROPERTIES]
        )
        return "{" + ", ".join(parts) + "}"
    if kind == "array":
        items = schema.get("items", {})
        items = (items[0] if items else {}) if isinstance(items, list) else items
        return "[]" if depth > _MOST_DEPTH else f"[{form_of(items, root, depth + 1)}]"
    return kind


def _kind_of(schema: dict[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0]
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "any"
    return str(kind)


def _follow(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Past references inside of the document; nothing is known of others."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        node: Any = root
        for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if not name:
                continue
            if not isinstance(node, dict) or name not in node:
                return {}
            node = node[name]
        schema = node
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}
