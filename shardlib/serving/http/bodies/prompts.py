"""Prompts of a body, and texts to embed: a text, tokens, or a list of either."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from shardlib.untrusted import shown

#: Prompts, or texts to embed, of one request.
MOST_PROMPTS = 256
#: What a prompt may be, in words.
KINDS = "a text, tokens, a list of texts, or a list of lists of tokens"


def read_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Prompts, each a text or its tokens.

    >>> read_prompts([5, 2]), read_prompts(["a", "b"])
    (((5, 2),), ('a', 'b'))

    Args:
        value: as JSON has it.

    Raises:
        PydanticCustomError: it is none of `KINDS`, with the item that is wrong.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _wrong(f"it is {_kind(value)}; it is {KINDS}")
    if not value:
        raise _wrong(f"the list is empty; it is {KINDS}")
    if _is_number(value[0]):
        return (_tokens(value, "item {}"),)
    if len(value) > MOST_PROMPTS:
        raise _wrong(f"there are {len(value)} of them; {MOST_PROMPTS} are the most")
    kind = str if isinstance(value[0], str) else list
    for index, item in enumerate(value):
        if not isinstance(item, kind):
            first_item = f", and item 0 {_kind(value[0])}" if index else ""
            raise _wrong(f"item {index} is {_kind(item)}{first_item}; it is {KINDS}")
    if kind is str:
        return tuple(value)
    return tuple(_tokens(item, f"item {index}.{{}}") for index, item in enumerate(value))


def _tokens(items: list[object], place: str) -> tuple[int, ...]:
    if not items:
        raise _wrong(f"{place.removesuffix('.{}')} is empty")
    tokens: list[int] = []
    for index, item in enumerate(items):
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            what = shown(item) if _is_number(item) else _kind(item)
            raise _wrong(f"{place.format(index)} is {what}; tokens are whole numbers from 0 on")
        tokens.append(item)
    return tuple(tokens)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: object) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "a boolean"}
    return kinds.get(type(value), "null" if value is None else "a number")


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("prompt", "{said}", {"said": message})


Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    PlainValidator(read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
