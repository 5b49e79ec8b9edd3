"""Choices of an answer, as `/v1/completions` and `/v1/chat/completions` write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardlib.serving.hosting.answer import Listed, Part, ToolCall, Written
from shardlib.serving.hosting.tool_calls import CALLED
from shardlib.serving.scheduling.requests import LENGTH, STOP
from shardlib.serving.text import UNKNOWN
from shardlib.untrusted.json_types import JsonObject

#: The logarithm that stands for a probability of 0, which JSON has no number for.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How an interface writes choices.

    Attributes:
        prefix: of ids.
        kind: of objects with a whole answer.
        event: of objects with a piece.
        whole: fields of a whole choice.
        part: fields of a piece.
        listed: tokens with their logarithms.
        begin: what the first piece has, before there is a token; empty for no such
            piece.
    """

    prefix: str
    kind: str
    event: str
    whole: Callable[[Part], JsonObject]
    part: Callable[[Part], JsonObject]
    listed: Callable[[Sequence[Written]], JsonObject]
    begin: JsonObject = field(default_factory=dict)

    def choice(self, index: int, fields: JsonObject, part: Part, *, listed: bool) -> JsonObject:
        """A choice, whole or a piece."""
        return {
            "index": index,
            **fields,
            "logprobs": self.listed(part.tokens) if listed else None,
            "finish_reason": _finish(part.ended),
        }


def _finish(ended: str | None) -> str | None:
    return ended if ended in (None, STOP, LENGTH, CALLED) else LENGTH  # late ones lack their end


def _odds(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def _columns(tokens: Sequence[Written]) -> JsonObject:
    """Tokens as lists of what they have."""
    return {
        "tokens": [_key(token.listed) for token in tokens],
        "token_logprobs": [_odds(token.listed.logprob) for token in tokens],
        "top_logprobs": [_by_key(token.likely) or None for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_key(likely: Sequence[Listed]) -> JsonObject:
    """Logarithms by token; a token that is written as a likelier one has its number, as vLLM has
    it.
    """
    odds: JsonObject = {}
    for token in likely:
        key = _key(token)
        odds[f"token_id:{token.token}" if key in odds else key] = _odds(token.logprob)
    return odds


def _key(token: Listed) -> str:
    """A token's text; where it is none its bytes, as OpenAI has them: `bytes:\\xe2\\x82`."""
    return token.text if token.raw is None else f"bytes:{_escaped(token.raw)}"


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _rows(tokens: Sequence[Written]) -> JsonObject:
    """Tokens as objects."""
    rows = [
        {
            **_likely(token.listed),
            "top_logprobs": [_likely(likely) for likely in token.likely],
        }
        for token in tokens
    ]
    return {"content": rows, "refusal": None}


def _likely(token: Listed) -> JsonObject:
    if token.raw is not None:
        text, raw = _escaped(token.raw), list(token.raw)
    else:
        text = token.text
        raw = None if UNKNOWN in text else list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": _odds(token.logprob), "bytes": raw}


def _message(part: Part) -> JsonObject:
    content = part.text or (None if part.calls else "")
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if part.calls:
        message["tool_calls"] = [_call(call) for call in part.calls]
    return {"message": message}


def _delta(part: Part) -> JsonObject:
    delta: JsonObject = {"content": part.text} if part.text or part.tokens else {}
    if part.calls:
        delta["tool_calls"] = [
            {"index": call.index, **(_call(call) if call.begins else _more(call))}
            for call in part.calls
        ]
    return {"delta": delta}


def _call(call: ToolCall) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _more(call: ToolCall) -> JsonObject:
    return {"function": {"arguments": call.arguments}}


#: Choices of `/v1/completions`.
COMPLETION = Shape(
    prefix="cmpl",
    kind="text_completion",
    event="text_completion",
    whole=lambda part: {"text": part.text},
    part=lambda part: {"text": part.text},
    listed=_columns,
)
#: Choices of `/v1/chat/completions`.
CHAT = Shape(
    prefix="chatcmpl",
    kind="chat.completion",
    event="chat.completion.chunk",
    whole=_message,
    part=_delta,
    listed=_rows,
    begin={"delta": {"role": "assistant", "content": ""}},
)
