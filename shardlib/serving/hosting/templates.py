"""Conversations as text, by the templates that checkpoints bring along.

They are rendered in a process of its own (`rendering.py`), which ends when it takes more than its
limits allow; the next conversation has a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from shardlib.errors import ArgumentError
from shardlib.serving.text import Text, plain_chat
from shardlib.untrusted.confined import ChildLimits, Confined, Fork, RefusedError
from shardlib.untrusted.json_types import JsonMapping

#: Characters of a template.
LONGEST = 1 << 17
LIMITS = ChildLimits(seconds=2.0, memory_bytes=1 << 29)


class Renderer:
    """Renders conversations for a model; from any thread.

    Args:
        text: whose template.

    Raises:
        ArgumentError: the template is too long.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._confined = Confined(Path(__file__).with_name("rendering.py"), limits=LIMITS)
        self._fork: Fork | None = None
        if text.template is not None and len(text.template) > LONGEST:
            raise ArgumentError(
                f"the template of conversations has {len(text.template)} characters; {LONGEST} are"
                " the most"
            )

    def __call__(self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping] = ()) -> str:
        """The text of a conversation, up to where the assistant answers."""
        if self._text.template is None:
            return plain_chat(messages)
        variables = {
            **self._text.variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            **({"tools": [dict(tool) for tool in tools]} if tools else {}),
        }
        arguments = {"template": self._text.template, "variables": variables}
        with self._lock:
            try:
                self._fork = self._fork or self._confined.fork()
                return self._fork.call("render", arguments)[1].decode()
            except RefusedError as error:
                if error.ended:
                    self._fork = None
                raise ArgumentError(
                    f"the template of conversations refuses this: {error}"
                ) from error

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            if self._fork is not None:
                self._fork.close()
            self._fork = None
            self._confined.close()
