"""Conversations as text, by the templates that checkpoints bring along.

They are rendered in a process of its own (`rendering.py`), which ends when it takes more than two
seconds or half a gigabyte; the next conversation has a new one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardlib.errors import ArgumentError
from shardlib.serving.text import Text, plain_chat
from shardlib.untrusted.json_types import JsonMapping

#: Characters of a template.
LONGEST = 1 << 17


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
        self._process: subprocess.Popen[str] | None = None
        if text.template is not None and len(text.template) > LONGEST:
            raise ArgumentError(
                f"the template of conversations has {len(text.template)} characters; {LONGEST} are"
                " the most"
            )

    def __call__(self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping] = ()) -> str:
        """The text of a conversation, up to where the assistant answers.

        Args:
            messages: each with a "role" and a "content".
            tools: functions that the template is to write.

        Raises:
            ArgumentError: the template refuses them, fails, or takes too long.
        """
        if self._text.template is None:
            return plain_chat(messages)
        variables = {
            **self._text.variables,
            "messages": [dict(one) for one in messages],
            "add_generation_prompt": True,
            **({"tools": [dict(one) for one in tools]} if tools else {}),
        }
        with self._lock:
            found = self._asked({"template": self._text.template, "variables": variables})
        if "error" in found:
            raise ArgumentError(f"the template of conversations refuses this: {found['error']}")
        return found["text"]

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._end()

    def _asked(self, line: Mapping[str, object]) -> dict[str, str]:
        process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self._end()
            return {"error": "it takes too long, or too much memory"}
        return json.loads(answer)

    def _started(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("rendering.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={"PATH": "", "PYTHONIOENCODING": "utf-8"},
        )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
