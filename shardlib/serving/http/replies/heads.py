"""What every object of an answer has, and the tokens that are counted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardlib.untrusted.json_types import Json, JsonObject


@dataclass(kw_only=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt: of its prompts.
        answer: of its answers, so far.
        cached: of its prompts, that other requests had computed.
    """

    prompt: int
    answer: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    @property
    def json(self) -> JsonObject:
        """As JSON."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass(frozen=True, kw_only=True)
class Head:
    """What every object of one answer has.

    Attributes:
        id: of the answer.
        kind: of object.
        model: that answers.
        created: seconds since 1970.
    """

    id: str
    kind: str
    model: str
    created: int

    def json(self, choices: Sequence[JsonObject], version: str, **more: Json) -> JsonObject:
        """An object."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": version or None,
            "choices": list(choices),
            **more,
        }


def new_head(prefix: str, kind: str, model: str) -> Head:
    """The head of a new answer."""
    return Head(
        id=f"{prefix}-{secrets.token_hex(12)}", kind=kind, model=model, created=int(time.time())
    )
