"""Functions that an answer may call."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardlib.serving.http.bodies.fields import Body
from shardlib.untrusted.json_types import JsonObject

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """A function."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    """What may be used."""

    type: Literal["function"]
    function: Function

    @property
    def json_object(self) -> JsonObject:
        """As a template gets it."""
        return self.model_dump(exclude_none=True)

    @property
    def schema_of_arguments(self) -> JsonObject:
        """Of its arguments; none where nothing is said, as OpenAI has it."""
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        return self.function.parameters or none


class ChosenFunction(Body):
    """A function by its name."""

    name: FunctionName


class NamedTool(Body):
    """The function that is to be called."""

    type: Literal["function"]
    function: ChosenFunction
