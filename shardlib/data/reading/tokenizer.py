"""Numbers that stand for a text: any object that says them can be used; bytes are built in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shardlib.errors import DataError


@runtime_checkable
class Tokenizer(Protocol):
    """What makes tokens of text.

    Two more attributes are used where an object has them: `end`, the token put after every
    document, and `unknown`, the token that stands for text outside of the vocabulary, which is
    counted.

    Attributes:
        vocab_size: tokens are from 0 to this, exclusive.
        identity: changes whenever the tokens of some text change; stores of tokens are found by it.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """A token for every byte of UTF-8; documents end with a line break.

    Attributes:
        vocab_size: at least 256, for models whose vocabulary is larger.
        end: see `Tokenizer`.
    """

    vocab_size: int = 256
    end: int | None = 10

    @property
    def identity(self) -> str:
        """See `Tokenizer`."""
        return f"bytes, end {self.end}"

    def encode(self, text: str) -> np.ndarray:
        """The bytes of a text, uint8."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some bytes; what is not UTF-8 becomes a replacement character."""
        return bytes(int(token) for token in tokens).decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A tokenizer of another library.

    Attributes:
        vocab_size, identity, end, unknown: see `Tokenizer`.
        to_tokens, to_text: what the other library calls its functions.
    """

    vocab_size: int
    identity: str
    end: int | None
    unknown: int | None
    to_tokens: Callable[[str], Sequence[int]]
    to_text: Callable[[Sequence[int]], str]

    def encode(self, text: str) -> Sequence[int]:
        """See `Tokenizer`."""
        return self.to_tokens(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self.to_text([int(token) for token in tokens])


#: A tokenizer of ours, of `tokenizers`, `transformers` or SentencePiece: it is told by what it has.
AnyTokenizer = Any


def adapted(tokenizer: AnyTokenizer, *, end: int | None = None) -> Tokenizer:
    """A tokenizer of ours, `tokenizers` or `transformers` (Hugging Face), or SentencePiece, as one
    that can be used here.

    Objects with `encode`, `decode`, `vocab_size` and `identity` are returned as they are.

    Args:
        end: the token put after every document, for those of other libraries; by default the one
            that `transformers` or SentencePiece know.
    """
    if hasattr(tokenizer, "backend_tokenizer"):
        return _of_tokenizers(
            tokenizer.backend_tokenizer, tokenizer.eos_token_id if end is None else end
        )
    if hasattr(tokenizer, "get_vocab_size") and hasattr(tokenizer, "to_str"):
        return _of_tokenizers(tokenizer, end)
    if hasattr(tokenizer, "serialized_model_proto"):
        end = (
            tokenizer.eos_id() if end is None and tokenizer.eos_id() >= 0 else end
        )  # -1: it has none
        return Adapted(
            vocab_size=tokenizer.vocab_size(),
            identity=_hashed(tokenizer.serialized_model_proto(), end),
            end=end,
            unknown=tokenizer.unk_id(),
            to_tokens=lambda text: tokenizer.encode(text),
            to_text=lambda tokens: tokenizer.decode(list(tokens)),
        )
    missing = [
        name
        for name in ("encode", "decode", "vocab_size", "identity")
        if not hasattr(tokenizer, name)
    ]
    if missing:
        raise DataError(
            f"the tokenizer {tokenizer!r} has no {' and no '.join(missing)}\nTry: an object with"
            " encode(text), decode(tokens), vocab_size and identity, a string that changes with"
            " its tokens"
        )
    return tokenizer


def _of_tokenizers(tokenizer: Any, end: int | None) -> Adapted:
    unknown = getattr(tokenizer.model, "unk_token", None)
    return Adapted(
        vocab_size=tokenizer.get_vocab_size(),
        identity=_hashed(tokenizer.to_str().encode(), end),
        end=end,
        unknown=None if unknown is None else tokenizer.token_to_id(unknown),
        to_tokens=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        to_text=tokenizer.decode,
    )


def _hashed(model: bytes, end: int | None) -> str:
    return f"{hashlib.sha256(model).hexdigest()}, end {end}"
