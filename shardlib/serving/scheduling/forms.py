"""What form an answer has: JSON of a schema, a regular expression, one of some texts.

>>> Form.choice(["yes", "no"])
Form(kind='choice', text='["yes", "no"]')
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.errors import ArgumentError

#: Kinds of forms, by what their text is.
KINDS = {
    "json": "a schema, as JSON",
    "regex": "a regular expression without look-around",
    "choice": "a list of texts, as JSON",
    "lark": "a grammar in the notation of Lark",
}
#: Characters of a text at most.
LONGEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Form:
    """What form an answer has.

    Attributes:
        kind: see `KINDS`.
        text: that says more.

    Raises:
        ArgumentError: there is no such kind, or the text is none of it.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"the form is {self.kind!r}; it is one of {', '.join(KINDS)}")
        if not isinstance(self.text, str) or not 0 < len(self.text) <= LONGEST:
            raise ArgumentError(
                f"the text of a form is {KINDS[self.kind]}, of 1 to {LONGEST} characters"
            )
        if self.kind == "choice" and not _texts(self.text):
            raise ArgumentError(
                f"a choice is {KINDS['choice']}, of at least one, none of them empty"
            )

    @classmethod
    def schema(cls, schema: Mapping[str, object] | bool) -> Form:
        """JSON that a schema describes, without spaces."""
        try:
            return cls(kind="json", text=json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"the schema is no JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Form:
        """Texts that a regular expression matches from beginning to end."""
        return cls(kind="regex", text=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Form:
        """One of some texts."""
        return cls(kind="choice", text=json.dumps(list(texts)))

    @classmethod
    def grammar(cls, lark: str) -> Form:
        """Texts of a grammar."""
        return cls(kind="lark", text=lark)


def _texts(text: str) -> bool:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(items, list)
        and bool(items)
        and all(isinstance(item, str) and item for item in items)
    )
