"""Tokens as the text of an answer, up to the first stop string.

>>> from shardlib.serving import Told
>>> from shardlib.serving.text import ByteText
>>> answer = Answer(ByteText(), stop=("\\n\\n",))
>>> [answer.add(Told(token=byte, logprob=-1)).text for byte in b"a\\nb\\n"]
['a', '', '\\nb', '']
>>> answer.add(Told(token=10, logprob=-1))
Part(text='', tokens=(), ended='stop', calls=())
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardlib.serving.scheduling.requests import STOP, Told
from shardlib.serving.text import UNKNOWN, Pieces, Text


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A token with its logarithm.

    Attributes:
        token: which.
        text: of the token alone.
        raw: its bytes, where they are no text; None where they are, or are not known.
        logprob: natural logarithm of its probability; None for the first token of a prompt.
    """

    token: int
    text: str
    raw: bytes | None
    logprob: float | None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A token of an answer.

    Attributes:
        listed: the token.
        likely: the likeliest tokens there, in falling order.
        offset: characters of the answer before it.
    """

    listed: Listed
    likely: tuple[Listed, ...]
    offset: int


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A function that an answer calls, or a piece of that.

    Attributes:
        name: of the function.
        arguments: as JSON, or a piece of it; of an answer that was cut off only a beginning.
        index: of the call in its answer.
        begins: whether the call begins with the piece.
        id: by which its result is told.
    """

    name: str
    arguments: str
    index: int = 0
    begins: bool = True
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True)
class Part:
    """What is new of an answer.

    Attributes:
        text: that follows.
        tokens: whose text has begun.
        ended: why the answer is whole with it; None while it goes on.
        calls: of functions, whole or what is new of them.
    """

    text: str
    tokens: tuple[Written, ...]
    ended: str | None
    calls: tuple[ToolCall, ...] = ()


def written(text: Text, sampled: Told, offset: int) -> Written:
    """A token as text."""
    return Written(
        listed=_listed(text, sampled.token, sampled.logprob),
        likely=tuple(_listed(text, alternative, odds) for alternative, odds in sampled.likeliest),
        offset=offset,
    )


def _listed(text: Text, token: int, logprob: float | None) -> Listed:
    decoded = text.decode([token])
    raw = text.raw(token) if UNKNOWN in decoded else None
    if raw is not None and raw.decode("utf-8", "ignore").encode() == raw:
        raw = None  # it says U+FFFD itself
    return Listed(token=token, text=decoded, raw=raw, logprob=logprob)


def prompt_part(text: Text, prompt: Sequence[int], scores: Sequence[Told]) -> Part:
    """A prompt as the beginning of what is answered."""
    prompt_text = text.decode(prompt)
    if len(scores) != len(prompt) - 1:
        return Part(prompt_text, (), None)
    tokens = [Written(listed=_listed(text, prompt[0], None), likely=(), offset=0)]
    pieces = Pieces(text)
    offset = len(pieces.add(prompt[0]))
    for score in scores:
        tokens.append(written(text, score, offset))
        offset += len(pieces.add(score.token))
    return Part(prompt_text, tuple(tokens), None)


class Answer:
    """The text of an answer, as its tokens come in.

    Args:
        text: the model's tokenizer.
        stop: texts that end the answer; they are not part of it.
        before: characters that stand in front of it.
        least: tokens in which no text ends the answer; one that goes on after them does.
    """

    def __init__(
        self, text: Text, *, stop: Sequence[str] = (), before: int = 0, minimum: int = 0
    ) -> None:
        self._text, self._stop = text, tuple(stop)
        self._pieces = Pieces(text)
        self._held = ""  # that may be the beginning of a stop string
        self._given = before
        self._least = minimum
        self._safe = 0  # characters that are held, of the first tokens
        self._tokens: list[Written] = []  # whose text has not begun

    def add(self, sampled: Told | None, *, ended: str | None = None) -> Part:
        """One more token, or the end.

        Args:
            sampled: the token; None where the answer ends without one.
        """
        if sampled is not None:
            self._tokens.append(written(self._text, sampled, self._given + len(self._held)))
            self._held += self._pieces.add(sampled.token)
            if self._least > 0:
                self._least -= 1
                self._safe = len(self._held)
        if ended is not None:
            self._held += self._pieces.end()
        starts = [
            start
            for stop in self._stop
            if (start := self._held.find(stop, max(0, self._safe - len(stop) + 1))) >= 0
        ]
        if starts:
            self._held = self._held[: min(starts)]
            return replace(self._give(len(self._held), last=False), ended=STOP)
        if ended is not None:
            return replace(self._give(len(self._held), last=True), ended=ended)
        return self._give(len(self._held) - self._waiting(), last=False)

    def _waiting(self) -> int:
        """Characters at the end that a stop string may begin with."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, len(stop))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )

    def _give(self, size: int, *, last: bool) -> Part:
        piece, self._held = self._held[:size], self._held[size:]
        self._given += size
        self._safe = max(0, self._safe - size)
        complete = [token for token in self._tokens if last or token.offset < self._given]
        self._tokens = self._tokens[len(complete) :]
        return Part(text=piece, tokens=tuple(complete), ended=None)
