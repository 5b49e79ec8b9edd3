"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardlib.serving.http.bodies.choosing import Choosing
from shardlib.serving.http.bodies.messages import Message
from shardlib.serving.http.bodies.tools import NamedTool, Tool
from shardlib.untrusted.json_types import JsonObject

#: Functions that a body may give.
MOST_TOOLS = 128


class Chat(Choosing):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: list[str] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[JsonObject] | None = None

    @property
    def prompt_field(self) -> str:
        """The field that prompts are made of."""
        return "messages"

    @property
    def unserved(self) -> list[str]:
        """Fields that are understood and not served."""
        other_modalities = self.modalities not in (None, ["text"])
        return ["functions"] * bool(self.functions) + ["modalities"] * other_modalities

    @property
    def most(self) -> int | None:
        """Tokens of an answer at most; None for as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that says how many tokens an answer has at most, and what it says."""
        if self.max_tokens is not None and self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def listed(self) -> bool:
        """Whether tokens are listed with their logarithms."""
        return bool(self.logprobs)

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return self.top_logprobs or 0
