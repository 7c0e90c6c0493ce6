"""What an answer must look like, as OpenAI's and TGI's bodies say it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from octavo.grammar import Grammar, JsonObject, JsonSchema, Regex
from octavo.server.schema import Body, Text


class NamedSchema(Body):
    """OpenAI's wrapping of a schema. Answers obey it whether it is `strict` or not."""

    name: str = Field(min_length=1)
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="Unset: any object.")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer must look like: OpenAI's kinds, and TGI's with their `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = Field(default=None, description="For the type json_schema.")
    value: Text | dict[str, Any] | None = Field(
        default=None, description="A JSON schema, as an object or as text, or a regular expression: TGI's shape."
    )

    @model_validator(mode="after")
    def _can_be_read(self) -> ResponseFormat:
        self.grammar()
        return self

    def grammar(self) -> Grammar | None:
        """The same for the engine; None for plain text. Raises ValueError."""
        match self.type:
            case "text":
                return None
            case "json_object" if self.value is None:
                return JsonObject()
            case "json_schema" if self.json_schema is not None:
                return JsonSchema(self.json_schema.schema_ or {"type": "object"})
            case "regex":
                if not isinstance(self.value, str):
                    raise ValueError("the type regex needs a `value`, the regular expression")
                return Regex(self.value)
        if self.value is None:
            raise ValueError(
                f"the type {self.type} needs a schema: `json_schema` with `name` and `schema`, or TGI's `value`"
            )
        return JsonSchema(self.value)


class TgiGrammar(Body):
    """TGI's grammar: a JSON schema as an object or as text, or a regular expression that the whole answer matches."""

    type: Literal["json", "json_object", "regex", "json_schema"]
    value: Text | dict[str, Any]

    @model_validator(mode="after")
    def _can_be_read(self) -> TgiGrammar:
        self.grammar()
        return self

    def grammar(self) -> Grammar | None:
        """The same for the engine. Raises ValueError."""
        value = self.value
        if self.type == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
            value = value["schema"]  # with a name beside it
        if self.type != "regex":
            return JsonSchema(value)
        if not isinstance(value, str):
            raise ValueError("the type regex needs a text as its `value`")
        return Regex(value)
