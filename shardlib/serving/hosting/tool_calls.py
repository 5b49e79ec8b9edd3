"""Calls of functions, out of the text of an answer.

Models write them as text, in one of two forms:

- with tags, as Hermes and Qwen do: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`;
- as JSON alone, as Llama 3 does: `{"name": "f", "parameters": {}}`, several in a list or with `;`.

>>> reader = CallReader(tagged({"f"}))
>>> part = reader.add(Part('So: <tool_call>{"name": "f", "arguments": {"a": 1}}</to', (), None))
>>> part.text, part.calls
('So: ', ())
>>> part = reader.add(Part("ol_call>", (), "stop"))
>>> part.text, [(one.name, one.arguments) for one in part.calls], part.ended
('', [('f', '{"a": 1}')], 'tool_calls')
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from shardlib.serving.hosting.answer import Part, ToolCall
from shardlib.serving.scheduling.requests import STOP

#: What stands around a call.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: Why an answer ends that has called functions.
CALLED = "tool_calls"


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
        rest: that may become a call.
    """

    text: str = ""
    calls: Sequence[ToolCall] = ()
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

    def add(self, part: Part) -> Part:
        """More of the answer.

        Args:
            part: with text.

        Returns:
            The same with less text, and the calls that are whole with it.
        """
        last = part.ended is not None
        held = Held(
            text=self._rest + part.text, last=last, begun=self._begun, called=self._calls > 0
        )
        found = self._split(held)
        calls = tuple(
            replace(one, index=at) for at, one in enumerate(found.calls, start=self._calls)
        )
        self._rest, self._calls = found.rest, self._calls + len(calls)
        self._begun = self._begun or bool(found.text)
        ended = self._ends if part.ended == STOP and self._calls else part.ended
        return replace(part, text=found.text, calls=calls, ended=ended)


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
                size = len(rest) - (0 if held.last else _waiting(rest))
                return Split(text=text + given(rest[:size]), calls=calls, rest=rest[size:])
            inner, close, after = after.partition(CLOSE)
            if not close and not held.last:
                return Split(text=text + given(before), calls=calls, rest=tag + inner)
            call = _call(_objects(inner)[:1], names)
            text += given(before) if call else before + tag + inner + close
            calls, rest = [*calls, *call], after
        return Split(text=text, calls=calls)

    return split


def plain(names: Collection[str]) -> Splitter:
    """Calls that are the whole answer, which is held back as long as it may be calls.

    Args:
        names: of the functions that were given.
    """

    def split(held: Held) -> Split:
        begins = held.text.lstrip()[:1]
        if held.begun or held.called or begins not in ("", "{", "["):
            return Split(text=held.text)
        if not held.last:
            return Split(rest=held.text)
        objects = _objects(held.text)
        calls = _call(objects, names)
        if not calls or len(calls) < len(objects):
            return Split(text=held.text)
        return Split(calls=calls)

    return split


def forced(name: str) -> Splitter:
    """An answer that is the arguments of one function, by its form.

    Args:
        name: of the function.
    """

    def split(held: Held) -> Split:
        if not held.last:
            return Split(rest=held.text)
        return Split(calls=[ToolCall(name=name, arguments=held.text)])

    return split


def _call(objects: Sequence[object], names: Collection[str]) -> list[ToolCall]:
    """Those of some JSON that are calls."""
    calls: list[ToolCall] = []
    for one in objects:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(name, str) or name not in names:
            continue
        arguments = one.get("arguments", one.get("parameters", {}))
        if isinstance(arguments, dict):
            text = json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(name=name, arguments=text))
        elif isinstance(arguments, str):
            calls.append(ToolCall(name=name, arguments=arguments))
    return calls


def _objects(text: str) -> list[object]:
    """What a text has of JSON, one after another; nothing where it has anything else."""
    found: list[object] = []
    decoder, at = json.JSONDecoder(parse_constant=_refuse), _next(text, 0)
    try:
        while at < len(text):
            one, at = decoder.raw_decode(text, at)
            found += one if isinstance(one, list) else [one]
            at = _next(text, at)
    except (ValueError, RecursionError):
        return []
    return found


def _next(text: str, at: int) -> int:
    while at < len(text) and (text[at].isspace() or text[at] == ";"):
        at += 1
    return at


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _waiting(text: str) -> int:
    """Characters at the end that a tag may begin with."""
    return next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)
