"""Which tokens may come next, where an answer has a form: masks by llguidance.

A grammar is compiled once, and copied for each answer.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardlib.errors import ArgumentError, MissingPackageError
from shardlib.serving.sampling.edits import BITS
from shardlib.serving.scheduling.forms import Form

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

#: Grammars that are kept.
KEPT = 128


class Guides:
    """Guides answers of a model.

    Args:
        tokens: bytes that each token spells; empty for those that spell none.
        ends: tokens that end an answer, at least one.
        vocab: size of the logits; tokens that spell nothing known never come.

    Raises:
        ArgumentError: there is no token that ends an answer, or one that the model does not have.
        MissingPackageError: llguidance is not there.
    """

    def __init__(self, tokens: Sequence[bytes], ends: Collection[int], *, vocab: int) -> None:
        if not ends or not all(0 <= one < len(tokens) for one in ends) or len(tokens) > vocab:
            raise ArgumentError(
                f"{len(tokens)} tokens are spelt, of which {sorted(ends)} end an answer; the model"
                f" has {vocab}, and at least one of those that are spelt ends an answer"
            )
        self.ends, self.vocab = frozenset(ends), vocab
        self._tokenizer = _tokenizer(tokens, sorted(ends))
        self._grammars: OrderedDict[Form, LLMatcher] = OrderedDict()

    def guide(self, form: Form) -> Guide:
        """A guide of one answer.

        Args:
            form: of it.

        Raises:
            ArgumentError: it cannot be compiled.
        """
        if form not in self._grammars:
            self._grammars[form] = self._compiled(form)
            if len(self._grammars) > KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(form)
        return Guide(self._grammars[form].deep_copy(), -(-self.vocab // BITS))

    def _compiled(self, form: Form) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            grammar = (
                LLMatcher.grammar_from_json_schema(
                    form.text, defaults={"whitespace_flexible": False}
                )
                if form.kind == "json"
                else LLMatcher.grammar_from_lark(form.text)
                if form.kind == "lark"
                else LLMatcher.grammar_from_regex(
                    form.text
                    if form.kind == "regex"
                    else "|".join(map(re.escape, json.loads(form.text)))
                )
            )
            made = LLMatcher(self._tokenizer, grammar, log_level=0)
        except ValueError as error:
            raise ArgumentError(f"the form of the answer is not usable: {error}") from error
        first = made.deep_copy()
        first.compute_bitmask()  # what no answer meets is found where the first token is looked for
        for one in (made, first):
            if one.is_error():
                said = one.get_error()[:500] or "no answer has it"
                raise ArgumentError(f"the form of the answer is not usable: {said}")
        return made


class Guide:
    """Which tokens may come next in one answer.

    Args:
        matcher: of its form.
        words: of a mask.
    """

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher, self._words = matcher, words

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty where it can."""
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def masks(self, rows: int, drafted: Sequence[int]) -> list[np.ndarray]:
        """Masks of the rows of a step, uint32 [W].

        Args:
            rows: of them; those in front of the choices may have any token.
            drafted: tokens that are guessed, before the choices but the first.
        """
        found = [self._any() for _ in range(rows - 1 - len(drafted))]
        done = 0
        for guess in (*drafted, None):
            found.append(self._mask())
            if guess is None or self._matcher.try_consume_tokens([guess]) != 1:
                break
            done += 1
        if done:
            self._matcher.rollback(done)
        return [*found, *(self._any() for _ in range(rows - len(found)))]

    def took(self, token: int) -> bool:
        """The answer has one more token; whether it is whole, so that none can follow.

        Args:
            token: one that the mask allows.
        """
        self._matcher.consume_token(token)
        return self._matcher.is_stopped()

    def _any(self) -> np.ndarray:
        return np.full(self._words, 0xFFFFFFFF, np.uint32)

    def _mask(self) -> np.ndarray:
        mask = np.zeros(self._words, np.uint32)
        found = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        mask[: len(found)] = found[: self._words]
        return mask


def spelt(tokenizer: Path) -> list[bytes]:
    """What the tokens of a Hugging Face tokenizer spell, for `Engine.spell`.

    Args:
        tokenizer: its file `tokenizer.json`.

    Returns:
        Bytes of each token; empty for special ones.

    Raises:
        ArgumentError: the file cannot be read.
        MissingPackageError: llguidance is not there.
    """
    made = _package()[0]
    try:
        found = made(tokenizer.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{tokenizer} is no tokenizer that can be read: {error}") from error
    return [
        b"" if found.is_special_token(token) else found.decode_bytes([token])
        for token in range(found.vocab_size)
    ]


def _tokenizer(tokens: Sequence[bytes], ends: list[int]) -> LLTokenizer:
    tokenizer, wrapper = _package()

    class Spelt:
        """Tokens as llguidance wants them; texts are never split by it here."""

        eos_token_id, bos_token_id = ends[0], None
        special_token_ids = ends

        def __init__(self) -> None:
            self.tokens = list(tokens)
            self._bytes = {one[0]: at for at, one in enumerate(tokens) if len(one) == 1}

        def __call__(self, text: bytes | str) -> list[int]:
            whole = text.encode() if isinstance(text, str) else text
            return [self._bytes[byte] for byte in whole if byte in self._bytes]

    return tokenizer(wrapper(Spelt()), n_vocab=len(tokens), eos_token=ends)


def _package() -> tuple[type[LLTokenizer], type[TokenizerWrapper]]:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise MissingPackageError(
            "the form of an answer needs the package llguidance\nTry: pip install"
            " 'shardlib[structured]'"
        ) from error
    return LLTokenizer, TokenizerWrapper
