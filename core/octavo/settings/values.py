"""What a setting may be and what it is by itself, in words: for messages, `--help` and docs/settings.md."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

Schema = dict[str, Any]
"""A setting's JSON schema: it knows types and bounds however deep they stand in the annotation."""


def allowed(schema: Schema) -> str:
    """The values that a setting takes, to go on after "it must be"."""
    schema = _without_null(schema)
    if "enum" in schema:
        *most, last = map(str, schema["enum"])
        return f"{', '.join(most)} or {last}"
    match schema["type"]:
        case "boolean":
            return "true or false"
        case "integer":
            return "a whole number" + _bounds(schema, step=1)
        case "number":
            return "a number" + _bounds(schema)
        case "array":
            return "texts with commas between them"
        case "object":
            return "a JSON object"
    return "a path" if schema.get("format") == "path" else "a text"


def word(schema: Schema) -> str:
    """What stands for a value behind the setting's flag; nothing where the flag alone says it."""
    kind = _without_null(schema)["type"]
    words = {"integer": "NUMBER", "number": "NUMBER", "boolean": "", "object": "JSON", "array": "TEXT,TEXT"}
    return words.get(kind, "TEXT")


def default(field: FieldInfo) -> str | None:
    """What a setting is that nobody gives; None where that is nothing, or is worked out at the start."""
    value = None if field.default_factory is not None else field.default
    if value is None or value == ():
        return None
    return str(value).lower()


def _without_null(schema: Schema) -> Schema:
    return next(one for one in schema.get("anyOf", [schema]) if one.get("type") != "null")


def _bounds(schema: Schema, step: int | None = None) -> str:
    """Those of whole numbers are told as values that are allowed themselves."""
    least, above, most = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None and step is not None:
        least, above = above + step, None
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}"
    told = [
        f"{words} {value:g}"
        for words, value in (("at least", least), ("above", above), ("at most", most))
        if value is not None
    ]
    return " " + " and ".join(told) if told else ""
