"""What bodies have in common.

Values are of the types that they have in JSON; no number is made of a text, and none of a boolean.
Fields that are not here are ignored, as OpenAI ignores what it does not know.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Token = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """What all bodies, and their parts, have in common."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Asking(Body):
    """A body that asks a model for something."""

    model: str | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_characters(cls, given: object) -> object:
        """Refuses halves of surrogate pairs, which JSON can hold and no text has."""
        if (path := half_of_a_pair(given)) is not None:
            raise PydanticCustomError(
                "characters",
                "{field} has half of a surrogate pair, which is no character",
                {"field": path},
            )
        return given


def half_of_a_pair(body: object) -> str | None:
    """Where some JSON has half of a surrogate pair, as a dotted path; None where it has none.

    >>> half_of_a_pair({"messages": [{"content": "a\\ud800"}]})
    'messages.0.content'

    Args:
        body: as read.
    """
    waiting: list[tuple[str, object]] = [("", body)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, str) and not item.isascii() and _is_half(item):
            return path or "the body"
        if isinstance(item, dict):
            for name, value in item.items():
                if _is_half(str(name)):
                    return path or "a name"
                waiting.append((f"{path}.{name}" if path else str(name), value))
        elif isinstance(item, list):
            waiting += [(f"{path}.{index}", value) for index, value in enumerate(item)]
    return None


def _is_half(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
