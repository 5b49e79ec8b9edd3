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
        """More of the answer.

        Args:
            part: with text.

        Returns:
            The same with less text, and what is new of calls.
        """
        last = part.ended is not None
        called = self._calls > (self._told is not None)
        held = Held(text=self._rest + part.text, last=last, begun=self._begun, called=called)
        found = self._split(held)
        pieces = [piece for one in found.calls for piece in self._new(one, whole=True)]
        if found.begun is not None:
            pieces += self._new(found.begun, whole=False)
        self._rest, self._begun = found.rest, self._begun or bool(found.text)
        ended = self._ends if part.ended == STOP and self._calls else part.ended
        return replace(part, text=found.text, calls=tuple(pieces), ended=ended)

    def _new(self, call: ToolCall, *, whole: bool) -> list[ToolCall]:
        """What is new of a call."""
        begins = self._told is None
        told = self._told or replace(call, arguments="", index=self._calls)
        self._calls += begins
        self._told = None if whole else replace(told, arguments=call.arguments)
        new = call.arguments[len(told.arguments) :]
        return [replace(told, arguments=new, begins=begins)] if new or begins else []


def joined(given: Iterable[ToolCall]) -> list[ToolCall]:
    """Calls, of the pieces that an answer gave.

    Args:
        given: by one answer, in order.
    """
    found: list[ToolCall] = []
    for one in given:
        if one.begins:
            found.append(one)
        else:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + one.arguments)
    return found


def tagged(names: Collection[str]) -> Splitter:
    """Calls between tags; text before them is given as it comes. Blanks after a call are none.

    Args:
        names: of the functions that were given.
    """

    def split(held: Held) -> Split:
        text, calls, rest = "", list[ToolCall](), held.text

        def given(piece: str) -> str:
            return "" if (held.called or calls) and piece.isspace() else piece

        while rest:
            before, tag, after = rest.partition(OPEN)
            if not tag:
                size = len(rest) - (0 if held.last else _waiting(rest, OPEN))
                return Split(text=text + given(rest[:size]), calls=calls, rest=rest[size:])
            inner, close, after = after.partition(CLOSE)
            if not close and (waits := _waiting(inner, CLOSE)):
                inner, close = inner[:-waits], inner[-waits:]
            if close != CLOSE and not held.last:
                begun, rest = _begun(inner, 0, names), tag + inner + close
                return Split(text=text + given(before), calls=calls, begun=begun, rest=rest)
            call = _whole(inner, names) or _begun(inner, 0, names)
            text += before + tag + inner + close if call is None else given(before)
            calls += [] if call is None else [call]
            rest = after
        return Split(text=text, calls=calls)

    return split


def plain(names: Collection[str]) -> Splitter:
    """Calls that the answer begins with, which is held back as long as it may be calls.

    Args:
        names: of the functions that were given.
    """

    def split(held: Held) -> Split:
        text, calls, at = held.text, list[ToolCall](), 0
        if held.begun or text.lstrip()[:1] not in ("", "{", "[", *(",;]" if held.called else "")):
            return Split(text=text)
        try:
            while (at := _after_blanks(text, at)) < len(text):
                call, end = _object(text, at, names)
                if call is None:  # of none of the functions
                    return Split(text=text[at:] if calls or held.called else text, calls=calls)
                calls, at = [*calls, call], end
        except (ValueError, RecursionError):
            begun = _begun(text, at, names)
        else:
            begun = None
        called = bool(calls or begun or held.called)
        rest = text[at:] if called else text
        if not held.last:
            return Split(calls=calls, begun=begun, rest=rest)
        if begun is not None:
            return Split(calls=[*calls, begun])
        return Split(calls=calls, text=rest)

    return split


def forced(name: str) -> Splitter:
    """An answer that is the arguments of one function, by its form.

    Args:
        name: of the function.
    """

    def split(held: Held) -> Split:
        call = ToolCall(name=name, arguments=held.text)
        if held.last:
            return Split(calls=[call])
        return Split(begun=call if held.text else None, rest=held.text)

    return split


def _begun(text: str, at: int, names: Collection[str]) -> ToolCall | None:
    """A call that begins at a place, with its arguments so far."""
    found = BEGUN.match(text, at)
    if found is None or found[1] not in names:
        return None
    end = len(text)  # unless they are whole, all that there is, is of the arguments
    with contextlib.suppress(ValueError, RecursionError):
        end = DECODER.raw_decode(text, found.end())[1]
    return ToolCall(name=found[1], arguments=text[found.end() : end])


def _whole(text: str, names: Collection[str]) -> ToolCall | None:
    """The call that a text is; None where it is none."""
    try:
        call, end = _object(text, _after_blanks(text, 0), names)
    except (ValueError, RecursionError):
        return None
    return call if _after_blanks(text, end) == len(text) else None


def _object(text: str, at: int, names: Collection[str]) -> tuple[ToolCall | None, int]:
    """The JSON at a place as a call, where it is one, and where it ends.

    Raises:
        ValueError, RecursionError: it is not whole.
    """
    value, end = DECODER.raw_decode(text, at)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None, end
    if (begun := _begun(text, at, names)) is not None:
        return begun, end
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return (ToolCall(name=name, arguments=arguments) if isinstance(arguments, str) else None), end


def _after_blanks(text: str, at: int) -> int:
    """Where what stands between calls ends."""
    found = BETWEEN.match(text, at)
    return at if found is None else found.end()


def _waiting(text: str, tag: str) -> int:
    """Characters at the end that a tag may begin with."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
