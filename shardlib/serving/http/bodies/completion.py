"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardlib.serving.http.bodies.choosing import Choosing
from shardlib.serving.http.bodies.prompts import Prompts

#: Tokens of an answer where a body does not say how many.
MOST = 16


class Completion(Choosing):
    """`/v1/completions`."""

    prompt: Prompts
    suffix: str | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def unserved(self) -> list[str]:
        """Fields that are understood and not served."""
        more = self.best_of not in (None, self.answers)
        return ["suffix"] * bool(self.suffix) + ["best_of"] * more

    @property
    def most(self) -> int:
        """Tokens of an answer at most."""
        return MOST if self.max_tokens is None else self.max_tokens

    @property
    def listed(self) -> bool:
        """Whether tokens are listed with their logarithms."""
        return self.logprobs is not None

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return self.logprobs or 0

    @property
    def echoes(self) -> bool:
        """Whether prompts stand in front of their answers."""
        return bool(self.echo)

    @property
    def scored(self) -> bool:
        """Whether tokens of the prompt are listed, too."""
        return self.echoes and self.listed
