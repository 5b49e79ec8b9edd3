"""What is answered, as JSON has it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardlib.serving.hosting.answer import Part, Written
from shardlib.serving.text import UNKNOWN
from shardlib.untrusted.json_types import Json, JsonObject

#: The logarithm that stands for a probability of 0, which JSON has no number for.
LEAST_LOGPROB = -9999.0


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
        """An object.

        Args:
            choices: of the answer.
            version: of the weights, in words.
            **more: fields.
        """
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
    """The head of a new answer.

    Args:
        prefix: of its id.
        kind: of object.
        model: that answers.
    """
    return Head(
        id=f"{prefix}-{secrets.token_hex(12)}", kind=kind, model=model, created=int(time.time())
    )


class Shape(Protocol):
    """How an interface writes choices."""

    @property
    def prefix(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def event(self) -> str: ...

    def begin(self, index: int) -> JsonObject | None:
        """The first event of a choice, before it has a token; None for none."""
        ...

    def part(self, index: int, part: Part) -> JsonObject:
        """A choice of an event: what is new."""
        ...

    def whole(self, index: int, part: Part) -> JsonObject:
        """A choice as a whole."""
        ...


def _finish(ended: str | None) -> str | None:
    return ended if ended in (None, "stop", "length") else "stop"


def _odds(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


@dataclass(frozen=True, kw_only=True)
class CompletionShape:
    """Choices of `/v1/completions`.

    Attributes:
        logprobs: whether tokens are listed.
    """

    logprobs: bool = False
    prefix: str = "cmpl"
    kind: str = "text_completion"
    event: str = "text_completion"

    def begin(self, index: int) -> JsonObject | None:
        """There is none."""
        del index
        return None

    def part(self, index: int, part: Part) -> JsonObject:
        """What is new."""
        return {
            "index": index,
            "text": part.text,
            "logprobs": self._listed(part.tokens) if self.logprobs else None,
            "finish_reason": _finish(part.ended),
        }

    def whole(self, index: int, part: Part) -> JsonObject:
        """The text."""
        return self.part(index, part)

    def _listed(self, tokens: Sequence[Written]) -> JsonObject:
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [_odds(one.logprob) for one in tokens],
            "top_logprobs": [
                {text: _odds(odds) for text, odds in reversed(one.likely)} or None for one in tokens
            ],
            "text_offset": [one.offset for one in tokens],
        }


@dataclass(frozen=True, kw_only=True)
class ChatShape:
    """Choices of `/v1/chat/completions`.

    Attributes:
        logprobs: whether tokens are listed.
    """

    logprobs: bool = False
    prefix: str = "chatcmpl"
    kind: str = "chat.completion"
    event: str = "chat.completion.chunk"

    def begin(self, index: int) -> JsonObject | None:
        """Who speaks."""
        begun = {"role": "assistant", "content": ""}
        return self._choice(index, "delta", begun, Part("", (), None))

    def part(self, index: int, part: Part) -> JsonObject:
        """What is new."""
        delta = {"content": part.text} if part.text or part.tokens else {}
        return self._choice(index, "delta", delta, part)

    def whole(self, index: int, part: Part) -> JsonObject:
        """The message."""
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return self._choice(index, "message", message, part)

    def _choice(self, index: int, name: str, message: JsonObject, part: Part) -> JsonObject:
        listed = {"content": [_token(one) for one in part.tokens], "refusal": None}
        return {
            "index": index,
            name: message,
            "logprobs": listed if self.logprobs else None,
            "finish_reason": _finish(part.ended),
        }


def _token(one: Written) -> JsonObject:
    return {
        **_likely(one.text, one.logprob),
        "top_logprobs": [_likely(text, odds) for text, odds in one.likely],
    }


def _likely(text: str, logprob: float | None) -> JsonObject:
    whole = UNKNOWN not in text
    return {
        "token": text,
        "logprob": _odds(logprob),
        "bytes": list(text.encode("utf-8", "replace")) if whole else None,
    }
