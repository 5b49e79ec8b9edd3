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


def read_prompts(given: object) -> tuple[str | tuple[int, ...], ...]:
    """Prompts, each a text or its tokens.

    >>> read_prompts([5, 2]), read_prompts(["a", "b"])
    (((5, 2),), ('a', 'b'))

    Args:
        given: as JSON has it.

    Raises:
        PydanticCustomError: it is none of `KINDS`, with the item that is wrong.
    """
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list):
        raise _wrong(f"it is {_kind(given)}; it is {KINDS}")
    if not given:
        raise _wrong(f"the list is empty; it is {KINDS}")
    if _is_number(given[0]):
        return (_tokens(given, "item {}"),)
    if len(given) > MOST_PROMPTS:
        raise _wrong(f"there are {len(given)} of them; {MOST_PROMPTS} are the most")
    kind = str if isinstance(given[0], str) else list
    for at, one in enumerate(given):
        if not isinstance(one, kind):
            other = f", and item 0 {_kind(given[0])}" if at else ""
            raise _wrong(f"item {at} is {_kind(one)}{other}; it is {KINDS}")
    if kind is str:
        return tuple(given)
    return tuple(_tokens(one, f"item {at}.{{}}") for at, one in enumerate(given))


def _tokens(given: list[object], place: str) -> tuple[int, ...]:
    if not given:
        raise _wrong(f"{place.removesuffix('.{}')} is empty")
    found: list[int] = []
    for at, one in enumerate(given):
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            what = shown(one) if _is_number(one) else _kind(one)
            raise _wrong(f"{place.format(at)} is {what}; tokens are whole numbers from 0 on")
        found.append(one)
    return tuple(found)


def _is_number(one: object) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool)


def _kind(one: object) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "a boolean"}
    return kinds.get(type(one), "null" if one is None else "a number")


def _wrong(said: str) -> PydanticCustomError:
    return PydanticCustomError("prompt", "{said}", {"said": said})


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
