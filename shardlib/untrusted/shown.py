"""Text of a stranger as it is shown: escaped where a terminal would obey it, and no longer than a
reader can use.

>>> printable("a\\x1b[2Jb")
'a\\\\x1b[2Jb'
>>> shown("x" * 100, 20)
"'xxxxxxxx...xxxxxxx'"
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import cast

#: Characters of a value in a message; failures in one message; characters of a line that tells one
#: failure.
VALUE, FAILURES, FAILURE = 80, 20, 400
#: What text for people may hold beside printable characters.
LAYOUT = frozenset("\n\t")


def printable(text: str, allowed: frozenset[str] = LAYOUT) -> str:
    """The text with everything escaped that a terminal takes as a command, or that hides or turns
    around what stands beside it.

    Letters and signs of all languages stay; control characters (ESC, backspace, carriage return),
    formatting characters (overrides of the direction, zero-width ones), private and unpaired code
    points become `\\x1b`, `\\u202e`.

    Args:
        allowed: control characters that stay, by default those of layout.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in allowed or character == "\u00a0"
        else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def shown(value: object, limit: int = VALUE) -> str:
    """A value in a message: its `repr`, with the middle left out where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 4 * limit:  # rather than escape a gigabyte
        value = value[: 2 * limit] + value[-2 * limit :]
    elif isinstance(value, (list, tuple, dict, set)):
        count = len(cast("Sized", value))
        if count > limit:
            return f"{type(cast('object', value)).__name__} of {count} entries"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} of many levels"
    return fit(printable(text), limit)


def fit(text: str, limit: int) -> str:
    """A text of at most so many characters; the middle is left out.

    >>> fit("abcdefghijkl", 9)
    'abc...jkl'
    """
    if len(text) <= limit:
        return text
    after = (limit - 3) // 2
    return f"{text[: limit - 3 - after]}...{text[len(text) - after :]}"


def bounded(failures: Sequence[str]) -> list[str]:
    """Failures as one message lists them: not too many, and none too long."""
    listed = [fit(failure, FAILURE) for failure in failures[:FAILURES]]
    return (
        listed if len(failures) <= FAILURES else [*listed, f"and {len(failures) - FAILURES} more"]
    )
