"""What the request bodies of all dialects have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, from_json, to_json

from agentjet.errors import InvalidRequest
from agentjet.protocol import Int64


def _whole(text: str) -> str:
    """Raises `ValueError` for half a surrogate pair, which JSON's escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair is no text") from error
    return text


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Raises `ValueError` for what only Python's parser takes for JSON, and for what other parsers would give up on."""
    from_json(to_json(value), allow_inf_nan=False)
    return value


Text = Annotated[str, AfterValidator(_whole)]
"""Text in whole characters."""
JsonObject = Annotated[dict[str, Any], AfterValidator(plain)]
"""An object that any JSON parser reads: without NaN and half characters, nested about 200 deep at most."""
Count = Annotated[Int64, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
"""A text before which an answer ends. The bound keeps it cheap to look for it in every piece of the answer."""
StopStrings = Annotated[list[StopString], Field(max_length=16)]
"""OpenAI allows 4."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _stop_lists_at_first_error(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list" and "items_schema" in schema:
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _stop_lists_at_first_error(part)


class FirstError(BaseModel):
    """A model whose lists stop at their first wrong item: one error for each item would take gigabytes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_lists_at_first_error(schema)
        return schema


class Body(FirstError):
    """Part of a request: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RequestBody(Body):
    """A request for an answer of the model."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None


class Part(Body):
    """A part of a message's content. The policy reads text; what else a part may hold differs by dialect."""

    type: str
    text: str | None = None


OMITTED = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
"""Types of part that the policy cannot read, in any dialect, and what they are called where they stood."""


def omission(kind: str, notes: list[str]) -> str:
    """The text that the policy is fed in place of a part of type `kind`. Adds to `notes`."""
    notes.append(f"{OMITTED[kind]} omitted")
    return f"[{OMITTED[kind]} omitted: this model reads text only]"


def text_of(content: str | Sequence[Part], kinds: Sequence[str], where: str, notes: list[str]) -> str:
    """The text of a content, `kinds` being the types of part that hold text. Raises `InvalidRequest` for any other
    that is not in `OMITTED`.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type in kinds and part.text is not None:
            texts.append(part.text)
        elif part.type in OMITTED:
            texts.append(omission(part.type, notes))
        else:
            raise InvalidRequest(
                f"{where}.{i} is of type {part.type!r}: the policy reads text only.",
                code="unsupported_content",
                param=f"{where}.{i}",
            )
    return "".join(texts)
