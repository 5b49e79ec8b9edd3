"""Calls of functions, out of the text of an answer.

Models write them as text, in one of two forms:

- with tags, as Hermes and Qwen do: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`;
- as JSON alone, as Llama 3 does: `{"name": "f", "parameters": {}}`, several in a list or with `;`.

A call begins with the brace of its arguments, after the name of a function that was given; from
there on its arguments are given as they come. Where they end too early, or are no JSON, they are
what the model wrote.

>>> reader = CallReader(tagged({"f"}))
>>> part = reader.add(Part('So: <tool_call>{"name": "f", "arguments": {"a": ', (), None))
>>> part.text, [(one.name, one.arguments) for one in part.calls]
('So: ', [('f', '{"a": ')])
>>> part = reader.add(Part("1}}</tool_call>", (), "stop"))
>>> part.text, [(one.begins, one.arguments) for one in part.calls], part.ended
('', [(False, '1}')], 'tool_calls')
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from shardlib.serving.hosting.answer import Part, ToolCall
from shardlib.serving.scheduling.requests import STOP

#: What stands around a call.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: Why an answer ends that has called functions.
CALLED = "tool_calls"
#: How a call begins whose arguments are given as they come.
BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
#: What stands between calls.
BETWEEN = re.compile(r"[\s;,\[\]]*")
DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class Held:
    """Text of an answer that is not given yet.

    Attributes:
        text: of it.
        last: whether nothing follows.
        begun: whether other text came before it.
        called: whether a call came before it.
    """

    text: str
    last: bool
    begun: bool
    called: bool


@dataclass(frozen=True, kw_only=True)
class Split:
    """What text is.

    Attributes:
        text: that is no call.
        calls: that are whole.
        begun: a call that has begun after them, with its arguments so far.
        rest: that may become a call, or more of the one that has begun.
    """

    text: str = ""
    calls: Sequence[ToolCall] = ()
    begun: ToolCall | None = None
    rest: str = ""


#: Tells text from calls. What is no call of a function that was given is text.
Splitter = Callable[[Held], Split]


class CallReader:
    """Takes calls out of the text of one answer.

    Args:
        split: how they are written.
        ends: why an answer ends that has called functions, and would have stopped.
    """

    def __init__(self, split: Splitter, *, ends: str = CALLED) -> None:
        self._split, self._ends = split, ends
        self._rest, self._begun, self._calls = "", False, 0
        self._told: ToolCall | None = None  # the call that has begun

    def add(self, part: Part) -> Part:
        """More of the answer."""
        last = part.ended is not None
        called = self._calls > (self._told is not None)
        buffered = Held(text=self._rest + part.text, last=last, begun=self._begun, called=called)
        parsed = self._split(buffered)
        pieces = [piece for call in parsed.calls for piece in self._new(call, complete=True)]
        if parsed.begun is not None:
            pieces += self._new(parsed.begun, complete=False)
        self._rest, self._begun = parsed.rest, self._begun or bool(parsed.text)
        ended = self._ends if part.ended == STOP and self._calls else part.ended
        return replace(part, text=parsed.text, calls=tuple(pieces), ended=ended)

    def _new(self, call: ToolCall, *, complete: bool) -> list[ToolCall]:
        """What is new of a call."""
        begins = self._told is None
        announced = self._told or replace(call, arguments="", index=self._calls)
        self._calls += begins
        self._told = None if complete else replace(announced, arguments=call.arguments)
        new = call.arguments[len(announced.arguments) :]
        return [replace(announced, arguments=new, begins=begins)] if new or begins else []


def joined(deltas: Iterable[ToolCall]) -> list[ToolCall]:
    """Calls, of the pieces that an answer gave."""
    calls: list[ToolCall] = []
    for piece in deltas:
        if piece.begins:
            calls.append(piece)
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.arguments)
    return calls


def tagged(names: Collection[str]) -> Splitter:
    """Calls between tags; text before them is given as it comes. Blanks after a call are none."""

    def split(buffered: Held) -> Split:
        text, calls, remaining = "", list[ToolCall](), buffered.text

        def given(piece: str) -> str:
            return "" if (buffered.called or calls) and piece.isspace() else piece

        while remaining:
            before, tag, after = remaining.partition(OPEN)
            if not tag:
                size = len(remaining) - (0 if buffered.last else _waiting(remaining, OPEN))
                return Split(
                    text=text + given(remaining[:size]), calls=calls, rest=remaining[size:]
                )
            inner, close, after = after.partition(CLOSE)
            if not close and (waits := _waiting(inner, CLOSE)):
                inner, close = inner[:-waits], inner[-waits:]
            if close != CLOSE and not buffered.last:
                begun, remaining = _begun(inner, 0, names), tag + inner + close
                return Split(text=text + given(before), calls=calls, begun=begun, rest=remaining)
            call = _whole(inner, names) or _begun(inner, 0, names)
            text += before + tag + inner + close if call is None else given(before)
            calls += [] if call is None else [call]
            remaining = after
        return Split(text=text, calls=calls)

    return split


def plain(names: Collection[str]) -> Splitter:
    """Calls that the answer begins with, which is held back as long as it may be calls."""

    def split(buffered: Held) -> Split:
        text, calls, position = buffered.text, list[ToolCall](), 0
        if buffered.begun or text.lstrip()[:1] not in (
            "",
            "{",
            "[",
            *(",;]" if buffered.called else ""),
        ):
            return Split(text=text)
        try:
            while (position := _after_blanks(text, position)) < len(text):
                call, end = _object(text, position, names)
                if call is None:  # of none of the functions
                    return Split(
                        text=text[position:] if calls or buffered.called else text, calls=calls
                    )
                calls, position = [*calls, call], end
        except (ValueError, RecursionError):
            begun = _begun(text, position, names)
        else:
            begun = None
        called = bool(calls or begun or buffered.called)
        remaining = text[position:] if called else text
        if not buffered.last:
            return Split(calls=calls, begun=begun, rest=remaining)
        if begun is not None:
            return Split(calls=[*calls, begun])
        return Split(calls=calls, text=remaining)

    return split


def forced(name: str) -> Splitter:
    """An answer that is the arguments of one function, by its form."""

    def split(buffered: Held) -> Split:
        call = ToolCall(name=name, arguments=buffered.text)
        if buffered.last:
            return Split(calls=[call])
        return Split(begun=call if buffered.text else None, rest=buffered.text)

    return split


def _begun(text: str, start: int, names: Collection[str]) -> ToolCall | None:
    """A call that begins at a place, with its arguments so far."""
    match = BEGUN.match(text, start)
    if match is None or match[1] not in names:
        return None
    end = len(text)  # unless they are whole, all that there is, is of the arguments
    with contextlib.suppress(ValueError, RecursionError):
        end = DECODER.raw_decode(text, match.end())[1]
    return ToolCall(name=match[1], arguments=text[match.end() : end])


def _whole(text: str, names: Collection[str]) -> ToolCall | None:
    """The call that a text is; None where it is none."""
    try:
        call, end = _object(text, _after_blanks(text, 0), names)
    except (ValueError, RecursionError):
        return None
    return call if _after_blanks(text, end) == len(text) else None


def _object(text: str, start: int, names: Collection[str]) -> tuple[ToolCall | None, int]:
    """The JSON at a place as a call, where it is one, and where it ends."""
    value, end = DECODER.raw_decode(text, start)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None, end
    if (begun := _begun(text, start, names)) is not None:
        return begun, end
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (ToolCall(name=name, arguments=arguments) if isinstance(arguments, str) else None), end


def _after_blanks(text: str, start: int) -> int:
    """Where what stands between calls ends."""
    match = BETWEEN.match(text, start)
    return start if match is None else match.end()


def _waiting(text: str, tag: str) -> int:
    """Characters at the end that a tag may begin with."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
