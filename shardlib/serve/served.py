"""A served model: its weights, its tokenizer and its name.

A `Text` turns texts into tokens, and back.

>>> text = ByteText()
>>> text.encode("é"), text.decode([195, 169])
([195, 169], 'é')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from shardlib.annotation.model import Init
from shardlib.annotation.trees import Tree
from shardlib.models.config import TransformerConfig
from shardlib.serve.engine import Engine
from shardlib.serve.program import Forward
from shardlib.serve.requests import Capacity, Sampling

#: What stands in a text for bytes that are not a character, or not yet one.
UNKNOWN = "\ufffd"
#: Tokens that `Pieces` decodes again at most, where none of them ends with a whole character.
LONGEST_KEPT = 32


class Text(Protocol):
    """A tokenizer, and how a conversation is written for the model.

    Attributes:
        ends: tokens that end an answer.
        template: of conversations, in Jinja; None for plain lines, see `plain_chat`.
        variables: what the template finds beside the messages, such as "bos_token".
    """

    @property
    def ends(self) -> frozenset[int]: ...

    @property
    def template(self) -> str | None: ...

    @property
    def variables(self) -> Mapping[str, str]: ...

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; what is not a character, or not yet one, is U+FFFD."""
        ...

    def raw(self, token: int) -> bytes | None:
        """Bytes of a token that may be no text by itself; None where they are not known."""
        ...

    def spelling(self) -> Sequence[bytes] | None:
        """Bytes that each token spells, empty for those that spell none, by which answers get a
        form; None where that is not known.
        """
        ...


class ByteText:
    """Every byte of UTF-8 is a token, and nothing ends an answer."""

    ends: frozenset[int] = frozenset()
    template: str | None = None
    variables: Mapping[str, str] = {}

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Bytes of a text; half of a surrogate pair becomes "?"."""
        del begin
        return list(text.encode("utf-8", "replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some bytes."""
        return bytes(tokens).decode("utf-8", "replace")

    def raw(self, token: int) -> bytes:
        """The byte itself."""
        return bytes([token])

    def spelling(self) -> list[bytes]:
        """Every byte spells itself, but 0, which no text has: it ends answers that have a form."""
        return [b"", *(bytes([byte]) for byte in range(1, 256))]


class Pieces:
    """A text that is written token by token: each piece is given as soon as it cannot change.

    A last character that is not whole waits. Only the last tokens are decoded again, since some
    tokenizers write the first token of a text without its space.

    >>> pieces = Pieces(ByteText())
    >>> [pieces.add(byte) for byte in "né".encode()], pieces.end()
    (['n', '', 'é'], '')
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []  # that are decoded again
        self._sent = 0  # characters of theirs that were given
        self._new = 0  # of the tokens, since all was given

    def add(self, token: int) -> str:
        """One more token; returns what is new of the text."""
        self._tokens.append(token)
        self._new += 1
        text = self._text.decode(self._tokens)
        complete = len(text) - text.endswith(UNKNOWN)
        piece, self._sent = text[self._sent : complete], max(self._sent, complete)
        if complete == len(text):
            self._keep(self._new, waiting=0)
            self._new = 0
        elif len(self._tokens) > LONGEST_KEPT:
            self._keep(LONGEST_KEPT // 2, waiting=1)
        return piece

    def end(self) -> str:
        """Returns the pieces that waited for more."""
        return self._text.decode(self._tokens)[self._sent :]

    def _keep(self, tokens: int, *, waiting: int) -> None:
        self._tokens = self._tokens[-tokens:]
        self._sent = len(self._text.decode(self._tokens)) - waiting


#: Weights that are newer than those of a version, and their version; None where there are none.
Newer = Callable[[str], tuple[Tree, str] | None]


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model with its weights, tokenizer and name.

    Attributes:
        name: by which requests ask for it.
        init: what makes the model, as `Engine` takes it.
        forward: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab].
        weights: as `Engine` takes them.
        longest: tokens that the model looks at.
        text: its tokenizer.
        hidden: (model, int32 tokens [batch, seq]) -> states [batch, seq, width] before the logits,
            which embeddings are made of; None where the model does not give them.
        version: of the weights, in words; empty where they have none.
        newer: asks for newer weights; None where there never are any.
        config: of the reference transformer; None for other models.
        sampling: how answers are made unless somebody asks otherwise; None where nothing is said.
        warning: what whoever starts the server should know; empty for nothing.
    """

    name: str
    init: Init
    forward: Forward
    weights: Tree | int
    longest: int
    text: Text
    hidden: Forward | None = None
    version: str = ""
    newer: Newer | None = None
    config: TransformerConfig | None = None
    sampling: Sampling | None = None
    warning: str = ""

    def engine(
        self,
        capacity: Capacity,
        *,
        tensor: int = 1,
        data: int = 1,
        devices: Sequence[jax.Device] | None = None,
    ) -> Engine:
        """An engine that serves it."""
        return Engine(
            self.init,
            self.forward,
            weights=self.weights,
            capacity=capacity,
            tensor=tensor,
            data=data,
            devices=devices,
        )
