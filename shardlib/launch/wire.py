"""The wire of the roll call: lines of JSON, sealed with the secret of the job.

Each end says a number that nobody has said before; the other end's line carries an HMAC-SHA256 (RFC
2104) of that number, of who is speaking, and of what is said, by the secret, which itself never
goes over the wire. So a stranger can neither speak for a process nor for process 0, and a line that
was overheard is of no use a second time. What is said can be read by everybody: it is no secret.

>>> line = sealed("the secret", "7f", "member", {"process": 1})
>>> opened("the secret", "7f", "member", line)
{'process': 1}
>>> opened("another", "7f", "member", line)
Traceback (most recent call last):
    ...
shardlib.launch.wire.StrangerError: it does not know the secret of the job
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from typing import Any, cast

from shardlib.errors import LaunchError, ShardlibError
from shardlib.untrusted.data import (
    JsonMapping,
    JsonObject,
    Limits,
    parse_json,
)

#: Bytes of a line, at most.
LINE_BYTES = 1 << 16


#: What process 0 says first: the version of these words, and its number.
GREETING = re.compile(rb"shardlib roll call 2 ([0-9a-f]{32})\n")


class StrangerError(ShardlibError, ValueError):
    """A line that no process of the job has said."""


def number() -> str:
    """A number that nobody has said before."""
    return secrets.token_hex(16)


def greeting(challenge: str) -> bytes:
    """The first line of process 0."""
    return f"shardlib roll call 2 {challenge}\n".encode()


def greeted(line: bytes) -> str:
    """The number in the first line of process 0."""
    match = GREETING.fullmatch(line)
    if match is None:
        raise StrangerError("it is not process 0 that listens there")
    return match[1].decode()


def sealed(secret: str, challenge: str, who: str, content: JsonMapping) -> bytes:
    """A line."""
    text = json.dumps(dict(content), sort_keys=True)
    return json.dumps({"said": text, "seal": _seal(secret, challenge, who, text)}).encode() + b"\n"


def opened(secret: str, challenge: str, who: str, line: bytes) -> JsonObject:
    """Returns the content of a line."""
    try:
        sealed_line = _object(
            parse_json(line, "the line", LaunchError, limits=Limits(bytes=32 * LINE_BYTES, depth=4))
        )
        content, seal = sealed_line.get("said"), sealed_line.get("seal")
        if (
            not isinstance(content, str)
            or not isinstance(seal, str)
            or not hmac.compare_digest(
                seal.encode(), _seal(secret, challenge, who, content).encode()
            )
        ):
            raise StrangerError(
                "it does not know the secret of the job"
                if secret
                else "its line is none of a roll call"
            )
        return _object(
            parse_json(
                content, "the line", LaunchError, limits=Limits(bytes=16 * LINE_BYTES, depth=8)
            )
        )
    except LaunchError as error:
        raise StrangerError(str(error)) from error


def _object(value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise StrangerError("its line is no object")
    return cast("dict[str, Any]", value)


def _seal(secret: str, challenge: str, who: str, text: str) -> str:
    return hmac.new(
        secret.encode(), f"{challenge} {who} {text}".encode(), hashlib.sha256
    ).hexdigest()
