"""What bodies have in common.

Values are of the types that they have in JSON; no number is made of a text, and none of a boolean.
Fields that are not here are ignored, as OpenAI ignores what it does not know.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

#: Prompts, or texts to embed, of one request.
MOST_PROMPTS = 256

Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
ManyTokens = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
Prompt = str | Tokens | Texts | ManyTokens


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    user: str | None = None


def count(prompt: Prompt) -> int:
    """How many prompts, or texts to embed, a field has.

    Args:
        prompt: of a body.
    """
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
